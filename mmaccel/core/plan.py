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

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from mmaccel.backends import ops
from mmaccel.backends.ops import ABSENT, FULL, TEST, packed
from mmaccel.core.errors import RecipeError
from mmaccel.core.layout import TokenLayout
from mmaccel.core.lists import BlockLists, BlockRuns

FAR = 2**31 - 1
"""The upper end of an open range."""


@lru_cache(256)
def numbered(heads: tuple[int, ...], device: torch.device) -> Tensor:
    """`heads` as an index on `device`, made once: indexing with a list sends it there each time, and waits for it."""
    with torch.inference_mode(False):
        return torch.tensor(heads, device=device)


@dataclass(frozen=True, eq=False)
class KeySpan:
    """Keys in an order of their own, under one range test.

    k_row [b, h, N]: rows of the key tensor, -1 = nothing (padding, or a key that another span owns).
    q_place [b, h, P], k_place [b, h, N]: coordinates of the range test, those of keys from 0 on; lo, hi: its half-open
    range. No difference of what is compared exceeds 32 bits where places are told in 32.
    """

    k_row: Tensor
    q_place: Tensor
    k_place: Tensor
    lo: int
    hi: int
    lists: BlockLists | BlockRuns


class Cover(NamedTuple):
    """Adjacent heads `first` .. `past`, with as many of each key/value group, among them the heads that are meant."""

    heads: tuple[int, ...]
    first: int
    past: int

    @classmethod
    def of(cls, heads: Sequence[int], group: int) -> Cover:
        """The fewest that cover `heads`; `group` is how many query heads share a key/value head."""
        first, last = min(heads), max(heads)
        if first // group != last // group:
            first, last = first // group * group, last // group * group + group - 1
        return cls(tuple(sorted(heads)), first, last + 1)

    def __len__(self) -> int:
        return self.past - self.first

    @property
    def slots(self) -> tuple[int, ...]:
        """Where the heads that are meant are among the adjacent ones."""
        return tuple(head - self.first for head in self.heads)


@dataclass(frozen=True, eq=False)
class Part:
    """Query rows in one order, and the spans they attend to under one softmax.

    q_row [b, h, P]: rows of the query tensor, -1 pads to whole blocks. cover: the part is for these heads alone, and h is
    1 or their number; None for all. turn: what parts of different turns say of one row, over disjoint keys, is merged;
    parts of one turn have no row of a head in common.
    """

    q_row: Tensor
    spans: tuple[KeySpan, ...]
    cover: Cover | None = None
    turn: int = 0

    def of(self, heads: int) -> slice:
        """Of so many heads those that the part covers."""
        return slice(0, heads) if self.cover is None else slice(self.cover.first, self.cover.past)


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
    """What one attention layer computes: disjoint parts, or in several turns parts that share rows over disjoint keys.

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
    dense: DenseHeads | None = None

    @property
    def overlap(self) -> bool:
        """Whether parts may share rows."""
        return any(part.turn for part in self.parts)

    def count_mask(self) -> Tensor:
        """[B, H, n_query, n_key] uint8: in how many spans a pair is computed. Anything above 1 is a fault of the planner."""
        B, H = self.batch, self.heads
        device = self.parts[0].q_row.device
        total = torch.zeros(B, H, self.n_query + 1, self.n_key + 1, dtype=torch.uint8, device=device)
        for part in self.parts:
            some = total[:, part.of(H)]
            h = some.shape[1]
            q_row = part.q_row.expand(B, h, -1).long()
            for span in part.spans:
                seen = element_mask(part, span, self.block_q, self.block_k).expand(B, h, -1, -1)
                k_row = span.k_row.expand(B, h, -1).long()
                wide = torch.zeros(B, h, seen.shape[2], self.n_key + 1, dtype=torch.uint8, device=device)
                wide.scatter_add_(
                    3, _or_last(k_row, self.n_key)[:, :, None].expand_as(seen), seen.to(torch.uint8)
                )
                rows = _or_last(q_row, self.n_query)[..., None].expand_as(wide)
                some.scatter_add_(2, rows, wide)
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
            for span in part.spans:
                total[:, part.of(H)] += span.lists.area(part.q_row, span.k_row, self.block_q, self.block_k)
        if self.dense is not None:
            total[:, numbered(self.dense.heads, device)] += self.dense.pairs()[:, None]
        return total

    def to(self, device: torch.device | str) -> AttentionPlan:
        """This plan with its tensors on `device`."""

        def moved(span: KeySpan) -> KeySpan:
            k_row, q_place, k_place = (t.to(device) for t in (span.k_row, span.q_place, span.k_place))
            return KeySpan(k_row, q_place, k_place, span.lo, span.hi, span.lists.to(device))

        parts = tuple(
            replace(p, q_row=p.q_row.to(device), spans=tuple(map(moved, p.spans))) for p in self.parts
        )
        dense = self.dense.to(device) if self.dense is not None else None
        return replace(self, parts=parts, dense=dense)


def check_sizes(plan: AttentionPlan, who: str, query: Tensor, key: Tensor, whole: bool) -> None:
    """Raise `RecipeError` for a plan that cannot be that of query [B, H, n, D] and key [B, G, N, D]; no device read.

    who  the pattern; whole  no row is padding, so that each has to stand in a part
    """
    B, H, n, _ = query.shape
    for field, size in (("batch", B), ("heads", H), ("n_query", n), ("n_key", key.shape[2])):
        found = getattr(plan, field)
        if found != size:
            raise RecipeError(
                f"sparse {who!r}: the plan's {field} is {found}, and the layer's is {size}; make it of its tensors."
            )
    served = [0] * H
    for part in plan.parts:
        heads = part.of(H)
        h, rows = len(range(H)[heads]), part.q_row.shape[-1]
        shapes = {"q_row": (part.q_row, rows, plan.block_q)}
        for i, span in enumerate(part.spans):
            keys = span.k_row.shape[-1]
            shapes[f"k_row of span {i}"] = span.k_row, keys, plan.block_k
            shapes[f"k_place of span {i}"] = span.k_place, keys, plan.block_k
            shapes[f"q_place of span {i}"] = span.q_place, rows, plan.block_q
        for field, (tensor, count, block) in shapes.items():
            size = tensor.shape[-1]
            whole_blocks = size == count and size > 0 and size % block == 0
            if (
                tensor.ndim != 3
                or tensor.shape[0] not in (1, B)
                or tensor.shape[1] not in (1, h)
                or not whole_blocks
            ):
                raise RecipeError(
                    f"sparse {who!r}: {field} of a part is {list(tensor.shape)}; give [1 or {B}, 1 or {h}, {count}], the "
                    f"last in whole blocks of {block} (`pad_rows`)."
                )
        for i, span in enumerate(part.spans):
            if span.lists.blocks != rows // plan.block_q:
                raise RecipeError(
                    f"sparse {who!r}: the lists of span {i} are of {span.lists.blocks} blocks of queries, and its "
                    f"part has {rows // plan.block_q}; list key blocks for each."
                )
        for head in range(H)[heads]:
            served[head] += rows
    for head, rows in enumerate(served):
        if whole and rows < n and (plan.dense is None or head not in plan.dense.heads):
            raise RecipeError(
                f"sparse {who!r}: the plan's parts hold {rows} of {n} rows of head {head}; put each row in a part."
            )


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


def span_by_range(
    q_row: Tensor,
    k_row: Tensor,
    q_place: Tensor,
    k_place: Tensor,
    lo: int,
    hi: int,
    block_q: int,
    block_k: int,
) -> KeySpan:
    """A span of which each query block lists the blocks in which a pair may pass the range test; no host read.

    The places of the keys ascend. A list is one run: from the first block that any row of the query block reaches to the
    last, so that it also holds what lies between when places jump within a query block.
    """
    row, kind = ops.reach_now(q_row, k_row, q_place, k_place, lo, hi, block_q, block_k)
    ops.tell_reach(row, ops.band(q_row, k_row, q_place, k_place, lo, hi, (block_q, block_k)))
    return KeySpan(k_row, q_place, k_place, lo, hi, BlockRuns(row, None, kind, kind.shape[-1]))


def span_by_table(
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
    """As `span_by_range`, of the True entries of `table` [b, h, M, key blocks] alone; room for all of them, no host read."""
    b, h, m, n = table.shape
    row, kind = ops.reach_now(q_row, k_row, q_place, k_place, lo, hi, block_q, block_k)
    first, count, head, tail, _ = torch.split(row.expand(b, h, m, 5), 1, -1)
    number = torch.arange(n, device=table.device)
    listed = table & (number >= first) & (number < first + count)
    index, upto = packed(listed, number)
    head, tail, count = (upto.gather(-1, (first + t).clamp(max=n)) for t in (head, tail, count))
    begin = (torch.arange(b * h * m, device=table.device) * n).view(b, h, m, 1)
    row = torch.cat([begin, count, head, tail, torch.zeros_like(begin)], -1)
    return KeySpan(k_row, q_place, k_place, lo, hi, BlockRuns(row, index, kind, n))


def block_kinds(k_row: Tensor, block: int) -> Tensor:
    """[b, h, N] int8: FULL for the blocks of keys that are all there, ABSENT for the rest."""
    return torch.where(_blocks(k_row >= 0, block).all(-1), FULL, ABSENT).to(torch.int8)


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
    """A span that lists the True entries of `table` [b, h, M, key blocks], as `span_from_entries`; places in any order."""
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
    """A span of listed blocks told one by one; those in which no pair passes the range
    test are dropped, the rest classified. Reads sizes on the host.

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


def _blocks(x: Tensor, block: int) -> Tensor:
    return x.reshape(*x.shape[:-1], x.shape[-1] // block, block)


def _or_last(rows: Tensor, last: int) -> Tensor:
    return torch.where(rows >= 0, rows, last)
