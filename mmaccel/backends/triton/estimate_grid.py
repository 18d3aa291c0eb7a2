"""The phases of a grid head, from what the last queries give to each class of keys (`index.class_phases`).

One program goes over the keys of one class, so that sums need no exchange; a second kernel compares the classes of a head.
"""

# mypy: ignore-errors

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmaccel.backends.triton.estimate import (
    load_queries,
    load_totals,
    row_totals,
    shape_of,
    tile_scores,
    tile_weights,
)


@triton.jit(do_not_specialize=["n", "C"])
def classes_kernel(
    query,
    key,
    row,
    at,
    total,
    order,
    start,
    given,
    spread,
    lines,
    query_strides,
    key_strides,
    n,
    C,
    H,
    L,
    scale,
    SCORE: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    MEMBERS: tl.constexpr,
    D: tl.constexpr,
    GATHERED: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One class of one head, or of the mean of MEMBERS: given [B, h, L, C], what each query gives to the keys before it.

    lines [B, h, 3, C]: of what the columns count for the sum and the largest, and their number; spread [B, h, L, C], with
    ROWS: the part of the class in the entropy of each query's weights.
    """
    heads = H // MEMBERS
    b, one, mine = tl.program_id(0) // heads, tl.program_id(0) % heads, tl.program_id(1)
    r = tl.arange(0, BLOCK_L)
    place_of = tl.load(at + b * L + r, mask=r < L, other=-1).to(tl.int32)
    last = tl.max(place_of, 0)
    begin, end = tl.load(start + b * (C + 1) + mine), tl.load(start + b * (C + 1) + mine + 1)
    to_class = tl.zeros([BLOCK_L], tl.float32)
    entropy = tl.zeros([BLOCK_L], tl.float32)
    sums = tl.zeros([BLOCK_N], tl.float32)
    largest = tl.full([BLOCK_N], float("-inf"), tl.float32)
    number = tl.zeros([BLOCK_N], tl.float32)
    if MEMBERS == 1:
        q = load_queries(query, b, one, query_strides, L, D, BLOCK_L, BLOCK_D)
        lse = load_totals(total, b, one, H, L, BLOCK_L)
    for first in range(begin, end, BLOCK_N):
        member = first + tl.arange(0, BLOCK_N)
        there = member < end
        place = tl.load(order + b.to(tl.int64) * n + member, mask=there, other=0)
        seen = there[None, :] & (place[None, :] <= place_of[:, None])
        if MEMBERS == 1:
            score = tile_scores(
                q, key, row, place, there, b, one // GROUP, key_strides, n, D, GATHERED, PRECISION, BLOCK_D
            )
            weight = tile_weights(score, lse, seen, scale)
        else:
            weight = tl.zeros([BLOCK_L, BLOCK_N], tl.float32)
            for other in range(MEMBERS):
                h = one * MEMBERS + other
                q = load_queries(query, b, h, query_strides, L, D, BLOCK_L, BLOCK_D)
                lse = load_totals(total, b, h, H, L, BLOCK_L)
                score = tile_scores(
                    q, key, row, place, there, b, h // GROUP, key_strides, n, D, GATHERED, PRECISION, BLOCK_D
                )
                weight += tile_weights(score, lse, seen, scale)
            weight = weight / MEMBERS
        to_class += tl.sum(tl.where(place[None, :] < place_of[:, None], weight, 0.0), 1)
        if ROWS:
            entropy -= tl.sum(weight * tl.log(tl.where(weight > 0, weight, 1.0)), 1)
        askers = tl.sum(seen.to(tl.float32), 0)
        value = tl.sum(weight, 0) / tl.maximum(askers, 1.0)
        if SCORE == "contrast":
            # From what an even spread counts for, so that nothing is lost where all are near it.
            value = tl.log((value * (last + 1) + 0.1) / 1.1)
        asked = there & (place <= last)
        sums += tl.where(asked, value, 0.0)
        largest = tl.maximum(largest, tl.where(asked, value, float("-inf")))
        number += asked.to(tl.float32)
    out = tl.program_id(0).to(tl.int64) * L * C + r * C + mine
    tl.store(given + out, to_class, mask=r < L)
    if ROWS:
        tl.store(spread + out, entropy, mask=r < L)
    told = lines + tl.program_id(0) * 3 * C + mine
    tl.store(told, tl.sum(sums, 0))
    tl.store(told + C, tl.max(largest, 0))
    tl.store(told + 2 * C, tl.sum(number, 0))


@triton.jit(do_not_specialize=["C"])
def phases_kernel(
    given,
    lines,
    own,
    members,
    stride,
    line,
    shift,
    heads,
    room,
    C,
    L,
    SCORE: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """line and shift [B, h]: the class of the heaviest columns, and the phase of the heaviest slashes."""
    head = tl.program_id(0)
    b = head // heads
    c = tl.arange(0, BLOCK_C)
    s = tl.load(stride + b).to(tl.int32)
    there = c < C
    told = lines + head * 3 * C + c
    total = tl.load(told, mask=there, other=0.0)
    largest = tl.load(told + C, mask=there, other=0.0)
    number = tl.load(told + 2 * C, mask=there, other=0.0)
    value = total
    if SCORE != "sum":
        rest = tl.maximum(number - 1, 1.0)
        value = total - largest
        if SCORE == "contrast":
            # What a line counts for is measured from the mean over all lines; their spread is one for all classes.
            mean = tl.sum(total, 0) / tl.maximum(tl.sum(number, 0), 1.0)
            value = (value - rest * mean) / tl.sqrt(rest)
        else:
            value = value / rest
        value = tl.where(number >= 2, value, float("-inf"))
    value = tl.where(there, value, float("-inf"))
    tl.store(line + head, tl.min(tl.where(value == tl.max(value, 0), c, BLOCK_C), 0).to(tl.int64))

    phase = c < s
    found = tl.zeros([BLOCK_C], tl.float32)
    for first in range(0, L, BLOCK_L):
        r = first + tl.arange(0, BLOCK_L)
        mine = tl.load(own + b * L + r, mask=r < L, other=0).to(tl.int32)
        of = mine[:, None] - c[None, :]
        of = tl.where(of < 0, of + s, of)
        at = given + head.to(tl.int64) * L * C + r[:, None] * C + of
        found += tl.sum(tl.load(at, mask=(r < L)[:, None] & phase[None, :], other=0.0), 0)
    if SCORE != "sum":
        found = found / tl.maximum(tl.load(members + b * room + c, mask=phase & there, other=1.0), 1.0)
    found = tl.where(phase, found, float("-inf"))
    tl.store(shift + head, tl.min(tl.where(found == tl.max(found, 0), c, BLOCK_C), 0).to(tl.int64))


def class_phases(
    query: Tensor,
    key: Tensor,
    row: Tensor | None,
    at: Tensor,
    total: Tensor | None,
    width: int,
    pooled: bool,
    order: Tensor,
    start: Tensor,
    own: Tensor,
    members: Tensor,
    stride: Tensor,
    score: str,
    rows: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `mmaccel.backends.index.class_phases`."""
    B, H, L, D = query.shape
    C = start.shape[1] - 1
    shape, at = shape_of(query, key, row), at.contiguous()
    if total is None:
        total = row_totals(query, key, row, at, width)
    members_of = shape["GROUP"] if pooled else 1
    heads = H // members_of
    given = query.new_empty(B, heads, L, C, dtype=torch.float32)
    spread = torch.empty_like(given) if rows else given
    lines = query.new_empty(B, heads, 3, C, dtype=torch.float32)
    line, shift = (query.new_empty(B, heads, 1, dtype=torch.int64) for _ in range(2))
    with torch.cuda.device_of(query):
        classes_kernel[(B * heads, C)](
            query, key, at if row is None else row, at, total, order, start, given, spread, lines,
            query.stride(), key.stride(), order.shape[1], C, H, L, D**-0.5 * math.log2(math.e),
            SCORE=score, ROWS=rows, MEMBERS=members_of, **shape, num_stages=2,
        )  # fmt: skip
        phases_kernel[(B * heads,)](
            given, lines, own, members, stride, line, shift, heads, members.shape[1], C, L,
            SCORE=score, BLOCK_L=16, BLOCK_C=triton.next_power_of_2(C), num_warps=8,
        )  # fmt: skip
    return line, shift, spread.sum(-1) if rows else query.new_empty(0, dtype=torch.float32)
