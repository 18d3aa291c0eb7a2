"""Few rows through a model's layers in Triton (`ops.decode.project_rows`): weights are read once, and that is all.

A product of a few rows takes as long as its weights take to read, so nothing else may take time: the gate and the residual
after it are done by the same program, and so is what a norm after it needs; the first norm is a kernel of 2 us.

On an H200 a step of a 7B model after 25 088 columns takes 4.05 ms so, 1.12 of what reading weights and cache takes. What was
tried beside is in docs/speed.md and slower: larger tiles, the norm in every program, cuBLAS, kernels that begin before the
last one ends, one launch for all between two layers' attention.
"""

# mypy: ignore-errors

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmaccel.backends.ops import operator as operators
from mmaccel.backends.triton.pointwise import rms_norm_kernel

HELD = 2048
"""Parts of sums of squares that a program holds while it makes a product."""

UNDER_WAY = ((512, 4), (512, 3), (256, 4))
"""Inputs at a time and steps of a product under way, the most first."""

FEW = 16
"""Rows up to which small tiles of weights are read fastest; of more rows each tile is to serve more outputs."""


@triton.jit
def sums_of(
    x, weight, other_weight, line, r, mine,
    K: tl.constexpr, GATED: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """[BLOCK_O, BLOCK_R] twice: the products of rows `r` with the lines of one weight that begin at `line`; GATED: and with
    those of the other. What is loaded before this is on its way meanwhile."""
    k = tl.arange(0, BLOCK_K)
    acc = tl.zeros([BLOCK_O, BLOCK_R], tl.float32)
    up = tl.zeros([BLOCK_O, BLOCK_R], tl.float32)
    WHOLE: tl.constexpr = K // BLOCK_K * BLOCK_K
    for start in tl.range(0, WHOLE, BLOCK_K, num_stages=STAGES):
        at = line[:, None] + (start + k)[None, :]
        some = tl.load(weight + at)
        row = tl.trans(tl.load(x + r[:, None] * K + (start + k)[None, :], mask=mine[:, None], other=0.0))
        acc = tl.dot(some, row, acc, input_precision=PRECISION)
        if GATED:
            other = tl.load(other_weight + at)
            up = tl.dot(other, row, up, input_precision=PRECISION)
    if WHOLE < K:
        inside = (WHOLE + k < K)[None, :]
        at = line[:, None] + (WHOLE + k)[None, :]
        some = tl.load(weight + at, mask=inside, other=0.0)
        last = x + r[:, None] * K + (WHOLE + k)[None, :]
        row = tl.trans(tl.load(last, mask=mine[:, None] & inside, other=0.0))
        acc = tl.dot(some, row, acc, input_precision=PRECISION)
        if GATED:
            other = tl.load(other_weight + at, mask=inside, other=0.0)
            up = tl.dot(other, row, up, input_precision=PRECISION)
    return acc, up


@triton.jit
def squares_of(squares, r, mine, begin, PARTS: tl.constexpr, CHUNK: tl.constexpr):
    """[BLOCK_R, CHUNK]: the parts from `begin` on of the sums of squares of rows `r`."""
    part = begin + tl.arange(0, CHUNK)
    there = mine[:, None] & (part < PARTS)[None, :]
    return tl.load(squares + r[:, None] * PARTS + part[None, :], mask=there, other=0.0)


@triton.jit
def over_mean(first, squares, r, mine, eps, K: tl.constexpr, PARTS: tl.constexpr, CHUNK: tl.constexpr):
    """[BLOCK_R]: one over the root mean square of rows `r`, of whose parts the `first` are there."""
    total = tl.sum(first, 1)
    for begin in tl.range(CHUNK, PARTS, CHUNK):
        total += tl.sum(squares_of(squares, r, mine, begin, PARTS, CHUNK), 1)
    return tl.rsqrt(total / K + eps)


@triton.jit(do_not_specialize=["rows", "eps"])
def project_kernel(
    x, weight_0, weight_1, weight_2, bias_0, bias_1, bias_2, residual, squares, gain, out, gained,
    squares_out, rows, eps,
    K: tl.constexpr, WIDTH_0: tl.constexpr, WIDTH_1: tl.constexpr, WIDTH_2: tl.constexpr,
    WIDTH: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr, RESIDUAL: tl.constexpr,
    AHEAD: tl.constexpr, PARTS: tl.constexpr, CHUNK: tl.constexpr, BLOCKS: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """BLOCK_O outputs of one of up to three weights, whose outputs stand one after another; see `ops.decode`.

    EVEN: blocks divide the outputs. PARTS: of how many the sums of squares of `x` are made, 0 where it is not to be normed.
    AHEAD: what the norm after this needs is written, too; see `pass_rows`. BLOCKS: how many programs there are.
    """
    block = tl.program_id(0)
    weight, bias, begin, width = weight_0, bias_0, 0, WIDTH_0
    if WIDTH_1 and not GATED:
        own = (WIDTH_0 + BLOCK_O - 1) // BLOCK_O
        if block >= own:
            weight, bias, begin, width, block = weight_1, bias_1, WIDTH_0, WIDTH_1, block - own
            own = (WIDTH_1 + BLOCK_O - 1) // BLOCK_O
            if WIDTH_2:  # noqa: SIM102 - what is constant leaves no trace
                if block >= own:
                    weight, bias, begin, width = weight_2, bias_2, WIDTH_0 + WIDTH_1, WIDTH_2
                    block -= own
    o, r = block * BLOCK_O + tl.arange(0, BLOCK_O), tl.arange(0, BLOCK_R)
    there, mine = o < width, r < rows
    line = (o if EVEN else tl.where(there, o, 0)).to(tl.int64) * K
    place = r[None, :] * WIDTH + begin + o[:, None]
    mask = mine[None, :] & there[:, None]
    # What the end needs is on its way meanwhile.
    if BIAS:
        offset = tl.load(bias + o, mask=there, other=0.0)
        if GATED:
            other_offset = tl.load(bias_1 + o, mask=there, other=0.0)
    if RESIDUAL:
        before = tl.load(residual + place, mask=mask, other=0.0)
    if AHEAD:
        factor = tl.load(gain + o, mask=there, other=0.0)
    if PARTS:
        first = squares_of(squares, r, mine, 0, PARTS, CHUNK)
    acc, up = sums_of(
        x, weight, weight_1, line, r, mine, K, GATED, BLOCK_O, BLOCK_K, BLOCK_R, PRECISION, STAGES
    )
    if PARTS:
        shrink = over_mean(first, squares, r, mine, eps, K, PARTS, CHUNK)[None, :]
        acc, up = acc * shrink, up * shrink
    if BIAS:
        acc += offset.to(tl.float32)[:, None]
        if GATED:
            up += other_offset.to(tl.float32)[:, None]
    if GATED:
        acc = acc / (1.0 + tl.exp(-acc)) * up
    if RESIDUAL:
        acc += before.to(tl.float32)
    answer = acc.to(out.dtype.element_ty)
    tl.store(out + place, answer, mask=mask)
    if AHEAD:
        wide = answer.to(tl.float32)
        tl.store(gained + place, (wide * factor.to(tl.float32)[:, None]).to(out.dtype.element_ty), mask=mask)
        sums = tl.sum(tl.where(there[:, None], wide * wide, 0.0), 0)
        tl.store(squares_out + r * BLOCKS + block, sums, mask=mine)


def normed(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """Each row over its root mean square, times `gain`; rounded as the model's own norm rounds."""
    (rows, K), out = x.shape, torch.empty_like(x)
    rms_norm_kernel[(rows,)](x, gain, out, eps, E=K, BLOCK=triton.next_power_of_2(K), num_warps=8)
    return out


class Tile(NamedTuple):
    """What a program makes at a time: outputs, inputs, rows; and how many steps of its loop are under way."""

    outputs: int
    inputs: int
    rows: int
    warps: int
    stages: int


def tile_of(x: Tensor, outputs: int, weights: int, block_k: int | None = None) -> Tile:
    """The tile for rows `x` [R, K] and so many `outputs`, each of one or, gated, two `weights`; `block_k` inputs, if given.

    Memory is read at its rate if enough of it is asked for at a time, and all programs begin at once: as much is under way
    as the memory of the multiprocessors has room for where each of them has all of its programs. Where these are too many
    they come one after another, and little of each is.
    """
    R, K = x.shape
    here = operators.resources(x.device)
    rows = max(triton.next_power_of_2(R), here.columns)
    if R > FEW:
        made = Tile(32, 128, rows, 2, 4)
    else:
        made = Tile(16, 256 // weights, rows, 1, 5 - weights)
        each = triton.cdiv(triton.cdiv(outputs, 16), here.processors)
        for inputs, steps in UNDER_WAY:
            if each * steps * inputs * (16 * weights + rows) * x.element_size() <= here.resident:
                made = Tile(16, inputs, rows, 1, steps)
                break
    inputs = block_k or min(made.inputs, max(triton.next_power_of_2(K), 16))
    stages = here.stages(made.stages, inputs * (made.outputs * weights + rows) * x.element_size())
    return made._replace(inputs=inputs, stages=stages)


def parts_of(squares: Tensor | None, block_r: int) -> tuple[int, int]:
    """PARTS, and CHUNK of them at a time: the first are held while a product is made."""
    parts = 0 if squares is None else squares.shape[1]
    return parts, min(triton.next_power_of_2(max(parts, 1)), max(HELD // block_r, 1))


def project_rows(
    x: Tensor,
    weight: Sequence[Tensor],
    bias: Sequence[Tensor] = (),
    gain: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    gated: bool = False,
    squares: Tensor | None = None,
    block_k: int | None = None,
) -> Tensor:
    """See `ops.decode.project_rows`; a program takes up `block_k` inputs at a time."""
    return _project(x, weight, bias, gain, eps, residual, gated, squares, None, block_k)[0]


def pass_rows(
    x: Tensor,
    weight: Tensor,
    bias: Sequence[Tensor],
    residual: Tensor,
    gain: Tensor,
    block_k: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `ops.decode.pass_rows`; a program takes up `block_k` inputs at a time."""
    return _project(x, [weight], bias, None, 0.0, residual, False, None, gain, block_k)


def _project(
    x: Tensor,
    weight: Sequence[Tensor],
    bias: Sequence[Tensor],
    gain: Tensor | None,
    eps: float,
    residual: Tensor | None,
    gated: bool,
    squares: Tensor | None,
    ahead: Tensor | None,
    block_k: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The product; and, where `ahead` is the gain of a norm after it, what that needs."""
    rows, K = x.shape
    widths = [w.shape[0] for w in weight]
    width = widths[0] if gated else sum(widths)
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    # The kernel knows rows that follow each other alone; a model's weights are such, and nothing is copied.
    x, *weight = (t.contiguous() for t in (x, *weight))
    bias = [t.contiguous() for t in bias]
    gain, residual, squares, ahead = (
        None if t is None else t.contiguous() for t in (gain, residual, squares, ahead)
    )
    missing = [x] * (3 - len(weight))
    block_o, block_k, block_r, warps, stages = tile_of(x, width, 1 + gated, block_k)
    parts, chunk = parts_of(squares, block_r)
    grid = triton.cdiv(widths[0], block_o) if gated else sum(triton.cdiv(w, block_o) for w in widths)
    even = all(w % block_o == 0 for w in widths)
    gained, sums = out, out
    if ahead is not None:
        gained = torch.empty_like(out)
        sums = torch.empty(rows, grid, dtype=torch.float32, device=x.device)
    if gain is not None:
        x = normed(x, gain, eps)
    project_kernel[(grid,)](
        x, *weight, *missing, *(bias or weight), *missing, x if residual is None else residual,
        x if squares is None else squares, x if ahead is None else ahead, out, gained, sums, rows, eps,
        K=K, WIDTH_0=widths[0], WIDTH_1=widths[1] if len(weight) > 1 else 0,
        WIDTH_2=widths[2] if len(weight) > 2 else 0, WIDTH=width, BIAS=bool(bias), GATED=gated,
        RESIDUAL=residual is not None, AHEAD=ahead is not None, PARTS=parts, CHUNK=chunk, BLOCKS=grid,
        EVEN=even, BLOCK_O=block_o, BLOCK_K=block_k, BLOCK_R=block_r, PRECISION="ieee", STAGES=stages,
        num_warps=warps,
    )  # fmt: skip
    return out, gained, sums
