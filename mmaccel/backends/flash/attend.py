"""The operator `block_attend` (attention of one part of a plan) by flash-attn 4: query and key rows are put in the part's
order, and block lists become flash-attn's block-sparse tensors.

If every list is a run of consecutive blocks, adjacent blocks are joined into tiles of 128 x 128, and a mask limits each
query to the run of its own block. For other lists a tile is one block, of 64 or 128 tokens. A tile is masked unless all its
blocks are of kind FULL; in ABSENT blocks (some keys missing) the mask admits the keys that are there. Keys that are already
in the plan's order are read in place, without a gather.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce
from operator import or_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmaccel.backends.flash.tiles import (
    ConcatenatedSpan,
    TileSizes,
    compact_mask_rows,
    concatenate_broadcast,
    join_tiles,
    key_bounds,
    key_run_mask_tensors,
    merge_window_and_sinks,
    pad_to_tiles,
    position_run_mask_tensors,
    subdivide_mask_blocks,
)
from mmaccel.backends.ops.block_attend import (
    BlockAttendCall,
    BlockLists,
    Part,
    empty_output,
    memoize,
    scatter_to_query_order,
    with_unpacked_args,
)
from mmaccel.core.errors import RecipeError

LEAST = 64  # the smallest edge of a tile
SIZES = (64, 80, 96, 128)  # head sizes that are served
# Pairs of blocks whose table is held at a time, about 30 bytes each while it is made, 8 after: heads go in turns.
ROOM = 1 << 26
KEPT = 1 << 24  # most pairs of tiles whose table is kept for the next layer, 8 bytes each
# Pairs of blocks of one head and all sequences beyond which nothing is made: a million tokens in blocks of 64.
MOST = 1 << 28


class FlashCallLayout(NamedTuple):
    """Host-side description of one flash-attn call: how queries and keys are laid out, and what masks them.

    spans     the key spans, each with the index of its first key among the keys of the call
    tiles     tile sizes
    own       None: the keys of all spans are gathered one after another, each span from a tile boundary on; else all spans
              read the first `own` keys of the key tensor in place
    in_place  whether queries are read in place; otherwise they are gathered in the part's order
    bounds, seen  results of `merge_window_and_sinks`; None if the mask needs tensors
    sizes     numbers of queries and keys of the call, padding included
    """

    spans: list[ConcatenatedSpan]
    tiles: TileSizes
    own: int | None
    in_place: bool
    bounds: tuple[int, ...] | None
    seen: tuple[int, int] | None
    sizes: tuple[int, int]

    @classmethod
    def choose(cls, part: Part, n: int, block_q: int, block_k: int, rows: int) -> FlashCallLayout:
        """Choose the layout of the flash-attn call for `part` and a query of `n` rows; `rows`: as in `block_attend`."""
        plain = all(span.lists.index is None for span in part.spans)
        tiles = TileSizes.choose(block_q, block_k, plain)
        P = part.q_row.shape[-1]
        in_place = part.ordered is not None and rows == n <= P
        spans, begin = [], 0
        for span in part.spans:
            spans.append(ConcatenatedSpan(span, begin))
            begin += span.k_row.shape[-1] + -span.k_row.shape[-1] % tiles.keys
        known = [span.ordered for span in part.spans if span.ordered is not None]
        # Of lists that are no runs a tile does not tell which span has listed it.
        apart = len(spans) > 1 and not (plain and all(span.key_count is not None for span in spans))
        own = None
        if not apart and len(known) == len(spans):
            spans, own = [span._replace(begin=0) for span in spans], max(known)
        queries = n if in_place else P + -P % tiles.queries
        bounds = None if own is None else key_bounds(part)
        seen = None
        if bounds is not None:
            bounds, seen = merge_window_and_sinks(bounds, queries, tiles)
        return cls(spans, tiles, own, in_place, bounds, seen, (queries, begin if own is None else own))

    @property
    def compares_key_indices(self) -> bool:
        """Whether the mask compares key indices; otherwise it compares positions."""
        return all(span.key_count is not None for span in self.spans)

    @property
    def block_lists(self) -> list[BlockLists]:
        """The `BlockLists` of all key spans."""
        return [span.of.lists for span in self.spans]

    def mask_tensors(self, blocks: tuple[int, int]) -> list[Tensor]:
        """The tensors that the mask function reads: `key_run_mask_tensors` or `position_run_mask_tensors`; none if
        `bounds` describe the whole mask."""
        if self.bounds is not None:
            return []
        return (key_run_mask_tensors if self.compares_key_indices else position_run_mask_tensors)(
            self.spans, self.tiles, blocks
        )

    def block_sparse_tensors(self, heads: slice) -> tuple[Tensor, ...]:
        """Build flash-attn's four block-sparse tensors for some heads: count and index of masked tiles, then of full."""
        some = [lists.for_heads(heads) for lists in self.block_lists]
        return _block_tensors(some, self.tiles, *self.sizes, together=self.own is not None, seen=self.seen)

    @property
    def can_cache_block_tensors(self) -> bool:
        """Whether the block-sparse tensors of all heads are small enough to be cached with the plan."""
        each = max(lists.row.shape[0] * lists.head_count for lists in self.block_lists)
        return each * self.sizes[0] * self.sizes[1] <= KEPT * self.tiles.queries * self.tiles.keys


def prepare_mask_tensors(
    part: Part, query: Tensor, key: Tensor, block_q: int, block_k: int, rows: int
) -> list[Tensor]:
    """Return the mask tensors of a part and, if small, its block-sparse tensors; cached with the part for all layers."""
    (H, n), group = query.shape[1:3], query.shape[1] // key.shape[1]

    def made() -> list[Tensor]:
        setup = FlashCallLayout.choose(part, n, block_q, block_k, rows)
        found = setup.mask_tensors((block_q, block_k))
        if setup.can_cache_block_tensors:
            found += [
                t
                for heads in iter_head_slices(setup.block_lists, H, group)
                for t in setup.block_sparse_tensors(heads)
            ]
        return found

    _check_table(part, len(query), block_q, block_k)
    return memoize(part.memo, ("flash", n, H, group, rows), made)


@with_unpacked_args
def block_attend(call: BlockAttendCall) -> tuple[Tensor, Tensor]:
    """The operator of `ops.block_attend` by flash-attn 4. No host synchronization; all sizes come from shapes.

    Raises `RecipeError` for calls that flash-attn 4 does not support, or whose block-sparse tensors are too large.
    """
    query, key, value, part, block_q, block_k, scale, rows, prepared = call
    B, H, n, _ = query.shape
    q_row = part.q_row
    check_call(query, value, part, block_q, block_k)
    if min(query.numel(), key.numel(), q_row.numel()) == 0:
        out, lse = empty_output(query, value, q_row.shape[-1], rows)
        return out.zero_(), lse.fill_(-torch.inf)
    if prepared is None:
        prepared = prepare_mask_tensors(part, query, key, block_q, block_k, rows)
    if scale <= 0:
        # The kernel takes the largest score before it scales, which a positive scale alone allows.
        query, scale = query * scale, 1.0

    setup = FlashCallLayout.choose(part, n, block_q, block_k, rows)
    tiles, group = setup.tiles, H // key.shape[1]
    q = query.transpose(1, 2)
    if not setup.in_place:
        q = gather_head_rows(query, pad_to_tiles(q_row, tiles.queries, -1), H)
    if setup.own is None:
        k_rows = concatenate_broadcast([pad_to_tiles(span.k_row, tiles.keys, -1) for span in part.spans])
        k, v = (gather_head_rows(t, k_rows, H) for t in (key, value))
        group = H // k.shape[2]
    else:
        k, v = (t[:, :, : setup.own].transpose(1, 2) for t in (key, value))
    count = 0 if setup.bounds is not None else len(part.spans) + (not setup.compares_key_indices)
    tests, tables = prepared[:count], prepared[count:]
    outs, sums = [], []
    for i, heads in enumerate(iter_head_slices(setup.block_lists, H, H // key.shape[1])):
        tensors = tables[4 * i : 4 * i + 4] if tables else setup.block_sparse_tensors(heads)
        mine = [
            expand_batch_and_heads(t if t.shape[1] == 1 else t[:, heads], B, heads.stop - heads.start)
            for t in tests
        ]
        its = slice(heads.start // group, (heads.stop - 1) // group + 1)
        some = q[:, :, heads], k[:, :, its], v[:, :, its]
        out, lse = call_flash_attn(
            *some, tensors, tiles, mine, setup.compares_key_indices, scale, setup.bounds
        )
        outs.append(out)
        sums.append(lse)
    out, lse = concatenate_broadcast(outs, 2).transpose(1, 2), concatenate_broadcast(sums, 1)
    if setup.in_place:
        # The rows past the last that the part has were computed with the rest.
        out[:, :, part.ordered :], lse[:, :, part.ordered :] = 0.0, -torch.inf
        return out, lse
    out, lse = out[:, :, : q_row.shape[-1]], lse[..., : q_row.shape[-1]]
    if rows:
        return scatter_to_query_order(out, lse, q_row, rows)
    blind = (q_row < 0).expand(lse.shape)
    return out.masked_fill(blind[..., None], 0.0).contiguous(), lse.masked_fill(blind, -torch.inf)


def check_call(query: Tensor, value: Tensor, part: Part, block_q: int, block_k: int) -> None:
    """Raise `RecipeError` if this backend does not support the call."""
    size = query.shape[-1]
    plain = all(span.lists.index is None for span in part.spans)
    if query.dtype not in (torch.float16, torch.bfloat16):
        why = f"computes in float16 or bfloat16, not in {str(query.dtype).removeprefix('torch.')}"
    elif size not in SIZES or value.shape[-1] != size:
        why = f"serves heads of {', '.join(map(str, SIZES))}, not of {size} and {value.shape[-1]}"
    elif not plain and min(block_q, block_k) < LEAST:
        why = f"serves these lists in blocks of {LEAST} or more, not of {block_q} by {block_k}"
    elif part.needs_extensions:
        why = "serves no bias, no keys of a span's own and no window of a part"
    else:
        return _check_table(part, len(query), block_q, block_k)
    raise RecipeError(f"backend: 'flash' {why}; choose 'triton'.")


def _check_table(part: Part, batch: int, block_q: int, block_k: int) -> None:
    """Raise `RecipeError` if the block-sparse table of one head, over `batch` sequences and all spans, would have more than
    `MOST` entries (pairs of a query and a key block)."""
    blocks = sum(span.k_row.shape[-1] for span in part.spans) // block_k
    pairs = batch * (part.q_row.shape[-1] // block_q) * blocks
    if pairs > MOST:
        raise RecipeError(
            f"backend: 'flash' holds a table of at most {MOST} pairs of blocks a head, and this prompt has {pairs}; choose "
            "'triton'."
        )


def gather_head_rows(x: Tensor, row: Tensor, heads: int) -> Tensor:
    """Gather rows `row` [b, h, n] of x [B, X, S, D]: [B, n, X, D], or [B, n, heads, D] if each head has rows of its own."""
    B, X = x.shape[:2]
    count = X if row.shape[1] == 1 else heads
    batch = torch.arange(B, device=x.device)[:, None, None]
    source = torch.arange(count, device=x.device) // (count // X)
    return x.transpose(1, 2)[batch, row.clamp(min=0).transpose(1, 2).long(), source]


def iter_head_slices(lists: Sequence[BlockLists], heads: int, group: int) -> Iterator[slice]:
    """Yield slices of heads whose block-sparse tensors are built together: all heads if they share lists, else as many as
    fit in memory: a multiple or a divisor of `group`, the number of query heads that share a key/value head."""
    step = heads
    if any(one.head_count > 1 for one in lists):
        pairs = max(one.row.shape[0] for one in lists) * sum(one.kind.shape[-1] for one in lists)
        most = max(ROOM // (pairs * lists[0].blocks), 1)
        step = most // group * group or max(s for s in range(1, most + 1) if group % s == 0)
    for first in range(0, heads, step):
        yield slice(first, min(first + step, heads))


def _block_tensors(
    lists: Sequence[BlockLists],
    tiles: TileSizes,
    n_query: int,
    n_key: int,
    *,
    together: bool,
    seen: tuple[int, int] | None = None,
) -> tuple[Tensor, ...]:
    """Block-sparse tensors of flash-attn for `n_query` queries and `n_key` keys: count [b, h, M] and index [b, h, M, N] of
    masked tiles, then of unmasked tiles, int32. Spans are concatenated, or `together` over the same keys. `seen`: see
    `merge_window_and_sinks`."""
    pairs: list[Sequence[Tensor]] = [
        join_tiles(subdivide_mask_blocks(one.to_dense_table(), *tiles.cut), *tiles.joined) for one in lists
    ]
    rows, columns = -(-n_query // tiles.queries), -(-n_key // tiles.keys)
    if together:
        # Each cut, or lengthened with False, to the same columns.
        pairs = [[pad(t, (0, columns - t.shape[-1])) for t in pair] for pair in pairs]
        listed, full = (reduce(or_, (pair[i] for pair in pairs)) for i in (0, 1))
    else:
        listed, full = (concatenate_broadcast([pair[i] for pair in pairs])[..., :columns] for i in (0, 1))
    listed, full = listed[:, :, :rows], full[:, :, :rows]
    if seen is not None:
        first = torch.arange(rows, device=full.device)[:, None] * tiles.queries
        past = (torch.arange(columns, device=full.device) + 1) * tiles.keys
        full = full | (listed & (past <= seen[0]) & (past <= first + seen[1]))
    return *compact_mask_rows(listed & ~full), *compact_mask_rows(full)


def expand_batch_and_heads(t: Tensor, batch: int, heads: int) -> Tensor:
    """Expand t [b, h, ...] to all sequences and heads with stride 0 where shared, so that kernels see the same strides."""
    lead = tuple(0 if t.shape[i] == 1 else t.stride(i) for i in (0, 1))
    return t.as_strided((batch, heads, *t.shape[2:]), (*lead, *t.stride()[2:]), t.storage_offset())


def call_flash_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tensors: Sequence[Tensor],
    tiles: TileSizes,
    tests: Sequence[Tensor],
    by_key: bool,
    scale: float,
    bounds: tuple[int, ...] | None,
) -> tuple[Tensor, Tensor]:
    """Call flash-attn: out [B, n, h, D] and lse [B, h, n] of query [B, n, h, D] over key and value [B, N, g, D]. `tensors`:
    the block-sparse tensors. `bounds` (from `key_bounds`) state the mask; if they are None, the tensors `tests` do: those of
    `key_run_mask_tensors` if `by_key`, else of `position_run_mask_tensors`."""
    from flash_attn.cute import flash_attn_func
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    from mmaccel.backends.flash.within import (
        diagonal_band_mask_mod,
        key_run_mask_mod,
        position_run_mask_mod,
        to_runtime_ints,
    )

    if bounds is not None:
        test = dict(mask_mod=diagonal_band_mask_mod, aux_scalars=to_runtime_ints(bounds))
    else:
        test = dict(mask_mod=key_run_mask_mod if by_key else position_run_mask_mod, aux_tensors=tests)

    found: Any = flash_attn_func(
        query,
        key,
        value,
        softmax_scale=scale,
        **test,
        block_sparse_tensors=BlockSparseTensorsTorch(*tensors, block_size=(tiles.queries, tiles.keys)),
        pack_gqa=False,
        return_lse=True,
    )
    out, lse = found[:2]
    return out, lse
