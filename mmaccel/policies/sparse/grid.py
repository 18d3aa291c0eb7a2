"""Evenly spaced lines: slashes, columns and rows of one stride, made dense by the order (class, position)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from mmaccel.core.errors import RecipeError
from mmaccel.core.layout import TokenLayout
from mmaccel.core.plan import AttentionPlan, Part
from mmaccel.core.registry import register
from mmaccel.core.sparse import SparsePattern
from mmaccel.policies.sparse.estimate import LastQueries
from mmaccel.policies.sparse.orders import Order, at_or_before, natural, touched, whole_blocks
from mmaccel.policies.sparse.residue import Residue, dense_rows
from mmaccel.policies.sparse.stride import Classes, best_stride, frame_classes, frame_phases, strided_classes


@register("sparse", "grid")
@dataclass(frozen=True, kw_only=True)
class Grid(SparsePattern):
    """Every token has a class; a head attends along lines of one class. Exact, no block is rounded up.

    slash       a query of class c sees the keys of class (c - p) mod s not after it: lines parallel to the diagonal
    vertical    every query sees the keys of class v not after it
    horizontal  a query of class v sees every key not after it

    The stride s and the phases p and v are estimated, head by head, from the last `last_q` queries (MMInference,
    Algorithm 1): the weight of a line is the mean over its members, the largest one left out, of what they get from each
    of those queries; of the strides within `slack` of the best the smallest wins, for multiples of a stride weigh alike.
    The phase of horizontal lines is that of the columns: few queries cannot show which rows are dense, and grids are
    symmetrical (section 2.2). A query on no line sees nothing, and its output is zero.

    stride="free"   class = place mod s, with s searched in min_stride..max_stride
    stride="frame"  class = number of the token in its frame, s = tokens of the largest frame (at most max_stride, beyond
                    which classes wrap), so that neither ragged frames nor timestamps shift a line; tokens outside frames
                    count on from the first token of the frame before them

    A batch is attended densely when one of its prompts is shorter than 3 * min_stride, or, under "frame", has no frame or
    one class that holds more than 1 / min_stride of its tokens.
    """

    adaptive: ClassVar[bool] = True

    stride: Literal["frame", "free"] = "frame"
    max_stride: int = 1024
    min_stride: int = 8
    horizontal: bool = True
    vertical: bool = True
    slash: bool = True
    last_q: int = 64
    slack: float = 0.02

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stride not in ("frame", "free"):
            raise RecipeError(f"grid: stride is {self.stride!r}; give 'frame' or 'free'.")
        if self.min_stride < 2 or self.max_stride < self.min_stride:
            raise RecipeError(
                f"grid: min_stride {self.min_stride} and max_stride {self.max_stride} are no range from 2 upwards."
            )
        if not (self.horizontal or self.vertical or self.slash):
            raise RecipeError("grid: horizontal, vertical and slash are all off; turn one on.")
        if self.last_q < 1:
            raise RecipeError(f"grid: last_q is {self.last_q}; give at least 1 query.")
        if not 0 <= self.slack < 1:
            raise RecipeError(f"grid: slack is {self.slack}; give a share from 0 to 1.")

    def plan(
        self, query: Tensor, key: Tensor, q_layout: TokenLayout, k_layout: TokenLayout
    ) -> AttentionPlan | None:
        B, H, n_query, _ = query.shape
        n_key, block = key.shape[2], self.block
        if n_key < 3 * self.min_stride:
            return None
        queries, keys = natural(q_layout, block=block), natural(k_layout, block=block)
        place = at_or_before(keys, queries)
        sample = LastQueries.of(query, key, queries, keys, place, self.last_q, k_layout.padded)
        classes = self._classes(sample, k_layout, keys)
        if classes is None:
            return None
        residue = Residue.of(queries, keys, place, classes, block=block, slash=self.slash)
        parts: list[Part] = []
        if self.slash or self.vertical:
            q_row = residue.q_row
            if self.horizontal:
                q_row = torch.where(residue.own == classes.line, -1, q_row)
            spans = [residue.slash(q_row, self.vertical)] if self.slash else []
            spans += [residue.vertical(q_row)] if self.vertical else []
            parts.append(Part(q_row, tuple(spans)))
        if self.horizontal:
            parts.append(dense_rows(queries, keys, place, classes, block))
        return AttentionPlan(
            parts=tuple(parts),
            block_q=block,
            block_k=block,
            batch=B,
            heads=H,
            n_query=n_query,
            n_key=n_key,
        )

    def bound(self, n_query: int, n_key: int) -> int:
        block, room = self.block, self._room(n_key)
        rows, keys = whole_blocks(n_query, block), whole_blocks(n_key, block)
        total = 0
        if self.slash:
            # A block of queries touches one class, and one more for each class that begins in it.
            total += rows * touched(room, block) + keys + 2 * min(self.max_stride, n_query)
        if self.vertical:
            total += rows * touched(room, block)
        if self.horizontal:
            total += whole_blocks(min(room, n_query), block) * keys
        return total

    def _room(self, n_key: int) -> int:
        """The most keys of a class."""
        return whole_blocks(n_key, self.min_stride)

    def _classes(self, sample: LastQueries, layout: TokenLayout, keys: Order) -> Classes | None:
        n, low, high = sample.key.shape[2], self.min_stride, self.max_stride
        if self.stride == "free":
            if layout.padded and bool((layout.valid.sum(1) < 3 * low).any()):
                return None
            high = min(high, n // 3)
            columns, diagonals = (line / sample.askers() for line in sample.lines())
            stride = best_stride(
                columns if self.horizontal or self.vertical else None,
                diagonals if self.slash else None,
                sample.at[:, -1],
                low,
                high,
                self.slack,
            )
            return strided_classes(columns, diagonals, sample, stride, len(keys), low, high)
        number, stride, fits = frame_classes(layout, keys, low, high)
        if not bool(fits):
            return None
        return frame_phases(sample, number, stride, self._room(n), high)
