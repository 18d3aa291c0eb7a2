"""Triton kernels of RMSNorm, SiLU gate, RoPE and merged attention, and the functions that launch them, with the arguments of
`ops.layer_ops`.

Each row is read once and written once.
"""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mmaccel.backends.triton.launch_args import row_strides

MERGED = 32  # rows that a program of `_merge_parts_kernel` merges
ROWS = 16  # positions whose angles a program makes
WORDS = 4096  # elements that a program of `_silu_times_kernel` looks at


@triton.jit(do_not_specialize=["eps"])
def rms_norm_kernel(X, WEIGHT, OUT, eps, E: tl.constexpr, BLOCK: tl.constexpr, CENTRED: tl.constexpr = False):
    """RMSNorm of one row; CENTRED: its gain is one more than the weight."""
    row = tl.program_id(0).to(tl.int64) * E
    e = tl.arange(0, BLOCK)
    inside = e < E
    x = tl.load(X + row + e, mask=inside, other=0.0).to(tl.float32)
    normed = x * tl.rsqrt(tl.sum(x * x, 0) / E + eps)
    weight = tl.load(WEIGHT + e, mask=inside, other=0.0).to(tl.float32)
    if CENTRED:
        out = (1.0 + weight) * normed
    else:
        out = weight * normed.to(OUT.dtype.element_ty).to(tl.float32)
    tl.store(OUT + row + e, out.to(OUT.dtype.element_ty), mask=inside)


@triton.jit
def _silu_times_kernel(GATE, UP, count, BLOCK: tl.constexpr):
    """GATE = silu(GATE) * UP, for BLOCK elements."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    gate = tl.load(GATE + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(UP + at, mask=inside, other=0.0).to(tl.float32)
    active = (gate / (1.0 + tl.exp(-gate))).to(GATE.dtype.element_ty)
    tl.store(GATE + at, (active.to(tl.float32) * up).to(GATE.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["n", "x_b", "angle_b"])
def _rotate_kernel(
    X, COS, SIN, n, x_b, x_h, x_s, angle_b, angle_s,
    H: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr, ADJACENT: tl.constexpr,
):  # fmt: skip
    """Apply RoPE to the H heads of one token; pairs are ADJACENT numbers, or those HALF a head apart."""
    b, s = tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64)
    d, h = tl.arange(0, BLOCK), tl.arange(0, HEADS)
    kind = X.dtype.element_ty
    # Each product is rounded to the type of the angles, as PyTorch does.
    product = COS.dtype.element_ty
    APART: tl.constexpr = 1 if ADJACENT else HALF
    inside = d < HALF
    if ADJACENT:
        d *= 2
    angle = b * angle_b + s * angle_s + d
    cos_1 = tl.load(COS + angle, mask=inside, other=0.0).to(tl.float32)[None, :]
    cos_2 = tl.load(COS + angle + APART, mask=inside, other=0.0).to(tl.float32)[None, :]
    sin_1 = tl.load(SIN + angle, mask=inside, other=0.0).to(tl.float32)[None, :]
    sin_2 = tl.load(SIN + angle + APART, mask=inside, other=0.0).to(tl.float32)[None, :]
    at = X + b * x_b + s * x_s + (h.to(tl.int64) * x_h)[:, None] + d[None, :]
    there = (h < H)[:, None] & inside[None, :]
    x_1 = tl.load(at, mask=there, other=0.0).to(tl.float32)
    x_2 = tl.load(at + APART, mask=there, other=0.0).to(tl.float32)
    first = (x_1 * cos_1).to(product).to(tl.float32) + (-x_2 * sin_1).to(product).to(tl.float32)
    second = (x_2 * cos_2).to(product).to(tl.float32) + (x_1 * sin_2).to(product).to(tl.float32)
    tl.store(at, first.to(kind), mask=there)
    tl.store(at + APART, second.to(kind), mask=there)


@triton.jit(do_not_specialize=["n", "scale"])
def _angles_kernel(
    POSITION, PACE, COS, SIN, n, scale, HALF: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """RoPE cosines and sines of ROWS positions."""
    s, d = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    position = tl.load(POSITION + s, mask=s < n, other=0).to(tl.float32)
    angle = position[:, None] * tl.load(PACE + d, mask=d < HALF, other=0.0)[None, :]
    at = s.to(tl.int64)[:, None] * (2 * HALF) + d[None, :]
    inside = (s < n)[:, None] & (d < HALF)[None, :]
    kind = COS.dtype.element_ty
    cos, sin = (tl.cos(angle) * scale).to(kind), (tl.sin(angle) * scale).to(kind)
    tl.store(COS + at, cos, mask=inside)
    tl.store(COS + at + HALF, cos, mask=inside)
    tl.store(SIN + at, sin, mask=inside)
    tl.store(SIN + at + HALF, sin, mask=inside)


@triton.jit(do_not_specialize=["count"])
def _merge_parts_kernel(
    OUT, LSE, MERGED, count, PARTS: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Merge ROWS rows of PARTS partial results of attention by their log-sum-exps."""
    row, d = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    inside, wide = row < count, (d < D)[None, :]
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    for part in tl.static_range(PARTS):
        peak = tl.maximum(peak, tl.load(LSE + part * count + row, mask=inside, other=float("-inf")))
    level = tl.where(peak == float("-inf"), 0.0, peak)
    total, acc = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, BLOCK], tl.float32)
    for part in tl.static_range(PARTS):
        at = part * count + row
        weight = tl.exp(tl.load(LSE + at, mask=inside, other=float("-inf")) - level)
        held = inside[:, None] & wide
        some = tl.load(OUT + at[:, None] * D + d[None, :], mask=held, other=0.0)
        acc += weight[:, None] * some.to(tl.float32)
        total += weight
    merged = acc / tl.where(total > 0, total, 1.0)[:, None]
    to = MERGED + row[:, None] * D + d[None, :]
    tl.store(to, merged.to(MERGED.dtype.element_ty), mask=inside[:, None] & wide)


def rms_norm(x, weight, eps, centred=False):
    """Launch `ops.layer_ops.rms_norm`: RMSNorm of x with `weight`, or with 1 + `weight`, one program per row."""
    x = x.contiguous()
    out = torch.empty_like(x)
    E = x.shape[-1]
    if x.numel():
        rms_norm_kernel[(x.numel() // E,)](
            x, weight, out, eps, E=E, BLOCK=triton.next_power_of_2(E), CENTRED=centred,
            num_warps=8 if E > 2048 else 4 if E > 512 else 1,
        )  # fmt: skip
    return out


def silu_multiply_(gate, up):
    """Launch `ops.layer_ops.silu_multiply_`: gate = silu(gate) * up, in place; `ValueError` unless both are contiguous."""
    if not (gate.is_contiguous() and up.is_contiguous()):
        raise ValueError("silu_multiply_: gate and up are to be contiguous")
    if gate.numel():
        _silu_times_kernel[(triton.cdiv(gate.numel(), WORDS),)](
            gate, up, gate.numel(), BLOCK=WORDS, num_warps=8
        )


def rotate_(x, cos, sin, adjacent=False):
    """Launch `ops.layer_ops.rotate_`: RoPE on x [B, H, n, D] in place; raises `ValueError` unless the last dimension of `x`
    is dense."""
    B, H, n, D = x.shape
    if x.stride(-1) != 1:
        raise ValueError("rotate_: the numbers of a head are to lie side by side")
    cos, sin = cos.contiguous(), sin.contiguous()
    if x.numel():
        _rotate_kernel[(n, B)](
            x, cos, sin, n, *row_strides(x), cos.stride(0) if cos.shape[0] > 1 else 0, cos.stride(1),
            H=H, HALF=D // 2, HEADS=triton.next_power_of_2(H), BLOCK=triton.next_power_of_2(D // 2),
            ADJACENT=adjacent, num_warps=4 if H * D > 2048 else 1,
        )  # fmt: skip


def rope_angles(positions, inv_freq, scale, dtype):
    """Launch `ops.layer_ops.rope_angles`: RoPE cosines and sines [n, D] of positions [n], `ROWS` of them per program."""
    n, half = len(positions), len(inv_freq)
    out = torch.empty(2, n, 2 * half, dtype=dtype, device=positions.device)
    if n:
        _angles_kernel[(triton.cdiv(n, ROWS),)](
            positions.contiguous(), inv_freq, out[0], out[1], n, scale,
            HALF=half, ROWS=ROWS, BLOCK=triton.next_power_of_2(half), num_warps=4,
        )  # fmt: skip
    return out[0], out[1]


def merge_parts(out, lse):
    """Launch `ops.layer_ops.merge_parts`: attention from `len(out)` partial results, `MERGED` rows per program."""
    out, lse, D = out.contiguous(), lse.contiguous(), out.shape[-1]
    merged, count = torch.empty_like(out[0]), lse[0].numel()
    if count:
        _merge_parts_kernel[(triton.cdiv(count, MERGED),)](
            out, lse, merged, count, PARTS=len(out), D=D, ROWS=MERGED, BLOCK=triton.next_power_of_2(D)
        )
    return merged
