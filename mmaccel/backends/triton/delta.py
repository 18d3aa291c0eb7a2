"""Triton kernels of `ops.delta` (Gated DeltaNet), and the function that launches them, with the operator's arguments.

A program holds a strip of one head's state, all of K by some of V, and processes one after another the columns that the
state lacks and the new ones; the strip is read once and written once. Each program recomputes the causal convolution over
the last columns, some 16 loads from the L2 cache.
"""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl

STRIP = 16  # of V that a program holds


@triton.jit
def _column(rows, journal, column, first, number, n, channel, inside, R: tl.constexpr, W: tl.constexpr):
    """Channels of one column: a new one from `rows`, an earlier one from the journal."""
    new = column >= first
    own = tl.load(rows + (number * n + column - first) * W + channel, mask=inside & new, other=0.0)
    old = tl.load(journal + (column + R) % R * W + channel, mask=inside & (column < first), other=0.0)
    return tl.where(new, own, old)


@triton.jit
def _mixed(
    rows, journal, conv, column, first, number, n, channel, inside,
    R: tl.constexpr, W: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    """Channels of one column behind the convolution and its SiLU, each rounded."""
    total = tl.zeros(channel.shape, tl.float32)
    for tap in tl.static_range(TAPS):
        x = _column(rows, journal, column - (TAPS - 1) + tap, first, number, n, channel, inside, R, W)
        weight = tl.load(conv + channel * TAPS + tap, mask=inside, other=0.0)
        total += x.to(tl.float32) * weight.to(tl.float32)
    kind = rows.dtype.element_ty
    total = total.to(kind).to(tl.float32)
    return (total / (1.0 + tl.exp(-total))).to(kind).to(tl.float32)


@triton.jit(do_not_specialize=["n"])
def _delta_kernel(
    rows, conv, decay, shift, bounds, journal, state, out, n, scale,
    R: tl.constexpr, W: tl.constexpr, TAPS: tl.constexpr, GROUPS: tl.constexpr, HEADS: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Gated delta rule on a strip of one head's state, for one sequence; out [B * n, HEADS, V] float32."""
    head, strip, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    number = b.to(tl.int64)
    first, taken = tl.load(bounds + 4 * b).to(tl.int32), tl.load(bounds + 4 * b + 1).to(tl.int32)
    upto, own = tl.load(bounds + 4 * b + 2).to(tl.int32), tl.load(bounds + 4 * b + 3)
    journal += own * (R * W)
    k, v = tl.arange(0, BLOCK_K), strip * BLOCK_V + tl.arange(0, BLOCK_V)
    deep, wide = k < K, v < V
    VALUES: tl.constexpr = 2 * GROUPS * K
    RATES: tl.constexpr = VALUES + HEADS * V
    group = head // (HEADS // GROUPS)
    queries, keys, values = group * K + k, GROUPS * K + group * K + k, VALUES + head * V + v
    place = state + (own * HEADS + head) * K * V + k[:, None] * V + v[None, :]
    inside = deep[:, None] & wide[None, :]
    now = tl.load(place, mask=inside, other=0.0)
    speed = tl.exp(tl.load(decay + head).to(tl.float32))
    offset = tl.load(shift + head).to(tl.float32)
    for column in range(taken, first + n):
        value = _mixed(rows, journal, conv, column, first, number, n, values, wide, R, W, TAPS)
        key = _mixed(rows, journal, conv, column, first, number, n, keys, deep, R, W, TAPS)
        key *= tl.rsqrt(tl.sum(key * key, 0) + 1e-6)
        rate = tl.arange(0, 2) * HEADS + RATES + head
        both = _column(rows, journal, column, first, number, n, rate, rate >= 0, R, W).to(tl.float32)
        first_one = tl.arange(0, 2) == 0
        write = tl.sum(tl.where(first_one, both, 0.0), 0)
        fade = tl.sum(tl.where(first_one, 0.0, both), 0) + offset
        write = (1.0 / (1.0 + tl.exp(-write))).to(rows.dtype.element_ty).to(tl.float32)
        soft = tl.where(fade > 20.0, fade, tl.log(1.0 + tl.exp(tl.minimum(fade, 20.0))))
        now *= tl.exp(-speed * soft)
        missing = (value - tl.sum(now * key[:, None], 0)) * write
        now += key[:, None] * missing[None, :]
        if column >= first:
            query = _mixed(rows, journal, conv, column, first, number, n, queries, deep, R, W, TAPS)
            query *= tl.rsqrt(tl.sum(query * query, 0) + 1e-6) * scale
            answer = tl.sum(now * query[:, None], 0)
            row = number * n + column - first
            tl.store(out + (row * HEADS + head) * V + v, answer, mask=wide)
            # No program reads these columns from the journal in this launch.
            source, to = rows + row * W, journal + column % R * W
            tl.store(to + values, tl.load(source + values, mask=wide), mask=wide)
            once = (strip == 0) & (head % (HEADS // GROUPS) == 0)
            tl.store(to + queries, tl.load(source + queries, mask=deep & once), mask=deep & once)
            tl.store(to + keys, tl.load(source + keys, mask=deep & once), mask=deep & once)
            tl.store(to + rate, tl.load(source + rate, mask=strip == 0), mask=strip == 0)
        if column + 1 == upto:
            tl.store(place, now, mask=inside)


@triton.jit(do_not_specialize=["eps"])
def _gate_kernel(x, gate, gain, out, eps, V: tl.constexpr, BLOCK_V: tl.constexpr):
    """Gated RMSNorm of one head of one row: norm, times `gain`, times silu(gate)."""
    at = tl.program_id(0).to(tl.int64) * V
    v = tl.arange(0, BLOCK_V)
    wide = v < V
    kind = out.dtype.element_ty
    told = tl.load(x + at + v, mask=wide, other=0.0).to(kind).to(tl.float32)
    normed = (told * tl.rsqrt(tl.sum(told * told, 0) / V + eps)).to(kind).to(tl.float32)
    normed = (normed * tl.load(gain + v, mask=wide, other=0.0).to(tl.float32)).to(kind).to(tl.float32)
    open_ = tl.load(gate + at + v, mask=wide, other=0.0).to(tl.float32)
    tl.store(out + at + v, (normed * (open_ / (1.0 + tl.exp(-open_)))).to(kind), mask=wide)


def delta_rows(rows, gate, conv, decay, shift, gain, eps, bounds, journal, state, *, strip=STRIP):
    """Launch `ops.delta.delta_rows` (Gated DeltaNet on new rows); a program holds `strip` of the V values."""
    (_, heads, K, V), (taps, R, W) = state.shape, (conv.shape[1], *journal.shape[1:])
    B, groups = len(bounds), (conv.shape[0] - heads * V) // (2 * K)
    n = len(rows) // B
    rows, gate = rows.contiguous(), gate.contiguous()
    said = torch.empty(len(rows), heads, V, dtype=torch.float32, device=rows.device)
    out = torch.empty_like(gate)
    block_v = min(strip, max(triton.next_power_of_2(V), 2))
    _delta_kernel[(heads, triton.cdiv(V, block_v), B)](
        rows, conv.contiguous(), decay, shift, bounds, journal, state, said, n, K**-0.5,
        R=R, W=W, TAPS=taps, GROUPS=groups, HEADS=heads, K=K, V=V, BLOCK_K=triton.next_power_of_2(K),
        BLOCK_V=block_v, num_warps=1,
    )  # fmt: skip
    if n:
        _gate_kernel[(len(rows) * heads,)](
            said, gate, gain, out, eps, V=V, BLOCK_V=triton.next_power_of_2(V), num_warps=1
        )
    return out
