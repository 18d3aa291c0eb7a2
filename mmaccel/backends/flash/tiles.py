"""Tiles of flash-attn 4: which are computed, and which of these need a mask; and the tensors that the mask functions read:
for each query the runs of keys or positions that it sees. No host synchronization."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmaccel.backends.ops.block_attend import FULL, KeySpan, Part
from mmaccel.backends.ops.block_lists import compact_by_mask

TILE = 128

MOST = 1 << 30  # beyond any position of a query or key: what is compared is kept in 32 bits
# A position that no query sees: of keys that are not there.
NEVER = {torch.int32: 2**31 - 1, torch.int64: 2**63 - 1}


@dataclass(frozen=True)
class TileSizes:
    """Tile sizes in queries and keys; along each axis, how many blocks one tile joins (`joined`), or into how many tiles one
    block is cut (`cut`)."""

    queries: int
    keys: int
    joined: tuple[int, int]
    cut: tuple[int, int]

    @classmethod
    def choose(cls, block_q: int, block_k: int, plain: bool) -> TileSizes:
        """Choose tile sizes: `TILE` x `TILE` if all lists are runs of consecutive blocks (`plain`); else blocks of at most
        `TILE` tokens are tiles, and larger ones are cut into tiles of `TILE`."""
        queries, keys = (TILE if plain else min(block, TILE) for block in (block_q, block_k))
        joined = max(queries // block_q, 1), max(keys // block_k, 1)
        return cls(queries, keys, joined, (max(block_q // queries, 1), max(block_k // keys, 1)))


class ConcatenatedSpan(NamedTuple):
    """A `KeySpan` with the index `begin` of its first key among the concatenated keys of all spans, as flash-attn's mask
    needs it."""

    of: KeySpan
    begin: int

    @property
    def key_count(self) -> int | None:
        """Number n of keys if the span is known to hold exactly the rows 0 .. n - 1 of the key tensor, in order; else
        None."""
        return self.of.ordered if self.of.ranks else None


def pad_to_tiles(t: Tensor, tile: int, value: int) -> Tensor:
    """Pad t [..., n] with `value` to whole tiles."""
    short = -t.shape[-1] % tile
    return pad(t, (0, short), value=value) if short else t


def concatenate_broadcast(tensors: Sequence[Tensor], dim: int = -1) -> Tensor:
    """Concatenate tensors along `dim`, after broadcasting their other dimensions of size 1."""
    if len(tensors) == 1:
        return tensors[0]
    shape = [max(sizes) for sizes in zip(*(t.shape for t in tensors), strict=True)]
    shape[dim] = -1
    return torch.cat([t.expand(shape) for t in tensors], dim)


def key_bounds(part: Part) -> tuple[int, ...] | None:
    """Arguments of the mask `diagonal_band_mask_mod` for a part whose queries and keys are in order: (low, high, count) for
    each span.

    Query i sees keys max(0, i + low) <= key < min(i + high, count). None if the order is unknown or a list may lack blocks.
    """
    found: list[int] = []
    for span in part.spans:
        in_order = part.ordered is not None and span.ordered is not None and span.ranks
        if not in_order or span.q_first is None or not span.complete:
            return None
        assert span.ordered is not None
        ends = (max(-MOST, min(span.q_first + 1 - end, MOST)) for end in (span.hi, span.lo))
        found += [*ends, span.ordered]
    return tuple(found)


def merge_window_and_sinks(
    bounds: tuple[int, ...], n_query: int, tiles: TileSizes
) -> tuple[tuple[int, ...], tuple[int, int] | None]:
    """Reduce the bounds of two spans, a sliding window and attention sinks, to one mask.

    This applies if the window is at least as long as a tile of queries plus a tile of keys, and if the sinks are the first
    keys of the call, a whole number of tiles, of which each query sees those before its window. Then no tile holds both.
    Returns the window's bounds and (keys, past): of the first `keys` keys, query i sees those before i + past, and a tile of
    these is FULL if its first query sees its last key. Otherwise returns `bounds` unchanged and None.
    """
    for near, far in ((bounds[:3], bounds[3:]), (bounds[3:], bounds[:3])) if len(bounds) == 6 else ():
        first_keys = far[0] <= -n_query and far[1] == near[0] and far[2] <= near[2]
        if first_keys and far[2] % tiles.keys == 0 and near[1] - near[0] >= tiles.queries + tiles.keys:
            return near, (far[2], near[1])
    return bounds, None


def key_run_mask_tensors(
    spans: Sequence[ConcatenatedSpan], tiles: TileSizes, blocks: tuple[int, int]
) -> list[Tensor]:
    """Return the tensors of the mask `key_run_mask_mod`, for spans whose keys are rows 0, 1, 2, ... of the key tensor:
    for each span [b, h, 2, P] int32, the first key that each query sees, and how many keys it sees from there."""
    found = []
    for span in spans:
        assert span.key_count is not None
        first, past = _positions(span.of, span.key_count)
        listed = _listed(span.of, blocks)
        if listed is not None:
            first, past = torch.maximum(first, listed[0]), torch.minimum(past, listed[1])
        found.append(_runs((first + span.begin, past + span.begin), tiles, torch.int32))
    return found


def position_run_mask_tensors(
    spans: Sequence[ConcatenatedSpan], tiles: TileSizes, blocks: tuple[int, int]
) -> list[Tensor]:
    """Return the tensors of the mask `position_run_mask_mod`, for any spans: [b, h, N], the position of each key; then for
    each span [b, h, 4, P]: the first position that a query sees and how many positions, the first key that is listed for it
    and how many keys. int64 if positions are."""
    wide = any(t.dtype == torch.int64 for span in spans for t in (span.of.q_pos, span.of.k_pos))
    dtype = torch.int64 if wide else torch.int32
    never = NEVER[dtype]
    places, found = [], []
    for span in spans:
        place = torch.where(span.of.k_row >= 0, span.of.k_pos.to(dtype), never)
        places.append(pad_to_tiles(place, tiles.keys, never))
        listed = _listed(span.of, blocks)
        if listed is None:
            none = torch.zeros_like(span.of.q_pos[:1, :1], dtype=torch.long)
            listed = none, none + places[-1].shape[-1]
        keys = listed[0] + span.begin, listed[1] + span.begin
        found.append(
            concatenate_broadcast(
                [_runs(_positions(span.of, never), tiles, dtype), _runs(keys, tiles, dtype)], 2
            )
        )
    return [concatenate_broadcast(places), *found]


def _positions(span: KeySpan, end: int) -> tuple[Tensor, Tensor]:
    """[b, h, P]: for each query the first position that is in the range, and the end of those, all in 0 .. end."""
    at = span.q_pos.long()
    return (at - (span.hi - 1)).clamp(0, end), (at - (span.lo - 1)).clamp(0, end)


def _listed(span: KeySpan, blocks: tuple[int, int]) -> tuple[Tensor, Tensor] | None:
    """[b, h, P]: for each query the first key, and the end of the keys, of the run of blocks listed for its block; None
    where lists are no runs: tiles are listed as they are."""
    if span.lists.index is not None:
        return None
    begin, count, _, _, shift = span.lists.row.unbind(-1)
    first = (begin + shift) * blocks[1]
    found = torch.stack([first, first + count * blocks[1]])
    wide = found[..., None].expand(*found.shape, blocks[0]).flatten(-2)
    return wide[0], wide[1]


def _runs(ends: tuple[Tensor, Tensor], tiles: TileSizes, dtype: torch.dtype) -> Tensor:
    """[b, h, 2, P] of `dtype`: where each run begins, and its length, 0 where it ends before; whole tiles of queries."""
    first, past = ends
    both = torch.stack([first, (past - first).clamp(min=0)], 2).to(dtype)
    return pad_to_tiles(both, tiles.queries, 0)


def join_tiles(kinds: Tensor, queries: int, keys: int) -> tuple[Tensor, Tensor]:
    """Join blocks into tiles of `queries` x `keys` blocks: which tiles hold a listed block, and which are FULL throughout.

    kinds [b, h, M, N]; both results [b, h, query tiles, key tiles] bool. Query blocks beyond the last one are ignored; key
    blocks beyond the last one count as absent.
    """
    listed, full = kinds >= 0, kinds == FULL
    if queries == keys == 1:
        return listed, full
    b, h, m, n = kinds.shape
    more = (0, -n % keys, 0, -m % queries)
    rows, columns = -(-m // queries), -(-n // keys)
    shape = (b, h, rows, queries, columns, keys)
    some = pad(listed, more).view(shape).any(-1).any(3)
    # What is padded on the side of the queries is full, on the side of the keys it is not.
    full = pad(full, (0, more[1]))
    full = pad(full, (0, 0, 0, more[3]), value=True)
    return some, full.view(shape).all(-1).all(3)


def subdivide_mask_blocks(kinds: Tensor, queries: int, keys: int) -> Tensor:
    """Split each block of the table `kinds` into `queries` x `keys` blocks of the same kind."""
    if queries == keys == 1:
        return kinds
    b, h, m, n = kinds.shape
    whole = kinds[:, :, :, None, :, None].expand(b, h, m, queries, n, keys)
    return whole.reshape(b, h, m * queries, n * keys)


def compact_mask_rows(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Compact each row of the mask `chosen` [b, h, M, N]: count [b, h, M] and the indices of True entries [b, h, M, N],
    int32, padded with 0."""
    number = torch.arange(chosen.shape[-1], device=chosen.device)
    index, upto = compact_by_mask(chosen, number)
    # Of one row, or one column, both are views with the strides of what is longer.
    dense = torch.contiguous_format
    return upto[..., -1].to(torch.int32, memory_format=dense), index.contiguous().view(chosen.shape)
