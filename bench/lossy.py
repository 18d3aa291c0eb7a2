"""Lossy pruners at one share of the video, whatever their own settings count: what `pruning.py` holds side by side.

One measure for all (`mmaccel_lab.eval.pruning.seen_share`): the share of the video tokens that a decoded token sees, a
mean over the layers from the method's first cut on. A mean over all layers would not do on eight of them: FastV, PyramidDrop
and SparseVLM rank by attention, so that a first layer reads everything, and that alone is an eighth.
"""

from __future__ import annotations

from collections.abc import Callable

from mmaccel.core.prefill.prune import TokenPruner
from mmaccel.policies.prune import DyCoke, FastV, PyramidDrop, SparseVLM, VisionZip

HALVINGS = 40
QUARTER = 0.25
"""The least that DyCoke leaves in the cache: the first of each four frames is never thinned."""
COUNTS = (1.0, 200 / 300, 110 / 300)
"""SparseVLM's stages, to its first: they are scaled together."""


def lossy(share: float, depth: int) -> dict[str, TokenPruner]:
    """The pruners of a target of `depth` layers at `share` of the video, 0.04 to 0.5; `ValueError` where one cannot."""

    def sparsevlm(knob: float) -> TokenPruner:
        return SparseVLM(retention=tuple(knob * count for count in COUNTS))

    def dycoke(knob: float) -> TokenPruner:
        if share >= QUARTER:
            return DyCoke(drop=1 - knob, forget=0.0)
        return DyCoke(drop=1.0, forget=1 - knob, layer=1)

    return {
        "fastv": matched(lambda knob: FastV(layer=1, retention=knob), share, depth),
        "pyramid_drop": matched(
            lambda knob: PyramidDrop(retention=knob, stages_at=(0.125, 0.375, 0.625)), share, depth
        ),
        "sparsevlm": matched(sparsevlm, share, depth),
        "dycoke": matched(dycoke, share, depth),
        "visionzip": VisionZip(retention=share, carry=True),
    }


def matched(make: Callable[[float], TokenPruner], share: float, depth: int) -> TokenPruner:
    """The pruner whose share, by `counted`, is `share`: `make` is told a knob from 0 to 1, with which the share grows."""
    low, high = 0.0, 1.0
    for _ in range(HALVINGS):
        knob = (low + high) / 2
        low, high = (knob, high) if counted(make(knob), depth) < share else (low, knob)
    found = make(high)
    if abs(counted(found, depth) - share) > 1e-6:
        raise ValueError(
            f"lossy: {found.name} has no setting that keeps {share:g}; give a share from 0.04 to 0.5."
        )
    return found


def counted(pruner: TokenPruner, depth: int) -> float:
    """What `seen_share` measures, of so long a video that no rounding matters, from the pruner's own stages."""
    stages = {stage.layer: stage.share for stage in pruner.stages(depth)}
    merged = pruner.recycle / 10 if isinstance(pruner, SparseVLM) else 0.0
    seen = 1 - pruner.forget if isinstance(pruner, DyCoke) else 1.0
    now, total = 1.0, 0.0
    for layer in range(min(stages), depth):
        if layer in stages:
            now = stages[layer] + merged * (now - stages[layer])
        glanced = pruner.glance is not None and layer > pruner.glance
        total += now * seen if glanced else now
    return total / (depth - min(stages))
