"""The `grid` pattern (MMInference): evenly spaced diagonals, columns and rows, made dense by sorting tokens by class."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from mmaccel.backends.ops.block_attend import KeySpan, Part
from mmaccel.backends.ops.lines import sort_by_class
from mmaccel.core.errors import RecipeError
from mmaccel.core.prefill.plan import FAR, span_by_range
from mmaccel.core.registry import SHARE, FieldLimit, at_least, limited, register
from mmaccel.policies.sparse.estimate import Score
from mmaccel.policies.sparse.orders import (
    AttentionRegion,
    IntraPattern,
    ceil_block_count,
    max_touched_blocks,
    max_window_sink_blocks,
    memoize_while_tracing,
)
from mmaccel.policies.sparse.stride import (
    FrameResidueClasses,
    StrideResidueClasses,
    StrideSearch,
    estimate_frame_phases,
    estimate_stride_classes,
    max_keys_per_class,
    stable_class_order,
)

Phase = Literal["keys", "queries"]
Estimate = Literal["head", "group"]

MOST_STRIDE = 1 << 16
"""The largest stride: every phase of each that is tried has a score of its own."""


@register("sparse", "grid")
@dataclass(frozen=True, kw_only=True)
class Grid(IntraPattern):
    """Attention along evenly spaced lines of stride s; a token's class is its index modulo s. Exact: all other keys of a
    block are masked.

    slash       a query of class c sees the earlier keys of class (c - p) mod s: lines parallel to the diagonal
    vertical    every query sees the earlier keys of class v
    horizontal  a query of class v sees every earlier key
    window      every query sees the last `window` keys, itself included. 0, as in the paper's algorithm: none
    sink        every query sees the first `sink` keys. 0: none

    The stride s and the phases p and v are estimated, head by head, from the last `last_q` queries (MMInference, Algorithm
    1). With no window and no sink, a query on no line sees nothing, and its output is zero. The authors' code
    (microsoft/MInference, `minference/modules/mminference.py`) adds to the lines a sink of all that precedes the video, a
    local window, and dense rows for the text after the video (here the recipe's `dense_tail`); its window is what Table 3
    prints as 1024. Its stride and phases come from the table of heads, and it has no slash lines. What the paper
    leaves open is a field:

    score             "mean": a class of lines weighs the mean over its members, the largest one left out, of what they get
                      from each of those queries; "contrast": the mean of the logarithms, in standard errors, which is
                      greatest at the true stride; under noise "mean" may be greatest at a multiple of it, which has more
                      classes; "sum": the sum over the members, which favours small strides
    slack             the smallest stride whose score is within this share of the best wins, as its multiples score alike
    horizontal_phase  "keys": v of the horizontal lines is that of the columns, for grids are symmetrical (section 2.2) and
                      few queries cannot show which rows are dense; "queries": the class whose queries spread their weight
                      most evenly, among the last ones
    estimate          "head": each query head by itself; "group": the heads that share a key head together

    stride="free"   class = position mod s, with s searched in min_stride..max_stride
    stride="frame"  class = index of the token in its frame, s = tokens of the largest frame (at most max_stride, beyond
                    which classes wrap), so that neither frames of unequal size nor timestamps shift a line; tokens outside
                    frames count on from the first token of the frame before them

    A sequence of fewer than 3 * min_stride tokens is one class, and so attended densely. One without frames, or with a class
    that holds more than 1 / min_stride of its tokens, gets a searched stride under "frame" too. Within a modality boundary
    positions and frames are those of the keys, and a query has the class of the last key up to it.
    """

    adaptive: ClassVar[bool] = True

    stride: Literal["frame", "free"] = "frame"
    max_stride: int = 1024
    min_stride: int = 8
    horizontal: bool = True
    vertical: bool = True
    slash: bool = True
    window: int = limited(0, at_least(0, " tokens"))
    sink: int = limited(0, at_least(0, " tokens"))
    last_q: int = limited(64, at_least(1, " query"))
    slack: float = limited(0.02, FieldLimit(lambda share: 0 <= share < 1, SHARE.give))
    score: Score = "contrast"
    horizontal_phase: Phase = "keys"
    estimate: Estimate = "head"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_stride < 2 or self.max_stride < self.min_stride:
            raise RecipeError(
                f"grid: min_stride {self.min_stride} and max_stride {self.max_stride} are no range from 2 upwards."
            )
        if self.max_stride > MOST_STRIDE:
            raise RecipeError(f"grid: max_stride is {self.max_stride}; give at most {MOST_STRIDE}.")
        if not (self.horizontal or self.vertical or self.slash):
            raise RecipeError("grid: horizontal, vertical and slash are all off; turn one on.")

    def build_plan_parts(self, region: AttentionRegion) -> tuple[Part, ...]:
        classes = self._classes(region)
        parts: list[Part] = []
        if self.slash and classes.frames is not None:
            parts += self._framed_lines(region, classes, classes.frames)
        else:
            if self.slash or self.vertical:
                parts.append(self._strided_lines(region, classes))
            if self.horizontal:
                parts.append(self._dense_rows(region, classes))
        if self.window or self.sink or not (self.slash or self.vertical):
            # Merged with the lines by log-sum-exp, over disjoint keys; or the part of rows on no line, which see nothing.
            near = region.window_and_sink(self.sink, self.window) or (region.key_span(FAR, FAR),)
            parts.append(region.plan_part(near, merge_group=1))
        return tuple(parts)

    def max_blocks(self, n_query: int, n_key: int, *, gaps: bool, ties: bool) -> tuple[int, int]:
        block, most = self.block, max_keys_per_class(n_key, self.min_stride)
        keys = ceil_block_count(n_key, block)
        each, more = max_window_sink_blocks(n_key, self.sink, self.window, block, gaps=gaps)
        each += max_touched_blocks(most, block) * (self.slash + self.vertical)
        if self.slash:
            # A block of queries touches one class, and one more for each class that begins in it.
            more += keys + 2 * min(self.max_stride, n_query)
        if self.horizontal:
            more += ceil_block_count(n_query if ties else min(most, n_query), block) * keys
        return each, more

    def estimate_blocks(self, rows: int, keys: int, share: float, region: AttentionRegion | None) -> float:
        block, line = self.block, max_keys_per_class(keys, self.min_stride)
        if self.stride == "frame" and region is not None:
            frames = FrameResidueClasses.make(region, self.min_stride, self.max_stride)
            line = min(line, frames.most_keys) if frames.all_fit else line
        # Of the rows, the last of the keys, a class has its share. A block of queries that begins in one class and ends in
        # others lists the lines of all, of the keys in their order no block twice, and lines begin anywhere.
        own = min(rows, -(-line * rows // max(keys, 1)))
        blocks, each = ceil_block_count(rows, block), share * line / block + 2
        lines = min(each * max(1.0, block / max(own, 1)), ceil_block_count(keys, block)) * self.slash
        dense = ceil_block_count(own, block) * (share * keys / block + 1)
        near = min(self.window, keys) / block + bool(self.window) + min(self.sink, keys) / block
        near = min(near, share * keys / block + 1)
        return blocks * (lines + each * self.vertical) + self.horizontal * dense + blocks * near

    def _classes(self, region: AttentionRegion) -> StrideResidueClasses:
        sample = region.last_query_attention(self.last_q, self.estimate == "group")
        rows = self.horizontal_phase == "queries"
        search = StrideSearch(self.min_stride, self.max_stride, self.slack, self.score, rows, region.max_keys)
        frames = FrameResidueClasses.make(region, search.low, search.most) if self.stride == "frame" else None
        framed = (
            estimate_frame_phases(sample, frames, search) if frames is not None and frames.any_fits else None
        )
        if framed is not None and framed.frames is not None:
            return framed
        lines = dict(by_columns=self.horizontal or self.vertical, by_diagonals=self.slash)
        free = estimate_stride_classes(sample, region.keys, search, **lines)
        return free if frames is None or framed is None else framed.select_sequences(frames.fits, free)

    def _uncovered(self, region: AttentionRegion) -> tuple[Tensor, Tensor]:
        """What the spans of the window and the sink leave to the lines: for each query the rank [B, P] of the last key, -1
        for none, and the rows [B, N] of the keys, -1 for the first ones."""
        keys, at = region.keys, region.at
        last = (at - self.window).clamp(min=-1) if self.window else at
        return last, keys.row.masked_fill(keys.rank < self.sink, -1) if self.sink else keys.row

    def _strided_lines(self, region: AttentionRegion, classes: StrideResidueClasses) -> Part:
        """The slashes and the vertical line of each head, where heads have classes of their own.

        Keys are by (class, position), queries by (class of the keys they pair with, position); without slashes the queries
        stay in the order they are in. The queries of the horizontal line are another part's.
        """
        (last, k_row), keys, at, most = self._uncovered(region), region.keys, region.at, classes.most_keys
        # The code of a key ascends in the order of the keys: base exceeds any rank.
        base = len(keys) + 1
        order = stable_class_order(classes.number, classes.count)
        code = (classes.number * base + keys.rank[:, None]).gather(2, order)
        number, place = code // base, torch.arange(code.shape[2], device=at.device)
        k_row = k_row[:, None].expand_as(order).gather(2, order)
        own = classes.query_classes(at)
        pair = (own - classes.shift) % classes.stride if self.slash else own
        q_row, q_at = region.q_row.expand_as(pair), last[:, None].expand_as(pair)
        own = own.expand_as(pair)
        if self.slash:
            order = stable_class_order(torch.where(q_row >= 0, pair, classes.count), classes.count)
            q_row, q_at, own, pair = (t.gather(2, order) for t in (q_row, q_at, own, pair))
        if self.horizontal:
            q_row = torch.where(own == classes.dense, -1, q_row)
        dtype = torch.int64 if 2 * most * classes.count >= FAR else torch.int32

        def find(wanted: Tensor, right: bool = False) -> Tensor:
            """Where codes [B, x, n] fall among those of the keys [B, h, N]; x is h, or any number when h is 1."""
            flat = wanted.reshape(*code.shape[:2], -1) if code.shape[1] == 1 else wanted.contiguous()
            return torch.searchsorted(code, flat, right=right).view_as(wanted)

        def span(rows: Tensor, q_pos: Tensor, k_pos: Tensor, hi: int) -> KeySpan:
            q_pos = torch.where(q_row >= 0, q_pos, -1).to(dtype)
            k_pos = torch.where(rows >= 0, k_pos, 0).to(dtype)
            return span_by_range(q_row, rows, q_pos, k_pos, 0, hi, self.block, self.block)

        spans = []
        if self.slash:
            start, end = find(pair * base), find(pair * base + q_at, right=True)
            rank = place - find(number * base)
            # Classes lie twice the most keys of a class apart: no pair of two classes is within the range.
            q_pos, k_pos = pair * (2 * most) + end - start - 1, number * (2 * most) + rank
            rows = torch.where(number == classes.line, -1, k_row) if self.vertical else k_row
            spans.append(span(rows, q_pos, k_pos, most))
        if self.vertical:
            begin = classes.line * base
            start, end = find(begin), find(begin + q_at, right=True)
            rows = torch.where(number == classes.line, k_row, -1)
            spans.append(span(rows, end - start - 1, place - start, FAR))
        return Part(q_row, tuple(spans))

    def _framed_lines(
        self, region: AttentionRegion, classes: StrideResidueClasses, frames: FrameResidueClasses
    ) -> list[Part]:
        """The lines of each head, where all heads share the classes."""
        block, most = self.block, frames.most_keys
        name = "order", region.kinds, self.window, self.sink
        order = memoize_while_tracing(
            frames.memo, name, lambda: TokensByStrideClass.sort(region, frames, *self._uncovered(region))
        )
        columns = ceil_block_count(max(most, 1), block) * block if self.vertical else 0
        rows = self._dense_size(region, classes) if self.horizontal else 0
        tokens = order.queries, order.q_begin, order.keys, order.k_begin, frames.stride[:, 0, 0]
        lines = classes.line, classes.shift, classes.dense
        wide = order.k_pos.dtype == torch.int64
        q_row, q_pos, *more = sort_by_class(tokens, lines, most, wide, columns, rows)
        spans = [span_by_range(q_row, order.k_row, q_pos, order.k_pos, 0, most, block, block)]
        if self.vertical:
            q_pos, k_row, k_pos, *more = more
            spans.append(span_by_range(q_row, k_row, q_pos, k_pos, 0, FAR, block, block))
        # Each of the last queries has a rank and so a class: it is dense, or turned.
        all_rows = region.layer.q_layout.length if region.queries_are_last_keys else None
        parts = [Part(q_row, tuple(spans), all_rows=all_rows)]
        if self.horizontal:
            parts.append(replace(self._dense_part(region, *more), all_rows=all_rows))
        return parts

    def _dense_rows(self, region: AttentionRegion, classes: StrideResidueClasses) -> Part:
        """The queries of the horizontal line, in their order, over every key not after them but those of other spans."""
        chosen = classes.query_classes(region.at) == classes.dense
        size = self._dense_size(region, classes)
        slot = torch.where(chosen, chosen.long().cumsum(2) - 1, size)

        def gathered(values: Tensor) -> Tensor:
            none = torch.full((*chosen.shape[:2], size + 1), -1, dtype=torch.int32, device=values.device)
            return none.scatter_(2, slot, values.expand_as(slot))[..., :-1].contiguous()

        last, _ = self._uncovered(region)
        return self._dense_part(region, gathered(region.q_row), gathered(last[:, None]))

    def _dense_size(self, region: AttentionRegion, classes: StrideResidueClasses) -> int:
        """Space for as many queries of one line as there can be, in whole blocks."""
        # Queries of one rank are of one class; others are of no more than keys are.
        size = (
            region.at.shape[1]
            if region.queries_may_share_rank
            else min(classes.most_keys, region.at.shape[1])
        )
        return size + -size % self.block

    def _dense_part(self, region: AttentionRegion, q_row: Tensor, last: Tensor) -> Part:
        """Queries [B, H, n], and the ranks of the last keys that they may see, over every key up to there."""
        (_, k_row), keys, block = self._uncovered(region), region.keys, self.block
        order = q_row, k_row[:, None], last, keys.rank[:, None]
        ordered = None if self.sink else keys.count
        return Part(q_row, (span_by_range(*order, 0, FAR, block, block, ordered=ordered, ranks=True),))


@dataclass(frozen=True, eq=False)
class TokensByStrideClass:
    """Queries and keys sorted by (residue class: rank modulo the stride, rank among the keys), for a grid whose heads share
    their classes. It depends on the token layouts alone, not on queries and keys.

    queries [3, B, P] int32: row, rank of the last key that it may see, and class; keys [3, B, N] int32: row, rank and class;
    q_begin, k_begin [B, C + 1] int32: where each class begins. k_row, k_pos [B, 1, N]: rows and positions of the keys for
    the slashes of every head; positions of different classes are so far apart (twice the most keys of a class) that no pair
    of two classes is in range. Queries without a rank see nothing, and are left out.
    """

    queries: Tensor
    q_begin: Tensor
    keys: Tensor
    k_begin: Tensor
    k_row: Tensor
    k_pos: Tensor

    @classmethod
    def sort(
        cls, region: AttentionRegion, frames: FrameResidueClasses, last: Tensor, k_row: Tensor
    ) -> TokensByStrideClass:
        """Sort the queries and keys of `region` by class, without the pairs that window and sink cover: `last` [B, P] is the
        rank of the last key that each query may see, -1 for none; `k_row` [B, N] are the rows of keys, -1 for the sink."""
        number, at, most = frames.number[:, 0], region.at.long(), frames.most_keys
        edge = torch.arange(frames.widest + 1, device=at.device).expand(len(at), -1).contiguous()

        def ordered(row: Tensor, rank: Tensor, of: Tensor) -> tuple[Tensor, Tensor]:
            order = stable_class_order(of, frames.widest + 1)
            tokens = torch.stack([t.gather(1, order).to(torch.int32) for t in (row, rank, of)])
            return tokens, torch.searchsorted(tokens[2].long(), edge, out_int32=True)

        own = torch.where(at >= 0, number.gather(1, at.clamp(min=0)), FAR)
        queries, q_begin = ordered(torch.where(at >= 0, region.q_row[:, 0], -1), last, own)
        keys, k_begin = ordered(k_row, region.keys.rank.long(), number)
        row, of = keys[0], keys[2].long()
        begin = k_begin.long().gather(1, of.clamp(max=frames.widest))
        k_pos = of * (2 * most) + torch.arange(row.shape[1], device=row.device) - begin
        wide = 2 * most * frames.widest >= FAR
        k_pos = torch.where(row >= 0, k_pos, 0).to(torch.int64 if wide else torch.int32)
        return cls(queries, q_begin, keys, k_begin, row[:, None].contiguous(), k_pos[:, None])
