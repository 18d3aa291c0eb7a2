"""The key blocks that diagonals touch, in a launch or two; see `mmaccel.backends.ops.lines`."""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmaccel.backends.ops import block_attend

FULL, ABSENT = tl.constexpr(block_attend.FULL), tl.constexpr(block_attend.ABSENT)

STEPS = 1024
"""Steps to earlier key blocks that a program looks at together."""

ROWS = 256
"""Blocks of queries, or of keys, that a program serves."""


MARKED = 1024
"""Columns, or diagonals, of a head that a program marks."""


@triton.jit(
    do_not_specialize=[
        "N",
        "H",
        "K",
        "S",
        "P",
        "width",
        "row_b",
        "column_b",
        "column_h",
        "diagonal_b",
        "diagonal_h",
    ]
)
def mark_kernel(
    row,
    columns,
    diagonals,
    owned,
    kept,
    k_row,
    k_place,
    N,
    H,
    K,
    S,
    P,
    width,
    row_b,
    column_b,
    column_h,
    diagonal_b,
    diagonal_h,
    MARKED: tl.constexpr,
):
    """Marks the columns among `owned`, the diagonals among `kept`, and gathers the rows and places of the columns."""
    head = tl.program_id(1).to(tl.int64)
    b, h = head // H, head % H
    i = tl.program_id(0) * MARKED + tl.arange(0, MARKED)
    column = tl.load(columns + b * column_b + h * column_h + i, mask=i < K, other=N)
    there = column < width
    tl.store(owned + head * N + column, tl.full([MARKED], 1, tl.uint8), mask=there)
    tl.store(k_row + head * P + i, tl.load(row + b * row_b + column, mask=there, other=-1), mask=i < P)
    tl.store(k_place + head * P + i, tl.where(there, column, 0).to(tl.int32), mask=i < P)
    diagonal = tl.load(diagonals + b * diagonal_b + h * diagonal_h + i, mask=i < S, other=N)
    tl.store(kept + head * N + diagonal, tl.full([MARKED], 1, tl.uint8), mask=diagonal < width)


@triton.jit(do_not_specialize=["N", "H", "row_b"])
def without_kernel(row, owned, left, kind, N, H, row_b, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """The rows of keys that are not owned, and the kinds of their blocks."""
    head = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = at < N
    found = tl.load(row + (head // H) * row_b + at, mask=inside, other=-1)
    gone = tl.load(owned + head * N + at, mask=inside, other=0)
    found = tl.where(gone != 0, -1, found)
    tl.store(left + head * N + at, found, mask=inside)
    whole = tl.min((found >= 0).to(tl.int32), 1) > 0
    told = tl.where(whole, FULL, ABSENT).to(tl.int8)
    tl.store(kind + head * (N // BLOCK) + block, told, mask=block < N // BLOCK)


@triton.jit
def _kept_before(kept, head, N, at):
    """How many diagonals of a head, and of the heads before it, are kept before the place `at`, moved into 0 .. N.

    kept [B * H * N]: how many are up to each.
    """
    at = head * N + tl.minimum(tl.maximum(at, 0), N)
    return tl.load(kept + at - 1, mask=at > 0, other=0)


@triton.jit(do_not_specialize=["N", "C", "H", "width"])
def steps_kernel(kept, shape, index, upto, N, C, H, width, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    """Of one shape and head the steps at which a kept diagonal lies, side by side, and how many are before each.

    `kept` as in `_kept_before`.
    """
    c, h = tl.program_id(0), tl.program_id(1)
    sequence, offset, length = tl.load(shape + c), tl.load(shape + C + c), tl.load(shape + 2 * C + c)
    head = sequence.to(tl.int64) * H + h
    to = (c * H + h).to(tl.int64)
    count = tl.zeros([], tl.int32)
    for first in range(0, width, STEPS):
        u = first + tl.arange(0, STEPS)
        # Place offset + l of the block, l < length, meets the key block 1 - u after its own on a run of diagonals.
        least, past = (u - 2) * BLOCK + offset + 1, (u - 1) * BLOCK + offset + length
        found = _kept_before(kept, head, N, past) > _kept_before(kept, head, N, least)
        touched = (found & (u < width)).to(tl.int32)
        before = count + tl.cumsum(touched, 0) - touched
        tl.store(upto + to * (width + 1) + u, before, mask=u < width)
        tl.store(index + to * width + before, 1 - u, mask=(touched > 0) & (u < width))
        count += tl.sum(touched, 0)
    tl.store(upto + to * (width + 1) + width, count)


@triton.jit(do_not_specialize=["H", "M", "BM", "width"])
def rows_kernel(upto, member, home, reach, out, H, M, BM, width, ROWS: tl.constexpr):
    """out [B, H, M, 5]: the list of each block of queries, a part of that of its shape."""
    b, h = tl.program_id(1) // H, tl.program_id(1) % H
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = m < M
    at = b * M + m
    shape = tl.load(member + at, mask=inside, other=0).to(tl.int64) * H + h
    ends = upto + shape * (width + 1)
    first = tl.load(ends + tl.load(reach + at, mask=inside, other=0))
    count = tl.load(ends + tl.load(reach + BM + at, mask=inside, other=0)) - first
    head = tl.load(ends + tl.load(reach + 2 * BM + at, mask=inside, other=0)) - first
    to = out + (tl.program_id(1).to(tl.int64) * M + m) * 5
    tl.store(to, shape * width + first, mask=inside)
    tl.store(to + 1, count.to(tl.int64), mask=inside)
    tl.store(to + 2, tl.minimum(tl.maximum(head, 0), count).to(tl.int64), mask=inside)
    tl.store(to + 3, count.to(tl.int64), mask=inside)
    tl.store(to + 4, tl.load(home + at, mask=inside, other=0).to(tl.int64), mask=inside)


@triton.jit(do_not_specialize=["N", "H", "M", "G", "R", "base", "blocks"])
def gaps_kernel(
    kept, broken, runs, sure, index, out, N, H, M, G, R, base, blocks, BLOCK: tl.constexpr, TILE: tl.constexpr
):
    """The list of one block of queries whose places jump, in place of that of a shape; its entries begin at its own.

    `kept` as in `_kept_before`.
    """
    g, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b = head // H
    m = tl.load(broken + b * G + g)
    if m >= M:
        return
    first = base + (head * G + g) * blocks
    last = tl.load(sure + b * G + g)
    count, tail = tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    for begin in range(0, blocks, TILE):
        block = begin + tl.arange(0, TILE)
        touched = tl.zeros([TILE], tl.int32)
        for run in range(R):
            told = runs + ((b * G + g) * R + run) * 2
            least, most = tl.load(told), tl.load(told + 1)
            near = (block < blocks) & (block * BLOCK <= most)
            low = _kept_before(kept, head, N, least - block * BLOCK - BLOCK + 1)
            high = _kept_before(kept, head, N, most + 1 - block * BLOCK)
            touched |= (near & (high > low)).to(tl.int32)
        slot = count + tl.cumsum(touched, 0) - touched
        tl.store(index + first + slot, block, mask=touched > 0)
        count += tl.sum(touched, 0)
        tail += tl.sum(touched * (block < last), 0)
    to = out + (head * M + m) * 5
    tl.store(to, first)
    tl.store(to + 1, count.to(tl.int64))
    tl.store(to + 2, tl.zeros([], tl.int64))
    tl.store(to + 3, tail.to(tl.int64))
    tl.store(to + 4, tl.zeros([], tl.int64))


def line_keys(
    row: Tensor, columns: Tensor, diagonals: Tensor, width: int, block: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See `mmaccel.backends.ops.lines.line_keys`."""
    (B, H, K), S, N = columns.shape, diagonals.shape[2], row.shape[1]
    P = max(K + -K % block, block)
    columns, diagonals = (t if t.stride(2) == 1 else t.contiguous() for t in (columns, diagonals))
    owned, kept = torch.zeros(2, B, H, N, dtype=torch.uint8, device=row.device).unbind()
    left, k_row, k_place = (row.new_empty(B, H, n) for n in (N, P, P))
    kind = torch.empty(B, H, N // block, dtype=torch.int8, device=row.device)
    blocks = max(1, 2048 // block)
    with torch.cuda.device_of(row):
        mark_kernel[(triton.cdiv(max(P, S), MARKED), B * H)](
            row, columns, diagonals, owned, kept, k_row, k_place, N, H, K, S, P, width,
            row.stride(0), *columns.stride()[:2], *diagonals.stride()[:2], MARKED=MARKED,
        )  # fmt: skip
        without_kernel[(triton.cdiv(N // block, blocks), B * H)](
            row, owned, left, kind, N, H, row.stride(0), BLOCK=block, ROWS=blocks
        )
    return left, kind, kept.view(torch.bool), k_row, k_place


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
    """See `mmaccel.backends.ops.lines.slash_runs`."""
    B, H, N = kept.shape
    C, M, G, blocks = shape.shape[1], member.shape[1], broken.shape[1], N // block
    width = blocks + 2
    index = torch.empty(C * H * width + B * H * G * blocks, dtype=torch.int32, device=kept.device)
    upto = torch.empty(C, H, width + 1, dtype=torch.int32, device=kept.device)
    row = torch.empty(B, H, M, 5, dtype=torch.int64, device=kept.device)
    # One sum over all heads: of each by itself it would be made by one program a head.
    before = kept.reshape(-1).cumsum(0, dtype=torch.int32)
    with torch.cuda.device_of(kept):
        steps_kernel[(C, H)](
            before, shape, index, upto, N, C, H, width, BLOCK=block, STEPS=STEPS, num_warps=4
        )
        rows_kernel[(triton.cdiv(M, ROWS), B * H)](
            upto, member, home, reach, row, H, M, B * M, width, ROWS=ROWS
        )
        if G:
            gaps_kernel[(G, B * H)](
                before, broken, runs, sure, index, row, N, H, M, G, runs.shape[2], C * H * width, blocks,
                BLOCK=block, TILE=ROWS, num_warps=1,
            )  # fmt: skip
    return row, index
