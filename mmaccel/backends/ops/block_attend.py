"""The operator `block_attend`: attention of one part of a plan, over all its key spans under one softmax.

Each backend registers the operator under a name of its own (`register_block_attend`). PyTorch operators take only tensors
and numbers, so `Part.pack` turns a part into its row tensor, a list of tensors and a list of integers, and `Part.unpack`
rebuilds it for the backend.

Letters: B batch, H query heads, G key/value heads, P rows of a part (whole blocks), N keys of a span (whole blocks), M query
blocks. Leading dimensions b and h are B and H, or 1 where all sequences or heads share the tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import wraps
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch._guards import detect_fake_mode

T = TypeVar("T")

FULL, ABSENT, TEST = 0, 1, 2
"""Kinds of listed block: no test needed; some keys absent (a vector mask); range test for each pair."""

BEGIN, COUNT, HEAD, TAIL, SHIFT = range(5)
"""Columns of `BlockLists.row`."""

BLOCK_ATTEND = (
    "(Tensor query, Tensor key, Tensor value, Tensor q_row, Tensor?[] tensors, SymInt[] numbers, int block_q, int block_k, "
    "float scale, SymInt rows=0, Tensor[]? prepared=None) -> (Tensor out, Tensor lse)"
)

UNKNOWN = -(1 << 40)
"""Stands for None among the numbers of a packed part."""


def memoize(memo: dict[Hashable, Any], name: Hashable, make: Callable[[], T]) -> T:
    """Get the entry `name` of the cache `memo`, computed by `make` if missing."""
    if name in memo:
        return memo[name]  # type: ignore[no-any-return]
    made = make()
    # What is made while a graph is traced or captured holds no values yet; a tracer cannot ask whether one is captured.
    traced = torch.compiler.is_compiling() or detect_fake_mode() is not None
    if not traced and not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        memo[name] = made
    return made


def common_batch_and_heads(*tensors: Tensor) -> tuple[int, int]:
    """Return the leading sizes (sequences, heads) to which tensors [b, h, ...] broadcast; each size is full or 1."""
    b, h = (max(sizes) for sizes in zip(*(t.shape[:2] for t in tensors), strict=True))
    return b, h


@dataclass(frozen=True, eq=False)
class BlockLists:
    """The key blocks that each query block attends to, as ranges of one shared index tensor.

    row [b, h, M, 5] int64: BEGIN, COUNT, HEAD, TAIL, SHIFT of each query block. Its list is the distinct key blocks
    ``index[BEGIN + e] + SHIFT`` for e < COUNT. Entries with e < HEAD or e >= TAIL get the range mask of their `KeySpan` pair
    by pair; the others have the kind of their key block.
    index [E] int32, or None: entry e is block e, so each list is a run of blocks. The lists of neighbouring query blocks may
    then be joined to one run: the mask of the `KeySpan` hides all pairs of the key blocks between them.
    kind [b, h, N / block] int8: FULL, or ABSENT if a key of the block has no row (`k_row` is -1).
    """

    row: Tensor
    index: Tensor | None
    kind: Tensor

    @property
    def blocks(self) -> int:
        """Number of query blocks, M."""
        return self.row.shape[2]

    @property
    def head_count(self) -> int:
        """Number of heads that have block lists of their own; 1 if all heads share them."""
        return max(self.row.shape[1], self.kind.shape[1])

    @property
    def list_lengths(self) -> Tensor:
        """Number of key blocks in each query block's list, [b, h, M]."""
        return self.row[..., COUNT]

    @property
    def index_or_empty(self) -> Tensor:
        """The index tensor of key blocks in the form that operators take: empty instead of None."""
        return self.row.new_empty(0, dtype=torch.int32) if self.index is None else self.index

    def for_heads(self, heads: slice) -> BlockLists:
        """The block lists of a slice of heads."""
        row, kind = (t[:, heads] if t.shape[1] > 1 else t for t in (self.row, self.kind))
        return BlockLists(row, self.index, kind)

    def to(self, device: torch.device | str) -> BlockLists:
        """Copy the block lists to `device`."""
        index = None if self.index is None else self.index.to(device)
        return BlockLists(self.row.to(device), index, self.kind.to(device))

    def to_dense_table(self) -> Tensor:
        """Dense form [b, h, M, key blocks] int8 of block lists: the kind of each listed block, else -1. No host sync."""
        (b, h), m, blocks = (common_batch_and_heads(self.row, self.kind), self.blocks, self.kind.shape[-1])
        begin, count, head, tail, shift = (t[..., None] for t in self.row.expand(b, h, m, 5).unbind(-1))
        entry = torch.arange(blocks, device=self.row.device)
        kinds = self.kind[:, :, None].expand(b, h, m, blocks)
        if self.index is None:
            block = entry - (begin + shift)
            listed, untested = (block >= 0) & (block < count), (block >= head) & (block < tail)
            return torch.where(listed, torch.where(untested, kinds, TEST), -1)
        block = self.index[(begin + entry).clamp(max=self.index.shape[0] - 1)] + shift
        block = torch.where(entry < count, block, blocks)
        untested = (entry >= head) & (entry < tail)
        own = torch.where(untested, kinds.gather(-1, block.clamp(max=blocks - 1)), TEST).to(torch.int8)
        found = torch.full((b, h, m, blocks + 1), -1, dtype=torch.int8, device=self.row.device)
        # What is no entry falls into a last column that is cut off.
        return found.scatter_(-1, block, own)[..., :-1]

    def flatten(self) -> tuple[Tensor, Tensor, Tensor]:
        """Concatenate the block lists: offsets [b, h, M + 1], block and kind of each entry. Synchronizes with the host."""
        (b, h), m, n = (common_batch_and_heads(self.row, self.kind), self.blocks, self.kind.shape[-1])
        begin, count, head, tail, shift = self.row.expand(b, h, m, 5).reshape(-1, 5).unbind(-1)
        owner = torch.repeat_interleave(torch.arange(len(count), device=count.device), count)
        ends = torch.nn.functional.pad(count.cumsum(0), (1, 0))
        entry = torch.arange(len(owner), device=count.device) - ends[owner]
        block = begin[owner] + entry
        block = (block if self.index is None else self.index[block]) + shift[owner]
        kinds = self.kind.expand(b, h, n).reshape(-1)[(owner // m) * n + block]
        kinds = torch.where((entry < head[owner]) | (entry >= tail[owner]), TEST, kinds).to(torch.int8)
        first = torch.arange(b * h, device=count.device)[:, None] * m
        offsets = ends[first + torch.arange(m + 1, device=count.device)].view(b, h, m + 1)
        return offsets, block.to(torch.int32), kinds


@dataclass(frozen=True, eq=False)
class KeySpan:
    """Keys in a given order with one range mask: query and key may attend iff ``lo <= q_pos - k_pos < hi``.

    k_row [b, h, N]: rows of the key tensor, -1 for none (padding, or a key of another span).
    q_pos [b, h, P], k_pos [b, h, N]: positions that the mask compares; those of keys are 0 or more. If they are int32, no
    difference overflows 32 bits.

    What is known on the host; None and False mean not known:
    ordered   `k_row` is 0 .. ordered - 1 in this order, then -1
    ranks     `k_pos` is 0, 1, 2, ... in each row
    q_first   the positions of the rows of an ordered part are q_first, q_first + 1, ...
    complete  the lists name every block that holds a pair in range
    scattered  upper bound of the number of keys, over all sequences and heads, in blocks whose `k_row` are not consecutive

    bias [b, h, N] float32, or None: added to the logits of each key. key, value, or None: keys [B or 1, G or 1, S', D] and
    values of this span alone, for the key/value heads of the part; `k_row` then indexes rows of these.
    """

    k_row: Tensor
    q_pos: Tensor
    k_pos: Tensor
    lo: int
    hi: int
    lists: BlockLists
    ordered: int | None = None
    ranks: bool = False
    q_first: int | None = None
    complete: bool = False
    scattered: int | None = None
    bias: Tensor | None = None
    key: Tensor | None = None
    value: Tensor | None = None

    def to(self, device: torch.device | str, moved: dict[int, Tensor] | None = None) -> KeySpan:
        """Copy the key span to `device`. Spans given the same dict `moved` (id -> copy) share copies of keys and values."""
        moved = {} if moved is None else moved
        for own in (self.key, self.value):
            if own is not None and id(own) not in moved:
                moved[id(own)] = own.to(device)
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return KeySpan(
            **{k: moved.get(id(v), v.to(device)) if hasattr(v, "to") else v for k, v in values.items()}
        )


class HeadRange(NamedTuple):
    """Adjacent query heads `first` .. `past` - 1, equally many per key/value head. Of them a `Part` is for `heads` alone."""

    heads: tuple[int, ...]
    first: int
    past: int

    @classmethod
    def covering(cls, heads: Sequence[int], group: int) -> HeadRange:
        """The smallest range of heads that contains `heads`, where `group` query heads share a key/value head."""
        first, last = min(heads), max(heads)
        if first // group != last // group:
            first, last = first // group * group, last // group * group + group - 1
        return cls(tuple(sorted(heads)), first, last + 1)

    def __len__(self) -> int:
        return self.past - self.first

    @property
    def head_indices(self) -> tuple[int, ...]:
        """Indices, counted from `first`, of the heads that use the part."""
        return tuple(head - self.first for head in self.heads)


@dataclass(frozen=True, eq=False)
class Part:
    """Query rows in a given order, and the key spans that they attend to under one softmax.

    q_row [b, h, P]: rows of the query tensor, padded with -1 to whole blocks. head_range: the heads of the part (h is 1 or
    their number); None: all. merge_group: parts of one group have disjoint rows; parts of different groups may share rows,
    over disjoint keys, and are merged by log-sum-exp. sinks, edge: a further condition in masked blocks, if edge is set:
    query row i attends to key row j only if ``j < sinks`` or ``j > i + edge``.

    What is known on the host; None means not known:
    ordered   `q_row` is 0 .. ordered - 1 in this order, then -1
    all_rows  the parts of this merge group together hold each row 0 .. all_rows - 1 exactly once per head

    memo: a cache of derived values; it is not copied with the part.
    """

    q_row: Tensor
    spans: tuple[KeySpan, ...]
    head_range: HeadRange | None = None
    merge_group: int = 0
    ordered: int | None = None
    all_rows: int | None = None
    sinks: int = 0
    edge: int | None = None
    memo: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False)

    def for_heads(self, heads: int) -> slice:
        """Return the slice of a layer's `heads` query heads to which this part of an attention plan applies."""
        some = self.head_range
        return slice(0, heads) if some is None else slice(some.first, some.past)

    def to(self, device: torch.device | str, moved: dict[int, Tensor] | None = None) -> Part:
        """Copy this part of an attention plan to `device`; `moved` as in `KeySpan.to`."""
        moved = {} if moved is None else moved
        spans = tuple(span.to(device, moved) for span in self.spans)
        return replace(self, q_row=self.q_row.to(device), spans=spans)

    @property
    def needs_extensions(self) -> bool:
        """Whether this plan part needs a key bias, keys of a span's own, or a row window; not all backends support these."""
        own = any(span.bias is not None or span.key is not None for span in self.spans)
        return own or self.edge is not None

    def limit_query_rows(self, rows: int) -> Part:
        """This part of an attention plan, restricted to query rows < `rows`; cached."""

        def cut() -> Part:
            ordered, all_rows = (None if n is None else min(n, rows) for n in (self.ordered, self.all_rows))
            q_row = torch.where(self.q_row < rows, self.q_row, -1)
            return replace(self, q_row=q_row, ordered=ordered, all_rows=all_rows)

        return memoize(self.memo, ("first", rows), cut)

    def pack(self) -> tuple[Tensor, list[Tensor | None], list[int]]:
        """Flatten this plan part to `q_row`, a list of tensors and a list of integers, as `block_attend` takes them."""

        def flat() -> tuple[list[Tensor | None], list[int]]:
            tensors: list[Tensor | None] = []
            facts = self.ordered, self.all_rows, self.sinks, self.edge
            numbers = [UNKNOWN if n is None else n for n in facts]
            for s in self.spans:
                tensors += [s.k_row, s.q_pos, s.k_pos, s.lists.row, s.lists.index, s.lists.kind]
                tensors += [s.bias, s.key, s.value]
                known = (UNKNOWN if n is None else n for n in (s.ordered, s.q_first, s.scattered))
                numbers += [s.lo, s.hi, *known, int(s.ranks), int(s.complete)]
            return tensors, numbers

        tensors, numbers = memoize(self.memo, "packed", flat)
        return self.q_row, tensors, numbers

    @staticmethod
    def unpack(q_row: Tensor, tensors: Sequence[Tensor | None], numbers: Sequence[int]) -> Part:
        """Rebuild a plan part from the results of `pack`; it applies to all heads of the tensors it is used with."""
        known: list[Any] = [None if n == UNKNOWN else n for n in numbers]
        spans = []
        for s in range((len(numbers) - 4) // 7):
            k_row, q_pos, k_pos, row, index, kind, *extra = tensors[9 * s : 9 * s + 9]
            assert k_row is not None and q_pos is not None and k_pos is not None
            assert row is not None and kind is not None
            lo, hi, ordered, q_first, scattered, ranks, complete = known[4 + 7 * s : 11 + 7 * s]
            facts = BlockLists(row, index, kind), ordered, bool(ranks), q_first, bool(complete), scattered
            spans.append(KeySpan(k_row, q_pos, k_pos, lo, hi, *facts, *extra))
        ordered, all_rows, sinks, edge = known[:4]
        return Part(q_row, tuple(spans), None, 0, ordered, all_rows, sinks, edge)


def append_span_keys(
    key: Tensor, value: Tensor, spans: Sequence[KeySpan]
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Append the spans' own keys and values to key and value [B, G, S, D]; returns both, and the spans' new `k_row`."""
    B, G, begin = *key.shape[:2], key.shape[2]
    keys, values, rows = [key], [value], []
    for span in spans:
        rows.append(span.k_row)
        if span.key is not None and span.value is not None:
            rows[-1] = torch.where(span.k_row >= 0, span.k_row + begin, -1)
            keys.append(span.key.to(key.dtype).expand(B, G, -1, -1))
            values.append(span.value.to(value.dtype).expand(B, G, -1, -1))
            begin += span.key.shape[2]
    return (key, value, rows) if len(keys) == 1 else (torch.cat(keys, 2), torch.cat(values, 2), rows)


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """Accumulation dtype for queries of `dtype`: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def empty_output(
    query: Tensor, value: Tensor, part: int, rows: int, whole: bool = False
) -> tuple[Tensor, Tensor]:
    """Allocate the results of `block_attend`, uninitialized, in the part's row order: out [B, H, P, D] and lse [B, H, P], P
    = `part`. If `rows` is not 0, in the query's order: [B, H, rows, D] (in memory [B, rows, H, D]) and [B, H, rows], preset
    to 0 and -inf unless the part holds every row (`whole`)."""
    B, H, D = *query.shape[:2], value.shape[-1]
    lse = query.new_empty(B, H, rows or part, dtype=lse_dtype(query.dtype))
    if not rows:
        return query.new_empty(B, H, part, D), lse
    if whole:
        return query.new_empty(B, rows, H, D).transpose(1, 2), lse
    return query.new_zeros(B, rows, H, D).transpose(1, 2), lse.fill_(-torch.inf)


def scatter_to_query_order(out: Tensor, lse: Tensor, q_row: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Scatter out [B, H, P, D] and lse [B, H, P] from the part's row order to that of a query of `rows` rows (0: as is)."""
    if not rows:
        return out, lse
    B, H, P, D = out.shape
    row = torch.where(q_row >= 0, q_row.long(), rows).expand(B, H, P)
    # The last row takes what is padding.
    whole = out.new_zeros(B, rows + 1, H, D).transpose(1, 2)
    whole.scatter_(2, row[..., None].expand(B, H, P, D), out)
    sums = lse.new_full((B, H, rows + 1), -torch.inf).scatter_(2, row, lse)
    return whole[:, :, :rows].transpose(1, 2).contiguous().transpose(1, 2), sums[..., :rows].contiguous()


def prepare_part(kernel: Any, part: Part, *sizes: Any) -> tuple[list[Tensor]] | tuple[()]:
    """Compute the argument `prepared` of `block_attend`, which can be reused for every layer, as a tuple: what the function
    ``kernel.prepare`` returns for a part and `sizes` (query, key, block_q, block_k, rows); empty if there is none."""
    make = getattr(kernel, "prepare", None)
    return () if make is None else (make(part, *sizes),)


class BlockAttendCall(NamedTuple):
    """Arguments of `block_attend`: queries of one `Part` of a plan, and the keys and values that its spans index."""

    query: Tensor
    key: Tensor
    value: Tensor
    part: Part
    block_q: int
    block_k: int
    scale: float
    rows: int = 0
    prepared: Sequence[Tensor] | None = None


def with_unpacked_args(kernel: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Decorator that turns ``kernel(call)`` into a function of the arguments of `block_attend`. It sets the current CUDA
    device to that of the tensors, since layers of a model may be on different devices."""

    @wraps(kernel)
    def unpacked(
        query: Tensor, key: Tensor, value: Tensor, *packed: Any, **how: Any
    ) -> tuple[Tensor, Tensor]:
        """`kernel` of the arguments of `BLOCK_ATTEND`: `packed` are q_row, tensors, numbers and what follows them."""
        q_row, tensors, numbers, *rest = packed
        with torch.cuda.device_of(query):  # type: ignore[no-untyped-call]
            return kernel(
                BlockAttendCall(query, key, value, Part.unpack(q_row, tensors, numbers), *rest), **how
            )

    return unpacked


def register_block_attend(name: str, kernel: Callable[..., tuple[Tensor, Tensor]]) -> Any:
    """Register `kernel` as the operator ``mmaccel::<name>`` for `block_attend`, on every device.

    The operator computes attention of one part of a plan, over all its key spans under one softmax.

    query [B, H, Sq, D], key and value [B, G, Sk, D], H a multiple of G; q_row, tensors and numbers: see `Part.pack`. Returns
    out [B, H, P, D] in the query's dtype and lse [B, H, P] in float32 (float64 for float64), in the part's row order: rows
    with q_row = -1, or that see no key, are zero with lse = -inf. Blocks of kind FULL are not masked. If `rows` is not 0,
    both are in the order of a query of that many rows: see `empty_output`. `prepared` is what the backend's own ``prepare``
    made of the part.
    """

    def shape(query: Tensor, key: Tensor, value: Tensor, q_row: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        """Empty results of the shapes that the arguments of `BLOCK_ATTEND` give; the last but one of them is `rows`."""
        return empty_output(query, value, q_row.shape[-1], rest[5] if len(rest) > 5 else 0)

    op = torch.library.custom_op(f"mmaccel::{name}", kernel, mutates_args=(), schema=BLOCK_ATTEND)
    op.register_fake(shape)
    return op
