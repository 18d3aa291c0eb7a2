"""The kernels of `enter_rows` and `turn_rows` (`ops.decode`): queries, keys and values are turned and written where they go.

In `enter_kernel` the program that made them does this: it makes the two halves of a head's numbers that are turned with each
other, so that it needs no other. By itself the turning is a kernel of some 10 KB, which takes as long as 10 MB of weights.
"""

# mypy: ignore-errors

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmaccel.backends.triton.decode.skinny_gemm import (
    normed,
    over_mean,
    parts_of,
    squares_of,
    sums_of,
    tile_of,
)
from mmaccel.backends.triton.launch_args import lines


@triton.jit(do_not_specialize=["rows", "n", "eps"])
def enter_kernel(
    x, weight_q, weight_k, weight_v, bias_q, bias_k, bias_v, squares, turn, columns, query, key, value,
    rows, n, eps, key_lines, value_lines,
    K: tl.constexpr, HEADS: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr, BIAS: tl.constexpr,
    PARTS: tl.constexpr, CHUNK: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """BLOCK_O outputs of one head, half of them in its first half and half in its second, where what they are turned with
    stands; see `ops.decode.enter_rows`."""
    HALF: tl.constexpr = D // 2
    PAIRS: tl.constexpr = BLOCK_O // 2
    BLOCKS: tl.constexpr = (HALF + PAIRS - 1) // PAIRS
    block = tl.program_id(0)
    head, block = block // BLOCKS, block % BLOCKS
    weight, bias, number = weight_q, bias_q, head
    if head >= HEADS + GROUPS:
        weight, bias, number = weight_v, bias_v, head - HEADS - GROUPS
    elif head >= HEADS:
        weight, bias, number = weight_k, bias_k, head - HEADS
    j, r = tl.arange(0, BLOCK_O), tl.arange(0, BLOCK_R)
    pair = block * PAIRS + j % PAIRS
    there, mine = pair < HALF, r < rows
    o = number * D + tl.where(there, pair, 0) + j // PAIRS * HALF
    # What the end needs is on its way meanwhile.
    if BIAS:
        offset = tl.load(bias + o)
    if PARTS:
        first = squares_of(squares, r, mine, 0, PARTS, CHUNK)
    d = block * PAIRS + tl.arange(0, PAIRS)
    inside = mine[None, :] & (d < HALF)[:, None]
    turns = inside & (head < HEADS + GROUPS)
    angle = turn + r[None, :] * D + d[:, None]
    cos_1, cos_2 = tl.load(angle, mask=turns, other=1.0), tl.load(angle + HALF, mask=turns, other=1.0)
    angle += rows * D
    sin_1, sin_2 = tl.load(angle, mask=turns, other=0.0), tl.load(angle + HALF, mask=turns, other=0.0)
    column = tl.load(columns + r, mask=mine, other=0)
    line = o.to(tl.int64) * K
    acc, _ = sums_of(x, weight, weight, line, r, mine, K, False, BLOCK_O, BLOCK_K, BLOCK_R, PRECISION, STAGES)
    if PARTS:
        acc *= over_mean(first, squares, r, mine, eps, K, PARTS, CHUNK)[None, :]
    if BIAS:
        acc += offset.to(tl.float32)[:, None]
    # As if the product had been written before it is turned.
    kind = query.dtype.element_ty
    halves = tl.permute(tl.reshape(acc, [2, PAIRS, BLOCK_R]), [1, 2, 0])
    one, two = tl.split(halves.to(kind).to(tl.float32))
    turned_1 = one * cos_1.to(tl.float32) - two * sin_1.to(tl.float32)
    turned_2 = two * cos_2.to(tl.float32) + one * sin_2.to(tl.float32)
    b = (r // n).to(tl.int64)
    to = query + (r * (HEADS * D) + head * D)[None, :] + d[:, None]
    if head >= HEADS + GROUPS:
        some = b * value_lines[0] + number * value_lines[1] + column * value_lines[2]
        to = value + some[None, :] + d[:, None]
    elif head >= HEADS:
        some = b * key_lines[0] + number * key_lines[1] + column * key_lines[2]
        to = key + some[None, :] + d[:, None]
    tl.store(to, turned_1.to(kind), mask=inside)
    tl.store(to + HALF, turned_2.to(kind), mask=inside)


@triton.jit(do_not_specialize=["n", "count"])
def turn_kernel(
    rows, cos, sin, places, columns, query, key, value, n, count, key_lines, value_lines,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One head of one new row: a query or a key is turned, and keys and values go to their column of the cache."""
    head, i, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b = b.to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    wide = d < D
    column = tl.load(columns + b * n + i)
    source = rows + ((b * n + i) * (HEADS + 2 * GROUPS) + head) * D
    x = tl.load(source + d, mask=wide, other=0.0)
    if head < HEADS + GROUPS:
        half = D // 2
        other = tl.load(source + tl.where(d < half, d + half, d - half), mask=wide, other=0.0).to(tl.float32)
        angle = (b * count + tl.load(places + b * n + i)) * D + d
        turned = x.to(tl.float32) * tl.load(cos + angle, mask=wide, other=0.0).to(tl.float32)
        turned += tl.where(d < half, -other, other) * tl.load(sin + angle, mask=wide, other=0.0).to(
            tl.float32
        )
        x = turned.to(x.dtype)
    if head < HEADS:
        tl.store(query + ((b * n + i) * HEADS + head) * D + d, x, mask=wide)
    elif head < HEADS + GROUPS:
        key += b * key_lines[0] + (head - HEADS) * key_lines[1] + column * key_lines[2]
        tl.store(key + d, x, mask=wide)
    else:
        value += b * value_lines[0] + (head - HEADS - GROUPS) * value_lines[1] + column * value_lines[2]
        tl.store(value + d, x, mask=wide)


def enter_rows(
    x: Tensor,
    weight: Sequence[Tensor],
    bias: Sequence[Tensor],
    gain: Tensor | None,
    squares: Tensor | None,
    eps: float,
    turn: Tensor,
    columns: Tensor,
    key: Tensor,
    value: Tensor,
    block_k: int | None = None,
) -> Tensor:
    """See `ops.decode.enter_rows`; a program takes up `block_k` inputs at a time."""
    rows, K = x.shape
    B, n = columns.shape
    G, D = key.shape[1], key.shape[-1]
    heads = weight[0].shape[0] // D
    query = torch.empty(B, n, heads, D, dtype=x.dtype, device=x.device)
    x, turn, columns, *weight = (t.contiguous() for t in (x, turn, columns, *weight))
    bias = [t.contiguous() for t in bias]
    gain, squares = (None if t is None else t.contiguous() for t in (gain, squares))
    block_o, block_k, block_r, warps, stages = tile_of(x, sum(map(len, weight)), 1, block_k)
    parts, chunk = parts_of(squares, block_r)
    if gain is not None:
        x = normed(x, gain, eps)
    enter_kernel[((heads + 2 * G) * triton.cdiv(D, block_o),)](
        x, *weight, *(bias or weight), x if squares is None else squares, turn, columns, query, key,
        value, rows, n, eps, lines(key), lines(value),
        K=K, HEADS=heads, GROUPS=G, D=D, BIAS=bool(bias), PARTS=parts, CHUNK=chunk, BLOCK_O=block_o,
        BLOCK_K=block_k, BLOCK_R=block_r, PRECISION="ieee", STAGES=stages, num_warps=warps,
    )  # fmt: skip
    return query.transpose(1, 2)


def turn_rows(
    rows: Tensor, cos: Tensor, sin: Tensor, places: Tensor, columns: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    B, n, width = rows.shape
    G, D = key.shape[1], key.shape[-1]
    heads = width // D - 2 * G
    query = torch.empty(B, n, heads, D, dtype=rows.dtype, device=rows.device)
    turn_kernel[(heads + 2 * G, n, B)](
        rows.contiguous(), cos.contiguous(), sin.contiguous(), places.contiguous(),
        columns.contiguous(), query, key, value, n, cos.shape[1], lines(key), lines(value),
        HEADS=heads, GROUPS=G, D=D, BLOCK_D=triton.next_power_of_2(D), num_warps=1,
    )  # fmt: skip
    return query.transpose(1, 2)
