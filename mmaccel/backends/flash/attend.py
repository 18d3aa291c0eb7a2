"""From the flat operator to calls of flash-attn 4: rows in the order of the part, lists as its block tensors.

Where all lists are runs of blocks in their order, neighbours go together into tiles of 128 by 128, and each query keeps to
the run of its own block. Other lists are told tile by tile, and their blocks, of 64 or 128, are tiles as they are. A tile
whose blocks are all FULL is not tested; the rest are, also blocks of kind ABSENT, whose present pairs pass. Keys that stand
in their own order stay where they are, also those that several spans list runs of.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial, reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmaccel.backends.current import on_its_device
from mmaccel.backends.flash.kept import kept
from mmaccel.backends.flash.limits import (
    Lists,
    Span,
    Tiles,
    key_bounds,
    key_runs,
    lengthened,
    near_alone,
    place_runs,
    side_by_side,
)
from mmaccel.backends.natural import rows_in_order
from mmaccel.backends.ops import placed, room_for
from mmaccel.backends.tables import finer, rooms, table, tiled
from mmaccel.core.errors import RecipeError

LEAST = 64
"""The smallest edge of a tile."""

SIZES = (64, 80, 96, 128)
"""Head sizes that are served."""

ROOM = 1 << 26
"""Pairs of blocks whose table is held at a time, about 30 bytes each while it is made, 8 after: heads go in turns."""

KEPT = 1 << 24
"""Most pairs of tiles whose table is kept for the next layer, 8 bytes each."""

MOST = 1 << 28
"""Pairs of blocks of one head and all sequences beyond which nothing is made: a million tokens in blocks of 64."""


@on_its_device
def block_attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    q_row: Tensor,
    k_row: Sequence[Tensor],
    q_place: Sequence[Tensor],
    k_place: Sequence[Tensor],
    lo: Sequence[int],
    hi: Sequence[int],
    offset: Sequence[Tensor],
    index: Sequence[Tensor],
    kind: Sequence[Tensor],
    block_q: int,
    block_k: int,
    scale: float,
    rows: int = 0,
    *,
    pack: bool = False,
) -> tuple[Tensor, Tensor]:
    """See `mmaccel.backends.ops.block_attend`. Reads nothing on the host; every size comes from shapes.

    pack    the heads of a group go into one tile where all share their lists

    Raises `RecipeError` for what flash-attn 4, or the room for its block tensors, does not serve.
    """
    B, H, n, _ = query.shape
    blocks = [t.shape[-1] // block_k for t in k_row]
    lists = [Lists(*one) for one in zip(offset, index, kind, blocks, strict=True)]
    plain = all(one.plain for one in lists)
    refuse(query, value, block_q, block_k, plain, B * (q_row.shape[-1] // block_q) * sum(blocks))
    if min(query.numel(), key.numel(), q_row.numel()) == 0:
        out, lse = room_for(query, value, q_row.shape[-1], rows)
        return out.zero_(), lse.fill_(-torch.inf)
    if scale <= 0:
        # The kernel takes the largest score before it scales, which a positive scale alone allows.
        query, scale = query * scale, 1.0

    tiles = Tiles.of(block_q, block_k, plain)
    here = rows_in_order(q_row)
    q_own = here is not None and rows == n <= q_row.shape[-1]
    spans, own = told(k_row, q_place, k_place, lo, hi, lists, tiles)
    q = query.transpose(1, 2) if q_own else gathered(query, lengthened(q_row, tiles.queries, -1), H)
    if own is None:
        k_rows = side_by_side([lengthened(t, tiles.keys, -1) for t in k_row])
        k, v = (gathered(t, k_rows, H) for t in (key, value))
    else:
        k, v = (t[:, :, :own].transpose(1, 2) for t in (key, value))
    by_key = all(span.there is not None for span in spans)
    made_of = (*k_row, *q_place, *k_place, *offset, *index, *kind)
    name = tuple(lo), tuple(hi), tuple(span.there for span in spans), own, block_q, block_k
    bounds = None if own is None else key_bounds(spans, q_row, (block_q, block_k))
    tests, seen = [], None
    if bounds is not None:
        bounds, seen = near_alone(bounds, q.shape[1], tiles)
    else:
        runs = partial(key_runs if by_key else place_runs, spans, tiles, (block_q, block_k))
        tests = kept(made_of, name, runs)
    group, size = H // k.shape[2], (q.shape[1], k.shape[1])
    each = max(one.offset.shape[0] * one.heads for one in lists)
    small = each * size[0] * size[1] <= KEPT * tiles.queries * tiles.keys
    outs, sums = [], []
    for heads in turns(lists, H, group):
        some_lists = [one.of(heads) for one in lists]
        tables = partial(block_tensors, some_lists, tiles, *size, together=own is not None, seen=seen)
        tensors = kept(made_of, (*name, *size, seen, heads.start, heads.stop), tables) if small else tables()
        mine = [over(t if t.shape[1] == 1 else t[:, heads], B, heads.stop - heads.start) for t in tests]
        its = slice(heads.start // group, (heads.stop - 1) // group + 1)
        some = q[:, :, heads], k[:, :, its], v[:, :, its]
        out, lse = call(*some, tensors, tiles, mine, by_key, scale, pack, bounds)
        outs.append(out)
        sums.append(lse)
    out, lse = side_by_side(outs, 2).transpose(1, 2), side_by_side(sums, 1)
    if q_own:
        # The rows past the last that the part has were computed with the rest.
        out[:, :, here:], lse[:, :, here:] = 0.0, -torch.inf
        return out, lse
    out, lse = out[:, :, : q_row.shape[-1]], lse[..., : q_row.shape[-1]]
    if rows:
        return placed(out, lse, q_row, rows)
    blind = (q_row < 0).expand(lse.shape)
    return out.masked_fill(blind[..., None], 0.0).contiguous(), lse.masked_fill(blind, -torch.inf)


def refuse(query: Tensor, value: Tensor, block_q: int, block_k: int, plain: bool, pairs: int) -> None:
    """Raise for what is not served; `pairs` of blocks of one head and all sequences."""
    size = query.shape[-1]
    if query.dtype not in (torch.float16, torch.bfloat16):
        why = f"computes in float16 or bfloat16, not in {str(query.dtype).removeprefix('torch.')}"
    elif size not in SIZES or value.shape[-1] != size:
        why = f"serves heads of {', '.join(map(str, SIZES))}, not of {size} and {value.shape[-1]}"
    elif not plain and min(block_q, block_k) < LEAST:
        why = f"serves these lists in blocks of {LEAST} or more, not of {block_q} by {block_k}"
    elif pairs > MOST:
        why = f"holds a table of at most {MOST} pairs of blocks a head, and this prompt has {pairs}"
    else:
        return
    raise RecipeError(f"backend: 'flash' {why}; choose 'triton'.")


def told(
    k_row: Sequence[Tensor],
    q_place: Sequence[Tensor],
    k_place: Sequence[Tensor],
    lo: Sequence[int],
    hi: Sequence[int],
    lists: Sequence[Lists],
    tiles: Tiles,
) -> tuple[list[Span], int | None]:
    """The spans side by side, each from a tile of its own on; or, if the second is not None, over the same keys, so many
    rows as they lie."""
    found, begin = [], 0
    for s, row in enumerate(k_row):
        found.append(Span(row, q_place[s], k_place[s], lo[s], hi[s], lists[s], begin))
        begin += row.shape[-1] + -row.shape[-1] % tiles.keys
    rows = [rows_in_order(t) for t in k_row]
    known = [n for n in rows if n is not None]
    # Of lists that are no runs a tile does not tell which span has listed it.
    apart = len(found) > 1 and not all(span.there is not None and span.lists.plain for span in found)
    if apart or len(known) < len(rows):
        return found, None
    return [span._replace(begin=0) for span in found], max(known)


def gathered(x: Tensor, row: Tensor, heads: int) -> Tensor:
    """Rows `row` [b, h, n] of x [B, X, S, D]: [B, n, X, D], or [B, n, heads, D] where each head has rows of its own."""
    B, X = x.shape[:2]
    count = X if row.shape[1] == 1 else heads
    batch = torch.arange(B, device=x.device)[:, None, None]
    source = torch.arange(count, device=x.device) // (count // X)
    return x.transpose(1, 2)[batch, row.clamp(min=0).transpose(1, 2).long(), source]


def turns(lists: Sequence[Lists], heads: int, group: int) -> Iterator[slice]:
    """The heads whose tables are made together: all, if they share their lists, or as many as there is room for, whole
    groups of `group` that share keys or a part of one."""
    step = heads
    if any(one.heads > 1 for one in lists):
        pairs = max(one.offset.shape[0] for one in lists) * sum(one.blocks for one in lists)
        rows = lists[0].offset.shape[2] - (lists[0].offset.dim() == 3)
        most = max(ROOM // (pairs * rows), 1)
        step = most // group * group or max(s for s in range(1, most + 1) if group % s == 0)
    for first in range(0, heads, step):
        yield slice(first, min(first + step, heads))


def block_tensors(
    lists: Sequence[Lists],
    tiles: Tiles,
    n_query: int,
    n_key: int,
    *,
    together: bool,
    seen: tuple[int, int] | None = None,
) -> tuple[Tensor, ...]:
    """Of the tiles of `n_query` queries and `n_key` keys how many are tested [b, h, M] and which [b, h, M, N], and the
    same of those that are not, all int32; the spans one after another, or `together` over the same keys. `seen` is of
    `near_alone`."""
    pairs = [tiled(finer(table(*one), *tiles.cut), *tiles.joined) for one in lists]
    rows, columns = -(-n_query // tiles.queries), -(-n_key // tiles.keys)
    if together:
        listed, full = (reduce(or_, (widened(pair[i], columns) for pair in pairs)) for i in (0, 1))
    else:
        listed, full = (side_by_side([pair[i] for pair in pairs])[..., :columns] for i in (0, 1))
    listed, full = listed[:, :, :rows], full[:, :, :rows]
    if seen is not None:
        first = torch.arange(rows, device=full.device)[:, None] * tiles.queries
        past = (torch.arange(columns, device=full.device) + 1) * tiles.keys
        full = full | (listed & (past <= seen[0]) & (past <= first + seen[1]))
    return *rooms(listed & ~full), *rooms(full)


def widened(t: Tensor, columns: int) -> Tensor:
    """t [..., n] cut or lengthened with False to `columns`."""
    return pad(t, (0, columns - t.shape[-1]))


def over(t: Tensor, batch: int, heads: int) -> Tensor:
    """t [b, h, ...] over all sequences and heads: of stride 0 where they share it, so that kernels know it alike."""
    lead = tuple(0 if t.shape[i] == 1 else t.stride(i) for i in (0, 1))
    return t.as_strided((batch, heads, *t.shape[2:]), (*lead, *t.stride()[2:]), t.storage_offset())


def call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tensors: Sequence[Tensor],
    tiles: Tiles,
    tests: list[Tensor],
    by_key: bool,
    scale: float,
    pack: bool,
    bounds: tuple[int, ...] | None,
) -> tuple[Tensor, Tensor]:
    """out [B, n, h, D] and lse [B, h, n] of query [B, n, h, D] over key and value [B, N, g, D]; `bounds` are of
    `key_bounds`, and if there are none, `tests` of `key_runs` or of `place_runs`."""
    from flash_attn.cute import flash_attn_func
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    from mmaccel.backends.flash.within import banded, between, numbers, within

    if bounds is not None:
        test = dict(mask_mod=banded, aux_scalars=numbers(bounds))
    else:
        test = dict(mask_mod=between if by_key else within, aux_tensors=tests)

    found: Any = flash_attn_func(
        query,
        key,
        value,
        softmax_scale=scale,
        **test,
        block_sparse_tensors=BlockSparseTensorsTorch(*tensors, block_size=(tiles.queries, tiles.keys)),
        pack_gqa=pack and tensors[0].shape[1] == 1,
        return_lse=True,
    )
    out, lse = found[:2]
    return out, lse
