"""The first clusters of a stream (Mosaic's constructor): by look, and inside each visual cluster by key, layer by layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mmaccel.policies.kv.mosaic.kmeans import kmeans
from mmaccel.policies.kv.mosaic.level import Level
from mmaccel.policies.kv.mosaic.rules import Bounds, Rules, refine
from mmaccel.policies.kv.mosaic.threshold import FLOOR, Threshold

if TYPE_CHECKING:
    from mmaccel.policies.kv.mosaic.hierarchy import Hierarchy


def construct(tree: Hierarchy, units: int) -> None:
    """Cluster the first `units` units of an empty `tree`, and calibrate its thresholds on what comes out.

    K-means makes clusters of the mean sizes asked for; those that fall apart when cut in two, mixtures of scenes, are cut
    before they are measured, for thresholds taken from mixtures would allow mixtures for ever.
    """
    rules, parts, zero = tree.rules, tree.summaries.parts, torch.zeros(1, dtype=torch.long)
    tree.summaries.settle(units)
    by_look = rules.levels in ("both", "visual")
    count = max(1, round(units / rules.visual)) if by_look else 1
    looks = tree.summaries.looks(torch.arange(units))
    label = kmeans(looks[None], count, iterations=rules.iterations)[0]
    for one in range(count):
        members = (label == one).nonzero().T
        tree.visual.fill(zero, tree.visual.take(zero, zero - 1), members, looks[members])
    if by_look:
        _unmix(rules, tree.visual, tree.summaries.look_points, lambda *_: None)
    visual = Bounds(rules.calibrate(tree.visual), rules.smallest, tree.most(("both", "visual"), rules.visual))
    tree.bind(visual, Bounds(rules.calibrate(tree.semantic), rules.smallest, None))
    tree.refine_visual(tree.visual.size[0].nonzero()[:, 0])
    everything = torch.arange(tree.layers)
    for one in tree.visual.size[0].nonzero()[:, 0].tolist():
        inside = tree.visual.contents(zero, torch.tensor([one]))[0].sort().values
        entries = (inside[:, None] * parts + torch.arange(parts)).flatten()
        k = {"visual": 1, "none": entries.numel()}.get(
            rules.levels, max(1, round(entries.numel() / rules.semantic))
        )
        x = tree.summaries.key_points(everything, entries.expand(tree.layers, -1))
        labels = kmeans(x, k, iterations=rules.iterations)
        for cluster in range(k):
            members = entries.masked_fill(labels != cluster, -1)
            tree.semantic.fill(everything, tree.open(everything, one), members, x)
    if rules.levels in ("both", "semantic"):
        _unmix(rules, tree.semantic, tree.summaries.key_points, tree.nested)
    most = tree.most(("both", "semantic"), rules.semantic)
    tree.bind(visual, Bounds(rules.calibrate(tree.semantic), rules.smallest, most))
    tree.refine(*(tree.semantic.size > 0).nonzero(as_tuple=True))


def _unmix(
    rules: Rules,
    level: Level,
    points: Callable[[Tensor, Tensor], Tensor],
    split: Callable[[Tensor, Tensor, Tensor], None],
) -> None:
    """Split the clusters that lose the share `unmix` of their variance by it."""
    least = torch.full((level.layers,), FLOOR, dtype=level.variance.dtype)
    bounds = Bounds(Threshold(least, least, rules.alpha, "fixed"), rules.smallest, level.owner.shape[1])
    layer, cluster = (level.size > 0).nonzero(as_tuple=True)
    refine(level, bounds, points, layer, cluster, split, gain=rules.unmix, iterations=rules.iterations)
    layer, cluster = (level.size > 0).nonzero(as_tuple=True)
    level.set("limit", layer, cluster, 0.0)
