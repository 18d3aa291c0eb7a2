"""Parts of adaptive indices in plain PyTorch: the strongest lines, and the key blocks that diagonals touch."""

from __future__ import annotations

import torch
from torch import Tensor

from mmaccel.backends.ops import ABSENT, FULL, packed


def strongest(
    columns: Tensor, diagonals: Tensor, last: Tensor, vertical: int, slash: int
) -> tuple[Tensor, Tensor]:
    """See `mmaccel.backends.index.strongest`."""
    n = columns.shape[2]
    place, last = torch.arange(n, device=columns.device), last[:, None, None]
    diagonals = diagonals.masked_fill((place == 0) & (last >= 0), torch.inf)

    def chosen(score: Tensor, count: int) -> Tensor:
        top = score.masked_fill(place > last, -1.0).topk(min(count, n), 2)
        return torch.where(top.values >= 0, top.indices, n).sort(2).values

    return chosen(columns, vertical), chosen(diagonals, slash)


def line_keys(
    row: Tensor, columns: Tensor, diagonals: Tensor, width: int, block: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See `mmaccel.backends.index.line_keys`."""
    (B, H, K), N = columns.shape, row.shape[1]

    def marked(lines: Tensor) -> Tensor:
        # What is no line falls past the last.
        none = torch.zeros(B, H, N + 1, dtype=torch.bool, device=row.device)
        return none.scatter_(2, torch.where(lines < width, lines, N), True)[..., :-1]

    left = row[:, None].masked_fill(marked(columns), -1)
    whole = (left >= 0).view(B, H, -1, block).all(-1)
    kind = torch.where(whole, FULL, ABSENT).to(torch.int8)
    there, more = columns < width, (0, max(K + -K % block, block) - K)
    own = row[:, None].expand(B, H, N).gather(2, columns.clamp(max=N - 1))
    k_row = torch.nn.functional.pad(torch.where(there, own, -1), more, value=-1)
    k_place = torch.nn.functional.pad(torch.where(there, columns, 0), more).to(torch.int32)
    return left, kind, marked(diagonals).contiguous(), k_row, k_place


def slash_runs(
    kept: Tensor,
    shape: Tensor,
    member: Tensor,
    home: Tensor,
    reach: Tensor,
    broken: Tensor,
    runs: Tensor,
    sure: Tensor,
    block: int,
) -> tuple[Tensor, Tensor]:
    """See `mmaccel.backends.index.slash_runs`."""
    _, H, N = kept.shape
    width = N // block + 2
    sequence, offset, length = shape.long().unbind(0)
    t = torch.arange(-1, width - 1, device=kept.device)
    # Place offset + l of the block, l < length, meets key block -t on the diagonals of a run of distances.
    least = (t * block + offset[:, None] - block + 1).clamp(0, N)
    past = (t * block + (offset + length)[:, None]).clamp(0, N)
    before = torch.nn.functional.pad(kept.cumsum(2, dtype=torch.int32), (1, 0))
    lead = (sequence[:, None] * H + torch.arange(H, device=kept.device))[..., None] * (N + 1)
    flat = before.flatten()
    steps = flat[lead + past[:, None]] > flat[lead + least[:, None]]
    index, upto = packed(steps, -t)
    of_shape = upto[member.long()]  # [B, M, H, width + 1]
    first, last, head = (
        of_shape.gather(3, t.long()[:, :, None, None].expand(-1, -1, H, -1))[..., 0] for t in reach
    )
    base = (member.long()[:, :, None] * H + torch.arange(H, device=kept.device)) * width
    count = last - first
    head = torch.minimum((head - first).clamp(min=0), count)
    shift = home.long()[:, :, None].expand_as(base)
    row = torch.stack([base + first, count, head, count, shift], -1).transpose(1, 2).contiguous()
    if not broken.shape[1]:
        return row, index
    own, listed = _jumping(before, broken, runs, sure, block, index.numel())
    # The last block of queries takes what is no block.
    wide = torch.nn.functional.pad(row, (0, 0, 0, 1))
    wide.scatter_(2, broken.long()[:, None, :, None].expand_as(own), own)
    return wide[:, :, :-1].contiguous(), torch.cat([index, listed])


def _jumping(
    before: Tensor, broken: Tensor, runs: Tensor, sure: Tensor, block: int, base: int
) -> tuple[Tensor, Tensor]:
    """Lists [B, H, G, 5] of the blocks whose places jump, and their entries, which begin at `base`.

    before [B, H, N + 1]: how many diagonals are kept before each.
    """
    (B, H, N), G = before.shape, broken.shape[1]
    N -= 1
    blocks = N // block
    begin = block * torch.arange(blocks, device=before.device)
    touched = torch.zeros(B, H, G, blocks, dtype=torch.bool, device=before.device)
    for least, most in (run.long()[..., None].unbind(2) for run in runs.unbind(2)):
        low = (least - begin - block + 1).clamp(0, N)[:, None].expand(-1, H, -1, -1).flatten(2)
        high = (most + 1 - begin).clamp(0, N)[:, None].expand(-1, H, -1, -1).flatten(2)
        found = (before.gather(2, high) > before.gather(2, low)).view_as(touched)
        touched |= found & ((most >= 0) & (begin <= most))[:, None]
    index, upto = packed(touched, torch.arange(blocks, device=before.device))
    first = base + torch.arange(B * H * G, device=before.device).view(B, H, G) * blocks
    sure = sure.long().clamp(max=blocks)[:, None, :, None].expand(-1, H, -1, -1)
    none = torch.zeros_like(first)
    return torch.stack([first, upto[..., -1], none, upto.gather(3, sure)[..., 0], none], -1), index
