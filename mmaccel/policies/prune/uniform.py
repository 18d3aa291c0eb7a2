"""The `uniform` pruner: evenly spaced visual tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from mmaccel.core.layout import TokenLayout
from mmaccel.core.prefill.prune import FixedRetentionPruner, Signals, Stage, evenly_spaced
from mmaccel.core.registry import register


@register("prune", "uniform")
@dataclass(frozen=True, kw_only=True)
class UniformPrune(FixedRetentionPruner):
    """Keep evenly spaced visual tokens: of the m of all images and videos, the middles of `retention` * m equal stretches.

    The unguided baseline of ParallelVLM (arXiv 2603.19610, Figure 7).
    """

    stage: ClassVar = "draft"

    def pruning_stages(self, depth: int) -> tuple[Stage, ...]:
        return (Stage(0, share=self.retention),)

    def choose_candidates(self, signals: Signals, layout: TokenLayout, at: Tensor, count: int) -> Tensor:
        return evenly_spaced(count, at.numel(), at.device)
