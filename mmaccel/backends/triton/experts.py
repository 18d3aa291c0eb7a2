"""Triton kernels of `ops.experts` (mixture of experts), and the function that launches them, with the operator's arguments.

Each program computes some outputs of one row by one of its experts, whose index it loads, so only weights of chosen experts
are read. Rows that share an expert find its weights in the L2 cache.
"""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl

OUTPUTS, INPUTS = 16, 256  # of a program


@triton.jit
def _product(x, weight, line, K: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr):
    """[BLOCK_O]: one row of K numbers by the lines of a weight that begin at `line`."""
    total = tl.zeros([BLOCK_O, BLOCK_K], tl.float32)
    for begin in tl.range(0, K, BLOCK_K):
        k = begin + tl.arange(0, BLOCK_K)
        inside = k < K
        row = tl.load(x + k, mask=inside, other=0.0).to(tl.float32)
        some = tl.load(weight + line[:, None] + k[None, :], mask=inside[None, :], other=0.0)
        total += some.to(tl.float32) * row[None, :]
    return tl.sum(total, 1)


@triton.jit
def _gate_up_kernel(
    x, chosen, gate_up, inner, k,
    E: tl.constexpr, DEEP: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """First half of a mixture of experts, for one row and one of its experts: gate and up projection, silu(gate) * up, to
    inner [R * k, DEEP]."""
    pair = tl.program_id(0).to(tl.int64)
    o = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
    there = o < DEEP
    line = (tl.load(chosen + pair) * (2 * DEEP) + tl.where(there, o, 0)) * E
    row = x + pair // k * E
    kind = inner.dtype.element_ty
    gate = _product(row, gate_up, line, E, BLOCK_O, BLOCK_K).to(kind).to(tl.float32)
    up = _product(row, gate_up, line + DEEP * E, E, BLOCK_O, BLOCK_K).to(kind).to(tl.float32)
    active = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32)
    tl.store(inner + pair * DEEP + o, (active * up).to(kind), mask=there)


@triton.jit
def _down_kernel(
    inner, chosen, share, down, out, k,
    E: tl.constexpr, DEEP: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Second half of a mixture of experts, for one row: the down projections of its experts, summed with weights `share`, to
    out [R, E]."""
    r = tl.program_id(0).to(tl.int64)
    o = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
    there = o < E
    kind = out.dtype.element_ty
    total = tl.zeros([BLOCK_O], tl.float32)
    for one in range(k):
        pair = r * k + one
        line = (tl.load(chosen + pair) * E + tl.where(there, o, 0)) * DEEP
        made = _product(inner + pair * DEEP, down, line, DEEP, BLOCK_O, BLOCK_K).to(kind).to(tl.float32)
        total += made * tl.load(share + pair).to(tl.float32)
    tl.store(out + r * E + o, total.to(kind), mask=there)


def expert_mlp(x, chosen, share, gate_up, down):
    """Launch `ops.experts.expert_mlp`: the mixture-of-experts MLP on a few rows."""
    (R, E), k, deep = x.shape, chosen.shape[1], down.shape[2]
    x, chosen, share, gate_up, down = (one.contiguous() for one in (x, chosen, share, gate_up, down))
    inner = torch.empty(R * k, deep, dtype=x.dtype, device=x.device)
    out = torch.empty_like(x)
    sizes = dict(E=E, DEEP=deep, BLOCK_O=OUTPUTS, num_warps=4)
    first, second = (min(INPUTS, triton.next_power_of_2(one)) for one in (E, deep))
    _gate_up_kernel[(R * k, triton.cdiv(deep, OUTPUTS))](x, chosen, gate_up, inner, k, BLOCK_K=first, **sizes)
    _down_kernel[(R, triton.cdiv(E, OUTPUTS))](inner, chosen, share, down, out, k, BLOCK_K=second, **sizes)
    return out
