"""Queries and keys in the order (class, position), turned by each head's phase, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor


def turned_classes(
    queries: Tensor,
    q_begin: Tensor,
    keys: Tensor,
    k_begin: Tensor,
    stride: Tensor,
    line: Tensor,
    shift: Tensor,
    dense: Tensor,
    room: int,
    wide: bool,
    vertical: bool,
    rows: int,
) -> list[Tensor]:
    """See `mmaccel.backends.index.turned_classes`."""
    (B, P), N, H = queries.shape[1:], keys.shape[2], line.shape[1]
    kind = torch.int64 if wide else torch.int32
    base, s = N + 1, stride[:, None, None]
    code = (keys[2].long() * base + keys[1]).contiguous()
    starts = k_begin.long()[:, None].expand(B, H, -1)

    def ranks(number: Tensor, at: Tensor) -> Tensor:
        """How many keys of class `number` are not after `at`, minus one."""
        wanted = (number * base + at).flatten(1)
        end = torch.searchsorted(code, wanted, right=True).view(at.shape)
        return end - starts.gather(2, number.expand_as(at)) - 1

    i = torch.arange(P, device=keys.device)
    served = q_begin.long().gather(1, stride[:, None])[..., None]
    turn = q_begin.long()[:, None].expand(B, H, -1).gather(2, shift)
    source = torch.where(i < served, (i + turn) % served.clamp(min=1), i)
    row, at, own = (t[:, None].expand(B, H, P).gather(2, source) for t in queries)
    row = row.masked_fill(i >= served, -1)
    pair = (own.long() - shift) % s
    if rows:
        row = row.masked_fill(own == dense, -1)
    there = row >= 0
    slash_at = torch.where(there, pair * (2 * room) + ranks(pair, at), -1).to(kind)

    k_row, _, number = (t[:, None].expand(B, H, N) for t in keys)
    mine = number == line
    # An operator gives nothing back that it was given, which a view of one head would be.
    slash_row = (
        k_row.masked_fill(mine, -1) if vertical else k_row.clone(memory_format=torch.contiguous_format)
    )
    rank = torch.arange(N, device=keys.device) - starts.gather(
        2, number.long().clamp(max=starts.shape[2] - 1)
    )
    place = number.long() * (2 * room) + rank
    out = [row, slash_at, slash_row, torch.where(slash_row >= 0, place, 0).to(kind)]
    if vertical:
        line_row = k_row.masked_fill(~mine, -1)
        line_place = torch.where(line_row >= 0, rank, 0).to(kind)
        out += [torch.where(there, ranks(line, at), -1).to(kind), line_row, line_place]
    if rows:
        begin, end = (q_begin.long()[:, None].expand(B, H, -1).gather(2, dense + more) for more in (0, 1))
        source = begin + torch.arange(rows, device=keys.device)
        there, source = source < end, source.clamp(max=P - 1)
        out += [
            torch.where(there, t[:, None].expand(B, H, P).gather(2, source), -1).contiguous()
            for t in queries[:2]
        ]
    return out
