"""The key blocks that diagonals touch, for queries in any order of places."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mmaccel.core.lists import BlockRuns, packed
from mmaccel.core.plan import FAR, KeySpan, block_kinds

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


def slash_blocks(
    q_row: Tensor,
    k_row: Tensor,
    q_place: Tensor,
    k_place: Tensor,
    kept: Tensor,
    block: int,
    breaks: Breaks,
) -> KeySpan:
    """A span in which a query block lists every key block that a diagonal of `kept` [B, H, N] touches in its rows.

    q_row, q_place [B, 1, P], places ascending, -1 where a row sees nothing; k_row [B, H, N], k_place [B, 1, N] the ranks.
    A diagonal d pairs a query of place i with the key of place i - d.

    What a block of places that follow each other touches, told in blocks before its first, is the same for all that begin
    at the same place within a key block and are as long: one list a shape, and one shape where queries are in the order of
    the sequence. Blocks whose places jump, at the islands of a modality, have lists of their own.
    """
    B, H, N = kept.shape
    M, blocks = q_row.shape[2] // block, N // block
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
    if C * H * (blocks + 2) > ROOM:
        C = int(rank[-1]) + 1
    member = torch.empty_like(rank).scatter_(0, order, rank).view(B, M)
    shapes = torch.zeros(C, dtype=torch.long, device=place.device).scatter_(0, rank, sorted_shape)
    shapes = torch.where(shapes == FAR, 0, shapes)
    before = torch.nn.functional.pad(kept.to(torch.int32).cumsum(2, dtype=torch.int32), (1, 0))
    steps = _steps(before, shapes, block)
    index, upto = packed(steps, 1 - torch.arange(blocks + 2, device=place.device))
    # Step u of a block is key block home + 1 - u; those past its own, and past the last, are cut off.
    width = blocks + 2
    first, last = (home + 2 - blocks).clamp(0, width), (home + 2).clamp(0, width)
    # A query before the first key, if there is one, sees nothing: such a block is tested whole.
    early = ((q_row[:, 0] >= 0).view(B, M, block) & ~live).any(2)
    sure = torch.where(early, 0, (low + 1) // block)
    head = (home + 2 - sure).clamp(0, width)
    head = torch.maximum(head, first)
    of_shape = upto.view(C, H, width + 1)[member]  # [B, M, H, width + 1]
    first, last, head = (
        of_shape.gather(3, t[:, :, None, None].expand(-1, -1, H, -1)) for t in (first, last, head)
    )
    base = (member[:, :, None] * H + torch.arange(H, device=place.device)) * width
    count = torch.where(whole[:, :, None], (last - first)[..., 0], 0)
    shift = home[:, :, None].expand_as(base)
    head = torch.minimum((head - first)[..., 0], count)
    row = torch.stack([base + first[..., 0], count, head, count, shift], -1).transpose(1, 2)

    G = min(M, breaks.gaps)
    if G and B * H * G * blocks > ROOM:
        G = int(jump.any(2).sum(1).amax())
    if G:
        row, index = _with_gaps(row, index, before, place, jump, sure, G, min(breaks.pieces, block), block)
    lists = BlockRuns(row.contiguous(), index, block_kinds(k_row, block), blocks)
    return KeySpan(k_row, q_place, k_place, 0, FAR, lists)


def _steps(before: Tensor, shapes: Tensor, block: int) -> Tensor:
    """[C, H, T]: whether a block of shape c touches the key block u - 1 before the one it begins in, at u."""
    _, H, past_last = before.shape
    N = past_last - 1
    sequence, offset = shapes // ((block + 1) * block), shapes // (block + 1) % block
    length = shapes % (block + 1)
    t = torch.arange(-1, N // block + 1, device=before.device)
    # Place offset + l of the block, l < length, meets key block -t on the diagonals of a run of distances.
    least = (t * block + offset[:, None] - block + 1).clamp(0, N)
    past = (t * block + (offset + length)[:, None]).clamp(0, N)
    lead = (sequence[:, None] * H + torch.arange(H, device=before.device))[..., None] * (N + 1)
    flat = before.flatten()
    return flat[lead + past[:, None]] > flat[lead + least[:, None]]


def _with_gaps(
    row: Tensor,
    index: Tensor,
    before: Tensor,
    place: Tensor,
    jump: Tensor,
    sure: Tensor,
    G: int,
    pieces: int,
    block: int,
) -> tuple[Tensor, Tensor]:
    """`row` [B, H, M, 5] and `index` with the lists of the query blocks whose places jump, at most G of a sequence."""
    B, H, past_last = before.shape
    N, M = past_last - 1, place.shape[1]
    blocks = N // block
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
    for piece in range(pieces):
        mine = (run == piece) & (own >= 0)
        least = torch.where(mine, own, FAR).amin(2)[..., None]
        most = torch.where(mine, own, -1).amax(2)[..., None]
        some = most >= 0
        low = (least - begin - block + 1).clamp(0, N)[:, None].expand(-1, H, -1, -1)
        high = (most + 1 - begin).clamp(0, N)[:, None].expand(-1, H, -1, -1)
        found = _at(before, high) > _at(before, low)
        touched |= found & some[:, None] & (begin <= most)[:, None]
    listed, upto = packed(touched, torch.arange(blocks, device=place.device))
    base = index.numel() + torch.arange(B * H * G, device=place.device).view(B, H, G) * blocks
    tail = upto.gather(3, sure.gather(1, chosen).clamp(max=blocks)[:, None, :, None].expand(-1, H, -1, -1))
    none = torch.zeros_like(base)
    lists = torch.stack([base, upto[..., -1], none, tail[..., 0], none], -1)
    # The last query block takes what is no block.
    wide = torch.nn.functional.pad(row, (0, 0, 0, 1))
    wide = wide.scatter(2, number[:, None, :, None].expand(B, H, G, 5), lists)
    return wide[:, :, :M], torch.cat([index, listed])


def _at(before: Tensor, where: Tensor) -> Tensor:
    """The entries `where` [B, H, G, blocks] of before [B, H, N + 1]."""
    return before.gather(2, where.flatten(2)).view(where.shape)
