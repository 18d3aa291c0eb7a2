"""What the last queries attend to, reduced tile by tile (`index.row_totals`, `index.line_sums`): weights are never stored.

One pass over the keys finds the log-sum-exp of each query, a second one makes the weights again and sums them. Each sum is
made by one program in one order, so that a prompt has one answer.
"""

# mypy: ignore-errors

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmaccel.backends.ops import operator as operators
from mmaccel.backends.triton.launch_args import lines

SPLITS = 64
"""Most pieces into which the keys are cut, in the first pass."""

LEAST_PIECE = 1024
"""Keys of a piece, at least."""

LINES = 64
"""Columns and diagonals of a program; gathers of longer rows spill registers."""

BEYOND = tl.constexpr(2**31 - 1)
"""No place is as far."""


@triton.jit
def load_queries(query, b, h, strides, L, D, BLOCK_L: tl.constexpr, BLOCK_D: tl.constexpr):
    """[BLOCK_L, BLOCK_D]: the queries of one head."""
    r, d = tl.arange(0, BLOCK_L), tl.arange(0, BLOCK_D)
    at = query + b.to(tl.int64) * strides[0] + h.to(tl.int64) * strides[1]
    at += (r.to(tl.int64) * strides[2])[:, None] + (d * strides[3])[None, :]
    return tl.load(at, mask=(r < L)[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def tile_scores(
    q, key, row, place, there, b, g, strides, n, D,
    GATHERED: tl.constexpr, PRECISION: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """[BLOCK_L, BLOCK_N]: products of the queries q and the keys at the places `place`, of which `there` are there."""
    d = tl.arange(0, BLOCK_D)
    source = place.to(tl.int64)
    if GATHERED:
        source = tl.load(row + b.to(tl.int64) * n + place, mask=there, other=0).to(tl.int64)
    at = key + b.to(tl.int64) * strides[0] + g.to(tl.int64) * strides[1]
    at += (source * strides[2])[None, :] + (d * strides[3])[:, None]
    k = tl.load(at, mask=there[None, :] & (d < D)[:, None], other=0.0)
    return tl.dot(q, k, input_precision=PRECISION)


@triton.jit
def tile_weights(score, total, seen, scale):
    """[BLOCK_L, BLOCK_N]: softmax weights where `seen`, of scores and the log-sum-exps `total` [BLOCK_L] to the base 2."""
    seen = seen & (total > float("-inf"))[:, None]
    return tl.where(seen, tl.math.exp2(score * scale - total[:, None]), 0.0)


@triton.jit
def load_totals(total, b, h, H, L, BLOCK_L: tl.constexpr):
    """[BLOCK_L]: the log-sum-exps of one head, to the base 2."""
    r = tl.arange(0, BLOCK_L)
    found = tl.load(total + (b * H + h) * L + r, mask=r < L, other=float("-inf"))
    return found * 1.4426950408889634


@triton.jit(do_not_specialize=["n", "piece"])
def totals_kernel(
    query, key, row, at, out, query_strides, key_strides, n, piece, H, L, scale,
    GROUP: tl.constexpr, D: tl.constexpr, GATHERED: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_L: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """out [splits, B, H, L]: the log-sum-exps, to the base 2, over pieces of the keys; -inf of nothing."""
    b, h = tl.program_id(0) // H, tl.program_id(0) % H
    r = tl.arange(0, BLOCK_L)
    q = load_queries(query, b, h, query_strides, L, D, BLOCK_L, BLOCK_D)
    place_of = tl.load(at + b * L + r, mask=r < L, other=-1).to(tl.int32)
    begin = tl.program_id(1) * piece
    end = tl.minimum(tl.minimum(begin + piece, n), tl.max(place_of, 0) + 1)
    peak = tl.full([BLOCK_L], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_L], tl.float32)
    # What every query sees needs no test.
    least = tl.min(tl.where(r < L, place_of, end), 0)
    whole = begin + tl.maximum(tl.minimum(end, least + 1) - begin, 0) // BLOCK_N * BLOCK_N
    for first in range(begin, whole, BLOCK_N):
        place = first + tl.arange(0, BLOCK_N)
        score = tile_scores(
            q, key, row, place, place < n, b, h // GROUP, key_strides, n, D, GATHERED, PRECISION, BLOCK_D
        )
        top = tl.maximum(peak, tl.max(score, 1) * scale)
        part = tl.sum(tl.math.exp2(score * scale - top[:, None]), 1)
        total = total * tl.math.exp2(peak - top) + part
        peak = top
    for first in range(whole, end, BLOCK_N):
        place = first + tl.arange(0, BLOCK_N)
        score = tile_scores(
            q, key, row, place, place < end, b, h // GROUP, key_strides, n, D, GATHERED, PRECISION, BLOCK_D
        )
        seen = (place[None, :] <= place_of[:, None]) & (place < end)[None, :]
        score = tl.where(seen, score * scale, float("-inf"))
        top = tl.maximum(peak, tl.max(score, 1))
        floor = tl.where(top == float("-inf"), 0.0, top)
        total = total * tl.math.exp2(peak - floor) + tl.sum(tl.math.exp2(score - floor[:, None]), 1)
        peak = top
    found = tl.where(total > 0, peak + tl.log2(tl.where(total > 0, total, 1.0)), float("-inf"))
    tl.store(out + (tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)) * L + r, found, mask=r < L)


@triton.jit(do_not_specialize=["splits"])
def merge_kernel(part, out, rows, splits, BLOCK: tl.constexpr, SPLITS: tl.constexpr):
    """out [rows]: the log-sum-exps of those of the pieces, part [splits, rows] to the base 2."""
    at, s = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, SPLITS)
    some = (s < splits)[:, None] & (at < rows)[None, :]
    found = tl.load(part + s[:, None] * rows + at[None, :], mask=some, other=float("-inf"))
    top = tl.max(found, 0)
    floor = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.math.exp2(found - floor[None, :]), 0)
    lse = tl.where(total > 0, floor + tl.log2(tl.where(total > 0, total, 1.0)), float("-inf"))
    tl.store(out + at, lse * 0.6931471805599453, mask=at < rows)


@triton.jit(do_not_specialize=["n"])
def lines_kernel(
    query, key, row, at, total, columns, diagonals, query_strides, key_strides, n, H, L, scale,
    GROUP: tl.constexpr, MEMBERS: tl.constexpr, D: tl.constexpr, GATHERED: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The sums of BLOCK_N columns and of as many diagonals, the means over MEMBERS heads; both [B, H / MEMBERS, n].

    Queries whose places lie in one run of BLOCK_N meet these diagonals in twice as many keys; there is one round for each
    run. In a tile of weights the diagonals are rows moved by the place of their query, which a gather undoes.
    """
    b, one = tl.program_id(0) // (H // MEMBERS), tl.program_id(0) % (H // MEMBERS)
    r, c = tl.arange(0, BLOCK_L), tl.arange(0, BLOCK_N)
    place_of = tl.load(at + b * L + r, mask=r < L, other=-1).to(tl.int32)
    last = tl.max(place_of, 0)
    line = tl.program_id(1) * BLOCK_N + c
    column = tl.zeros([BLOCK_N], tl.float32)
    diagonal = tl.zeros([BLOCK_N], tl.float32)
    if tl.program_id(1) * BLOCK_N <= last:
        for member in range(MEMBERS):
            h = one * MEMBERS + member
            q = load_queries(query, b, h, query_strides, L, D, BLOCK_L, BLOCK_D)
            lse = load_totals(total, b, h, H, L, BLOCK_L)
            there = line < n
            score = tile_scores(
                q, key, row, line, there, b, h // GROUP, key_strides, n, D, GATHERED, PRECISION, BLOCK_D
            )
            seen = (line[None, :] <= place_of[:, None]) & there[None, :]
            column += tl.sum(tile_weights(score, lse, seen, scale), 0)
            base = tl.min(tl.where(place_of >= 0, place_of, BEYOND), 0)
            while base < BEYOND:
                mine = (place_of >= base) & (place_of - base < BLOCK_N)
                for half in tl.static_range(2):
                    # The key of diagonal line[c] of a query at `base` is at base - line[c].
                    first = base - tl.program_id(1) * BLOCK_N + (half - 1) * BLOCK_N + 1
                    place = first + c
                    there = (place >= 0) & (place < n)
                    score = tile_scores(
                        q,
                        key,
                        row,
                        place,
                        there,
                        b,
                        h // GROUP,
                        key_strides,
                        n,
                        D,
                        GATHERED,
                        PRECISION,
                        BLOCK_D,
                    )
                    seen = mine[:, None] & there[None, :] & (place[None, :] <= place_of[:, None])
                    weight = tile_weights(score, lse, seen, scale)
                    source = place_of[:, None] - line[None, :] - first
                    inside = mine[:, None] & (source >= 0) & (source < BLOCK_N)
                    moved = tl.gather(weight, tl.where(inside, source, 0), 1)
                    diagonal += tl.sum(tl.where(inside, moved, 0.0), 0)
                base = tl.min(tl.where(place_of - base >= BLOCK_N, place_of, BEYOND), 0)
    out = tl.program_id(0).to(tl.int64) * n + line
    tl.store(columns + out, column / MEMBERS, mask=line < n)
    tl.store(diagonals + out, diagonal / MEMBERS, mask=line < n)


def strides(t: Tensor) -> tuple[int, int, int, int]:
    """Of the sequence, the head, the row and the number."""
    return (*lines(t), t.stride(3))


def shape_of(query: Tensor, key: Tensor, row: Tensor | None) -> dict[str, Any]:
    """What the kernels are compiled for."""
    L, D = query.shape[2:]
    wide = query.dtype == torch.float32
    return dict(
        GROUP=query.shape[1] // key.shape[1],
        D=D,
        GATHERED=row is not None,
        PRECISION="ieee" if wide else "tf32",
        BLOCK_L=max(16, triton.next_power_of_2(L)),
        BLOCK_N=64 if wide or L > 64 or D > 128 else 128,
        BLOCK_D=max(16, triton.next_power_of_2(D)),
        num_warps=4,
    )


def row_totals(query: Tensor, key: Tensor, row: Tensor | None, at: Tensor, width: int) -> Tensor:
    B, H, L, D = query.shape
    shape, at = shape_of(query, key, row), at.contiguous()
    piece = max(LEAST_PIECE, -(-width // SPLITS))
    piece += -piece % shape["BLOCK_N"]
    splits = max(1, -(-width // piece))
    part = query.new_empty(splits, B * H * L, dtype=torch.float32)
    out = query.new_empty(B, H, L, dtype=torch.float32)
    scale = D**-0.5 * math.log2(math.e)
    tile, item = shape["BLOCK_D"] * shape["BLOCK_N"], query.element_size()
    stages = operators.resources(query.device).stages(
        3, tile * item, shape["BLOCK_L"] * shape["BLOCK_D"] * item
    )
    totals_kernel[(B * H, splits)](
        query, key, at if row is None else row, at, part, strides(query), strides(key),
        width, piece, H, L, scale, **shape, num_stages=stages,
    )  # fmt: skip
    merge_kernel[(triton.cdiv(B * H * L, 64),)](part, out, B * H * L, splits, BLOCK=64, SPLITS=SPLITS)
    return out


def line_sums(
    query: Tensor,
    key: Tensor,
    row: Tensor | None,
    at: Tensor,
    total: Tensor | None,
    width: int,
    pooled: bool,
) -> tuple[Tensor, Tensor]:
    B, H, L, D = query.shape
    shape, at = shape_of(query, key, row), at.contiguous()
    if total is None:
        total = row_totals(query, key, row, at, width)
    shape["BLOCK_N"] = LINES
    members = shape["GROUP"] if pooled else 1
    columns = query.new_empty(B, H // members, width, dtype=torch.float32)
    diagonals = torch.empty_like(columns)
    lines_kernel[(B * H // members, triton.cdiv(width, shape["BLOCK_N"]))](
        query, key, at if row is None else row, at, total, columns, diagonals, strides(query), strides(key),
        width, H, L, D**-0.5 * math.log2(math.e), MEMBERS=members, **shape, num_stages=1,
    )  # fmt: skip
    return columns, diagonals
