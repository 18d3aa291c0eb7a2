"""The strongest columns and diagonals of each head, and the key blocks that they touch."""

from __future__ import annotations

import torch
from torch import Tensor

from mmaccel.backends.ops.block_attend import ABSENT, FULL
from mmaccel.backends.ops.block_lists import packed
from mmaccel.backends.ops.operator import operator


def _strongest_shapes(columns: Tensor, vertical: int, slash: int) -> tuple[Tensor, ...]:
    B, H, n = columns.shape
    return tuple(columns.new_empty(B, H, min(k, n), dtype=torch.int64) for k in (vertical, slash))


@operator("prefill.strongest.strongest", fake=_strongest_shapes)
def strongest(
    columns: Tensor, diagonals: Tensor, last: Tensor, vertical: int, slash: int
) -> tuple[Tensor, Tensor]:
    """[B, H, K] long, ascending: of columns and of diagonals those of the K greatest scores [B, H, n], none of them
    negative.

    K is the lesser of n and `vertical` or `slash`. last [B]: the last line there is, -1 for none; past the last that is
    chosen comes n. Diagonal 0 is chosen whatever its score. Of equal scores any may be.
    """
    n = columns.shape[2]
    place, last = torch.arange(n, device=columns.device), last[:, None, None]
    diagonals = diagonals.masked_fill((place == 0) & (last >= 0), torch.inf)

    def chosen(score: Tensor, count: int) -> Tensor:
        top = score.masked_fill(place > last, -1.0).topk(min(count, n), 2)
        return torch.where(top.values >= 0, top.indices, n).sort(2).values

    return chosen(columns, vertical), chosen(diagonals, slash)


def _line_shapes(row: Tensor, columns: Tensor, block: int) -> tuple[Tensor, ...]:
    (B, H, K), N = columns.shape, row.shape[1]
    left = row.new_empty(B, H, N)
    k_row = row.new_empty(B, H, max(K + -K % block, block))
    kind = left.new_empty(B, H, N // block, dtype=torch.int8)
    return left, kind, left.new_empty(B, H, N, dtype=torch.bool), k_row, torch.empty_like(k_row)


@operator("prefill.slashes.line_keys", fake=_line_shapes)
def line_keys(
    row: Tensor, columns: Tensor, diagonals: Tensor, width: int, block: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Columns [B, H, K] and diagonals [B, H, S] long among the keys `row` [B, N], which are those of the first `width`
    places.

    left [B, H, N] int32: the rows of the keys that are no column, -1 for the columns; kind [B, H, N / block] int8: FULL
    where all keys of a block are there, ABSENT elsewhere. kept [B, H, N] bool: the diagonals. k_row, k_place [B, H,
    whole blocks, at least one] int32: the rows and places of the columns, -1 and 0 for none.
    """
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


def _run_shapes(
    kept: Tensor, shape: Tensor, member: Tensor, broken: Tensor, block: int
) -> tuple[Tensor, Tensor]:
    B, H, N = kept.shape
    row = kept.new_empty(B, H, member.shape[1], 5, dtype=torch.int64)
    room = shape.shape[1] * H * (N // block + 2) + broken.shape[1] * B * H * (N // block)
    return row, kept.new_empty(room, dtype=torch.int32)


@operator("prefill.slashes.slash_runs", fake=_run_shapes)
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
    """row [B, H, M, 5] long and index int32 of `BlockLists`: the key blocks that diagonals touch.

    kept [B, H, N] bool: the diagonals; the rest as in `mmaccel.policies.sparse.slashes.Shapes`.
    """
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
