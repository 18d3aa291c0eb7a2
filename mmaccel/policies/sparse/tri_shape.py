"""Sink, local window, and dense last queries."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from mmaccel.core.errors import RecipeError, check_least
from mmaccel.core.plan import FAR, Part
from mmaccel.core.registry import register
from mmaccel.policies.sparse.a_shape import near_and_first, near_and_first_blocks
from mmaccel.policies.sparse.orders import IntraPattern, Region, whole_blocks


@register("sparse", "tri_shape")
@dataclass(frozen=True, kw_only=True)
class TriShape(IntraPattern):
    """As `a_shape`, and the last `bottom` queries of a sequence see every key not after them.

    In chunked prefill these are the last queries of each chunk, as with the estimates of adaptive patterns: what comes
    after a chunk is not known to it, and its dense rows cost bottom / chunk of dense attention. Within a modality boundary
    they are the last queries of the modality. The dense rows are a part of their own, so that their long lists stand apart.

    Exact: no block is rounded up. After SCBench (LI et al. 2025, arXiv 2412.10319) with the sizes of MMInference
    (Table 2: sink 128, local 4096, bottom 128).
    """

    sink: int = 128
    window: int = 4096
    bottom: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sink < 0:
            raise RecipeError(f"tri_shape: sink is {self.sink}; give 0 or more.")
        check_least(self, 1, "window", of=", the token itself")
        if self.bottom < 0:
            raise RecipeError(f"tri_shape: bottom is {self.bottom}; give 0 or more queries.")

    def parts(self, region: Region) -> tuple[Part, ...]:
        block, rows = self.block, region.q_row[:, 0]
        count = (rows >= 0).sum(1, keepdim=True)
        last = min(self.bottom, rows.shape[1])
        parts = []
        if last < rows.shape[1]:
            upper = torch.arange(rows.shape[1], device=rows.device) < count - last
            above = replace(region, q_row=torch.where(upper, rows, -1)[:, None], ordered=None)
            parts.append(above.part(near_and_first(above, self.sink, self.window)))
        if last:
            slot = count - last + torch.arange(whole_blocks(last, block) * block, device=rows.device)
            there = (slot >= 0) & (slot < count)
            source = slot.clamp(0, rows.shape[1] - 1)
            q_row, at = (torch.where(there, t.gather(1, source), -1) for t in (rows, region.at))
            below = replace(region, q_row=q_row[:, None], at=at, ordered=None)
            parts.append(below.part([below.span(0, FAR)]))
        return tuple(parts)

    def max_blocks(self, n_query: int, n_key: int, *, gaps: bool, ties: bool) -> tuple[int, int]:
        each, more = near_and_first_blocks(n_key, self.sink, self.window, self.block, gaps=gaps)
        return each, more + whole_blocks(min(self.bottom, n_query), self.block) * whole_blocks(
            n_key, self.block
        )
