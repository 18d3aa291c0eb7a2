"""Estimates the stride and phases of a `grid` head (MMInference, Algorithm 1), and each token's class modulo the stride."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from mmaccel.backends.ops.lines import choose_grid_lines, score_strides
from mmaccel.policies.sparse.estimate import (
    LastQueryAttention,
    SampledQueryLayout,
    Score,
    concatenate_heads,
    score_class_totals,
    score_columns_or_diagonals,
    score_line_classes,
)
from mmaccel.policies.sparse.orders import AttentionRegion, TokenOrder, memoize_while_tracing

REACH = 64
"""Members of a line, at most, by which a stride is judged; a grid repeats, so the nearest tell."""


@dataclass(frozen=True, eq=False)
class StrideResidueClasses:
    """The residue class (position modulo the stride) of each key in each head of a `grid` pattern, and the lines along which
    the head attends; s, v and p as in `Grid`.

    number [B, h, N]: class of each key, in key order; padding has the highest. stride [B, h, 1]: s. line [B, H, 1]: v of the
    vertical lines. dense [B, H, 1]: v of the horizontal ones. shift [B, H, 1]: p of the slashes. h is 1 or H. most_keys:
    most keys of a class that a query can see. count: number of classes, with that of padding. frames: the
    `FrameResidueClasses` that gave all sequences their classes; None if the stride was estimated from queries and keys.
    """

    number: Tensor
    stride: Tensor
    line: Tensor
    dense: Tensor
    shift: Tensor
    most_keys: int
    count: int
    frames: FrameResidueClasses | None = None

    def select_sequences(self, chosen: Tensor, other: StrideResidueClasses) -> StrideResidueClasses:
        """Combine two batches: return these classes where `chosen` [B] bool is True, and those of `other` elsewhere."""
        mixed: dict[str, Any] = {
            name: torch.where(chosen[:, None, None], getattr(self, name), getattr(other, name))
            for name in ("number", "stride", "line", "dense", "shift")
        }
        return replace(self, **mixed, frames=None)

    def query_classes(self, at: Tensor) -> Tensor:
        """Return the class [B, h, P] of each query: that of the key at its rank `at` [B, P]; -1 if it sees no key."""
        own = self.number.gather(2, at.clamp(min=0).long()[:, None].expand(-1, self.number.shape[1], -1))
        return own.masked_fill(at[:, None] < 0, -1)


@dataclass(frozen=True)
class StrideSearch:
    """Settings of the search for the stride (`low` .. `most` tokens) and the phases of a grid pattern. slack, score: as in
    `Grid`; rows: whether the phase of horizontal lines is estimated from queries; keys: number of keys of the sequence that
    has most. No stride is longer than a third of it."""

    low: int
    most: int
    slack: float
    score: Score
    rows: bool
    keys: int


def max_keys_per_class(keys: int, low: int) -> int:
    """Return the most keys of one residue class that a query can see, of `keys` keys and at strides of `low` or more."""
    return max(-(-keys // low), min(keys, 3 * low - 1))


def estimate_stride_classes(
    sample: LastQueryAttention,
    keys: TokenOrder,
    search: StrideSearch,
    *,
    by_columns: bool,
    by_diagonals: bool,
) -> StrideResidueClasses:
    """Return for each head its best stride, the residue class of each key (its rank modulo the stride), and the residues of
    the columns and diagonals that get most attention from the last queries (`sample`).

    A class of columns or diagonals is scored by its attention. A stride's score is that of its best class of columns plus
    that of its best class of diagonals, -inf if three strides do not fit in the sequence. The best stride is the smallest
    whose score is at least 1 - `search.slack` of the highest. With fewer than 3 * `search.low` keys (`low`: smallest stride
    tried) the stride is 1: one class, attended densely.
    """
    layout, n, at = sample.sample, sample.key_count, sample.query_ranks[:, -1]
    # There is a diagonal of each distance at which the last query sees a column.
    value = score_columns_or_diagonals(
        torch.stack(sample.line_weights()) / layout.query_counts, layout.seen, search.score
    )
    columns, diagonals = value
    low, high = search.low, max(search.low, min(search.most, search.keys // 3))
    width = min(n, REACH * high)
    step = torch.arange(width, device=at.device)
    recent = (at[:, None] - step).clamp(min=0)[:, None]
    lines = [columns.gather(2, recent.expand(*columns.shape[:2], -1))] if by_columns else []
    near = torch.stack([*lines, diagonals[..., :width]] if by_diagonals else lines)
    strides = torch.arange(low, high + 1, device=at.device)
    if sample.has_kernel:
        # All strides in one launch; one by one they are ten thousand.
        score = score_strides(near, at, low, high, search.score)
    else:
        there = (step <= at[:, None])[None, :, None]
        near = near.masked_fill(~there, 0.0)
        each = [_heaviest(near, there, s, search.score) for s in range(low, high + 1)]
        score = torch.stack(each, -1)
    score = score.masked_fill((3 * strides > at[:, None] + 1)[:, None], -torch.inf)
    best = score.amax(-1, keepdim=True)
    good = score >= best - search.slack * best.abs()
    stride = low + good.to(torch.uint8).argmax(-1, keepdim=True)
    stride = stride.masked_fill((at + 1 < 3 * low)[:, None, None], 1)
    number = torch.where((keys.row >= 0)[:, None], keys.rank[:, None] % stride, search.most)
    own, classes = number[..., :n], search.most + 1
    line, shift = score_line_classes(value, own, layout.seen, classes, search.score).argmax(-1, keepdim=True)
    dense = _most_even_class(sample.entropy(), sample.query_ranks, own, classes) if search.rows else line
    return StrideResidueClasses(
        number, stride, line, dense, shift, max_keys_per_class(search.keys, low), classes
    )


def _heaviest(value: Tensor, there: Tensor, stride: int, score: Score) -> Tensor:
    """[B, H]: the score of the heaviest class, summed over the kinds of line; value [kinds, B, H, width], 0 outside."""
    short = -value.shape[-1] % stride
    lines = -(-value.shape[-1] // stride)
    folded = torch.nn.functional.pad(value, (0, short)).view(*value.shape[:-1], lines, stride)
    inside = torch.nn.functional.pad(there, (0, short)).view(*there.shape[:-1], lines, stride)
    largest = folded.masked_fill(~inside, -torch.inf).amax(-2)
    return score_class_totals(folded.sum(-2), largest, inside.sum(-2), score).amax(-1).sum(0)


@dataclass(frozen=True, eq=False)
class FrameResidueClasses:
    """Residue classes of the keys by their index within their frame, modulo a stride; made from the token layout.

    number [B, 1, N], stride [B, 1, 1]. fits [B]: whether a sequence can have these classes: where `low` is the smallest
    stride, it has at least 3 * low keys and one frame, and no class has more than 1 / low of the keys. all_fit, any_fits:
    whether all or any sequences fit. most_keys: the most keys of a class. widest: the largest stride. memo: derived values.
    """

    number: Tensor
    stride: Tensor
    fits: Tensor
    all_fit: bool
    any_fits: bool
    most_keys: int
    widest: int
    memo: dict[Hashable, Any] = field(default_factory=dict)

    @classmethod
    def make(cls, region: AttentionRegion, low: int, high: int) -> FrameResidueClasses:
        """Class the keys of `region` by index in their frame, with a stride from `low` to `high`; cached for a prompt."""
        name = "frames", region.kinds[1], low, high
        return memoize_while_tracing(region.layer.memo, name, lambda: cls._made(region, low, high, name))

    @classmethod
    def _made(cls, region: AttentionRegion, low: int, high: int, name: Hashable) -> FrameResidueClasses:
        """Reads the device once. A token outside frames counts on from the first token of the frame before it."""
        keys, layout = region.keys, region.layer.k_layout
        here, row = keys.row >= 0, keys.row.clamp(min=0).long()
        framed = (layout.frame.gather(1, row) >= 0) & here
        cell = layout.cell.gather(1, row)
        rank = torch.arange(len(keys), device=row.device).expand_as(row)
        begin = torch.where(framed & (cell == 0), rank, 0).cummax(1).values
        number = torch.where(framed, cell, rank - begin)
        longest = torch.where(framed, cell + 1, 0).amax(1, keepdim=True)
        stride = longest.clamp(low, high)
        number = torch.where(here, number % stride, high)
        sizes = torch.zeros(len(row), high + 1, dtype=torch.long, device=row.device)
        sizes = sizes.scatter_add(1, number, here.long())
        count = here.sum(1)
        even = sizes.amax(1) <= (count + low - 1) // low
        fits = ((count >= 3 * low) & (longest[:, 0] > 0) & even) | (count == 0)
        facts = torch.stack([fits.all().long(), fits.any().long(), sizes[:, :high].amax(), stride.amax()])
        whole, some, largest, widest = layout.host_value(name, facts.tolist)
        return cls(number[:, None], stride[:, None], fits, bool(whole), bool(some), largest, widest)


def stable_class_order(number: Tensor, most: int) -> Tensor:
    """Return the indices [..., n] that sort tokens by class `number` [..., n], stably; classes from `most` on come last.

    Sorting costs time per bit of the numbers, so small ones are cast to 16 bits: a quarter of the kernel launches.
    """
    number = number.clamp(max=most)
    return (number.to(torch.int16) if most < 2**15 else number).argsort(stable=True, dim=-1)


@dataclass(frozen=True, eq=False)
class StrideClassPairing:
    """For each possible phase p of a grid's slashes (lines parallel to the diagonal): the keys that each of the last queries
    would see. A token's class is its index in its frame modulo the stride s; a query of class c sees the keys of class
    (c - p) mod s. Made from token layouts, not tensors.

    own [B, L] int32: class of each query; paired [B, 1, L, phases]: class of the keys that it sees at each phase; members
    [B, phases]: number of pairs of a query and an earlier key that it sees. order [B, n] int32: key ranks sorted by class;
    start [B, S + 1] int32, S the largest stride: index in `order` at which each class begins, then where the last ends.
    """

    own: Tensor
    paired: Tensor
    members: Tensor
    order: Tensor
    start: Tensor

    @classmethod
    def make(cls, sample: SampledQueryLayout, frames: FrameResidueClasses, high: int) -> StrideClassPairing:
        """Pair the sampled queries `sample` with the classes of the keys of `frames`, at the phases 0 .. high - 1."""
        number = frames.number[..., : sample.seen.shape[1]]
        B, L = sample.at.shape
        own = number.gather(2, sample.at.clamp(min=0)[:, None])
        bins = number[:, :, None].expand(B, 1, L, -1)
        count = number.new_zeros(B, 1, L, high + 1, dtype=torch.float32)
        count = count.scatter_add_(3, bins, sample.causal_key_mask()[:, None].float())
        phase, stride = torch.arange(high, device=number.device), frames.stride[..., None]
        paired = torch.where(phase < stride, (own[..., None] - phase) % stride, high)
        order = stable_class_order(number[:, 0], high)
        edge = torch.arange(frames.widest + 1, device=number.device).expand(B, -1).contiguous()
        start = torch.searchsorted(number[:, 0].gather(1, order), edge, out_int32=True)
        members = count.gather(3, paired).sum((1, 2))
        return cls(own[:, 0].to(torch.int32), paired, members, order.to(torch.int32), start)


def estimate_frame_phases(
    sample: LastQueryAttention, frames: FrameResidueClasses, search: StrideSearch
) -> StrideResidueClasses:
    """Return the classes of `frames` and, for each head, the phases of lines to which the last queries attend most."""
    layout, classes = sample.sample, search.most + 1
    own = frames.number[..., : sample.key_count]
    pairing = memoize_while_tracing(
        frames.memo, ("pairing", id(layout)), lambda: StrideClassPairing.make(layout, frames, search.most)
    )
    if sample.has_kernel:
        order = pairing.order, pairing.start, pairing.own, pairing.members, frames.stride[:, 0, 0]
        found = []
        for one in sample.split_by_head_run():
            made = choose_grid_lines(*one.kernel_args, order, search.score, search.rows)
            found.append([one.expand_heads(t) for t in (made if search.rows else made[:2])])
        line, shift, *spread = map(concatenate_heads, zip(*found, strict=True))
        dense = _most_even_class(spread[0], sample.query_ranks, own, classes) if search.rows else line
    else:
        # What each query gives to each class of keys, its own key left out: that one is heavy whatever the phase.
        before = layout.causal_key_mask()[:, None]
        bins = own[:, :, None].expand(*before.shape)
        lines, shifts = [], []
        for weight in sample.attention_weights():
            value = score_columns_or_diagonals(weight.sum(2) / layout.query_counts, layout.seen, search.score)
            lines.append(
                score_line_classes(value, own, layout.seen, classes, search.score).argmax(-1, keepdim=True)
            )
            given = weight.new_zeros(*weight.shape[:3], classes)
            given.scatter_add_(3, bins.expand(-1, weight.shape[1], -1, -1), weight * before)
            total = given.gather(3, pairing.paired.expand(-1, weight.shape[1], -1, -1)).sum(2)
            score = total if search.score == "sum" else total / pairing.members[:, None].clamp(min=1)
            shifts.append(score.argmax(-1, keepdim=True))
        line, shift = torch.cat(lines, 1), torch.cat(shifts, 1)
        dense = _most_even_class(sample.entropy(), sample.query_ranks, own, classes) if search.rows else line
    most, whole = (
        (frames.most_keys, frames) if frames.all_fit else (max_keys_per_class(search.keys, search.low), None)
    )
    return StrideResidueClasses(frames.number, frames.stride, line, dense, shift, most, classes, whole)


def _most_even_class(spread: Tensor, at: Tensor, number: Tensor, classes: int) -> Tensor:
    """Return [B, H, 1]: the class whose queries, at ranks `at` [B, L], have the largest mean entropy `spread` [B, H, L]."""
    at = at[:, None]
    own = number.gather(2, at.clamp(min=0).expand(-1, number.shape[1], -1)).long()
    there = (at >= 0).expand_as(spread).float()
    zeros = spread.new_zeros(*spread.shape[:2], classes)
    total = zeros.scatter_add(2, own.expand_as(spread), spread * there)
    count = zeros.scatter_add(2, own.expand_as(spread), there)
    return (total / count.clamp(min=1)).argmax(-1, keepdim=True)
