"""What a tested tile compares: of each key the places that see it, of each query its place and what is listed for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

TILE = 128

NEVER = {torch.int32: 2**31 - 1, torch.int64: 2**63 - 1}
"""A least place that no query reaches: of keys that are not there."""


class Lists(NamedTuple):
    """The lists of one span, its index called `entries`, in either form of `ops.ragged`; how many key blocks it has."""

    offset: Tensor
    entries: Tensor
    kind: Tensor
    blocks: int

    @property
    def plain(self) -> bool:
        """Whether each list is a run of blocks in their order."""
        return self.offset.dim() == 4 and not self.entries.shape[0]

    @property
    def heads(self) -> int:
        """How many heads have lists of their own; 1 where all share them."""
        return max(self.offset.shape[1], self.kind.shape[1] if self.offset.dim() == 4 else 1)

    def of(self, heads: slice) -> Lists:
        """Those of some heads; all share them where there is but one."""
        offset = self.offset[:, heads] if self.offset.shape[1] > 1 else self.offset
        kind = self.kind[:, heads] if self.kind.dim() == 3 and self.kind.shape[1] > 1 else self.kind
        return Lists(offset, self.entries, kind, self.blocks)


@dataclass(frozen=True)
class Tiles:
    """Tiles of queries by keys: how many blocks are `joined` in one along either, or into how many a block is `cut`."""

    queries: int
    keys: int
    joined: tuple[int, int]
    cut: tuple[int, int]

    @classmethod
    def of(cls, block_q: int, block_k: int, plain: bool) -> Tiles:
        """Whole tiles where all lists are `plain`; otherwise a block is a tile, or several."""
        queries, keys = (TILE if plain else min(block, TILE) for block in (block_q, block_k))
        joined = max(queries // block_q, 1), max(keys // block_k, 1)
        return cls(queries, keys, joined, (max(block_q // queries, 1), max(block_k // keys, 1)))


def lengthened(t: Tensor, tile: int, value: int) -> Tensor:
    """t [..., n] with `value` up to whole tiles."""
    short = -t.shape[-1] % tile
    return pad(t, (0, short), value=value) if short else t


def side_by_side(tensors: Sequence[Tensor], dim: int = -1) -> Tensor:
    """Tensors that differ in `dim`, and in which of the others are 1, one after another in `dim`."""
    if len(tensors) == 1:
        return tensors[0]
    shape = [max(sizes) for sizes in zip(*(t.shape for t in tensors), strict=True)]
    shape[dim] = -1
    return torch.cat([t.expand(shape) for t in tensors], dim)


def limits(
    q_place: Sequence[Tensor],
    k_row: Sequence[Tensor],
    k_place: Sequence[Tensor],
    lo: Sequence[int],
    hi: Sequence[int],
    lists: Sequence[Lists],
    tiles: Tiles,
    blocks: tuple[int, int],
) -> list[Tensor]:
    """What `within` takes, in `tiles` of joined `blocks` (of queries, of keys), the spans side by side.

    Of each key, [b, h, N], the least place that sees it, and the end of the places that do; then for each span, [b, h, 3,
    P], of each query its place, the first key that the span lists for it, and the end of those.
    """
    dtype = torch.int64 if any(t.dtype == torch.int64 for t in (*q_place, *k_place)) else torch.int32
    never = NEVER[dtype]
    least, most, rows, begin = [], [], [], 0
    for s, (row, place) in enumerate(zip(k_row, k_place, strict=True)):
        first, last = ((place.long() + edge).clamp(-never, never).to(dtype) for edge in (lo[s], hi[s]))
        least.append(lengthened(torch.where(row >= 0, first, never), tiles.keys, never))
        most.append(lengthened(last, tiles.keys, -never))
        end = begin + least[-1].shape[-1]
        at = q_place[s].to(dtype)
        if tiles.joined == (1, 1):
            listed = [torch.full_like(at[:1, :1], edge) for edge in (begin, end)]
        else:
            listed = [t.to(dtype) + begin for t in _run(lists[s].offset, *blocks)]
        of_span = [lengthened(t, tiles.queries, -1)[:, :, None] for t in (at, *listed)]
        rows.append(side_by_side(of_span, 2))
        begin = end
    return [side_by_side(least), side_by_side(most), *rows]


def _run(offset: Tensor, block_q: int, block_k: int) -> tuple[Tensor, Tensor]:
    """[b, h, P]: for each query the first key, and the end of the keys, of the run of blocks listed for its block."""
    begin, count, _, _, shift = offset.unbind(-1)
    first = (begin + shift) * block_k
    found = torch.stack([first, first + count * block_k])
    wide = found[..., None].expand(*found.shape, block_q).flatten(-2)
    return wide[0], wide[1]
