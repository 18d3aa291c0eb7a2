"""Triton kernels of `ops.delta` (Gated DeltaNet), and the functions that launch them, with the operators' arguments.

In `deltanet_rows` a program holds a strip of one head's state, all of K by some of V, and processes one after another the
columns that the state lacks and the new ones; the strip is read once and written once. Each program recomputes the causal
convolution over the last columns, some 16 loads from the L2 cache, which are sent for a column ahead.
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
    rate = tl.arange(0, 2) * HEADS + RATES + head
    first_one, end = tl.arange(0, 2) == 0, first + n
    value = _mixed(rows, journal, conv, taken, first, number, n, values, wide & (taken < end), R, W, TAPS)
    key = _mixed(rows, journal, conv, taken, first, number, n, keys, deep & (taken < end), R, W, TAPS)
    query = _mixed(rows, journal, conv, taken, first, number, n, queries, deep & (taken < end), R, W, TAPS)
    both = _column(rows, journal, taken, first, number, n, rate, (rate >= 0) & (taken < end), R, W)
    for column in range(taken, end):
        late, more = column + 1, column + 1 < end
        next_value = _mixed(rows, journal, conv, late, first, number, n, values, wide & more, R, W, TAPS)
        next_key = _mixed(rows, journal, conv, late, first, number, n, keys, deep & more, R, W, TAPS)
        next_query = _mixed(rows, journal, conv, late, first, number, n, queries, deep & more, R, W, TAPS)
        next_both = _column(rows, journal, late, first, number, n, rate, (rate >= 0) & more, R, W)
        key *= tl.rsqrt(tl.sum(key * key, 0) + 1e-6)
        write = tl.sum(tl.where(first_one, both.to(tl.float32), 0.0), 0)
        fade = tl.sum(tl.where(first_one, 0.0, both.to(tl.float32)), 0) + offset
        write = (1.0 / (1.0 + tl.exp(-write))).to(rows.dtype.element_ty).to(tl.float32)
        soft = tl.where(fade > 20.0, fade, tl.log(1.0 + tl.exp(tl.minimum(fade, 20.0))))
        now *= tl.exp(-speed * soft)
        missing = (value - tl.sum(now * key[:, None], 0)) * write
        now += key[:, None] * missing[None, :]
        if column >= first:
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
        value, key, query, both = next_value, next_key, next_query, next_both
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


@triton.jit(do_not_specialize=["S"])
def _convolve_kernel(
    X, WEIGHT, OUT, S, x_b, x_s, x_c,
    C: tl.constexpr, TAPS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Causal convolution and SiLU of ROWS rows of BLOCK channels."""
    b = tl.program_id(2).to(tl.int64)
    s, c = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (s < S)[:, None] & (c < C)[None, :]
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for tap in tl.static_range(TAPS):
        row = s - (TAPS - 1) + tap
        at = X + b * x_b + row.to(tl.int64)[:, None] * x_s + c.to(tl.int64)[None, :] * x_c
        x = tl.load(at, mask=inside & (row >= 0)[:, None], other=0.0).to(tl.float32)
        weight = tl.load(WEIGHT + c * TAPS + tap, mask=c < C, other=0.0).to(tl.float32)
        total += x * weight[None, :]
    kind = OUT.dtype.element_ty
    total = total.to(kind).to(tl.float32)
    to = OUT + (b * S + s.to(tl.int64))[:, None] * C + c[None, :]
    tl.store(to, (total / (1.0 + tl.exp(-total))).to(kind), mask=inside)


def convolve_silu(x, weight, *, rows=32, channels=128):
    """Launch `ops.delta.convolve_silu`: causal convolution of x [B, S, C] and SiLU; a program has `rows` x `channels`."""
    (B, S, C), taps = x.shape, weight.shape[1]
    out = torch.empty(B, S, C, dtype=x.dtype, device=x.device)
    channels = min(channels, triton.next_power_of_2(C))
    if out.numel():
        _convolve_kernel[(triton.cdiv(S, rows), triton.cdiv(C, channels), B)](
            x,
            weight.contiguous(),
            out,
            S,
            *x.stride(),
            C=C,
            TAPS=taps,
            ROWS=rows,
            BLOCK=channels,
            num_warps=4,
        )
    return out


def gated_rms_norm(x, gate, gain, eps):
    """Launch `ops.delta.gated_rms_norm`: RMSNorm of x [..., V] times `gain`, times silu(gate), one program per row."""
    x, gate, V = x.contiguous(), gate.contiguous(), x.shape[-1]
    out = torch.empty_like(gate)
    if x.numel():
        block = triton.next_power_of_2(V)
        _gate_kernel[(x.numel() // V,)](x, gate, gain, out, eps, V=V, BLOCK_V=block, num_warps=1)
    return out


def deltanet_rows(rows, gate, conv, decay, shift, gain, eps, bounds, journal, state, *, strip=STRIP):
    """Launch `ops.delta.deltanet_rows` (Gated DeltaNet on new rows); a program holds `strip` of the V values."""
    (_, heads, K, V), (taps, R, W) = state.shape, (conv.shape[1], *journal.shape[1:])
    B, groups = len(bounds), (conv.shape[0] - heads * V) // (2 * K)
    n = len(rows) // B
    rows = rows.contiguous()
    said = torch.empty(len(rows), heads, V, dtype=torch.float32, device=rows.device)
    block_v = min(strip, max(triton.next_power_of_2(V), 2))
    _delta_kernel[(heads, triton.cdiv(V, block_v), B)](
        rows, conv.contiguous(), decay, shift, bounds, journal, state, said, n, K**-0.5,
        R=R, W=W, TAPS=taps, GROUPS=groups, HEADS=heads, K=K, V=V, BLOCK_K=triton.next_power_of_2(K),
        BLOCK_V=block_v, num_warps=1,
    )  # fmt: skip
    return gated_rms_norm(said, gate, gain, eps)
