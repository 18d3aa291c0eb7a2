"""Every so many-th visual token: pruning that knows nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from mmaccel.core.layout import TokenLayout
from mmaccel.core.prune import Stage, TokenPruner, candidates, check_share, quota, spread, staying
from mmaccel.core.registry import register


@register("prune", "uniform")
@dataclass(frozen=True, kw_only=True)
class UniformPrune(TokenPruner):
    """Keep visual tokens at even steps through all images and videos, the middle of each of `retention` x m equal stretches.

    The baseline without guidance of ParallelVLM (arXiv 2603.19610, Figure 7).
    """

    seat: ClassVar = "draft"

    retention: float = 0.1

    def __post_init__(self) -> None:
        check_share(self.name, "retention", self.retention)

    def stages(self, depth: int) -> tuple[Stage, ...]:
        return (Stage(0, share=self.retention),)

    def keep(
        self, signals: Mapping[str, Tensor], layout: TokenLayout, stage: Stage, total: int | None = None
    ) -> Tensor:
        at = candidates(layout)
        count = min(quota(stage.share, total if total is not None else at.numel()), at.numel())
        return staying(layout, at[spread(count, at.numel(), at.device)])
