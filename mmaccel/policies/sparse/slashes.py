"""The key blocks that diagonals touch, for queries in any order of places."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mmaccel.backends import ops
from mmaccel.core.lists import BlockRuns, packed
from mmaccel.core.plan import FAR, KeySpan

ROOM = 1 << 28
"""Most entries of lists made by the host's bound of their sizes; beyond it the sizes are read."""


class Breaks(NamedTuple):
    """How far from one run of places the queries of a sequence are: bounds from the layout alone.

    shapes  different (offset in a key block, number of places) of query blocks whose places leave none out
    gaps    query blocks whose places jump; pieces: runs of places in one of them
    """

    shapes: int
    gaps: int
    pieces: int


@dataclass(frozen=True, eq=False)
class Shapes:
    """The blocks of queries by what they ask of a diagonal: from the layouts alone.

    What a block of places that follow each other touches, told in blocks before its first, is the same for all that begin
    at the same place within a key block and are as long: one list a shape, and one shape where queries are in the order of
    the sequence. Blocks whose places jump, at the islands of a modality, have lists of their own.

    shape [3, C] int32: sequence, offset in a key block, number of places; member [B, M] int32 the shape of each block; home
    [B, M] int32 the key block in which it begins. reach [3, B, M] int32: of the steps of its shape, step u to key block
    home + 1 - u, the first that is one, the last but one, and the first that needs no test; all 0 for blocks that jump.
    place [B, M, block], jump [B, M, block - 1], sure [B, M]: the places, where they jump, and the last key block but one in
    which all is seen. gaps: the most blocks that jump in a sequence; pieces: runs of places in one of them.
    """

    shape: Tensor
    member: Tensor
    home: Tensor
    reach: Tensor
    place: Tensor
    jump: Tensor
    sure: Tensor
    gaps: int
    pieces: int

    @classmethod
    def of(
        cls, q_row: Tensor, q_place: Tensor, blocks: int, heads: int, block: int, breaks: Breaks
    ) -> Shapes:
        """Those of q_row, q_place [B, 1, P], places ascending, -1 where a row sees nothing, among `blocks` key blocks."""
        B, M = q_row.shape[0], q_row.shape[2] // block
        place = q_place[:, 0].long().view(B, M, block)
        live = place >= 0
        low = torch.where(live, place, FAR).amin(2)
        length = (place.amax(2) - low + 1).clamp(min=0)
        jump = live[..., 1:] & live[..., :-1] & (place[..., 1:] - place[..., :-1] > 1)
        whole = live.any(2) & ~jump.any(2)
        home, offset = low // block, low % block
        lane = torch.arange(B, device=place.device)[:, None]

        shape = torch.where(whole, (lane * block + offset) * (block + 1) + length, FAR)
        sorted_shape, order = shape.flatten().sort()
        rank = torch.nn.functional.pad((sorted_shape[1:] != sorted_shape[:-1]).long().cumsum(0), (1, 0))
        C = min(B * M, B * breaks.shapes) + 1
        if C * heads * (blocks + 2) > ROOM:
            C = int(rank[-1]) + 1
        member = torch.empty_like(rank).scatter_(0, order, rank).view(B, M)
        shapes = torch.zeros(C, dtype=torch.long, device=place.device).scatter_(0, rank, sorted_shape)
        shapes = torch.where(shapes == FAR, 0, shapes)
        told = shapes // ((block + 1) * block), shapes // (block + 1) % block, shapes % (block + 1)

        # Step u of a block is key block home + 1 - u; those past its own, and past the last, are cut off.
        width = blocks + 2
        first, last = (home + 2 - blocks).clamp(0, width), (home + 2).clamp(0, width)
        # A query before the first key, if there is one, sees nothing: such a block is tested whole.
        early = ((q_row[:, 0] >= 0).view(B, M, block) & ~live).any(2)
        sure = torch.where(early, 0, (low + 1) // block)
        head = torch.maximum((home + 2 - sure).clamp(0, width), first)
        reach = torch.where(whole, torch.stack([first, last, head]), 0)

        gaps = min(M, breaks.gaps)
        if gaps and B * heads * gaps * blocks > ROOM:
            gaps = int(jump.any(2).sum(1).amax())
        return cls(
            torch.stack(told).to(torch.int32),
            member.to(torch.int32),
            home.clamp(max=FAR).to(torch.int32),
            reach.to(torch.int32),
            place,
            jump,
            sure,
            gaps,
            min(breaks.pieces, block),
        )


def slash_blocks(
    q_place: Tensor, k_row: Tensor, k_place: Tensor, kind: Tensor, kept: Tensor, block: int, shapes: Shapes
) -> KeySpan:
    """A span in which a query block lists every key block that a diagonal of `kept` [B, H, N] touches in its rows.

    q_place [B, 1, P] as in `shapes`; k_row [B, H, N], k_place [B, 1, N] the ranks, kind [B, H, key blocks] their kinds. A
    diagonal d pairs a query of place i with the key of place i - d.
    """
    blocks = kept.shape[2] // block
    row, entries = ops.slash_runs(kept, shapes.shape, shapes.member, shapes.home, shapes.reach, block)
    if shapes.gaps:
        row, entries = _with_gaps(row, entries, kept, shapes, block)
    return KeySpan(k_row, q_place, k_place, 0, FAR, BlockRuns(row, entries, kind, blocks))


def _with_gaps(
    row: Tensor, entries: Tensor, kept: Tensor, shapes: Shapes, block: int
) -> tuple[Tensor, Tensor]:
    """`row` [B, H, M, 5] and `entries` with the lists of the blocks whose places jump, at most `gaps` of a sequence."""
    B, H, N = kept.shape
    place, jump, G = shapes.place, shapes.jump, shapes.gaps
    blocks, M = N // block, place.shape[1]
    before = torch.nn.functional.pad(kept.cumsum(2, dtype=torch.int32), (1, 0))
    broken = jump.any(2)
    slot = torch.where(broken, broken.long().cumsum(1) - 1, G).clamp(max=G)
    number = torch.full((B, G + 1), M, device=place.device).scatter_(
        1, slot, torch.arange(M, device=place.device).expand(B, M)
    )[:, :G]
    chosen = number.clamp(max=M - 1)
    there = number < M
    own = place.gather(1, chosen[..., None].expand(-1, -1, block)).masked_fill(~there[..., None], -1)
    cut = jump.gather(1, chosen[..., None].expand(-1, -1, block - 1)) & there[..., None]
    run = torch.nn.functional.pad(cut.long().cumsum(2), (1, 0))
    begin = block * torch.arange(blocks, device=place.device)
    touched = torch.zeros(B, H, G, blocks, dtype=torch.bool, device=place.device)
    for piece in range(shapes.pieces):
        mine = (run == piece) & (own >= 0)
        least = torch.where(mine, own, FAR).amin(2)[..., None]
        most = torch.where(mine, own, -1).amax(2)[..., None]
        some = most >= 0
        low = (least - begin - block + 1).clamp(0, N)[:, None].expand(-1, H, -1, -1)
        high = (most + 1 - begin).clamp(0, N)[:, None].expand(-1, H, -1, -1)
        found = _at(before, high) > _at(before, low)
        touched |= found & some[:, None] & (begin <= most)[:, None]
    listed, upto = packed(touched, torch.arange(blocks, device=place.device))
    base = entries.numel() + torch.arange(B * H * G, device=place.device).view(B, H, G) * blocks
    tail = upto.gather(
        3, shapes.sure.gather(1, chosen).clamp(max=blocks)[:, None, :, None].expand(-1, H, -1, -1)
    )
    none = torch.zeros_like(base)
    lists = torch.stack([base, upto[..., -1], none, tail[..., 0], none], -1)
    # The last query block takes what is no block.
    wide = torch.nn.functional.pad(row, (0, 0, 0, 1))
    wide = wide.scatter(2, number[:, None, :, None].expand(B, H, G, 5), lists)
    return wide[:, :, :M], torch.cat([entries, listed])


def _at(before: Tensor, where: Tensor) -> Tensor:
    """The entries `where` [B, H, G, blocks] of before [B, H, N + 1]."""
    return before.gather(2, where.flatten(2)).view(where.shape)
