"""The rotation of new rows, and where they go, in Triton (`ops.qkv_rope_cache.turn_rows`)."""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmaccel.backends.triton.launch_args import lines


@triton.jit(do_not_specialize=["n", "count"])
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
    """See `ops.qkv_rope_cache.turn_rows`."""
    B, n, width = rows.shape
    G, D = key.shape[1], key.shape[-1]
    heads = width // D - 2 * G
    query = torch.empty(B, n, heads, D, dtype=rows.dtype, device=rows.device)
    with torch.cuda.device_of(rows):
        turn_kernel[(heads + 2 * G, n, B)](
            rows.contiguous(),
            cos.contiguous(),
            sin.contiguous(),
            places.contiguous(),
            columns.contiguous(),
            query,
            key,
            value,
            n,
            cos.shape[1],
            *lines(key),
            *lines(value),
            HEADS=heads,
            GROUPS=G,
            D=D,
            BLOCK_D=triton.next_power_of_2(D),
            num_warps=1,
        )
    return query.transpose(1, 2)
