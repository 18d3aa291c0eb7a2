"""Every key not after the query: the pattern that leaves nothing out."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmaccel.core.layout import TokenLayout
from mmaccel.core.plan import FAR, AttentionPlan, Part, span_from_ranges
from mmaccel.core.registry import register
from mmaccel.policies.sparse.intra import IntraPattern, Sight
from mmaccel.policies.sparse.orders import places, row_ranges, whole_blocks


@register("sparse", "dense")
@dataclass(frozen=True, kw_only=True)
class Dense(IntraPattern):
    """Full causal attention, by the dense kernel; the plan is None.

    Within a modality boundary: every key not after the query.
    """

    def plan(
        self, query: Tensor, key: Tensor, q_layout: TokenLayout, k_layout: TokenLayout
    ) -> AttentionPlan | None:
        return None

    def parts(self, sight: Sight) -> tuple[Part, ...]:
        block, place = self.block, sight.at[:, None]
        ranges = row_ranges(torch.zeros_like(place), place + 1, block, block)
        order = (sight.q_row, sight.keys.row[:, None], place, places(sight.keys)[:, None])
        return (Part(sight.q_row, (span_from_ranges(*order, 0, FAR, *ranges, block, block),)),)

    def toll(self, n_query: int, n_key: int, *, gaps: bool, ties: bool) -> tuple[int, int]:
        return whole_blocks(n_key, self.block), 0
