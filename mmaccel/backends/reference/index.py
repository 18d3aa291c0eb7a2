"""Parts of adaptive indices in plain PyTorch: the strongest lines, and the key blocks that diagonals touch."""

from __future__ import annotations

import torch
from torch import Tensor

from mmaccel.backends.ops import ABSENT, FULL


def strongest(score: Tensor, last: Tensor, count: int, first: bool) -> Tensor:
    """See `mmaccel.backends.index.strongest`."""
    n = score.shape[2]
    place, last = torch.arange(n, device=score.device), last[:, None, None]
    score = score.masked_fill(place > last, -1.0)
    if first:
        score = score.masked_fill((place == 0) & (last >= 0), torch.inf)
    top = score.topk(min(count, n), 2)
    return torch.where(top.values >= 0, top.indices, n).sort(2).values


def keys_without(row: Tensor, owned: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """See `mmaccel.backends.index.keys_without`."""
    left = row[:, None].masked_fill(owned, -1)
    whole = (left >= 0).view(*left.shape[:2], -1, block).all(-1)
    return left, torch.where(whole, FULL, ABSENT).to(torch.int8)


def slash_runs(
    kept: Tensor, shape: Tensor, member: Tensor, home: Tensor, reach: Tensor, block: int
) -> tuple[Tensor, Tensor]:
    """See `mmaccel.backends.index.slash_runs`."""
    _, H, N = kept.shape
    width = N // block + 2
    sequence, offset, length = shape.long().unbind(0)
    t = torch.arange(-1, width - 1, device=kept.device)
    # Place offset + l of the block, l < length, meets key block -t on the diagonals of a run of distances.
    least = (t * block + offset[:, None] - block + 1).clamp(0, N)
    past = (t * block + (offset + length)[:, None]).clamp(0, N)
    before = torch.nn.functional.pad(kept.cumsum(2, dtype=torch.int32), (1, 0)).flatten()
    lead = (sequence[:, None] * H + torch.arange(H, device=kept.device))[..., None] * (N + 1)
    steps = before[lead + past[:, None]] > before[lead + least[:, None]]
    upto = torch.nn.functional.pad(steps.long().cumsum(-1), (1, 0))
    slot = torch.where(steps, upto[..., :-1], width)
    index = torch.zeros(*steps.shape[:-1], width + 1, dtype=torch.int32, device=kept.device)
    index.scatter_(-1, slot, (-t).to(torch.int32).expand_as(slot))
    of_shape = upto[member.long()]  # [B, M, H, width + 1]
    first, last, head = (
        of_shape.gather(3, t.long()[:, :, None, None].expand(-1, -1, H, -1))[..., 0] for t in reach
    )
    base = (member.long()[:, :, None] * H + torch.arange(H, device=kept.device)) * width
    count = last - first
    head = torch.minimum((head - first).clamp(min=0), count)
    shift = home.long()[:, :, None].expand_as(base)
    row = torch.stack([base + first, count, head, count, shift], -1).transpose(1, 2).contiguous()
    return row, index[..., :width].flatten()
