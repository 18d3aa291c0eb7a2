"""`AttentionPlan`, the form of all sparse attention: query rows in some order, spans of keys, key blocks per query block.

A *row* is an index into the query or key tensor; a *position* is the coordinate that a span's range test compares. Query row
i sees key row j of a span iff their blocks are listed, j is present, and ``lo <= q_pos[i] - k_pos[j] < hi``. With a key's
position its rank in the span, and a query's position the number of the span's keys at or before it, minus one, ``lo >= 0``
is causality, whatever the order (MMInference, sections 2.4 and 3).

Letters: B batch, H query heads, P rows of a part (whole blocks), N keys of a span (whole blocks), M query blocks. Leading
dimensions b and h are B and H, or 1 where all sequences or heads share the order.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mmaccel.backends.ops.block_attend import ABSENT, FULL, TEST, BlockLists, KeySpan, Part, memoize
from mmaccel.backends.ops.block_lists import (
    block_bounds,
    compact_by_mask,
    list_band,
    listed_pairs,
    restrict_key_rows,
)
from mmaccel.core.errors import RecipeError
from mmaccel.core.layout import TokenLayout

FAR = 2**31 - 1
"""The upper end of an open range."""

_put = lru_cache(256)(torch.inference_mode(False)(torch.tensor))


def head_indices(heads: tuple[int, ...], device: torch.device) -> Tensor:
    """Return `heads` as an index tensor on `device`, copied there once; in a traced graph it is a constant."""
    return torch.tensor(heads, device=device) if torch.compiler.is_compiling() else _put(heads, device=device)


class HeadRun(NamedTuple):
    """Query heads whose keys and values can be sliced from a layer's tensors without a copy: they belong to adjacent
    key/value heads, with equally many query heads each."""

    heads: tuple[int, ...]
    groups: slice

    def select_queries(self, query: Tensor) -> Tensor:
        """Return the queries [B, h, n, D] of these heads; a view if the heads are adjacent."""
        return select_heads(self.heads, query)


def select_heads(heads: tuple[int, ...], x: Tensor) -> Tensor:
    """Return the ascending `heads` of x [B, H, ...]; a view if they are adjacent."""
    first, last = heads[0], heads[-1]
    if last - first + 1 == len(heads):
        return x[:, first : last + 1]
    return x[:, head_indices(heads, x.device)]


def head_runs(heads: Sequence[int], group: int) -> list[HeadRun]:
    """Split the query heads `heads` into `HeadRun`s: adjacent key/value heads that serve equally many of them share a run.
    `group` is H / G."""
    by_group: dict[int, list[int]] = {}
    for head in sorted(heads):
        by_group.setdefault(head // group, []).append(head)
    runs: list[HeadRun] = []
    for g, some in by_group.items():
        last = runs[-1] if runs else None
        same = last is not None and len(last.heads) == len(some) * (last.groups.stop - last.groups.start)
        if last is not None and same and last.groups.stop == g:
            runs[-1] = HeadRun((*last.heads, *some), slice(last.groups.start, g + 1))
        else:
            runs.append(HeadRun(tuple(some), slice(g, g + 1)))
    return runs


@dataclass(frozen=True, eq=False)
class DenseHeads:
    """The heads of a plan that use dense causal attention, computed by the dense operator.

    `heads` ascend. Of the queries, whose layout is `queries`, only the first `rows` are computed; `keys` is the layout of
    all keys. With a `window`, a query sees only the first `sinks` columns and those less than `window` columns behind it.
    """

    heads: tuple[int, ...]
    queries: TokenLayout
    keys: TokenLayout
    rows: int
    sinks: int = 0
    window: int | None = None

    def mask(self) -> Tensor:
        """Return [B, n_query, n_key] bool: the query-key pairs computed, the same for each dense head."""
        q, k = self.queries, self.keys
        seen = (k.position[:, None] <= q.position[:, :, None]) & k.valid[:, None] & q.valid[:, :, None]
        if self.window is not None:
            column = torch.arange(k.length, device=q.device)
            seen &= (column < self.sinks) | (column[-q.length :, None] - column < self.window)
        return seen & (torch.arange(q.length, device=q.device) < self.rows)[:, None]

    def count_pairs(self) -> Tensor:
        """Return [B] float64: how many query-key pairs each dense head computes."""
        q = self.queries.select_tokens(slice(0, self.rows))
        most = self.keys.length if self.window is None else self.sinks + self.window
        return ((q.position + 1).clamp(max=most) * q.valid).sum(1).double()

    def to(self, device: torch.device | str) -> DenseHeads:
        """Return these dense heads with their layouts on `device`."""
        return replace(self, queries=self.queries.to(device), keys=self.keys.to(device))


@dataclass(frozen=True, eq=False)
class AttentionPlan:
    """What one attention layer computes: disjoint parts of query rows, or groups of parts with equal rows and disjoint keys.

    `batch`, `heads`, `n_query`, `n_key` are the sizes of the tensors it is for. `dense`: heads with dense attention. `memo`
    caches what is derived from this plan; copies start empty.
    """

    parts: tuple[Part, ...]
    block_q: int
    block_k: int
    batch: int
    heads: int
    n_query: int
    n_key: int
    dense: DenseHeads | None = None
    memo: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False)

    @property
    def may_share_rows(self) -> bool:
        """Whether parts of the plan may share query rows."""
        return any(part.merge_group for part in self.parts)

    def limit_to_first_rows(self, rows: int) -> AttentionPlan:
        """Return this attention plan for only the first `rows` query rows; cached."""

        def cut() -> AttentionPlan:
            dense = replace(self.dense, rows=rows) if self.dense is not None else None
            return replace(self, parts=tuple(part.limit_query_rows(rows) for part in self.parts), dense=dense)

        return memoize(self.memo, ("first", rows), cut)

    def limit_to_window(self, sinks: int, window: int) -> AttentionPlan:
        """Return this plan restricted to the first `sinks` columns and those less than `window` columns behind each query
        (queries are the last columns); cached. All other pairs are dropped, and lists grow shorter. Raises `RecipeError` if
        spans have keys of their own, which have no column."""
        if window >= self.n_key:
            return self
        if self.own_keys:
            raise RecipeError(
                "sparse: this plan has keys that stand for many and have no column; choose a memory without a window."
            )
        if any(part.edge is not None for part in self.parts):
            raise ValueError("the plan has a window already")

        def cut() -> AttentionPlan:
            how = sinks, self.n_key - self.n_query - window, self.block_q, self.block_k
            parts = tuple(restrict_key_rows(part, *how) for part in self.parts)
            dense = self.dense and replace(self.dense, sinks=sinks, window=window)
            return replace(self, parts=parts, dense=dense)

        return memoize(self.memo, ("within", sinks, window), cut)

    @property
    def own_keys(self) -> list[tuple[Tensor, Tensor]]:
        """Keys and values that spans have of their own (pooled, say), each tensor once; in `to_mask` they follow `n_key`."""
        found: dict[int, tuple[Tensor, Tensor]] = {}
        for span in (span for part in self.parts for span in part.spans):
            if span.key is not None and span.value is not None:
                found.setdefault(id(span.key), (span.key, span.value))
        return list(found.values())

    def spans_per_pair(self) -> Tensor:
        """Return [B, H, n_query, n_key] uint8: in how many spans each pair is (> 1 is a bug). Last columns: `own_keys`."""
        return self._scattered(torch.uint8, lambda span: torch.ones_like(span.k_row, dtype=torch.uint8))

    def to_bias(self) -> Tensor:
        """Return the sum of `KeySpan.bias` for each pair (not its mask), float32, in the shape of `spans_per_pair`."""

        def bias(span: KeySpan) -> Tensor:
            return torch.zeros_like(span.k_row, dtype=torch.float32) if span.bias is None else span.bias

        return self._scattered(torch.float32, bias)

    def _scattered(self, dtype: torch.dtype, of: Callable[[KeySpan], Tensor]) -> Tensor:
        """The sum over all spans of what `of` gives [b, h, N] for their keys, where they compute a pair."""
        B, H = self.batch, self.heads
        device = self.parts[0].q_row.device
        begins, columns = {}, self.n_key
        for key, _ in self.own_keys:
            begins[id(key)] = columns
            columns += key.shape[2]
        total = torch.zeros(B, H, self.n_query + 1, columns + 1, dtype=dtype, device=device)
        for part in self.parts:
            some = total[:, part.for_heads(H)]
            h = some.shape[1]
            q_row = part.q_row.expand(B, h, -1).long()
            for span in part.spans:
                seen = element_mask(part, span, self.block_q, self.block_k).expand(B, h, -1, -1)
                begin = 0 if span.key is None else begins[id(span.key)]
                column = torch.where(span.k_row >= 0, span.k_row + begin, columns).expand(B, h, -1).long()
                wide = torch.zeros(B, h, seen.shape[2], columns + 1, dtype=dtype, device=device)
                worth = torch.where(seen, of(span).expand(B, h, -1)[:, :, None], 0).to(dtype)
                wide.scatter_add_(3, column[:, :, None].expand_as(seen), worth)
                rows = torch.where(q_row >= 0, q_row, self.n_query)[..., None].expand_as(wide)
                some.scatter_add_(2, rows, wide)
        total = total[:, :, :-1, :-1]
        if self.dense is not None and dtype == torch.uint8:
            total[:, list(self.dense.heads), :, : self.n_key] += self.dense.mask()[:, None].to(torch.uint8)
        return total

    def to_mask(self) -> Tensor:
        """Return [B, H, n_query, n_key] bool: exactly the pairs that this plan computes, followed by columns of `own_keys`.
        For tests and pictures, not for long inputs."""
        return self.spans_per_pair() > 0

    def count_listed_pairs(self) -> Tensor:
        """Return [B, H] float64: present query rows times present keys, summed over the listed blocks; no host read."""
        B, H = self.batch, self.heads
        device = self.parts[0].q_row.device
        total = torch.zeros(B, H, dtype=torch.float64, device=device)
        for part in self.parts:
            for span in part.spans:
                lists = span.lists.row, span.lists.index_or_empty
                area = listed_pairs(*lists, part.q_row, span.k_row, self.block_q, self.block_k)
                total[:, part.for_heads(H)] += area
        if self.dense is not None:
            total[:, head_indices(self.dense.heads, device)] += self.dense.count_pairs()[:, None]
        return total

    def to(self, device: torch.device | str) -> AttentionPlan:
        """Return this attention plan with its tensors on `device`."""
        dense = self.dense.to(device) if self.dense is not None else None
        moved: dict[int, Tensor] = {}
        return replace(self, parts=tuple(part.to(device, moved) for part in self.parts), dense=dense)


def check_plan_sizes(plan: AttentionPlan, who: str, query: Tensor, key: Tensor, whole: bool) -> None:
    """Raise `RecipeError`, which names the pattern `who`, if `plan` does not fit query [B, H, n, D] and key [B, G, N, D]. No
    device read. `whole`: no row is padding, so that each must be in a part."""
    B, H, n, _ = query.shape
    if not isinstance(plan, AttentionPlan):
        raise RecipeError(f"sparse {who!r}: plan returns a {type(plan).__name__}; return an AttentionPlan.")
    for name, size in (("batch", B), ("heads", H), ("n_query", n), ("n_key", key.shape[2])):
        if (planned := getattr(plan, name)) != size:
            raise RecipeError(
                f"sparse {who!r}: the plan's {name} is {planned}, and the layer's is {size}; plan from its tensors."
            )
    served = [0] * H
    for part in plan.parts:
        own, group, rows = part.for_heads(H), H // key.shape[1], part.q_row.shape[-1]
        heads = range(H)[own]
        sizes = B, len(heads), (own.stop - 1) // group - own.start // group + 1, key.shape[3]
        _check_rows(f"sparse {who!r}: q_row of a part", part.q_row, sizes, rows, plan.block_q)
        for i, span in enumerate(part.spans):
            keys, block_k = span.k_row.shape[-1], plan.block_k
            for name, tensor, count, block in (
                ("k_row", span.k_row, keys, block_k),
                ("k_pos", span.k_pos, keys, block_k),
                ("q_pos", span.q_pos, rows, plan.block_q),
            ):
                _check_rows(f"sparse {who!r}: {name} of span {i} of a part", tensor, sizes, count, block)
            _check_extra(span, f"sparse {who!r}: span {i} of a part", sizes)
            if span.lists.blocks != rows // plan.block_q:
                raise RecipeError(
                    f"sparse {who!r}: the lists of span {i} are of {span.lists.blocks} blocks of "
                    f"queries, and its part has {rows // plan.block_q}; list key blocks for each."
                )
        for head in heads:
            served[head] += rows
    for head, rows in enumerate(served):
        if whole and rows < n and (plan.dense is None or head not in plan.dense.heads):
            raise RecipeError(
                f"sparse {who!r}: the plan's parts hold {rows} of {n} rows of head {head}; put each row in a part."
            )


def _check_rows(name: str, t: Tensor, sizes: Sequence[int], count: int, block: int) -> None:
    """Raise `RecipeError` for rows or positions `t` that are not [B or 1, h or 1, count] in whole blocks."""
    B, h, *_ = sizes
    lead = t.ndim == 3 and t.shape[0] in (1, B) and t.shape[1] in (1, h)
    if not lead or t.shape[2] != count or not count or count % block:
        raise RecipeError(
            f"{name} is {list(t.shape)}; give [1 or {B}, 1 or {h}, {count}], the last in whole blocks of {block} "
            "(`pad_rows`)."
        )


def _check_extra(span: KeySpan, where: str, sizes: Sequence[int]) -> None:
    """Raise `RecipeError` for a bias or own keys of a wrong shape; `sizes` are those of sequences, heads, their key/value
    heads, and a head."""
    B, h, groups, size = sizes
    if (t := span.bias) is not None:
        N = span.k_row.shape[-1]
        right = t.ndim == 3 and t.shape[0] in (1, B) and t.shape[1] in (1, h) and t.shape[2] == N
        if not right or t.dtype != torch.float32:
            raise RecipeError(
                f"{where} has a bias of {list(t.shape)} in {t.dtype}; give [1 or {B}, 1 or {h}, {N}] in float32."
            )
    if (span.key is None) != (span.value is None):
        raise RecipeError(f"{where} has keys or values of its own alone; give both, or neither.")
    if span.key is None or span.value is None:
        return
    for t in (span.key, span.value):
        right = t.ndim == 4 and t.shape[0] in (1, B) and t.shape[1] in (1, groups)
        if not right or span.key.shape[3] != size or t.shape[2] != span.key.shape[2]:
            raise RecipeError(
                f"{where} has keys or values of its own of {list(t.shape)}; give [1 or {B}, 1 or {groups}, keys, {size}]."
            )


def element_mask(part: Part, span: KeySpan, block_q: int, block_k: int) -> Tensor:
    """Return [b, h, P, N] bool: the pairs that a span computes, in the plan's order; blocks marked FULL need no test."""
    kind = span.lists.to_dense_table().repeat_interleave(block_q, 2).repeat_interleave(block_k, 3)
    gap = span.q_pos[..., :, None] - span.k_pos[..., None, :]
    inside = (gap >= span.lo) & (gap < span.hi)
    k_row = span.k_row[..., None, :]
    if part.edge is not None:
        inside = inside & ((k_row < part.sinks) | (k_row > part.q_row[..., :, None] + part.edge))
    seen = (kind == FULL) | ((k_row >= 0) & ((kind == ABSENT) | ((kind == TEST) & inside)))
    return seen & (part.q_row >= 0)[..., :, None]


def pad_rows(rows: Tensor, block: int, value: int = -1) -> Tensor:
    """Return `rows` [..., n] padded with `value` to whole blocks (at least one)."""
    short = -rows.shape[-1] % block if rows.shape[-1] else block
    return torch.nn.functional.pad(rows, (0, short), value=value) if short else rows


def span_by_range(
    q_row: Tensor,
    k_row: Tensor,
    q_pos: Tensor,
    k_pos: Tensor,
    lo: int,
    hi: int,
    block_q: int,
    block_k: int,
    *,
    table: Tensor | None = None,
    **known: Any,
) -> KeySpan:
    """Return a span that lists, for each query block, the key blocks in which a pair may pass the range test; no host read.

    The positions of the keys ascend. A list is one run: from the first block that any row of the query block reaches to the
    last, including blocks between them if positions jump within a query block. With `table` [b, h, M, key blocks], only the
    True entries of the run are listed, in a buffer that could hold all. `known`: `ordered`, `ranks` and `q_first` of
    `KeySpan`, facts that the caller knows of the tensors.
    """
    row, kind = list_band(q_row, k_row, q_pos, k_pos, lo, hi, block_q, block_k)
    if table is None:
        return KeySpan(k_row, q_pos, k_pos, lo, hi, BlockLists(row, None, kind), complete=True, **known)
    b, h, m, n = table.shape
    first, count, head, tail, _ = torch.split(row.expand(b, h, m, 5), 1, -1)
    number = torch.arange(n, device=table.device)
    listed = table & (number >= first) & (number < first + count)
    index, upto = compact_by_mask(listed, number)
    head, tail, count = (upto.gather(-1, (first + t).clamp(max=n)) for t in (head, tail, count))
    begin = (torch.arange(b * h * m, device=table.device) * n).view(b, h, m, 1)
    row = torch.cat([begin, count, head, tail, torch.zeros_like(begin)], -1)
    return KeySpan(k_row, q_pos, k_pos, lo, hi, BlockLists(row, index, kind), **known)


def span_from_table(
    q_row: Tensor,
    k_row: Tensor,
    q_pos: Tensor,
    k_pos: Tensor,
    lo: int,
    hi: int,
    table: Tensor,
    block_q: int,
    block_k: int,
    **known: Any,
) -> KeySpan:
    """Return a span that lists the True entries of `table` [b, h, query blocks, key blocks]; positions in any order. Blocks
    in which no pair has lo <= q_pos - k_pos < hi are dropped; those in which each pair has it need no test, and come first
    in each list. Waits for the device: sizes are read on the host."""
    b, h, m, n = table.shape
    row, index = table.reshape(b * h * m, n).nonzero(as_tuple=True)
    *of_queries, _ = block_bounds(q_row, q_pos, block_q)
    *of_keys, kind = block_bounds(k_row, k_pos, block_k)
    q_min, q_max = (edge.expand(b, h, m).reshape(-1) for edge in of_queries)
    k_min, k_max = (edge.expand(b, h, n).reshape(-1) for edge in of_keys)
    key = (row // m) * n + index
    least, most = q_min[row] - k_max[key], q_max[row] - k_min[key]
    alive = (q_max[row] >= q_min[row]) & (k_max[key] >= k_min[key]) & (most >= lo) & (least < hi)
    row, index = row[alive], index[alive]
    test = ((least < lo) | (most >= hi))[alive].long()
    index = index[(2 * row + test).argsort(stable=True)]
    count, tested = (torch.bincount(row, t, minlength=b * h * m).long() for t in (None, test))
    none = torch.zeros_like(count)
    lists = torch.stack([count.cumsum(0) - count, count, none, count - tested, none], -1).view(b, h, m, 5)
    index = index.to(torch.int32) if len(index) else index.new_zeros(1, dtype=torch.int32)
    return KeySpan(k_row, q_pos, k_pos, lo, hi, BlockLists(lists, index, kind), **known)
