"""When a cluster must be split, and how it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mmaccel.policies.kv.mosaic.kmeans import bisect, halve
from mmaccel.policies.kv.mosaic.level import Level
from mmaccel.policies.kv.mosaic.statistics import pooled, summary
from mmaccel.policies.kv.mosaic.threshold import Mode, Threshold

Levels = Literal["both", "visual", "semantic", "none"]
DEEPEST = 3
"""Bisections of one cluster at a time; what is too large after them is cut by time."""
RAISED = 1.1
"""A cluster that no bisection makes more compact gets this multiple of its variance as its threshold."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The numbers of the clustering; the fields of the policy `mosaic` of the same names say what they mean."""

    levels: Levels
    visual: int
    semantic: int
    init: int
    smallest: int
    largest: int
    iterations: int = 10
    tau_small: float
    tau_large: float
    alpha: float
    threshold: Mode
    gain: float
    unmix: float
    new_scene: float
    deferred: bool
    buffer: int

    def calibrate(self, level: Level) -> Threshold:
        """Of the clusters that a level has now."""
        used = slice(0, level.used)
        return Threshold.calibrate(
            level.variance[:, used],
            level.size[:, used],
            small=self.tau_small,
            large=self.tau_large,
            alpha=self.alpha,
            mode=self.threshold,
        )


@dataclass(frozen=True, eq=False)
class Bounds:
    """What a cluster of one level may be. `largest` None: any size and any variance."""

    threshold: Threshold
    smallest: int
    largest: int | None

    def exceeded(self, layer: Tensor, n: Tensor, s2: Tensor, limit: Tensor) -> Tensor:
        """[b] whether clusters of size `n`, variance `s2` and own limit `limit` [b] must be split."""
        if self.largest is None:
            return torch.zeros_like(n, dtype=torch.bool)
        loose = s2 > torch.maximum(self.threshold.at(layer, n), limit)
        return ((n >= self.smallest) & loose) | (n > self.largest)


def refine(
    level: Level,
    bounds: Bounds,
    vectors: Callable[[Tensor, Tensor], Tensor],
    layer: Tensor,
    cluster: Tensor,
    split: Callable[[Tensor, Tensor, Tensor], None],
    *,
    gain: float,
    iterations: int,
) -> int:
    """Bisect the clusters (layer [b], cluster [b]) that exceed their bounds until none does; the number of splits.

    vectors(layer [b], entries [b, m]) gives [b, m, d]; split(layer, cluster, new) is told of each round: some entries of
    `cluster` are now in `new`. A bisection that lowers the variance by less than `gain` is not made, and the cluster is
    left alone until its variance has grown by a tenth; one that is too large is then cut by time.
    """
    splits = 0
    for depth in range(64):
        n, s2 = level.size[layer, cluster], level.variance[layer, cluster]
        too = bounds.exceeded(layer, n, s2, level.limit[layer, cluster])
        layer, cluster, n, s2 = layer[too], cluster[too], n[too], s2[too]
        if not layer.numel():
            break
        members = level.contents(layer, cluster)
        present = members >= 0
        x = vectors(layer, members)
        label = bisect(x, present, iterations) if depth < DEEPEST else halve(present)
        forced = n > (bounds.largest or 0)
        (_, s2_a, n_a), (_, s2_b, n_b) = (summary(x, label == side) for side in (0, 1))
        weak = pooled(s2_a, n_a, s2_b, n_b) > (1 - gain) * s2 if depth < DEEPEST else torch.ones_like(forced)
        label = torch.where((weak & forced)[:, None], halve(present), label)
        refused = weak & ~forced
        level.set("limit", layer[refused], cluster[refused], RAISED * s2[refused])
        layer, cluster, members, x, label = (t[~refused] for t in (layer, cluster, members, x, label))
        if not layer.numel():
            break
        new = level.take(layer, level.parent[layer, cluster])
        for ids, side in ((cluster, 0), (new, 1)):
            mine = label == side
            level.fill(layer, ids, members.masked_fill(~mine, -1), x)
            level.set("limit", layer, ids, 0.0)
        split(layer, cluster, new)
        splits += layer.numel()
        layer, cluster = torch.cat([layer, layer]), torch.cat([cluster, new])
    return splits
