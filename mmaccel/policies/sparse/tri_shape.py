"""The `tri_shape` pattern: sink, local window, and dense last queries."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from mmaccel.backends.ops.block_attend import Part
from mmaccel.core.prefill.plan import FAR
from mmaccel.core.registry import at_least, limited, register
from mmaccel.policies.sparse.a_shape import AShape
from mmaccel.policies.sparse.orders import AttentionRegion, ceil_block_count


@register("sparse", "tri_shape")
@dataclass(frozen=True, kw_only=True)
class TriShape(AShape):
    """Like `a_shape`; in addition the last `bottom` queries of a sequence see every earlier key.

    In chunked prefill these are the last queries of each chunk, as with the estimates of adaptive patterns: a chunk does not
    know what comes after it, and its dense rows cost bottom / chunk of dense attention. Within a modality boundary they are
    the last queries of the modality. The dense rows are a part of the plan by themselves, as their lists are long.

    Exact: all other keys of a block are masked. After SCBench (LI et al. 2025, arXiv 2412.10319) with the sizes of
    MMInference (Table 2: sink 128, local 4096, bottom 128).
    """

    bottom: int = limited(128, at_least(0, " queries"))

    def build_plan_parts(self, region: AttentionRegion) -> tuple[Part, ...]:
        rows = region.q_row[:, 0]
        count = (rows >= 0).sum(1, keepdim=True)
        last = min(self.bottom, rows.shape[1])
        parts: list[Part] = []
        if last < rows.shape[1]:
            upper = torch.arange(rows.shape[1], device=rows.device) < count - last
            above = replace(region, q_row=torch.where(upper, rows, -1)[:, None], ordered=None)
            parts += super().build_plan_parts(above)
        if last:
            slot = count - last + torch.arange(last + -last % self.block, device=rows.device)
            present = (slot >= 0) & (slot < count)
            source = slot.clamp(0, rows.shape[1] - 1)
            q_row, at = (torch.where(present, t.gather(1, source), -1) for t in (rows, region.at))
            below = replace(region, q_row=q_row[:, None], at=at, ordered=None)
            parts.append(below.plan_part([below.key_span(0, FAR)]))
        return tuple(parts)

    def max_blocks(self, n_query: int, n_key: int, *, gaps: bool, ties: bool) -> tuple[int, int]:
        each, more = super().max_blocks(n_query, n_key, gaps=gaps, ties=ties)
        dense = ceil_block_count(min(self.bottom, n_query), self.block) * ceil_block_count(n_key, self.block)
        return each, more + dense
