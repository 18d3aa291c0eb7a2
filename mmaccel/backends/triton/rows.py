"""Few rows through a model's layers in Triton (`ops.project_rows`, `ops.turn_rows`): weights are read once, and that is all.

A product of a few rows takes as long as its weights take to read. The row's norm before it, the gate and the residual
after it are done by the same program: as launches of their own they would cost more than a tenth of a decode step.
"""

# mypy: ignore-errors

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST = 64
"""Rows beyond which a product is no longer a matter of reading weights."""


@triton.jit
def project_kernel(
    x,
    weight_0,
    weight_1,
    weight_2,
    bias_0,
    bias_1,
    bias_2,
    gain,
    residual,
    out,
    rows,
    eps,
    K: tl.constexpr,
    WIDTH_0: tl.constexpr,
    WIDTH_1: tl.constexpr,
    WIDTH_2: tl.constexpr,
    WIDTH: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """BLOCK_O outputs of one of up to three weights, whose outputs stand one after another; see `ops.project_rows`.

    The norm of a row is a factor of its product, so the sum of its squares is gathered on the way and put in at the end.
    """
    block = tl.program_id(0)
    weight, bias, begin, width = weight_0, bias_0, 0, WIDTH_0
    if WIDTH_1 and not GATED:
        blocks = (WIDTH_0 + BLOCK_O - 1) // BLOCK_O
        if block >= blocks:
            weight, bias, begin, width, block = weight_1, bias_1, WIDTH_0, WIDTH_1, block - blocks
            blocks = (WIDTH_1 + BLOCK_O - 1) // BLOCK_O
            if WIDTH_2:  # noqa: SIM102 - what is constant leaves no trace
                if block >= blocks:
                    weight, bias, begin, width = weight_2, bias_2, WIDTH_0 + WIDTH_1, WIDTH_2
                    block -= blocks
    o = block * BLOCK_O + tl.arange(0, BLOCK_O)
    r, k = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_K)
    there, mine = o < width, r < rows
    line = tl.where(there, o, 0).to(tl.int64) * K
    acc = tl.zeros([BLOCK_O, BLOCK_R], tl.float32)
    up = tl.zeros([BLOCK_O, BLOCK_R], tl.float32)
    squares = tl.zeros([BLOCK_R, BLOCK_K], tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        inside = start + k < K
        some = tl.load(weight + line[:, None] + (start + k)[None, :], mask=inside[None, :], other=0.0)
        mask = mine[:, None] & inside[None, :]
        row = tl.load(x + r[:, None] * K + (start + k)[None, :], mask=mask, other=0.0)
        if NORM:
            wide = row.to(tl.float32)
            squares += wide * wide
            factor = tl.load(gain + start + k, mask=inside, other=0.0).to(tl.float32)
            row = (wide * factor[None, :]).to(row.dtype)
        acc = tl.dot(some, tl.trans(row), acc, input_precision=PRECISION)
        if GATED:
            other = tl.load(weight_1 + line[:, None] + (start + k)[None, :], mask=inside[None, :], other=0.0)
            up = tl.dot(other, tl.trans(row), up, input_precision=PRECISION)
    if NORM:
        factor = tl.rsqrt(tl.sum(squares, 1) / K + eps)
        acc *= factor[None, :]
        up *= factor[None, :]
    if BIAS:
        acc += tl.load(bias + o, mask=there, other=0.0).to(tl.float32)[:, None]
    if GATED:
        acc = acc / (1.0 + tl.exp(-acc)) * up
    place = r[None, :] * WIDTH + begin + o[:, None]
    mask = mine[None, :] & there[:, None]
    if RESIDUAL:
        acc += tl.load(residual + place, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + place, acc.to(out.dtype.element_ty), mask=mask)


def project_rows(
    x: Tensor,
    weight: Sequence[Tensor],
    bias: Sequence[Tensor] = (),
    gain: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    gated: bool = False,
    *,
    block_o: int = 16,
    block_k: int | None = None,
    warps: int = 4,
    stages: int = 4,
) -> Tensor:
    """See `mmaccel.backends.ops.project_rows`; a program makes `block_o` outputs, `block_k` inputs at a time."""
    rows, K = x.shape
    widths = [w.shape[0] for w in weight]
    width = widths[0] if gated else sum(widths)
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    x = x.contiguous()
    missing = [x] * (3 - len(weight))
    grid = triton.cdiv(widths[0], block_o) if gated else sum(triton.cdiv(w, block_o) for w in widths)
    with torch.cuda.device_of(x):
        project_kernel[(grid,)](
            x,
            *weight,
            *missing,
            *(bias or weight),
            *missing,
            x if gain is None else gain,
            x if residual is None else residual,
            out,
            rows,
            eps,
            K=K,
            WIDTH_0=widths[0],
            WIDTH_1=widths[1] if len(weight) > 1 else 0,
            WIDTH_2=widths[2] if len(weight) > 2 else 0,
            WIDTH=width,
            NORM=gain is not None,
            BIAS=bool(bias),
            GATED=gated,
            RESIDUAL=residual is not None,
            BLOCK_O=block_o,
            BLOCK_K=block_k or min(256, max(triton.next_power_of_2(K), 16)),
            BLOCK_R=max(triton.next_power_of_2(rows), 16),
            PRECISION="ieee",
            STAGES=stages,
            num_warps=warps,
        )
    return out


@triton.jit
def turn_kernel(
    rows,
    cos,
    sin,
    places,
    columns,
    query,
    key,
    value,
    n,
    count,
    key_b,
    key_g,
    key_s,
    value_b,
    value_g,
    value_s,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
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
        tl.store(key + b * key_b + (head - HEADS) * key_g + column * key_s + d, x, mask=wide)
    else:
        tl.store(value + b * value_b + (head - HEADS - GROUPS) * value_g + column * value_s + d, x, mask=wide)


def turn_rows(
    rows: Tensor, cos: Tensor, sin: Tensor, places: Tensor, columns: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    """See `mmaccel.backends.ops.turn_rows`."""
    B, n, width = rows.shape
    G, D = key.shape[1], key.shape[-1]
    heads = width // D - 2 * G
    query = torch.empty(B, n, heads, D, dtype=rows.dtype, device=rows.device)
    with torch.cuda.device_of(rows):
        turn_kernel[(heads + 2 * G, n, B)](
            rows.contiguous(),
            cos,
            sin,
            places.contiguous(),
            columns.contiguous(),
            query,
            key,
            value,
            n,
            cos.shape[1],
            *key.stride()[:3],
            *value.stride()[:3],
            HEADS=heads,
            GROUPS=G,
            D=D,
            BLOCK_D=triton.next_power_of_2(D),
            num_warps=1,
        )
    return query.transpose(1, 2)
