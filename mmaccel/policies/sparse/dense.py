"""Every key not after the query: the pattern that leaves nothing out."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mmaccel.core.layout import TokenLayout
from mmaccel.core.plan import AttentionPlan
from mmaccel.core.registry import register
from mmaccel.core.sparse import SparsePattern


@register("sparse", "dense")
@dataclass(frozen=True, kw_only=True)
class Dense(SparsePattern):
    """Full causal attention, by the dense kernel; the plan is None."""

    def plan(
        self, query: Tensor, key: Tensor, q_layout: TokenLayout, k_layout: TokenLayout
    ) -> AttentionPlan | None:
        return None

    def bound(self, n_query: int, n_key: int) -> int:
        return -(-n_query // self.block) * -(-n_key // self.block)
