"""One plan out of several, each for some of the heads: heads of different patterns go through one operator call a part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from mmaccel.backends.ops import ABSENT
from mmaccel.core.layout import TokenLayout
from mmaccel.core.lists import BlockLists, BlockRuns
from mmaccel.core.plan import FAR, AttentionPlan, DenseHeads, KeySpan, Part, numbered

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


def mix(shares: Sequence[Share], heads: int, queries: TokenLayout, keys: TokenLayout) -> AttentionPlan | None:
    """The plan of `heads` heads, each in one of `shares`; None when all are dense.

    Part for part and span for span the plans stand side by side: a head that lacks one has no rows (-1) and empty lists
    there. Spans share a slot when their ranges do, moved to begin at 0; nothing is rounded, and no list grows.

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
    # The longest parts of each side by side: rows that a head lacks are rows of padding.
    columns = [
        [(some, part) for part in sorted(plan.parts, key=lambda p: -p.q_row.shape[-1])]
        for some, plan in sparse
    ]
    depth = max(map(len, columns))
    parts = tuple(
        _part([column[i] for column in columns if i < len(column)], heads, first) for i in range(depth)
    )
    overlap = any(plan.overlap for _, plan in sparse)
    wide = DenseHeads(tuple(sorted(dense)), queries, keys, first.n_query) if dense else None
    return replace(first, parts=parts, heads=heads, overlap=overlap, dense=wide)


def joined(parts: Sequence[Part], block: int) -> Part:
    """Disjoint parts as one, block of queries after block of queries, so that one launch computes them all.

    A span has empty lists in the query blocks of parts that are not its own.
    """
    if len(parts) == 1:
        return parts[0]
    b, h = (max(part.q_row.shape[i] for part in parts) for i in (0, 1))
    q_row = torch.cat([part.q_row.expand(b, h, -1) for part in parts], -1)
    spans: list[KeySpan] = []
    begin = 0
    for part in parts:
        P = part.q_row.shape[-1]
        beside = (begin, q_row.shape[-1] - begin - P)
        for span in part.spans:
            q_place = torch.nn.functional.pad(span.q_place, beside, value=-1)
            lists = _among(span.lists, beside[0] // block, beside[1] // block)
            spans.append(replace(span, q_place=q_place, lists=lists))
        begin += P
    return Part(q_row, tuple(spans))


def _among(lists: BlockLists | BlockRuns, before: int, after: int) -> BlockLists | BlockRuns:
    """`lists` with empty ones for so many query blocks before and after theirs."""
    if isinstance(lists, BlockRuns):
        return replace(lists, row=torch.nn.functional.pad(lists.row, (0, 0, before, after)))
    o = lists.offset
    lead = o.shape[:2]
    offset = torch.cat([o[..., :1].expand(*lead, before), o, o[..., -1:].expand(*lead, after)], -1)
    return replace(lists, offset=offset)


def _part(members: list[tuple[tuple[int, ...], Part]], heads: int, like: AttentionPlan) -> Part:
    rows = max(part.q_row.shape[-1] for _, part in members)
    q_row = _spread([(some, part.q_row) for some, part in members], heads, rows, -1)
    slots: dict[tuple[int, type, int], list[tuple[tuple[int, ...], KeySpan]]] = {}
    for some, part in members:
        seen: dict[tuple[int, type], int] = {}
        for span in sorted(map(_from_zero, part.spans), key=lambda s: -s.k_row.shape[-1]):
            kind = span.hi, type(span.lists)
            number = seen[kind] = seen.get(kind, -1) + 1
            slots.setdefault((*kind, number), []).append((some, span))
    spans = tuple(_span(slot, heads, rows, like) for slot in slots.values())
    return Part(q_row, spans)


def _from_zero(span: KeySpan) -> KeySpan:
    """The same span with its range moved to begin at 0."""
    if span.lo == 0:
        return span
    hi = FAR if span.hi >= FAR else span.hi - span.lo
    return replace(span, q_place=span.q_place - span.lo, lo=0, hi=hi)


def _span(slot: list[tuple[tuple[int, ...], KeySpan]], heads: int, rows: int, like: AttentionPlan) -> KeySpan:
    keys = max(span.k_row.shape[-1] for _, span in slot)
    alone = len(slot) == 1
    k_row, q_place, k_place = (
        # What one share alone says may stand for all heads: the others list nothing here.
        _lengthened(tensors[0][1], size, fill)
        if alone and tensors[0][1].shape[1] == 1
        else _spread(tensors, heads, size, fill)
        for tensors, size, fill in (
            ([(some, s.k_row) for some, s in slot], keys, -1),
            ([(some, s.q_place) for some, s in slot], rows, -1),
            ([(some, s.k_place) for some, s in slot], keys, 0),
        )
    )
    blocks = rows // like.block_q
    told = [(some, s.lists) for some, s in slot if isinstance(s.lists, BlockLists)]
    shared = [(some, s.lists) for some, s in slot if isinstance(s.lists, BlockRuns)]
    lists = _lists(told, heads, blocks) if told else _runs(shared, heads, blocks, keys // like.block_k)
    return KeySpan(k_row, q_place, k_place, 0, slot[0][1].hi, lists)


def _runs(
    members: list[tuple[tuple[int, ...], BlockRuns]], heads: int, blocks: int, n_blocks: int
) -> BlockRuns:
    """The runs of all members over their indices laid end to end; one in block order is enough for all who have it."""
    plain = all(lists.index is None for _, lists in members)
    batch = max(lists.row.shape[0] for _, lists in members)
    device = members[0][1].row.device
    row = torch.zeros(batch, heads, blocks, 5, dtype=torch.int64, device=device)
    order = torch.arange(n_blocks, dtype=torch.int32, device=device)
    indices: list[Tensor] = [] if plain else [order]
    begun = 0 if plain else n_blocks
    for some, lists in members:
        told = lists.row.expand(-1, len(some), -1, -1) if lists.row.shape[1] == 1 else lists.row
        if lists.index is not None:
            # A number of the host goes into a kernel as it is; a tensor made of it would be a copy that is waited for.
            told = torch.cat([told[..., :1] + begun, told[..., 1:]], -1)
            indices.append(lists.index)
            begun += lists.index.numel()
        # Heads are written as runs of five columns a block.
        _put(row.flatten(2), some, told.flatten(2))
    kind = _spread([(some, lists.kind) for some, lists in members], heads, n_blocks, ABSENT)
    most = max(lists.most for _, lists in members)
    return BlockRuns(row, None if plain else torch.cat(indices), kind, most)


def _lengthened(x: Tensor, size: int, fill: int) -> Tensor:
    short = size - x.shape[-1]
    return torch.nn.functional.pad(x, (0, short), value=fill) if short else x


def _spread(tensors: list[tuple[tuple[int, ...], Tensor]], heads: int, size: int, fill: int) -> Tensor:
    """[b, heads, size]: each [b or 1, its heads or 1, n] in the rows of its heads, `fill` elsewhere."""
    batch = max(t.shape[0] for _, t in tensors)
    dtype = torch.int64 if any(t.dtype == torch.int64 for _, t in tensors) else tensors[0][1].dtype
    out = torch.full((batch, heads, size), fill, dtype=dtype, device=tensors[0][1].device)
    for some, t in tensors:
        _put(out, some, t)
    return out


def _put(out: Tensor, some: tuple[int, ...], t: Tensor) -> None:
    """Write `t` [b or 1, len(some) or 1, n] into the first n columns of the heads `some` of `out`."""
    first, last, n = some[0], some[-1], t.shape[-1]
    if some == tuple(range(first, last + 1)):
        out[:, first : last + 1, :n] = t
    else:
        out[:, numbered(some, out.device), :n] = t.to(out.dtype).expand(out.shape[0], len(some), n)


def _lists(members: list[tuple[tuple[int, ...], BlockLists]], heads: int, blocks: int) -> BlockLists:
    """Lists of all heads out of those of some, in the order (sequence, head, query block); no host read."""
    batch = max(o.offset.shape[0] for _, o in members)
    device = members[0][1].offset.device
    length = torch.zeros(batch, heads, blocks, dtype=torch.int64, device=device)
    begin = torch.zeros_like(length)
    room = shift = 0
    for some, lists in members:
        offset = lists.offset
        _put(length, some, offset[..., 1:] - offset[..., :-1])
        _put(begin, some, offset[..., :-1] + shift)
        shift += lists.index.numel()
        room += lists.index.numel() * (batch // offset.shape[0]) * (len(some) // offset.shape[1])
    ends = torch.cat([length.new_zeros(1), length.reshape(-1).cumsum(0)])
    flat = torch.arange(batch * heads, device=device)[:, None] * blocks
    offset = ends[flat + torch.arange(blocks + 1, device=device)].view(batch, heads, blocks + 1)
    # Entry e of the new lists is entry `source` of the old ones laid end to end; what is past the last is slack.
    entry = torch.arange(room, device=device)
    owner = torch.searchsorted(ends[1:], entry, right=True).clamp_(max=ends.numel() - 2)
    source = (begin.reshape(-1)[owner] + entry - ends[owner]).clamp_(min=0, max=max(shift - 1, 0))
    index = torch.cat([lists.index for _, lists in members])[source]
    kind = torch.cat([lists.kind for _, lists in members])[source]
    return BlockLists(offset, index, kind)
