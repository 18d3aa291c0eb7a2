"""The one currency of sparse attention: an order of rows, spans of keys, and a list of key blocks for each query block.

A *row* is an address in the query or key tensor; a *place* is the coordinate in which a span's range test measures.
A query row i sees a key row j of a span iff their blocks are listed, j is present, and
``lo <= q_place[i] - k_place[j] < hi``. With a key's place its rank in the span, and a query's place the number of the
span's keys at or before it, minus one, ``lo >= 0`` is causality, whatever the order (MMInference section 2.4 measures
windows and slashes inside a modality; section 3 permutes rows and columns).

Letters: B batch, H query heads, P rows of a part (whole blocks), N keys of a span (whole blocks), M query blocks.
Leading dimensions b and h are B and H, or 1 where all sequences or heads share the order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mmaccel.backends.ops import ABSENT, FULL, TEST
from mmaccel.core.layout import TokenLayout

FAR = 2**31 - 1
"""The upper end of an open range."""


@dataclass(frozen=True, eq=False)
class BlockLists:
    """Ragged lists of key blocks, one for each query block.

    offset [b, h, M + 1] int64: the list of query block m is ``index[offset[m]:offset[m + 1]]``; the lists of one head
    follow those of the head before it.
    index int32, kind int8: number and kind (FULL, ABSENT, TEST) of each listed block; may be longer than the last offset.
    """

    offset: Tensor
    index: Tensor
    kind: Tensor

    def table(self, n_blocks: int) -> Tensor:
        """[b, h, M, n_blocks] int8, the kind of each listed block and -1 elsewhere; for tests and small sizes."""
        b, h, m1 = self.offset.shape
        m = m1 - 1
        count = (self.offset[..., 1:] - self.offset[..., :-1]).reshape(-1)
        total = int(count.sum())
        rows = torch.repeat_interleave(
            torch.arange(count.numel(), device=count.device), count, output_size=total
        )
        begin = self.offset[..., :-1].reshape(-1)
        inside = torch.arange(total, device=count.device) - (count.cumsum(0) - count)[rows]
        entry = begin[rows] + inside
        table = torch.full((b * h * m, n_blocks), -1, dtype=torch.int8, device=count.device)
        table[rows, self.index[entry].long()] = self.kind[entry]
        return table.view(b, h, m, n_blocks)


@dataclass(frozen=True, eq=False)
class KeySpan:
    """Keys in an order of their own, under one range test.

    k_row [b, h, N]: rows of the key tensor, -1 = nothing (padding, or a key that another span owns).
    q_place [b, h, P], k_place [b, h, N]: coordinates of the range test; lo, hi: its half-open range.
    """

    k_row: Tensor
    q_place: Tensor
    k_place: Tensor
    lo: int
    hi: int
    lists: BlockLists


@dataclass(frozen=True, eq=False)
class Part:
    """Query rows in one order, and the spans they attend to under one softmax.

    q_row [b, h, P]: rows of the query tensor, -1 pads to whole blocks.
    """

    q_row: Tensor
    spans: tuple[KeySpan, ...]


@dataclass(frozen=True, eq=False)
class DenseHeads:
    """Heads that no part of a plan serves: their queries see every valid key not after them, by the dense operator.

    heads ascending; of the queries, whose layout is `queries`, the first `rows`; keys the layout of all keys.
    """

    heads: tuple[int, ...]
    queries: TokenLayout
    keys: TokenLayout
    rows: int

    def mask(self) -> Tensor:
        """[B, n_query, n_key] bool: the pairs of each of the heads."""
        q, k = self.queries, self.keys
        seen = (k.position[:, None] <= q.position[:, :, None]) & k.valid[:, None] & q.valid[:, :, None]
        return seen & (torch.arange(q.length, device=q.device) < self.rows)[:, None]

    def pairs(self) -> Tensor:
        """[B] float64: how many pairs each of the heads computes."""
        q = self.queries.take(slice(0, self.rows))
        return ((q.position + 1) * q.valid).sum(1).double()

    def to(self, device: torch.device | str) -> DenseHeads:
        """The same with its layouts on `device`."""
        return replace(self, queries=self.queries.to(device), keys=self.keys.to(device))


@dataclass(frozen=True, eq=False)
class AttentionPlan:
    """What one attention layer computes: disjoint parts, or parts that share rows over disjoint keys (`overlap`).

    `batch`, `heads`, `n_query`, `n_key` are the sizes of the tensors it is for. `dense`: heads that no part serves. Lives
    for one layer.
    """

    parts: tuple[Part, ...]
    block_q: int
    block_k: int
    batch: int
    heads: int
    n_query: int
    n_key: int
    overlap: bool = False
    dense: DenseHeads | None = None

    def count_mask(self) -> Tensor:
        """[B, H, n_query, n_key] uint8: in how many spans a pair is computed. Anything above 1 is a fault of the planner."""
        B, H = self.batch, self.heads
        device = self.parts[0].q_row.device
        total = torch.zeros(B, H, self.n_query + 1, self.n_key + 1, dtype=torch.uint8, device=device)
        for part in self.parts:
            q_row = part.q_row.expand(B, H, -1).long()
            for span in part.spans:
                seen = element_mask(part, span, self.block_q, self.block_k).expand(B, H, -1, -1)
                k_row = span.k_row.expand(B, H, -1).long()
                wide = torch.zeros(B, H, seen.shape[2], self.n_key + 1, dtype=torch.uint8, device=device)
                wide.scatter_add_(
                    3, _or_last(k_row, self.n_key)[:, :, None].expand_as(seen), seen.to(torch.uint8)
                )
                rows = _or_last(q_row, self.n_query)[..., None].expand_as(wide)
                total.scatter_add_(2, rows, wide)
        total = total[:, :, :-1, :-1]
        if self.dense is not None:
            total[:, list(self.dense.heads)] += self.dense.mask()[:, None].to(torch.uint8)
        return total

    def to_mask(self) -> Tensor:
        """[B, H, n_query, n_key] bool: the exact pairs this plan computes. For tests and pictures, not for long inputs."""
        return self.count_mask() > 0

    def listed_pairs(self) -> Tensor:
        """[B, H] float64: present query rows times present keys, summed over the listed blocks; no host read."""
        B, H = self.batch, self.heads
        device = self.parts[0].q_row.device
        total = torch.zeros(B, H, dtype=torch.float64, device=device)
        for part in self.parts:
            nq = _per_block(part.q_row >= 0, self.block_q)
            for span in part.spans:
                nk = _per_block(span.k_row >= 0, self.block_k)
                total += _listed_area(span.lists, nq, nk).expand(B, H)
        if self.dense is not None:
            total[:, list(self.dense.heads)] += self.dense.pairs()[:, None]
        return total

    def to(self, device: torch.device | str) -> AttentionPlan:
        """This plan with its tensors on `device`."""

        def moved(span: KeySpan) -> KeySpan:
            o = span.lists
            lists = BlockLists(o.offset.to(device), o.index.to(device), o.kind.to(device))
            k_row, q_place, k_place = (t.to(device) for t in (span.k_row, span.q_place, span.k_place))
            return KeySpan(k_row, q_place, k_place, span.lo, span.hi, lists)

        parts = tuple(Part(p.q_row.to(device), tuple(map(moved, p.spans))) for p in self.parts)
        dense = self.dense.to(device) if self.dense is not None else None
        return replace(self, parts=parts, dense=dense)


def element_mask(part: Part, span: KeySpan, block_q: int, block_k: int) -> Tensor:
    """[b, h, P, N] bool: the pairs of one span, in the plan's order. A FULL block skips the test, as the kernels do."""
    table = span.lists.table(span.k_row.shape[-1] // block_k)
    kind = table.repeat_interleave(block_q, 2).repeat_interleave(block_k, 3)
    gap = span.q_place[..., :, None] - span.k_place[..., None, :]
    inside = (gap >= span.lo) & (gap < span.hi)
    present = (span.k_row >= 0)[..., None, :]
    seen = (kind == FULL) | ((kind == ABSENT) & present) | ((kind == TEST) & present & inside)
    return seen & (part.q_row >= 0)[..., :, None]


def pad_rows(rows: Tensor, block: int, value: int = -1) -> Tensor:
    """`rows` [..., n] lengthened with `value` to whole blocks (at least one)."""
    short = -rows.shape[-1] % block if rows.shape[-1] else block
    return torch.nn.functional.pad(rows, (0, short), value=value) if short else rows


def span_from_ranges(
    q_row: Tensor,
    k_row: Tensor,
    q_place: Tensor,
    k_place: Tensor,
    lo: int,
    hi: int,
    start: Tensor,
    stop: Tensor,
    block_q: int,
    block_k: int,
) -> KeySpan:
    """A span whose query block m lists the key blocks of ranges ``[start[m, r], stop[m, r])``.

    start, stop [b, h, M, R] block numbers; ranges may overlap and leave the span. Blocks in which no pair passes the
    range test are dropped, the rest classified.
    """
    n_blocks = k_row.shape[-1] // block_k
    start, order = start.clamp(0, n_blocks).sort(-1)
    stop = stop.clamp(0, n_blocks).gather(-1, order)
    reach = stop.cummax(-1).values
    before = torch.cat([torch.zeros_like(reach[..., :1]), reach[..., :-1]], -1)
    start = torch.maximum(start, before)
    length = (stop - start).clamp(min=0)
    flat = length.reshape(-1)
    owner = torch.repeat_interleave(torch.arange(flat.numel(), device=flat.device), flat)
    inside = torch.arange(owner.numel(), device=flat.device) - (flat.cumsum(0) - flat)[owner]
    index = start.reshape(-1)[owner] + inside
    row = owner // length.shape[-1]
    return span_from_entries(
        q_row, k_row, q_place, k_place, lo, hi, row, index, length.shape[:3], block_q, block_k
    )


def span_from_table(
    q_row: Tensor,
    k_row: Tensor,
    q_place: Tensor,
    k_place: Tensor,
    lo: int,
    hi: int,
    table: Tensor,
    block_q: int,
    block_k: int,
) -> KeySpan:
    """A span that lists the True entries of `table` [b, h, M, key blocks]; dropped and classified as above."""
    b, h, m, n = table.shape
    row, index = table.reshape(b * h * m, n).nonzero(as_tuple=True)
    return span_from_entries(q_row, k_row, q_place, k_place, lo, hi, row, index, (b, h, m), block_q, block_k)


def span_from_entries(
    q_row: Tensor,
    k_row: Tensor,
    q_place: Tensor,
    k_place: Tensor,
    lo: int,
    hi: int,
    row: Tensor,
    index: Tensor,
    shape: tuple[int, ...] | torch.Size,
    block_q: int,
    block_k: int,
) -> KeySpan:
    """A span of listed blocks told one by one; dropped and classified as in `span_from_ranges`.

    `row` is the number of a query block counted through `shape` = (b, h, M), ascending; `index` that of a key block.
    """
    b, h, m = shape
    big = FAR
    q_has, k_has = q_row >= 0, k_row >= 0
    q_min = _edge(q_place, q_has, block_q, big, "amin").expand(b, h, m).reshape(-1)
    q_max = _edge(q_place, q_has, block_q, -big, "amax").expand(b, h, m).reshape(-1)
    n = k_row.shape[-1] // block_k
    k_min = _edge(k_place, k_has, block_k, big, "amin").expand(b, h, n).reshape(-1)
    k_max = _edge(k_place, k_has, block_k, -big, "amax").expand(b, h, n).reshape(-1)
    whole = _blocks(k_has, block_k).all(-1).expand(b, h, n).reshape(-1)
    key = (row // m) * n + index
    least, most = q_min[row] - k_max[key], q_max[row] - k_min[key]
    alive = (q_max[row] >= q_min[row]) & (k_max[key] >= k_min[key]) & (most >= lo) & (least < hi)
    sure = (least >= lo) & (most < hi)
    kind = torch.where(sure, torch.where(whole[key], FULL, ABSENT), TEST).to(torch.int8)
    row, index, kind = row[alive], index[alive], kind[alive]
    count = torch.bincount(row, minlength=b * h * m)
    ends = torch.cat([count.new_zeros(1), count.cumsum(0)])
    flat = torch.arange(b * h, device=ends.device)[:, None] * m + torch.arange(m + 1, device=ends.device)
    lists = BlockLists(ends[flat].view(b, h, m + 1), index.to(torch.int32), kind)
    return KeySpan(k_row, q_place, k_place, lo, hi, lists)


def _edge(place: Tensor, has: Tensor, block: int, fill: int, how: str) -> Tensor:
    filled = _blocks(torch.where(has, place.long(), fill), block)
    return filled.amin(-1) if how == "amin" else filled.amax(-1)


def _per_block(has: Tensor, block: int) -> Tensor:
    return _blocks(has, block).sum(-1)


def _blocks(x: Tensor, block: int) -> Tensor:
    return x.reshape(*x.shape[:-1], x.shape[-1] // block, block)


def _listed_area(lists: BlockLists, nq: Tensor, nk: Tensor) -> Tensor:
    """[b, h] float64: sum over listed blocks of nq[query block] * nk[key block], by prefix sums over the flat lists."""
    b, h, m1 = lists.offset.shape
    m = m1 - 1
    nq, nk = nq.expand(b, h, m), nk.expand(b, h, nk.shape[-1])
    entry = torch.arange(lists.index.numel(), device=lists.index.device)
    row = torch.searchsorted(lists.offset[..., 1:].reshape(-1).contiguous(), entry, right=True).clamp(
        max=b * h * m - 1
    )
    used = (entry < lists.offset[..., -1].max()).double()
    area = (
        nq.reshape(-1)[row].double() * nk.reshape(-1)[(row // m) * nk.shape[-1] + lists.index.long()] * used
    )
    return (
        torch.zeros(b * h, dtype=torch.float64, device=area.device).index_add_(0, row // m, area).view(b, h)
    )


def _or_last(rows: Tensor, last: int) -> Tensor:
    return torch.where(rows >= 0, rows, last)
