"""Which stride and which phases a grid head has (MMInference, Algorithm 1), and the class of each token."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mmaccel.backends.ops.estimate import class_phases, stride_scores
from mmaccel.core.layout import TokenLayout
from mmaccel.policies.sparse.estimate import Asking, LastQueries, Score, class_scores, judged, standing
from mmaccel.policies.sparse.intra import Sight
from mmaccel.policies.sparse.orders import Order

REACH = 64
"""Members of a line, at most, by which a stride is judged; a grid repeats, so the nearest tell."""


@dataclass(frozen=True, eq=False)
class Classes:
    """number [B, h, N] class of each key in its order, beyond every class for padding; stride [B, h, 1] classes there are.

    line [B, H, 1] class of the vertical lines, dense [B, H, 1] that of the horizontal ones, shift [B, H, 1] phase of the
    slashes; h is 1 or H. room is the most keys a query can see of a class, most the most classes, padding counted. frames:
    those whose classes they are, where no tensor of a layer had a say in them.
    """

    number: Tensor
    stride: Tensor
    line: Tensor
    dense: Tensor
    shift: Tensor
    room: int
    most: int
    frames: Frames | None = None

    def where(self, mine: Tensor, other: Classes) -> Classes:
        """Those of the sequences `mine` [B] as they are here, the rest as in `other`."""
        here = mine[:, None, None]
        return Classes(
            torch.where(here, self.number, other.number),
            torch.where(here, self.stride, other.stride),
            torch.where(here, self.line, other.line),
            torch.where(here, self.dense, other.dense),
            torch.where(here, self.shift, other.shift),
            self.room,
            self.most,
        )


@dataclass(frozen=True)
class Search:
    """How lines are judged: the strides in question, and fields of `Grid`; `keys` are how many keys there can be."""

    low: int
    most: int
    slack: float
    score: Score
    rows: bool
    keys: int

    @property
    def least(self) -> int:
        """Keys below which a stride of `low` does not repeat."""
        return 3 * self.low

    @property
    def high(self) -> int:
        """The largest stride that repeats."""
        return max(self.low, min(self.most, self.keys // 3))

    @property
    def room(self) -> int:
        """The most keys a query can see of one class: those of the least stride, or all of too short a sequence."""
        return room(self.keys, self.low)


def room(keys: int, low: int) -> int:
    """The most of `keys` keys that a query can see of one class when no stride is below `low`."""
    return max(-(-keys // low), min(keys, 3 * low - 1))


def best_stride(
    columns: Tensor | None, diagonals: Tensor | None, at: Tensor, search: Search, fused: bool = False
) -> Tensor:
    """[B, H, 1]: the smallest stride whose best lines weigh within the slack of the best of any stride.

    columns, diagonals [B, H, n] the standing of lines, or None; at [B] place of the last query. A stride weighs what its
    heaviest class of columns and its heaviest class of diagonals weigh together, and nothing where three of it do not fit.
    fused: the device weighs all strides in one launch; one by one they are ten thousand.
    """
    some = columns if columns is not None else diagonals
    assert some is not None
    low, high = search.low, search.high
    width = min(some.shape[2], REACH * high)
    step = torch.arange(width, device=some.device)
    there = (step <= at[:, None])[None, :, None]
    recent = (at[:, None] - step).clamp(min=0)[:, None]
    lines = [columns.gather(2, recent.expand(*columns.shape[:2], -1))] if columns is not None else []
    lines += [diagonals[..., :width]] if diagonals is not None else []
    value = torch.stack(lines)
    strides = torch.arange(low, high + 1, device=some.device)
    if fused:
        score = stride_scores(value, at, low, high, search.score)
    else:
        value = value.masked_fill(~there, 0.0)
        each = [_heaviest(value, there, s, search.score) for s in range(low, high + 1)]
        score = torch.stack(each, -1)
    score = score.masked_fill((3 * strides > at[:, None] + 1)[:, None], -torch.inf)
    best = score.amax(-1, keepdim=True)
    good = score >= best - search.slack * best.abs()
    found: Tensor = low + good.to(torch.uint8).argmax(-1, keepdim=True)
    return found


def _heaviest(value: Tensor, there: Tensor, stride: int, score: Score) -> Tensor:
    """[B, H]: the score of the heaviest class, summed over the kinds of line; value [kinds, B, H, width], 0 outside."""
    short = -value.shape[-1] % stride
    lines = -(-value.shape[-1] // stride)
    folded = torch.nn.functional.pad(value, (0, short)).view(*value.shape[:-1], lines, stride)
    inside = torch.nn.functional.pad(there, (0, short)).view(*there.shape[:-1], lines, stride)
    largest = folded.masked_fill(~inside, -torch.inf).amax(-2)
    return judged(folded.sum(-2), largest, inside.sum(-2), score).amax(-1).sum(0)


def strided_classes(
    sample: LastQueries, keys: Order, search: Search, *, by_columns: bool, by_diagonals: bool
) -> Classes:
    """Classes by place modulo the best stride, with the phases of the heaviest lines.

    Where fewer than 3 * low keys are seen no stride repeats, and it is 1: one class, of which every line is made.
    """
    last, n = sample.at[:, -1], sample.width
    # There is a diagonal of each distance at which the last query sees a column.
    weight = torch.stack(sample.lines()) / sample.asking.askers()
    value = standing(weight, sample.seen, search.score)
    lines = value[0] if by_columns else None, value[1] if by_diagonals else None
    stride = best_stride(*lines, last, search, sample.fused)
    stride = stride.masked_fill((last + 1 < search.least)[:, None, None], 1)
    number = torch.where((keys.row >= 0)[:, None], keys.rank[:, None] % stride, search.most)
    own, classes = number[..., :n], search.most + 1
    line, shift = class_scores(value, own, sample.seen, classes, search.score).argmax(-1, keepdim=True)
    dense = evenest(sample, own, classes) if search.rows else line
    return Classes(number, stride, line, dense, shift, search.room, classes)


@dataclass(frozen=True, eq=False)
class Frames:
    """Classes by the place of tokens in their frame: what follows from the layout alone.

    number [B, 1, N], stride [B, 1, 1]; fits [B] which sequences they serve: one that has 3 * low tokens, a frame, and no
    class of more than 1 / low of its tokens. whole: they serve all; some: they serve any; room: the most tokens of a class;
    widest: the largest stride. held: what else was derived of them.
    """

    number: Tensor
    stride: Tensor
    fits: Tensor
    whole: bool
    some: bool
    room: int
    widest: int
    held: dict[Any, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, sight: Sight, search: Search) -> Frames:
        """Those of the keys of `sight`, made once for a prompt, with one look at the device."""
        held = sight.layer.orders.held
        name = "frames", sight.kinds[1], search.low, search.most
        if name not in held:
            number, stride, fits, largest = frame_classes(sight.layer.k_layout, sight.keys, search)
            looked = torch.stack([fits.all().long(), fits.any().long(), largest, stride.amax()])
            whole, some, room, widest = looked.tolist()
            held[name] = cls(number, stride, fits, bool(whole), bool(some), room, widest)
        found: Frames = held[name]
        return found


def frame_classes(layout: TokenLayout, keys: Order, search: Search) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """number [B, 1, N], stride [B, 1, 1] and fits [B] of `Frames`, and the size of the largest class.

    A token outside frames counts on from the first token of the frame before it.
    """
    B, N = keys.row.shape
    low, high = search.low, search.most
    here, row = keys.row >= 0, keys.row.clamp(min=0).long()
    framed = (layout.frame.gather(1, row) >= 0) & here
    cell = layout.cell.gather(1, row)
    place = torch.arange(N, device=row.device).expand(B, N)
    begin = torch.where(framed & (cell == 0), place, 0).cummax(1).values
    number = torch.where(framed, cell, place - begin)
    longest = torch.where(framed, cell + 1, 0).amax(1, keepdim=True)
    stride = longest.clamp(low, high)
    number = torch.where(here, number % stride, high)
    sizes = torch.zeros(B, high + 1, dtype=torch.long, device=row.device).scatter_add_(1, number, here.long())
    count = here.sum(1)
    fits = (count >= search.least) & (longest[:, 0] > 0) & (sizes.amax(1) <= (count + low - 1) // low)
    return number[:, None], stride[:, None], fits | (count == 0), sizes[:, :high].amax()


def by_class(number: Tensor, most: int) -> Tensor:
    """The order (class, place) of tokens [..., n] by place, whose classes are `number`; those from `most` on come last.

    Sorts look at every bit: short numbers take a quarter of the launches.
    """
    number = number.clamp(max=most)
    return (number.to(torch.int16) if most < 2**15 else number).argsort(stable=True, dim=-1)


@dataclass(frozen=True, eq=False)
class Pairing:
    """The classes of frames as the last queries meet them: from the layouts alone.

    own [B, L] int32 the class of each query; paired [B, 1, L, phases] the class that a query's slash of each phase leads to;
    members [B, phases] how many pairs of a query and a key before it have a phase. order [B, n] int32 the places by class,
    start [B, widest + 1] int32 where each class begins in it, and the last ends.
    """

    own: Tensor
    paired: Tensor
    members: Tensor
    order: Tensor
    start: Tensor

    @classmethod
    def of(cls, asking: Asking, frames: Frames, search: Search) -> Pairing:
        """That of the queries `asking` and the keys of `frames`, made once."""
        name = "pairing", id(asking)
        if name not in frames.held:
            frames.held[name] = cls._made(asking, frames, search.most)
        found: Pairing = frames.held[name]
        return found

    @classmethod
    def _made(cls, asking: Asking, frames: Frames, high: int) -> Pairing:
        own = frames.number[..., : asking.width]
        B, L = asking.at.shape
        mine = own.gather(2, asking.at.clamp(min=0)[:, None])
        bins = own[:, :, None].expand(B, 1, L, -1)
        count = own.new_zeros(B, 1, L, high + 1, dtype=torch.float32)
        count = count.scatter_add_(3, bins, asking.before()[:, None].float())
        phase = torch.arange(high, device=own.device)
        paired = torch.where(
            phase < frames.stride[..., None], (mine[..., None] - phase) % frames.stride[..., None], high
        )
        order = by_class(own[:, 0], high)
        number = own[:, 0].gather(1, order)
        edge = torch.arange(frames.widest + 1, device=own.device).expand(B, -1)
        start = torch.searchsorted(number, edge.contiguous(), out_int32=True)
        members = count.gather(3, paired).sum((1, 2))
        return cls(mine[:, 0].to(torch.int32), paired, members, order.to(torch.int32), start)


def frame_phases(sample: LastQueries, frames: Frames, search: Search) -> Classes:
    """The classes of `frames`, with the phases of the heaviest lines."""
    number, stride, classes = frames.number, frames.stride, search.most + 1
    own = number[..., : sample.width]
    pairing = Pairing.of(sample.asking, frames, search)
    room, whole = (frames.room, frames) if frames.whole else (search.room, None)
    if sample.fused:
        line, shift, spread = class_phases(
            sample.query,
            sample.key,
            sample.asking.row,
            sample.at,
            sample.total,
            sample.width,
            sample.pooled,
            pairing.order,
            pairing.start,
            pairing.own,
            pairing.members,
            stride[:, 0, 0],
            search.score,
            search.rows,
        )
        dense = most_even(sample.spread(spread), sample.at, own, classes) if search.rows else line
        line, dense, shift = (sample.spread(t) for t in (line, dense, shift))
        return Classes(number, stride, line, dense, shift, room, classes, whole)
    # What each query gives to each class of keys, its own key left out: that one is heavy whatever the phase.
    before = sample.asking.before()[:, None]
    bins = own[:, :, None].expand(*before.shape)
    lines, shifts = [], []
    for weight in sample.weights():
        value = standing(weight.sum(2) / sample.asking.askers(), sample.seen, search.score)
        lines.append(class_scores(value, own, sample.seen, classes, search.score).argmax(-1, keepdim=True))
        given = weight.new_zeros(*weight.shape[:3], classes)
        given.scatter_add_(3, bins.expand(-1, weight.shape[1], -1, -1), weight * before)
        total = given.gather(3, pairing.paired.expand(-1, weight.shape[1], -1, -1)).sum(2)
        score = total if search.score == "sum" else total / pairing.members[:, None].clamp(min=1)
        shifts.append(score.argmax(-1, keepdim=True))
    line = torch.cat(lines, 1)
    dense = evenest(sample, own, classes) if search.rows else line
    return Classes(number, stride, line, dense, torch.cat(shifts, 1), room, classes, whole)


def evenest(sample: LastQueries, number: Tensor, classes: int) -> Tensor:
    """[B, H, 1]: of the classes of the last queries the one whose queries spread widest, by the entropy of their weights."""
    spread = torch.cat([torch.special.entr(weight).sum(-1) for weight in sample.weights()], 1)
    return most_even(spread, sample.at, number, classes)


def most_even(spread: Tensor, at: Tensor, number: Tensor, classes: int) -> Tensor:
    """[B, H, 1]: the class of the greatest mean of spread [B, H, L], of queries at the places `at` [B, L]."""
    at = at[:, None]
    own = number.gather(2, at.clamp(min=0).expand(-1, number.shape[1], -1)).long()
    there = (at >= 0).expand_as(spread).float()
    zeros = spread.new_zeros(*spread.shape[:2], classes)
    total = zeros.scatter_add(2, own.expand_as(spread), spread * there)
    count = zeros.scatter_add(2, own.expand_as(spread), there)
    return (total / count.clamp(min=1)).argmax(-1, keepdim=True)
