"""The key blocks that diagonals touch, for queries in any order of places."""

from __future__ import annotations

import torch
from torch import Tensor

from mmaccel.core.plan import FAR, KeySpan, span_from_entries


def slash_blocks(
    q_row: Tensor, k_row: Tensor, q_place: Tensor, k_place: Tensor, kept: Tensor, block: int
) -> KeySpan:
    """A span in which a query block lists every key block that a diagonal of `kept` [B, H, N] touches in its rows.

    q_row, q_place [B, 1, P], places ascending, -1 where a row sees nothing; k_row [B, H, N], k_place [B, 1, N] the ranks.
    A diagonal d pairs a query of place i with the key of place i - d.

    Queries fall into runs, within one query block, of places that follow each other. What a run touches, told in blocks
    before its own, is the same for all runs of one length that begin at the same place within a key block: of these there
    are as many as modalities interleave, and one in the order of the whole sequence.
    """
    B, H, N = kept.shape
    M, blocks = q_row.shape[2] // block, N // block
    sequence, number, place, length = _runs(q_place[:, 0].long(), block)
    home, offset = place // block, place % block
    shape, member = torch.unique((sequence * block + offset) * (block + 1) + length, return_inverse=True)
    steps = _steps(
        kept, shape // ((block + 1) * block), shape // (block + 1) % block, shape % (block + 1), block
    )
    # Step u of a run is key block home - T + 2 + u; those of one run and head are a range of `listed`.
    T = steps.shape[2]
    listed = steps.flip(2).flatten().nonzero()[:, 0]
    lane = sequence[:, None] * H + torch.arange(H, device=kept.device)
    begin = (member[:, None] * H + torch.arange(H, device=kept.device)) * T
    low = (T - 2 - home).clamp(0, T)[:, None]
    high = (T - 2 - home + blocks).clamp(0, T)[:, None]
    row = (lane * M + number[:, None]).flatten()
    order = row.argsort(stable=True)
    row = row[order]
    first = torch.searchsorted(listed, begin + low).flatten()[order]
    count = torch.searchsorted(listed, begin + high).flatten()[order] - first
    start = (home[:, None] + 2 - T - begin).flatten()[order]
    owner = torch.repeat_interleave(torch.arange(len(row), device=row.device), count)
    inside = torch.arange(len(owner), device=row.device) - (count.cumsum(0) - count)[owner]
    index = start[owner] + listed[first[owner] + inside]
    row = row[owner]
    if len(sequence) > len(
        torch.unique(sequence * M + number)
    ):  # runs that share a query block share key blocks
        entry = torch.unique(row * blocks + index)
        row, index = entry // blocks, entry % blocks
    return span_from_entries(q_row, k_row, q_place, k_place, 0, FAR, row, index, (B, H, M), block, block)


def _runs(place: Tensor, block: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The runs of place [B, P], in order: sequence, query block, first place, number of places."""
    live = place >= 0
    apart = torch.ones_like(live)
    apart[:, 1:] = (place[:, 1:] - place[:, :-1] > 1) | ~live[:, :-1]
    apart[:, ::block] = True
    ends = torch.ones_like(live)
    ends[:, :-1] = apart[:, 1:] | ~live[:, 1:]
    sequence, at = (live & apart).nonzero(as_tuple=True)
    first = place[sequence, at]
    return sequence, at // block, first, place[live & ends] - first + 1


def _steps(kept: Tensor, sequence: Tensor, offset: Tensor, length: Tensor, block: int) -> Tensor:
    """[C, H, T]: whether a run of shape c touches the key block t - 1 before the one it begins in."""
    H, N = kept.shape[1:]
    before = torch.nn.functional.pad(kept.to(torch.int32).cumsum(2, dtype=torch.int32), (1, 0)).flatten()
    t = torch.arange(-1, N // block + 1, device=kept.device)
    # Place offset + l of the run, l < length, meets key block -t on the diagonals of a run of distances.
    least = (t * block + offset[:, None] - block + 1).clamp(0, N)
    past = (t * block + (offset + length)[:, None]).clamp(0, N)
    lead = (sequence[:, None] * H + torch.arange(H, device=kept.device))[..., None] * (N + 1)
    return before[lead + past[:, None]] > before[lead + least[:, None]]
