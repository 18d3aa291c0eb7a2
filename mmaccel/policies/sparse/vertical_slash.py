"""Columns and diagonals that the last queries look at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mmaccel.core.errors import RecipeError
from mmaccel.core.layout import TokenLayout
from mmaccel.core.plan import FAR, AttentionPlan, KeySpan, Part, pad_rows, span_from_ranges, span_from_steps
from mmaccel.core.registry import register
from mmaccel.core.sparse import SparsePattern
from mmaccel.policies.sparse.estimate import LastQueries
from mmaccel.policies.sparse.orders import (
    Order,
    at_or_before,
    natural,
    places,
    row_ranges,
    whole_blocks,
)


@register("sparse", "vertical_slash")
@dataclass(frozen=True, kw_only=True)
class VerticalSlash(SparsePattern):
    """Every query sees the `vertical` strongest columns and the blocks that the `slash` strongest diagonals touch.

    Strength is the softmax weight of the last `last_q` queries of a head, summed along the line; the main diagonal is
    always kept, so that a token sees itself. Columns are exact. Diagonals are rounded: in blocks of the tokens' order, a
    block that a kept diagonal touches is seen whole, as far as causality goes. A column that stands in such a block is
    computed once. After MInference and MMInference (Appendix C.3, Table 3).
    """

    adaptive: ClassVar[bool] = True
    rounded: ClassVar[bool] = True

    vertical: int = 1000
    slash: int = 1024
    last_q: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.vertical < 0:
            raise RecipeError(f"vertical_slash: vertical is {self.vertical}; give 0 or more columns.")
        if self.slash < 1:
            raise RecipeError(f"vertical_slash: slash is {self.slash}; give at least 1, the main diagonal.")
        if self.last_q < 1:
            raise RecipeError(f"vertical_slash: last_q is {self.last_q}; give at least 1 query.")

    def plan(
        self, query: Tensor, key: Tensor, q_layout: TokenLayout, k_layout: TokenLayout
    ) -> AttentionPlan | None:
        block = self.block
        queries, keys = natural(q_layout, block=block), natural(k_layout, block=block)
        place = at_or_before(keys, queries)
        sample = LastQueries.of(query, key, queries, keys, place, self.last_q, k_layout.padded)
        columns, diagonals = sample.lines()
        chosen = self._columns(columns, sample.seen, len(keys))
        slash = self._slashes(queries, keys, place, chosen, self._diagonals(diagonals, sample.at))
        spans = (slash, self._verticals(queries, keys, place, chosen)) if self.vertical else (slash,)
        return AttentionPlan(
            parts=(Part(queries.row[:, None], spans),),
            block_q=block,
            block_k=block,
            batch=query.shape[0],
            heads=query.shape[1],
            n_query=query.shape[2],
            n_key=key.shape[2],
        )

    def bound(self, n_query: int, n_key: int) -> int:
        blocks = whole_blocks(n_key, self.block)
        columns = whole_blocks(min(self.vertical, n_key), self.block)
        return whole_blocks(n_query, self.block) * (min(2 * self.slash, blocks) + columns)

    def _columns(self, score: Tensor, seen: Tensor, none: int) -> Tensor:
        """[B, H, K] kept columns in ascending order, `none` where a sequence has fewer."""
        score = score.masked_fill(~seen[:, None], -1.0)
        top = score.topk(min(self.vertical, score.shape[2]), 2)
        return torch.where(top.values >= 0, top.indices, none).sort(2).values

    def _diagonals(self, score: Tensor, at: Tensor) -> Tensor:
        """[B, H, K] kept diagonals, the main one among them, -1 where a sequence has fewer."""
        n = score.shape[2]
        distance = torch.arange(n, device=score.device)
        score = score.masked_fill(distance > at[:, -1, None, None], -1.0)
        score = score.masked_fill((distance == 0) & (at[:, -1, None, None] >= 0), torch.inf)
        top = score.topk(min(self.slash, n), 2)
        return torch.where(top.values >= 0, top.indices, -1)

    def _slashes(
        self, queries: Order, keys: Order, place: Tensor, chosen: Tensor, diagonal: Tensor
    ) -> KeySpan:
        """The slash blocks, over keys in their order; the kept columns are absent, for the other span owns them."""
        B, H = chosen.shape[:2]
        N, block = len(keys), self.block
        owned = torch.zeros(B, H, N + 1, dtype=torch.bool, device=chosen.device).scatter_(2, chosen, True)
        # Query block m begins at place (home + m) * block + shift; diagonal d then touches two key blocks, `near` and
        # `far` blocks before home + m, for every m alike (near is -1 where a shift lets the block itself straddle).
        home, shift = place[:, :1] // block, (place[:, :1] % block)[:, None]
        near = -torch.div(shift + block - 1 - diagonal, block, rounding_mode="floor")
        far = -torch.div(shift - diagonal, block, rounding_mode="floor")
        last = N // block + 2
        steps = torch.zeros(B, H, last + 1, dtype=torch.bool, device=chosen.device)
        for step in (near, far):
            steps.scatter_(2, torch.where(diagonal >= 0, step + 1, last).clamp(max=last), True)
        k_row = keys.row[:, None].masked_fill(owned[..., :-1], -1)
        order = (queries.row[:, None], k_row, place[:, None], places(keys)[:, None])
        return span_from_steps(*order, 0, FAR, (home + 1).long(), steps[..., :last], block, block)

    def _verticals(self, queries: Order, keys: Order, place: Tensor, chosen: Tensor) -> KeySpan:
        """The kept columns, gathered; a column's place is that of its token."""
        block, there = self.block, chosen < len(keys)
        row = keys.row[:, None].expand(-1, chosen.shape[1], -1).gather(2, chosen.clamp(max=len(keys) - 1))
        k_row = pad_rows(torch.where(there, row, -1), block)
        k_place = pad_rows(torch.where(there, chosen, 0), block, 0).to(torch.int32)
        at = place[:, None].expand(-1, chosen.shape[1], -1).long().contiguous()
        seen = torch.searchsorted(chosen, at, right=True)
        start, stop = row_ranges(torch.zeros_like(seen), seen, block, block)
        order = (queries.row[:, None], k_row, place[:, None], k_place)
        return span_from_ranges(*order, 0, FAR, start, stop, block, block)
