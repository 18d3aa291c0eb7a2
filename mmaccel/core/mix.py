"""One plan out of several, each for some of the heads: heads of different patterns go through few operator calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mmaccel.backends.ops import ABSENT, rows_together, tell_together
from mmaccel.core.layout import TokenLayout
from mmaccel.core.lists import BlockLists, BlockRuns
from mmaccel.core.plan import FAR, AttentionPlan, Cover, DenseHeads, KeySpan, Part, numbered
from mmaccel.core.sheet import Room, Sheet

Share = tuple[Sequence[int], AttentionPlan | None]
"""Some heads, in the order in which their plan has them, and the plan; None for heads that are to be dense.

A plan of one head may stand for several: they then all follow it."""


class HeadRun(NamedTuple):
    """Some heads of adjacent key/value groups, as many of each group: an attention with fewer heads, keys uncopied."""

    heads: tuple[int, ...]
    groups: slice

    def of(self, query: Tensor) -> Tensor:
        """The queries [B, h, n, D] of these heads; a view where the heads are adjacent."""
        first, last = self.heads[0], self.heads[-1]
        if last - first + 1 == len(self.heads):
            return query[:, first : last + 1]
        return query[:, numbered(self.heads, query.device)]


def runs(heads: Sequence[int], group: int) -> list[HeadRun]:
    """`heads` in the fewest runs; `group` is how many query heads share a key/value head."""
    held: dict[int, list[int]] = {}
    for head in sorted(heads):
        held.setdefault(head // group, []).append(head)
    found: list[HeadRun] = []
    for g, some in held.items():
        last = found[-1] if found else None
        same = last is not None and len(last.heads) == len(some) * (last.groups.stop - last.groups.start)
        if last is not None and same and last.groups.stop == g:
            found[-1] = HeadRun((*last.heads, *some), slice(last.groups.start, g + 1))
        else:
            found.append(HeadRun(tuple(some), slice(g, g + 1)))
    return found


def mix(
    shares: Sequence[Share], heads: int, group: int, queries: TokenLayout, keys: TokenLayout
) -> AttentionPlan | None:
    """The plan of `heads` heads, each in one of `shares`; None when all are dense.

    The rows of each head's parts follow one another, and the spans of all stand side by side: a head that lacks one has
    empty lists there, and beyond its rows is padding (-1). Spans share a slot when their ranges do, moved to begin at 0;
    nothing is rounded, and no list grows. Heads whose lists are runs of blocks in their order are a part of their own, for
    an operator may read the lists of neighbours together there; so is each turn of those whose parts share rows. `group` is
    how many query heads share a key/value head.

    Dense heads are not listed: at a million tokens the full lists of one head take 0.7 GB, and block lists run below the
    rate of a dense kernel. They stand in the plan's `dense`, and one dense call serves them.
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
    families: dict[tuple[int, bool], list[Member]] = {}
    for some, plan in sparse:
        for turn in sorted({part.turn for part in plan.parts}):
            parts = [part for part in plan.parts if part.turn == turn]
            ordered = all(_in_order(span.lists) for part in parts for span in part.spans)
            families.setdefault((turn, ordered), []).append(Member(some, parts))
    blocks, sheet = (first.block_q, first.block_k), Sheet()
    drafts = [
        Draft.of(
            sheet,
            members,
            Cover.of([head for member in members for head in member.heads], group),
            blocks,
            turn,
        )
        for (turn, _), members in sorted(families.items(), key=lambda family: family[0][0])
    ]
    sheet.write()
    wide = DenseHeads(tuple(sorted(dense)), queries, keys, first.n_query) if dense else None
    return replace(first, parts=tuple(draft.part() for draft in drafts), heads=heads, dense=wide)


class Member(NamedTuple):
    """Some heads, and disjoint parts of each of them."""

    heads: tuple[int, ...]
    parts: Sequence[Part]


def joined(members: Sequence[Member], cover: Cover | None, blocks: tuple[int, int], turn: int = 0) -> Part:
    """One part of all that `members` compute, so that one launch computes it.

    `blocks` are the tokens of a block of queries and of keys. Without `cover` there is one member, of all heads.
    """
    sheet = Sheet()
    draft = Draft.of(sheet, members, cover, blocks, turn)
    sheet.write()
    return draft.part()


class Piece(NamedTuple):
    """A span of some heads, whose first row is `begin` of theirs."""

    heads: tuple[int, ...]
    begin: int
    span: KeySpan

    @property
    def hi(self) -> int:
        """The end of its range, moved to begin at 0."""
        return FAR if self.span.hi >= FAR else self.span.hi - self.span.lo


@dataclass(frozen=True)
class Lead:
    """The leading dimensions of a joined part, and where its heads are in them."""

    sheet: Sheet
    batch: int
    heads: int
    first: int

    def room(self, size: int, value: int, dtype: torch.dtype, *more: int) -> Room:
        """[b, h, size, ...] of `value`, wherever nothing is put."""
        return self.sheet.room((self.batch, self.heads, size, *more), value, dtype)

    def put(
        self, room: Room, heads: tuple[int, ...], t: Tensor, begin: int, more: int = 0, shift: int = 0
    ) -> None:
        """Write `t` [b or 1, its heads or 1, n, ...] into the columns from `begin` of `heads`: see `Sheet.put`."""
        slots = tuple(head - self.first for head in heads) if self.heads > 1 else (0,)
        self.sheet.put(room, slots, t, begin, more, shift)


@dataclass(frozen=True, eq=False)
class Draft:
    """A part whose tensors have rooms on a sheet that is not written yet; `whole`: how many rows every head is known to
    have, each once."""

    sheet: Sheet
    q_row: Room
    whole: int | None
    spans: list[DraftSpan]
    cover: Cover | None
    turn: int

    @classmethod
    def of(
        cls,
        sheet: Sheet,
        members: Sequence[Member],
        cover: Cover | None,
        blocks: tuple[int, int],
        turn: int,
    ) -> Draft:
        """As `joined`."""
        lead = _lead(sheet, members, cover)
        # Neighbours whose lists may be read together are of one part.
        ends = [
            list(accumulate((_whole(part.q_row.shape[-1], 2 * blocks[0]) for part in m.parts), initial=0))
            for m in members
        ]
        slots: dict[tuple[int, str, int], list[Piece]] = {}
        rows = max(begins[-1] for begins in ends)
        q_row = lead.room(rows, -1, torch.int32)
        for member, begins in zip(members, ends, strict=True):
            for part, begin in zip(member.parts, begins, strict=False):
                lead.put(q_row, member.heads, part.q_row, begin)
                seen: dict[tuple[int, str], int] = {}
                for span in sorted(part.spans, key=lambda s: -s.k_row.shape[-1]):
                    piece = Piece(member.heads, begin, span)
                    kind = piece.hi, _form(span.lists)
                    number = seen[kind] = seen.get(kind, -1) + 1
                    slots.setdefault((*kind, number), []).append(piece)
        spans = [_span(pieces, lead, rows, blocks) for pieces in slots.values()]
        return cls(sheet, q_row, _all_rows(members, cover), spans, cover, turn)

    def part(self) -> Part:
        """The part itself, once its sheet is written."""
        spans = tuple(span.made(self.sheet) for span in self.spans)
        q_row = self.sheet.tensor(self.q_row)
        if self.whole is not None:
            tell_together([q_row], self.whole)
        return Part(q_row, spans, self.cover, self.turn)


@dataclass(frozen=True, eq=False)
class DraftSpan:
    """A span of a draft."""

    k_row: Room
    q_place: Room
    k_place: Room
    hi: int
    lists: BlockLists | DraftRuns

    def made(self, sheet: Sheet) -> KeySpan:
        """The span itself."""
        lists = self.lists if isinstance(self.lists, BlockLists) else self.lists.made(sheet)
        k_row, q_place, k_place = (sheet.tensor(room) for room in (self.k_row, self.q_place, self.k_place))
        return KeySpan(k_row, q_place, k_place, 0, self.hi, lists)


@dataclass(frozen=True, eq=False)
class DraftRuns:
    """The lists of a span of a draft, where they are runs."""

    row: Room
    index: Room | None
    kind: Room
    most: int

    def made(self, sheet: Sheet) -> BlockRuns:
        """The lists themselves."""
        index = None if self.index is None else sheet.tensor(self.index).flatten()
        return BlockRuns(sheet.tensor(self.row), index, sheet.tensor(self.kind), self.most)


def _all_rows(members: Sequence[Member], cover: Cover | None) -> int | None:
    """How many rows each head has, every one once among the parts of its member; None where that is not known of all."""
    if cover is not None and sum(len(member.heads) for member in members) < len(cover):
        return None
    found = {rows_together([part.q_row for part in member.parts]) for member in members}
    return found.pop() if len(found) == 1 else None


def _lead(sheet: Sheet, members: Sequence[Member], cover: Cover | None) -> Lead:
    tensors = [
        t
        for member in members
        for part in member.parts
        for t in (
            part.q_row,
            *(t for s in part.spans for t in (s.k_row, s.q_place, s.k_place, _told(s.lists))),
        )
    ]
    batch, most = (max(t.shape[i] for t in tensors) for i in (0, 1))
    if cover is None:
        return Lead(sheet, batch, most, members[0].heads[0])
    return Lead(sheet, batch, len(cover), cover.first)


def _told(lists: BlockLists | BlockRuns) -> Tensor:
    return lists.row if isinstance(lists, BlockRuns) else lists.offset


def _in_order(lists: BlockLists | BlockRuns) -> bool:
    """Whether lists are runs of blocks in their order."""
    return isinstance(lists, BlockRuns) and lists.index is None


def _form(lists: BlockLists | BlockRuns) -> str:
    """What shares a slot must be told alike."""
    return "lists" if isinstance(lists, BlockLists) else "order" if lists.index is None else "index"


def _whole(n: int, block: int) -> int:
    return n + -n % block


def _span(pieces: list[Piece], lead: Lead, rows: int, blocks: tuple[int, int]) -> DraftSpan:
    """One span of all `pieces`: of each head the keys of its pieces follow one another, those of one order once."""
    one = pieces[0].span
    shared = len({_named(p.span) for p in pieces}) == 1 and one.k_row.shape[1] == one.k_place.shape[1] == 1
    # Keys that are those of all who list any need not be repeated for each head.
    keys = replace(lead, heads=1, first=0) if shared else lead
    held: dict[tuple[int, ...], dict[Any, int]] = {}
    ends: dict[tuple[int, ...], int] = {}
    begins: list[int] = []
    for p in pieces:
        mine, name = held.setdefault(p.heads, {}), _named(p.span)
        if name not in mine:
            mine[name] = ends.get(p.heads, 0)
            ends[p.heads] = mine[name] + p.span.k_row.shape[-1]
        begins.append(mine[name])
    width, wide = (
        max(ends.values()),
        any(t.dtype == torch.int64 for p in pieces for t in (p.span.q_place, p.span.k_place)),
    )
    dtype = torch.int64 if wide else torch.int32
    k_row, k_place = keys.room(width, -1, torch.int32), keys.room(width, 0, dtype)
    q_place = lead.room(rows, -1, dtype)
    written = set()
    for p, begin in zip(pieces, begins, strict=True):
        lead.put(q_place, p.heads, p.span.q_place, p.begin, -p.span.lo)
        some = (0,) if shared else p.heads
        if (some, begin) not in written:
            written.add((some, begin))
            keys.put(k_row, some, p.span.k_row, begin)
            keys.put(k_place, some, p.span.k_place, begin)
    firsts = [begin // blocks[1] for begin in begins]
    told = [(p.heads, p.begin // blocks[0], p.span.lists) for p in pieces]
    lists: BlockLists | DraftRuns
    if isinstance(pieces[0].span.lists, BlockLists):
        lists = _lists(told, firsts, lead, rows // blocks[0])
    else:
        lists = _runs(told, firsts, lead, keys, rows // blocks[0], width // blocks[1])
    return DraftSpan(k_row, q_place, k_place, pieces[0].hi, lists)


def _named(span: KeySpan) -> Any:
    """What tells the keys of a span from others: where they lie, or while a graph is traced, which tensors they are."""
    traced = torch.compiler.is_compiling()  # an address is not known there
    keys = span.k_row, span.k_place
    return tuple((id(t) if traced else t.data_ptr(), t.shape, t.stride()) for t in keys)


Told = tuple[tuple[int, ...], int, Any]
"""Heads, the first of their blocks of queries that lists are for, and the lists."""


def _runs(
    told: list[Told], firsts: list[int], lead: Lead, keys: Lead, blocks: int, n_blocks: int
) -> DraftRuns:
    """The runs of all over their indices laid end to end, their keys' first blocks `firsts`."""
    row = lead.room(blocks, 0, torch.int64, 5)
    kind = keys.room(n_blocks, ABSENT, torch.int8)
    indices = [lists.index for _, _, lists in told if lists.index is not None]
    index = None
    if indices:
        index = lead.sheet.room((1, 1, sum(t.numel() for t in indices)), 0, torch.int32)
    begun = 0
    written = set()
    for (heads, begin, lists), first in zip(told, firsts, strict=True):
        if lists.index is None:
            lead.put(row, heads, lists.row, begin, first)
        else:
            assert index is not None
            lead.put(row, heads, lists.row, begin, begun, first)
            lead.sheet.put(index, (0,), lists.index[None, None], begun)
            begun += lists.index.numel()
        some = heads if keys.heads > 1 else (0,)
        if (some, first) not in written:
            written.add((some, first))
            keys.put(kind, some, lists.kind, first)
    most = max(lists.most for _, _, lists in told)
    return DraftRuns(row, index, kind, most)


def _lists(told: list[Told], firsts: list[int], lead: Lead, blocks: int) -> BlockLists:
    """Lists of all heads out of those of some, in the order (sequence, head, query block); no host read."""
    # Where lists begin must be known before others can be written.
    lead = replace(lead, sheet=Sheet())
    lengths, begins = (lead.room(blocks, 0, torch.int64) for _ in range(2))
    room = shift = 0
    for heads, first, lists in told:
        offset = lists.offset
        lead.put(lengths, heads, offset[..., 1:] - offset[..., :-1], first)
        lead.put(begins, heads, offset[..., :-1], first, shift)
        shift += lists.index.numel()
        some = len(heads) if lead.heads > 1 else 1
        room += lists.index.numel() * (lead.batch // offset.shape[0]) * (some // offset.shape[1])
    lead.sheet.write()
    length, begin = (lead.sheet.tensor(of) for of in (lengths, begins))
    ends = torch.nn.functional.pad(length.reshape(-1).cumsum(0), (1, 0))
    flat = torch.arange(lead.batch * lead.heads, device=ends.device)[:, None] * blocks
    offset = ends[flat + torch.arange(blocks + 1, device=ends.device)].view(
        lead.batch, lead.heads, blocks + 1
    )
    # Entry e of the new lists is entry `source` of the old ones laid end to end; what is past the last is slack.
    entry = torch.arange(room, device=ends.device)
    owner = torch.searchsorted(ends[1:], entry, right=True).clamp_(max=ends.numel() - 2)
    source = (begin.reshape(-1)[owner] + entry - ends[owner]).clamp_(min=0, max=max(shift - 1, 0))
    index = torch.cat([lists.index + first for (_, _, lists), first in zip(told, firsts, strict=True)])[
        source
    ]
    kind = torch.cat([lists.kind for _, _, lists in told])[source]
    return BlockLists(offset, index, kind)
