"""One plan out of several, each for some of the heads: heads of different patterns go through few operator calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mmaccel.backends.ops import block_lists
from mmaccel.core.layout import TokenLayout
from mmaccel.core.plan import (
    ABSENT,
    FAR,
    AttentionPlan,
    BlockLists,
    DenseHeads,
    HeadRange,
    KeySpan,
    Part,
)

Share = tuple[Sequence[int], AttentionPlan | None]
"""Some heads, in the order in which their plan has them, and the plan; None for heads that are to be dense.

A plan of one head may stand for several: they then all follow it."""

ALIGNED = 128
"""Elements to whose multiples packed tensors begin: kernels are compiled for how addresses divide."""


def merge_plans(
    shares: Sequence[Share], heads: int, group: int, queries: TokenLayout, keys: TokenLayout
) -> AttentionPlan | None:
    """The plan of `heads` heads, each in one of `shares`; None when all are dense.

    The rows of each head's parts follow one another, and the spans of all are side by side: a head that lacks one has
    empty lists there, and beyond its rows is padding (-1). Spans share a slot when their ranges do, moved to begin at 0;
    nothing is rounded, and no list grows. Heads whose lists are runs of blocks in their order are a part of their own, for
    an operator may read the lists of neighbours together there; so is each merge group of those whose parts share rows.
    `group` query heads share a key/value head.

    Dense heads are not listed: at a million tokens the full lists of one head take 0.7 GB, and block lists run below the
    rate of a dense kernel. They are in the plan's `dense`, and one dense call serves them.
    """
    sparse = [(tuple(some), plan) for some, plan in shares if plan is not None and len(some)]
    dense = [head for some, plan in shares if plan is None for head in some]
    dense += [some[i] for some, plan in sparse if plan.dense is not None for i in plan.dense.heads]
    named = sorted(head for some, _ in shares for head in some)
    if named != list(range(heads)):
        raise ValueError(f"heads {named} are not each of 0 to {heads - 1} once")
    if not sparse:
        return None
    first = sparse[0][1]
    if len(sparse) == 1 and sparse[0][0] == tuple(range(heads)):
        return first if first.heads == heads else replace(first, heads=heads)
    sizes = {(p.block_q, p.block_k, p.batch, p.n_query, p.n_key) for _, p in sparse}
    if len(sizes) > 1:
        raise ValueError(f"plans of different blocks or tensors do not mix: {sorted(sizes)}")
    families: dict[tuple[int, bool, int], list[Member]] = {}
    for i, (some, plan) in enumerate(sparse):
        for number in sorted({part.merge_group for part in plan.parts}):
            parts = [part for part in plan.parts if part.merge_group == number]
            in_order = all(span.lists.index is None for part in parts for span in part.spans)
            # Keys of a span's own are of the heads that it was planned for.
            own = i if any(span.key is not None for part in parts for span in part.spans) else -1
            families.setdefault((number, in_order, own), []).append(Member(some, parts))
    packer = TensorPacker()
    drafts = []
    for (number, *_), members in sorted(families.items(), key=lambda family: family[0][0]):
        head_range = HeadRange.of([head for member in members for head in member.heads], group)
        drafts.append(_draft(packer, members, head_range, (first.block_q, first.block_k), number))
    packer.flush()
    rest = DenseHeads(tuple(sorted(dense)), queries, keys, first.n_query) if dense else None
    return replace(first, parts=tuple(draft() for draft in drafts), heads=heads, dense=rest)


class Member(NamedTuple):
    """Some heads, and the parts of one merge group of each of them."""

    heads: tuple[int, ...]
    parts: Sequence[Part]


def joined(parts: Sequence[Part], heads: int, blocks: tuple[int, int]) -> Part:
    """One part of all `parts` of a merge group, each for all `heads` heads, so that one launch computes them.

    `blocks` are the tokens of a block of queries and of keys.
    """
    packer = TensorPacker()
    draft = _draft(packer, [Member(tuple(range(heads)), parts)], None, blocks, parts[0].merge_group)
    packer.flush()
    return draft()


@dataclass(frozen=True)
class Slice:
    """Where a tensor [b, h, n, ...] will be among the packed elements of its type."""

    kind: int
    begin: int
    shape: tuple[int, ...]

    @property
    def line(self) -> int:
        """Elements of one head."""
        return self.shape[2] * (self.shape[3] if len(self.shape) > 3 else 1)

    @property
    def size(self) -> int:
        """Elements in all."""
        return self.shape[0] * self.shape[1] * self.line


@dataclass(eq=False)
class TensorPacker:
    """Puts many pieces of tensors together: each `put` is noted, and `flush` writes all of them in two launches."""

    _sources: list[Tensor] = field(default_factory=list)
    _fills: list[int] = field(default_factory=list)
    _puts: list[int] = field(default_factory=list)
    _ends: list[int] = field(default_factory=lambda: [0] * len(block_lists.KINDS))
    _tiles: list[int] = field(default_factory=lambda: [0, 0])
    _made: list[Tensor] = field(default_factory=list)

    def add(self, shape: tuple[int, ...], value: int, dtype: torch.dtype) -> Slice:
        """A tensor of `shape` [b, h, n], or of lists [b, h, n, 5], that is `value` wherever nothing is put."""
        kind = block_lists.KINDS.index(dtype)
        to = Slice(kind, self._ends[kind], shape)
        self._ends[kind] += to.size + -to.size % ALIGNED
        if to.size:
            tiles = self._next(0, 1, to.size)
            # In the order of `block_lists.FIELDS`, as below.
            self._fills += (tiles, to.begin, kind, 0, 0, 1, 1, to.size, -1, 0, 0, 0, value, 0, 0)
        return to

    def put(
        self, to: Slice, slots: tuple[int, ...], t: Tensor, begin: int, more: int = 0, shift: int = 0
    ) -> None:
        """Write `t` [b or 1, slots or 1, n, ...] plus `more` into the columns from `begin` of the heads `slots`.

        In lists `more` is added to where each begins, and `shift` to its last number.
        """
        of_row = len(to.shape) > 3
        size = t.shape[2] * (block_lists.ROW if of_row else 1)
        dense = t.stride(-1) == 1 and (not of_row or t.stride(2) == block_lists.ROW)
        if not size or not t.shape[0] * t.shape[1]:
            return
        t = t if dense else t.contiguous()
        source = len(self._sources)
        self._sources.append(t)
        from_b, from_h = (t.stride(i) if t.shape[i] > 1 else 0 for i in (0, 1))
        at = 0
        while at < len(slots):
            # One piece for each run of adjacent heads.
            end = at + 1
            while end < len(slots) and slots[end] == slots[end - 1] + 1:
                end += 1
            if from_h and at:
                source = len(self._sources)
                self._sources.append(t[:, at:end])
            target = to.begin + slots[at] * to.line + begin * (block_lists.ROW if of_row else 1)
            lead = target, to.kind, to.shape[1] * to.line, to.line, end - at, to.shape[0], size
            tail = source, block_lists.KINDS.index(t.dtype), from_b, from_h, more, int(of_row), shift
            self._puts += (self._next(1, (end - at) * to.shape[0], size), *lead, *tail)
            at = end

    def _next(self, phase: int, lines: int, size: int) -> int:
        """The tiles of a phase so far, to which those of a piece are added."""
        before = self._tiles[phase]
        self._tiles[phase] += lines * -(-size // block_lists.TILE)
        return before

    def flush(self) -> None:
        """Make all tensors."""
        fills = len(self._fills) // len(block_lists.FIELDS)
        self._made = block_lists.assembled(self._sources, [*self._fills, *self._puts], fills, self._ends)

    def tensor(self, of: Slice) -> Tensor:
        """The tensor of a slice, after `flush`."""
        return self._made[of.kind][of.begin : of.begin + of.size].view(of.shape)


@dataclass(frozen=True)
class Lead:
    """The leading dimensions of a joined part, and where its heads are in them."""

    packer: TensorPacker
    batch: int
    heads: int
    first: int

    @classmethod
    def of(cls, packer: TensorPacker, members: Sequence[Member], head_range: HeadRange | None) -> Lead:
        """The leading dimensions of all that `members` hold."""
        parts = [part for member in members for part in member.parts]
        tensors = [part.q_row for part in parts]
        for s in (s for part in parts for s in part.spans):
            tensors += [s.k_row, s.q_pos, s.k_pos, s.lists.row, *([] if s.bias is None else [s.bias])]
        batch, most = (max(t.shape[i] for t in tensors) for i in (0, 1))
        if head_range is None:
            return cls(packer, batch, most, members[0].heads[0])
        return cls(packer, batch, len(head_range), head_range.first)

    def add(self, size: int, value: int, dtype: torch.dtype, *more: int) -> Slice:
        """[b, h, size, ...] of `value`, wherever nothing is put."""
        return self.packer.add((self.batch, self.heads, size, *more), value, dtype)

    def put(
        self, to: Slice, heads: tuple[int, ...], t: Tensor, begin: int, more: int = 0, shift: int = 0
    ) -> None:
        """Write `t` [b or 1, its heads or 1, n, ...] into the columns from `begin` of `heads`: see `TensorPacker.put`."""
        slots = tuple(head - self.first for head in heads) if self.heads > 1 else (0,)
        self.packer.put(to, slots, t, begin, more, shift)


class Piece(NamedTuple):
    """A span of some heads, whose first row is `begin` of theirs."""

    heads: tuple[int, ...]
    begin: int
    span: KeySpan

    @property
    def hi(self) -> int:
        """The end of its range, moved to begin at 0."""
        return FAR if self.span.hi >= FAR else self.span.hi - self.span.lo

    @property
    def keys(self) -> Any:
        """What tells its keys from others: where they lie, or while a graph is traced, which tensors they are."""
        traced = torch.compiler.is_compiling()  # an address is not known there
        keys = [t for t in (self.span.k_row, self.span.k_pos, self.span.bias) if t is not None]
        return tuple((id(t) if traced else t.data_ptr(), t.shape, t.stride()) for t in keys)


def _draft(
    packer: TensorPacker,
    members: Sequence[Member],
    head_range: HeadRange | None,
    blocks: tuple[int, int],
    merge_group: int,
) -> Callable[[], Part]:
    """Note all that one part of `members` holds; what is returned makes the part once the packer is flushed.

    Without `head_range` there is one member, of all heads.
    """
    lead = Lead.of(packer, members, head_range)
    # Neighbours whose lists may be read together are of one part.
    step = 2 * blocks[0]
    ends = [
        list(accumulate((part.q_row.shape[-1] + -part.q_row.shape[-1] % step for part in m.parts), initial=0))
        for m in members
    ]
    slots: dict[tuple[Any, ...], list[Piece]] = {}
    rows = max(begins[-1] for begins in ends)
    q_row = lead.add(rows, -1, torch.int32)
    for member, begins in zip(members, ends, strict=True):
        for part, begin in zip(member.parts, begins, strict=False):
            lead.put(q_row, member.heads, part.q_row, begin)
            seen: dict[tuple[Any, ...], int] = {}
            for span in sorted(part.spans, key=lambda s: -s.k_row.shape[-1]):
                piece = Piece(member.heads, begin, span)
                kind = piece.hi, span.lists.index is None, span.bias is None, id(span.key), id(span.value)
                number = seen[kind] = seen.get(kind, -1) + 1
                slots.setdefault((*kind, number), []).append(piece)
    spans = [_span(some, lead, rows, blocks) for some in slots.values()]
    known = {_all_rows(member.parts) for member in members}
    each = head_range is None or sum(len(member.heads) for member in members) == len(head_range)
    all_rows = known.pop() if each and len(known) == 1 else None

    def made() -> Part:
        row = packer.tensor(q_row)
        return Part(row, tuple(span() for span in spans), head_range, merge_group, all_rows=all_rows)

    return made


def _all_rows(parts: Sequence[Part]) -> int | None:
    """How many rows `parts`, all of a merge group, hold, each once; None where that is not known."""
    if len(parts) == 1 and parts[0].ordered is not None:
        return parts[0].ordered
    known = {part.all_rows for part in parts}
    return known.pop() if len(known) == 1 else None


def _span(some: list[Piece], lead: Lead, rows: int, blocks: tuple[int, int]) -> Callable[[], KeySpan]:
    """One span of all pieces: of each head the keys of its pieces follow one another, those of one order once."""
    one = some[0].span
    alike = all(t is None or t.shape[1] == 1 for t in (one.k_row, one.k_pos, one.bias))
    shared = len({p.keys for p in some}) == 1 and alike
    # Keys that are those of all who list any need not be repeated for each head.
    keys = replace(lead, heads=1, first=0) if shared else lead
    known: dict[tuple[int, ...], dict[Any, int]] = {}
    ends: dict[tuple[int, ...], int] = {}
    begins: list[int] = []
    for p in some:
        mine, name = known.setdefault(p.heads, {}), p.keys
        if name not in mine:
            mine[name] = ends.get(p.heads, 0)
            ends[p.heads] = mine[name] + p.span.k_row.shape[-1]
        begins.append(mine[name])
    width = max(ends.values())
    wide = any(t.dtype == torch.int64 for p in some for t in (p.span.q_pos, p.span.k_pos))
    dtype = torch.int64 if wide else torch.int32
    k_row, k_pos = keys.add(width, -1, torch.int32), keys.add(width, 0, dtype)
    # A bias goes as its bits.
    bias = None if one.bias is None else keys.add(width, 0, torch.int32)
    q_pos = lead.add(rows, -1, dtype)
    kind = keys.add(width // blocks[1], ABSENT, torch.int8)
    row = lead.add(rows // blocks[0], 0, torch.int64, 5)
    indices = [p.span.lists.index for p in some if p.span.lists.index is not None]
    index = None
    if indices:
        index = lead.packer.add((1, 1, sum(t.numel() for t in indices)), 0, torch.int32)
    written, entries = set(), 0
    for p, begin in zip(some, begins, strict=True):
        lists, first, at = p.span.lists, begin // blocks[1], p.begin // blocks[0]
        lead.put(q_pos, p.heads, p.span.q_pos, p.begin, -p.span.lo)
        if index is None or lists.index is None:
            lead.put(row, p.heads, lists.row, at, first)
        else:
            lead.put(row, p.heads, lists.row, at, entries, first)
            lead.packer.put(index, (0,), lists.index[None, None], entries)
            entries += lists.index.numel()
        heads = (0,) if shared else p.heads
        if (heads, begin) not in written:
            written.add((heads, begin))
            keys.put(k_row, heads, p.span.k_row, begin)
            keys.put(k_pos, heads, p.span.k_pos, begin)
            keys.put(kind, heads, lists.kind, first)
            if bias is not None and p.span.bias is not None:
                keys.put(bias, heads, p.span.bias.view(torch.int32), begin)

    def made() -> KeySpan:
        tensor = lead.packer.tensor
        lists = BlockLists(tensor(row), None if index is None else tensor(index).flatten(), tensor(kind))
        extra: dict[str, Any] = dict(key=one.key, value=one.value)
        extra |= dict(bias=None if bias is None else tensor(bias).view(torch.float32))
        return KeySpan(tensor(k_row), tensor(q_pos), tensor(k_pos), 0, some[0].hi, lists, **extra)

    return made
