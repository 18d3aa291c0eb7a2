"""The key blocks that diagonals touch, for queries in any order of places."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mmaccel.backends.ops.lines import slash_runs
from mmaccel.core.plan import FAR, BlockLists

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
    broken [B, G] int32: the blocks that jump, M past the last; runs [B, G, R, 2] int32 their runs of places, the least and
    the greatest of each, which is -1 for none; sure [B, G] int32 the last key block but one in which all is seen.
    """

    shape: Tensor
    member: Tensor
    home: Tensor
    reach: Tensor
    broken: Tensor
    runs: Tensor
    sure: Tensor

    @classmethod
    def of(cls, q_row: Tensor, q_pos: Tensor, blocks: int, heads: int, block: int, breaks: Breaks) -> Shapes:
        """Those of q_row, q_pos [B, 1, P], places ascending, -1 where a row sees nothing, among `blocks` key blocks."""
        B, M = q_row.shape[0], q_row.shape[2] // block
        place = q_pos[:, 0].long().view(B, M, block)
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
        broken, runs, sure_of = _broken(place, jump, sure, gaps, min(breaks.pieces, block))
        return cls(
            torch.stack(told).to(torch.int32),
            member.to(torch.int32),
            home.clamp(max=FAR).to(torch.int32),
            reach.to(torch.int32),
            broken,
            runs,
            sure_of,
        )


def _broken(
    place: Tensor, jump: Tensor, sure: Tensor, gaps: int, pieces: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`broken`, `runs` and `sure` of `Shapes`, of at most `gaps` blocks of a sequence in at most `pieces` runs each.

    place [B, M, block] the places of all blocks, jump [B, M, block - 1] whether the next is further than one; sure [B, M].
    """
    B, M, block = place.shape
    is_broken = jump.any(2)
    slot = torch.where(is_broken, is_broken.long().cumsum(1) - 1, gaps).clamp(max=gaps)
    every = torch.arange(M, device=place.device).expand(B, M)
    broken = torch.full((B, gaps + 1), M, device=place.device).scatter_(1, slot, every)[:, :gaps]
    chosen, there = broken.clamp(max=M - 1), (broken < M)[..., None]
    own = place.gather(1, chosen[..., None].expand(-1, -1, block))
    cut = jump.gather(1, chosen[..., None].expand(-1, -1, block - 1))
    run = torch.nn.functional.pad(cut.long().cumsum(2), (1, 0)).clamp(max=max(pieces - 1, 0))
    seen = there & (own >= 0)
    some = (B, gaps, max(pieces, 1))
    least = own.new_full(some, FAR).scatter_reduce_(2, run, torch.where(seen, own, FAR), "amin")
    most = own.new_full(some, -1).scatter_reduce_(2, run, torch.where(seen, own, -1), "amax")
    runs = torch.stack([least, most], -1)
    return broken.to(torch.int32), runs.to(torch.int32), sure.gather(1, chosen).clamp(max=FAR).to(torch.int32)


def slash_lists(kind: Tensor, kept: Tensor, block: int, shapes: Shapes) -> BlockLists:
    """Lists in which a query block has every key block that a diagonal of `kept` [B, H, N] touches in its rows.

    kind [B, H, key blocks]: their kinds. A diagonal d pairs a query of place i with the key of place i - d.
    """
    s = shapes
    row, entries = slash_runs(kept, s.shape, s.member, s.home, s.reach, s.broken, s.runs, s.sure, block)
    return BlockLists(row, entries, kind)
