"""Key-block lists: the blocks that a range of positions reaches, the pairs they hold, and the merging of the lists of many
parts into one plan in two kernel launches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmaccel.backends.ops.block_attend import ABSENT, FULL, BlockLists, KeySpan, Part, common_batch_and_heads
from mmaccel.backends.ops.operator import operator

ENTRIES = 1 << 24  # most entries of lists looked at at a time, where they are counted
BEYOND = 1 << 60  # more than any position: wide ones exceed 32 bits

FIELDS = (
    *("batch", "heads", "size", "source", "to", "kind", "to_b", "to_h"),
    *("from_kind", "from_b", "from_h", "more", "of_row", "shift"),
)
"""What the table says of a piece: `batch` sequences of `heads` heads of `size` elements that follow each other. source:
number of the tensor it comes from, -1 for none; to, kind: its first element in the result of a kind; to_b, to_h, from_b,
from_h: elements from a sequence, or a head, to the next. more: what is added to each element; with of_row instead to the
first of each five, and `shift` to the last."""

KINDS = (torch.int32, torch.int64, torch.int8)  # the types of a result, or of a source, by number
ROW = 5  # numbers of a list, in `BlockLists`


def compact_by_mask(chosen: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """For each row of the mask `chosen` [..., n], list the entries of `value` [n] where it is True, padded with 0 to n.
    Returns the lists, int32, flattened to one axis; and the number of True values before each place of a row, long [..., n +
    1]."""
    n = chosen.shape[-1]
    upto = pad(chosen.long().cumsum(-1), (1, 0))
    slot = torch.where(chosen, upto[..., :-1], n)
    index = torch.zeros(*chosen.shape[:-1], n + 1, dtype=torch.int32, device=chosen.device)
    index.scatter_(-1, slot, value.to(torch.int32).expand_as(slot))
    return index[..., :n].flatten(), upto


def _count_present(row: Tensor, block: int) -> Tensor:
    """Number of present rows (>= 0) in each block of `row` [..., n]: int32 [..., n / block]."""
    return (row >= 0).view(*row.shape[:-1], -1, block).sum(-1, dtype=torch.int32)


def _key_block_shapes(
    q_row: Tensor, k_row: Tensor, q_pos: Tensor, k_pos: Tensor, block_q: int, block_k: int
) -> tuple[Tensor, Tensor]:
    row = q_row.new_empty(
        *common_batch_and_heads(q_row, k_row, q_pos, k_pos), q_row.shape[-1] // block_q, 5, dtype=torch.int64
    )
    return row, k_row.new_empty(
        *common_batch_and_heads(k_row, k_pos), k_row.shape[-1] // block_k, dtype=torch.int8
    )


@operator("prefill.lists", fake=_key_block_shapes)
def list_band(
    q_row: Tensor, k_row: Tensor, q_pos: Tensor, k_pos: Tensor, lo: int, hi: int, block_q: int, block_k: int
) -> tuple[Tensor, Tensor]:
    """List, for each query block, the key blocks of a band: those that may hold a pair with ``lo <= q_pos - k_pos < hi``.

    q_row [b, h, P], k_row [b, h, N], and positions q_pos [b, h, P], k_pos [b, h, N]; b and h full or 1; positions of
    present keys (k_row >= 0) ascend. Returns row [b, h, P / block_q, 5] and kind [b, h, N / block_k] of a `BlockLists`
    without index.
    """
    q_min, q_max, _ = block_bounds(q_row, q_pos, block_q)
    k_min, k_max, kind = block_bounds(k_row, k_pos, block_k)
    # A block without a key lies where its neighbours do.
    k_max, k_min = k_max.cummax(-1).values, k_min.flip(-1).cummin(-1).values.flip(-1)
    b, h = common_batch_and_heads(q_min, k_min)
    n = k_min.shape[-1]
    k_min, k_max = (t.expand(b, h, n).contiguous() for t in (k_min, k_max))
    q_min, q_max = (t.expand(b, h, -1).contiguous() for t in (q_min, q_max))
    first = torch.searchsorted(k_max, q_min - hi, right=True)
    count = (torch.searchsorted(k_min, q_max - lo, right=True) - first).clamp(min=0)
    head = torch.searchsorted(k_min, q_max - hi, right=True) - first
    tail = torch.searchsorted(k_max, q_min - lo, right=True) - first
    head, tail = (torch.minimum(t.clamp(min=0), count) for t in (head, tail))
    row = torch.stack([first.clamp(max=n - 1), count, head, tail, torch.zeros_like(first)], -1)
    return row, kind


@operator(
    "prefill.lists", fake=lambda row, q_row, k_row: row.new_empty(common_batch_and_heads(row, q_row, k_row))
)
def listed_pairs(
    row: Tensor, index: Tensor, q_row: Tensor, k_row: Tensor, block_q: int, block_k: int
) -> Tensor:
    """Count the query-key pairs in listed blocks, [b, h] int64. row [b, h, M, 5] and index: the fields of a `BlockLists`.
    q_row [b, h, P], k_row [b, h, N]: the tensor row in each slot; empty slots (-1) do not count."""
    nq, nk = _count_present(q_row, block_q), _count_present(k_row, block_k)
    (b, h), m = common_batch_and_heads(row, nq, nk), row.shape[2]
    begin, count, _, _, shift = row.expand(b, h, m, 5).unbind(-1)
    nk = nk.expand(b, h, nk.shape[-1]).long()
    if not index.shape[0]:
        upto = pad(nk.cumsum(-1), (1, 0))
        first = begin + shift
        keys = upto.gather(-1, first + count) - upto.gather(-1, first)
        return (nq.expand(b, h, m) * keys).sum(-1)
    keys = torch.zeros(b, h, m, dtype=torch.int64, device=nk.device)
    # No list names a block twice.
    most, step = min(index.shape[0], nk.shape[-1]), max(1, ENTRIES // (b * h * m))
    for entry in range(0, most, step):
        e = torch.arange(entry, min(entry + step, most), device=nk.device)
        there = e < count[..., None]
        block = index[(begin[..., None] + e).clamp(max=index.shape[0] - 1)] + shift[..., None]
        block = torch.where(there, block, 0).flatten(2)
        keys += (nk.gather(-1, block).view(there.shape) * there).sum(-1)
    return (nq.expand(b, h, m) * keys).sum(-1)


def restrict_key_rows(part: Part, sinks: int, edge: int, block_q: int, block_k: int) -> Part:
    """Restrict `part`: query row i sees only key rows j < `sinks` or j > i + `edge`. No host synchronization.

    Each list is trimmed to its first and last block that may hold such a key, and blocks that reach the edge are masked pair
    by pair. With sinks each span becomes two: keys before `sinks`, and the rest.
    """
    q_least, q_most, _ = block_bounds(part.q_row, part.q_row, block_q)

    def within(span: KeySpan, k_row: Tensor, edge: int) -> KeySpan:
        k_least, k_most, kind = block_bounds(k_row, k_row, block_k)
        lists = span.lists
        row = _trimmed(lists, k_least, k_most, q_least + edge, q_most + edge)
        kind = torch.where(kind == FULL, lists.kind, ABSENT).to(torch.int8)
        ordered = span.ordered if k_row is span.k_row else None
        return replace(
            span, k_row=k_row, lists=BlockLists(row, lists.index, kind), ordered=ordered, complete=False
        )

    spans = []
    for span in part.spans:
        first = span.k_row < sinks
        if sinks:
            spans.append(within(span, torch.where(first, span.k_row, -1), -BEYOND // 2))
        spans.append(within(span, torch.where(first, -1, span.k_row) if sinks else span.k_row, edge))
    return replace(part, spans=tuple(spans), sinks=sinks, edge=edge)


def _trimmed(lists: BlockLists, k_least: Tensor, k_most: Tensor, least: Tensor, most: Tensor) -> Tensor:
    """[b, h, M, 5]: of each list what stands between the first and the last of its blocks of which `k_most` is above `least`
    [b, h, M]; those up to the last block of which `k_least` is not above `most` are tested."""
    (b, h), m, n = common_batch_and_heads(lists.row, k_most, least), lists.blocks, k_most.shape[-1]
    begin, _, head, tail, shift = lists.row.expand(b, h, m, 5).unbind(-1)
    k_least, k_most = (t.expand(b, h, n) for t in (k_least, k_most))
    look = _in_runs if lists.index is None else _in_entries
    first, past = look(lists, k_most, least)
    # What is not above `most` is above it with the other sign.
    _, tested = look(lists, -k_least, -most - 1)
    length = (past - first).clamp(min=0)
    first = torch.where(length > 0, first, 0)
    head = torch.minimum((torch.maximum(head, tested) - first).clamp(min=0), length)
    tail = torch.minimum((tail - first).clamp(min=0), length)
    return torch.stack([begin + first, length, head, tail, shift], -1)


def _in_entries(lists: BlockLists, value: Tensor, bound: Tensor) -> tuple[Tensor, Tensor]:
    """[b, h, M] twice: the first entry of each list whose block's `value` [b, h, n] is above `bound` [b, h, M], and one past
    the last; where there is none, the first is beyond the list and 0 past the last."""
    index, (b, h), m, n = lists.index_or_empty, value.shape[:2], lists.blocks, value.shape[-1]
    begin, count, _, _, shift = lists.row.expand(b, h, m, 5)[..., None].unbind(-2)
    first, past = torch.full_like(begin[..., 0], BEYOND), torch.zeros_like(begin[..., 0])
    # No list names a block twice.
    longest, step = min(len(index), n), max(1, ENTRIES // (b * h * m))
    for entry in range(0, longest, step):
        e = torch.arange(entry, min(entry + step, longest), device=begin.device)
        block = torch.where(e < count, index[(begin + e).clamp(max=len(index) - 1)] + shift, 0)
        found = (value.gather(-1, block.flatten(2)).view(block.shape) > bound[..., None]) & (e < count)
        first = torch.minimum(first, torch.where(found, e, BEYOND).amin(-1))
        past = torch.maximum(past, torch.where(found, e + 1, 0).amax(-1))
    return first, past


def _in_runs(lists: BlockLists, value: Tensor, bound: Tensor) -> tuple[Tensor, Tensor]:
    """As `_in_entries`, of lists that are runs of blocks in their order: by the greatest values of 1, 2, 4, ... blocks,
    the largest steps first."""
    (b, h), m, n = value.shape[:2], lists.blocks, value.shape[-1]
    begin, count, _, _, shift = lists.row.expand(b, h, m, 5).unbind(-1)
    start = begin + shift
    first, past, greatest = start, start + count, [value]
    while 1 << len(greatest) <= n:
        step = 1 << len(greatest) - 1
        greatest.append(torch.maximum(greatest[-1][..., :-step], greatest[-1][..., step:]))
    for level in reversed(range(len(greatest))):
        step, most = 1 << level, greatest[level].shape[-1] - 1
        below = greatest[level].gather(-1, first.clamp(max=most)) <= bound
        first = torch.where(below & (first + step <= past), first + step, first)
    for level in reversed(range(len(greatest))):
        step, most = 1 << level, greatest[level].shape[-1] - 1
        below = greatest[level].gather(-1, (past - step).clamp(min=0, max=most)) <= bound
        past = torch.where(below & (past - step >= first), past - step, past)
    return first - start, torch.where(past > first, past - start, 0)


def block_bounds(row: Tensor, pos: Tensor, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the least and largest position `pos` of the present rows in each block, [b, h, blocks] int64 (an empty range if
    there are none); and int8 FULL if all rows are present, else ABSENT."""
    pos = pos.long()
    has = (row >= 0) & torch.ones_like(pos, dtype=torch.bool)
    cut = (*has.shape[:-1], has.shape[-1] // block, block)
    least = torch.where(has, pos, BEYOND).view(cut).amin(-1)
    most = torch.where(has, pos, -BEYOND).view(cut).amax(-1)
    return least, most, torch.where(has.view(cut).all(-1), FULL, ABSENT).to(torch.int8)


def _assembled_shapes(sources: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
    return [sources[0].new_empty(n, dtype=kind) for n, kind in zip(sizes, KINDS, strict=True)]


@operator("prefill.lists", fake=_assembled_shapes)
def assemble_slices(
    sources: Sequence[Tensor], table: Sequence[int], fills: int, sizes: Sequence[int]
) -> list[Tensor]:
    """Assemble tensors from slices of `sources`: one output of `sizes[i]` elements for each dtype in `KINDS`.

    table: the FIELDS of each slice, concatenated. A slice is copied from its source, or filled with a number if it has none.
    The first `fills` slices are written first, then all others; within each of these two steps slices must not overlap.
    Elements that no slice covers are undefined. Sources are dense from the third dimension on.
    """
    device = sources[0].device
    out = [torch.empty(n, dtype=kind, device=device) for n, kind in zip(sizes, KINDS, strict=True)]
    for first in range(0, len(table), len(FIELDS)):
        p = dict(zip(FIELDS, table[first : first + len(FIELDS)], strict=True))
        shape = p["batch"], p["heads"], p["size"]
        to = out[p["kind"]].as_strided(shape, (p["to_b"], p["to_h"], 1), p["to"])
        if p["source"] < 0:
            to.fill_(p["more"])
            continue
        source = sources[p["source"]]
        to.copy_(source.as_strided(shape, (p["from_b"], p["from_h"], 1), source.storage_offset()))
        if p["of_row"]:
            rows = to.as_strided((*shape[:2], p["size"] // ROW, ROW), (*to.stride()[:2], ROW, 1))
            rows[..., 0] += p["more"]
            rows[..., -1] += p["shift"]
        else:
            to += p["more"]
    return out
