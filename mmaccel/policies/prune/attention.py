"""The `attention` pruner (SpecVLM): a draft keeps what the target's question attends to most, and samples the rest
evenly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mmaccel.core.layout import TokenLayout
from mmaccel.core.prefill.prune import FixedRetentionPruner, Signals, Stage, complement_indices, evenly_spaced
from mmaccel.core.registry import SHARE, limited, register


@register("prune", "attention")
@dataclass(frozen=True, kw_only=True)
class AttentionPrune(FixedRetentionPruner):
    """Keep the visual tokens that the target's question attends to most, then fill up evenly.

    A token's score is the attention it gets from the text after the last image or video, a mean over these rows, heads and
    layers. A question that precedes the video counts too, because these rows have attended to it. The tokens with the
    highest scores are taken first, until they hold `mass` of the sum of all scores or the quota is full; the rest of the
    quota is spread evenly over the other tokens, in order. After SpecVLM (arXiv 2508.16201), whose even sample takes the
    ends of the video first; ours takes the middles of equal stretches, and LLaVA's newline is always kept.

    retention  share of the visual tokens that is kept, rounded down (the quota)
    mass       share of the sum of scores that the tokens of the highest scores hold; 1: no even sample
    variation  score by the last layer's attention minus the first layer's (ParallelVLM's ablation, Figure 9)
    """

    stage: ClassVar = "draft"
    needs: ClassVar[frozenset[str]] = frozenset({"attention"})
    no_tensor_parallel: ClassVar[str | None] = "judges tokens by the attention of all heads"

    mass: float = limited(0.4, SHARE)
    variation: bool = False

    def pruning_stages(self, depth: int) -> tuple[Stage, ...]:
        groups = ((0,), (depth - 1,)) if self.variation else (tuple(range(depth)),)
        return (Stage(depth, attention=groups, share=self.retention),)

    def choose_candidates(self, signals: Signals, layout: TokenLayout, at: Tensor, count: int) -> Tensor:
        groups = signals["attention"].float().mean(1)[:, at]
        score = groups[1] - groups[0] if self.variation else groups[0]
        ranked = score.sort(descending=True, stable=True)
        # With variation scores may be negative, and have no mass to speak of.
        total = ranked.values.clamp(min=0).double().cumsum(0)
        guided = min(int((total < self.mass * total[-1]).sum()) + 1, count) if self.mass < 1 else count
        first = ranked.indices[:guided]
        rest = complement_indices(first, at.numel())
        return torch.cat([first, rest[evenly_spaced(count - guided, rest.numel(), at.device)]])
