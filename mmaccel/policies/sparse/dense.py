"""The `dense` pattern: full causal attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mmaccel.backends.ops.block_attend import Part
from mmaccel.core.prefill.plan import FAR
from mmaccel.core.registry import register
from mmaccel.policies.sparse.orders import AttentionRegion, IntraPattern, ceil_block_count


@register("sparse", "dense")
@dataclass(frozen=True, kw_only=True)
class Dense(IntraPattern):
    """Full causal attention, by the dense kernel; the plan is None.

    Within a modality boundary: every key not after the query.
    """

    dense: ClassVar[bool] = True

    def build_plan_parts(self, region: AttentionRegion) -> tuple[Part, ...]:
        return (region.plan_part([region.key_span(0, FAR)]),)

    def max_blocks(self, n_query: int, n_key: int, *, gaps: bool, ties: bool) -> tuple[int, int]:
        return ceil_block_count(n_key, self.block), 0
