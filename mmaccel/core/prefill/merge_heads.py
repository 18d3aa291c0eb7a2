"""Merges plans of heads with different patterns into one plan, so that they need few operator launches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mmaccel.backends.ops import block_lists
from mmaccel.backends.ops.block_attend import ABSENT, BlockLists, HeadRange, KeySpan, Part
from mmaccel.core.layout import TokenLayout
from mmaccel.core.prefill.plan import FAR, AttentionPlan, DenseHeads

Share = tuple[Sequence[int], AttentionPlan | None]
"""Some heads, in the order in which their plan has them, and the plan; None for heads that are to be dense.

A plan of one head may stand for several: they then all follow it."""
Member = tuple[tuple[int, ...], Sequence[Part]]
"""Some heads, and the parts of one merge group of each of them."""

ALIGNED = 128
"""Elements to whose multiples packed tensors begin: kernels are compiled for how addresses divide."""


def merge_plans(
    shares: Sequence[Share], heads: int, group: int, queries: TokenLayout, keys: TokenLayout
) -> AttentionPlan | None:
    """Return one plan for all `heads` heads of a layer. `shares` are pairs of some heads and the plan they share (None:
    dense attention); the result is None if all heads are dense. `group` query heads share a key/value head.

    The merged plan computes the same pairs in fewer launches. Each head's query rows are concatenated over its parts, and
    padded with -1 to the longest. The key spans of all heads are side by side; a head has empty lists at spans of other
    heads. Spans with equally wide ranges of query-key distances are joined, and shifted to begin at 0. Heads whose lists
    are runs of adjacent blocks form a part of their own, as an operator may read neighbouring lists together there; so does
    each group of parts that share rows.

    Dense heads are not listed: at a million tokens the full lists of one head take 0.7 GB, and block lists run slower than a
    dense kernel. They are in the plan's `dense`, and one dense call computes them.
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
    if len({(part.sinks, part.edge) for _, plan in sparse for part in plan.parts}) > 1:
        raise ValueError("plans of different windows do not mix; merge them, and narrow the whole")
    families: dict[tuple[int, bool, int], list[Member]] = {}
    for i, (some, plan) in enumerate(sparse):
        for number in sorted({part.merge_group for part in plan.parts}):
            parts = [part for part in plan.parts if part.merge_group == number]
            in_order = all(span.lists.index is None for part in parts for span in part.spans)
            # Keys of a span's own are of the heads that it was planned for.
            own = i if any(span.key is not None for part in parts for span in part.spans) else -1
            families.setdefault((number, in_order, own), []).append((some, parts))
    packer, blocks, makers = TensorPacker(), (first.block_q, first.block_k), []
    for _, members in sorted(families.items(), key=lambda family: family[0][0]):
        head_range = HeadRange.covering([head for some, _ in members for head in some], group)
        makers.append(_part(packer, members, head_range, blocks))
    packer.write_recorded()
    rest = DenseHeads(tuple(sorted(dense)), queries, keys, first.n_query) if dense else None
    return replace(first, parts=tuple(make() for make in makers), heads=heads, dense=rest)


def merge_plan_parts(parts: Sequence[Part], heads: int, blocks: tuple[int, int]) -> Part:
    """Merge all `parts` of a group into one part for all `heads` heads, so that one launch computes them.

    `blocks` are the block sizes of queries and of keys, in tokens.
    """
    packer = TensorPacker()
    make = _part(packer, [(tuple(range(heads)), parts)], None, blocks)
    packer.write_recorded()
    return make()


def adjacent_head_ranges(heads: Sequence[int], most: int = 1 << 30) -> Iterator[tuple[int, int]]:
    """Yield the runs (begin, end) of adjacent heads among `heads`, each of at most `most` heads."""
    begin = 0
    for at in range(1, len(heads) + 1):
        if at == len(heads) or heads[at] != heads[at - 1] + 1 or at - begin == most:
            yield heads[begin], heads[at - 1] + 1
            begin = at


class PackedSlice(NamedTuple):
    """Where a tensor [b, h, n, ...] is in the packed buffer of its type (see `TensorPacker`); its heads begin at head
    `first`, or it is shared by all heads (h = 1)."""

    kind: int
    begin: int
    shape: tuple[int, ...]
    first: int


class TensorPacker:
    """Packs many tensors into a few buffers: `record_write` records a piece, `write_recorded` copies all in two launches."""

    def __init__(self) -> None:
        self._sources: list[Tensor] = []
        self._fills: list[int] = []
        self._puts: list[int] = []
        self._ends = [0] * len(block_lists.KINDS)
        self._made: list[Tensor] = []

    def reserve(self, shape: tuple[int, ...], value: int, dtype: torch.dtype, first: int = 0) -> PackedSlice:
        """Reserve a tensor of `shape` [b, h, n], or of block lists [b, h, n, 5]; it is `value` where nothing is written."""
        kind, size = block_lists.KINDS.index(dtype), prod(shape)
        to = PackedSlice(kind, self._ends[kind], shape, first)
        self._ends[kind] += size + -size % ALIGNED
        if size:
            # In the order of `block_lists.FIELDS`, as below.
            self._fills += (1, 1, size, -1, to.begin, kind, 0, 0, 0, 0, 0, value, 0, 0)
        return to

    def record_write(
        self, to: PackedSlice, heads: Sequence[int], t: Tensor, begin: int, more: int = 0, shift: int = 0
    ) -> None:
        """Record that `t` [b or 1, heads or 1, n, ...] is to be written to the tensor at `to`, from its column `begin` on,
        for the heads `heads`; `more` is added to each number.

        In rows of block lists [..., 5] (`BlockLists.row`) instead only the first number, the index at which the list begins,
        is increased by `more`, and the last, which is added to each key block's number, by `shift`.
        """
        slots = [head - to.first for head in heads] if to.shape[1] > 1 else [0]
        row = prod(to.shape[3:])
        size, line = t.shape[2] * row, to.shape[2] * row
        if not size or not t.shape[0] * t.shape[1]:
            return
        dense = t.stride(-1) == 1 and (row == 1 or t.stride(2) == row)
        t = t if dense else t.contiguous()
        from_b, from_h = (t.stride(i) if t.shape[i] > 1 else 0 for i in (0, 1))
        at = 0
        for slot, past in adjacent_head_ranges(slots):
            count = past - slot
            if not at or from_h:
                self._sources.append(t[:, at : at + count] if at else t)
            target = to.begin + slot * line + begin * row
            self._puts += (to.shape[0], count, size, len(self._sources) - 1)
            self._puts += (target, to.kind, to.shape[1] * line, line)
            self._puts += (block_lists.KINDS.index(t.dtype), from_b, from_h, more, int(row > 1), shift)
            at += count

    def write_recorded(self) -> None:
        """Write all pieces that `record_write` recorded into the packed buffers."""
        fills = len(self._fills) // len(block_lists.FIELDS)
        self._made = block_lists.assemble_slices(
            self._sources, [*self._fills, *self._puts], fills, self._ends
        )

    def packed_tensor(self, of: PackedSlice) -> Tensor:
        """Return the packed tensor at a `PackedSlice`, once `write_recorded` has run."""
        return self._made[of.kind][of.begin : of.begin + prod(of.shape)].view(of.shape)


class MergedSpan(NamedTuple):
    """A key span of some heads in a merged plan; `begin` is its first query row among the rows of these heads."""

    heads: tuple[int, ...]
    begin: int
    span: KeySpan

    @property
    def has_shared_keys(self) -> bool:
        """Whether all heads have the same keys."""
        return all(t is None or t.shape[1] == 1 for t in (self.span.k_row, self.span.k_pos, self.span.bias))

    @property
    def distance_range_end(self) -> int:
        """The end of the span's range of query-key distances, once it is shifted to begin at 0, as all ranges are."""
        return FAR if self.span.hi >= FAR else self.span.hi - self.span.lo

    def key_identity(self, known: list[Tensor]) -> Any:
        """Return a hashable value that is equal for two spans if they have the same key tensors. It is made of the tensors'
        addresses; while a graph is traced (no addresses), of their indices in `known`, to which new ones are added."""
        traced = torch.compiler.is_compiling()  # an address is not known there
        keys = [t for t in (self.span.k_row, self.span.k_pos, self.span.bias) if t is not None]
        return tuple((_number(t, known) if traced else t.data_ptr(), t.shape, t.stride()) for t in keys)


def _number(t: Tensor, known: list[Tensor]) -> int:
    """Which of `known` a tensor is; one that is none of them is added. (torch 2.11 does not trace the `id` of a tensor.)"""
    for number, one in enumerate(known):
        if one is t:
            return number
    known.append(t)
    return len(known) - 1


def _part(
    packer: TensorPacker, members: Sequence[Member], head_range: HeadRange | None, blocks: tuple[int, int]
) -> Callable[[], Part]:
    """Note all that one part of `members` holds; what is returned makes the part once the packer is flushed.

    Without `head_range` there is one member, of all heads.
    """
    tensors = [part.q_row for _, parts in members for part in parts]
    for span in (span for _, parts in members for part in parts for span in part.spans):
        tensors += [span.k_row, span.q_pos, span.k_pos, span.lists.row]
        tensors += [] if span.bias is None else [span.bias]
    batch, most = (max(t.shape[i] for t in tensors) for i in (0, 1))
    first = members[0][0][0]
    if head_range is not None:
        most, first = len(head_range), head_range.first
    # Neighbours whose lists may be read together are of one part.
    step = 2 * blocks[0]
    lengths = [[part.q_row.shape[-1] for part in parts] for _, parts in members]
    begins = [list(accumulate((n + -n % step for n in some), initial=0)) for some in lengths]
    rows = max(some[-1] for some in begins)
    q_row = packer.reserve((batch, most, rows), -1, torch.int32, first)
    slots: dict[tuple[Any, ...], list[MergedSpan]] = {}
    owned: list[Tensor] = []
    for (heads, parts), some in zip(members, begins, strict=True):
        for part, begin in zip(parts, some, strict=False):
            packer.record_write(q_row, heads, part.q_row, begin)
            seen: dict[tuple[Any, ...], int] = {}
            for span in sorted(part.spans, key=lambda s: -s.k_row.shape[-1]):
                piece = MergedSpan(heads, begin, span)
                own = (None if t is None else _number(t, owned) for t in (span.key, span.value))
                # Keys that all heads share do not go beside a head's own, which would repeat them for each head.
                apart = head_range is None and piece.has_shared_keys
                kind = piece.distance_range_end, span.lists.index is None, span.bias is None, apart, *own
                number = seen[kind] = seen.get(kind, -1) + 1
                slots.setdefault((*kind, number), []).append(piece)
    spans = [_span(packer, some, q_row, blocks) for some in slots.values()]
    known = {_all_rows(parts) for _, parts in members}
    each = head_range is None or sum(len(heads) for heads, _ in members) == len(head_range)
    all_rows = known.pop() if each and len(known) == 1 else None
    one = members[0][1][0]

    def make() -> Part:
        made = tuple(span() for span in spans)
        return replace(
            one,
            q_row=packer.packed_tensor(q_row),
            spans=made,
            head_range=head_range,
            ordered=None,
            all_rows=all_rows,
        )

    return make


def _all_rows(parts: Sequence[Part]) -> int | None:
    """How many rows `parts`, all of a merge group, hold, each once; None where that is not known."""
    if len(parts) == 1 and parts[0].ordered is not None:
        return parts[0].ordered
    known = {part.all_rows for part in parts}
    return known.pop() if len(known) == 1 else None


def _span(
    packer: TensorPacker, some: list[MergedSpan], q_row: PackedSlice, blocks: tuple[int, int]
) -> Callable[[], KeySpan]:
    """One span of all pieces: of each head the keys of its pieces follow one another, those of one order once."""
    one, (batch, heads, rows), put = some[0].span, q_row.shape, packer.record_write
    begins: list[int] = []
    seen: list[Tensor] = []
    known: dict[tuple[tuple[int, ...], Any], int] = {}
    ends: dict[tuple[int, ...], int] = {}
    for p in some:
        name = p.heads, p.key_identity(seen)
        if name not in known:
            known[name] = ends.get(p.heads, 0)
            ends[p.heads] = known[name] + p.span.k_row.shape[-1]
        begins.append(known[name])
    # Keys that are those of all who list any need not be repeated for each head.
    shared = some[0].has_shared_keys and len({name for _, name in known}) == 1
    width = max(ends.values())
    wide = any(t.dtype == torch.int64 for p in some for t in (p.span.q_pos, p.span.k_pos))
    dtype = torch.int64 if wide else torch.int32

    def keys(size: int, value: int, dtype: torch.dtype) -> PackedSlice:
        return packer.reserve((batch, 1 if shared else heads, size), value, dtype, q_row.first)

    k_row, k_pos = keys(width, -1, torch.int32), keys(width, 0, dtype)
    # A bias goes as its bits.
    bias = None if one.bias is None else keys(width, 0, torch.int32)
    q_pos = packer.reserve((batch, heads, rows), -1, dtype, q_row.first)
    kind = keys(width // blocks[1], ABSENT, torch.int8)
    row = packer.reserve((batch, heads, rows // blocks[0], block_lists.ROW), 0, torch.int64, q_row.first)
    indices = [p.span.lists.index for p in some if p.span.lists.index is not None]
    index = packer.reserve((1, 1, sum(t.numel() for t in indices)), 0, torch.int32) if indices else None
    written, entries, scattered = set(), 0, 0
    for p, begin in zip(some, begins, strict=True):
        lists, first, at = p.span.lists, begin // blocks[1], p.begin // blocks[0]
        put(q_pos, p.heads, p.span.q_pos, p.begin, -p.span.lo)
        if index is None or lists.index is None:
            put(row, p.heads, lists.row, at, first)
        else:
            put(row, p.heads, lists.row, at, entries, first)
            put(index, (0,), lists.index[None, None], entries)
            entries += lists.index.numel()
        place = (() if shared else p.heads), begin
        if place not in written:
            written.add(place)
            scattered += (
                batch * len(p.heads) * (p.span.k_row.shape[-1] if p.span.ordered is None else blocks[1])
            )
            put(k_row, p.heads, p.span.k_row, begin)
            put(k_pos, p.heads, p.span.k_pos, begin)
            put(kind, p.heads, lists.kind, first)
            if bias is not None and p.span.bias is not None:
                put(bias, p.heads, p.span.bias.view(torch.int32), begin)

    def make() -> KeySpan:
        tensor = packer.packed_tensor
        lists = BlockLists(tensor(row), None if index is None else tensor(index).flatten(), tensor(kind))
        extra: dict[str, Any] = dict(key=one.key, value=one.value)
        extra |= dict(bias=None if bias is None else tensor(bias).view(torch.float32))
        extra |= dict(ordered=one.ordered) if shared else dict(scattered=scattered)
        return KeySpan(
            tensor(k_row), tensor(q_pos), tensor(k_pos), 0, some[0].distance_range_end, lists, **extra
        )

    return make
