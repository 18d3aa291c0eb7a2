"""Grid heads: their phases and strides out of what the last queries attend to (`class_phases`, `stride_scores`), and queries
and keys in the order (class, position) that a head's phases turn (`turned_classes`).

For the phases one program goes over the keys of one class, so that sums need no exchange; a second kernel compares the
classes of a head.
"""

# mypy: ignore-errors

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmaccel.backends.triton.prefill.estimate import load_queries, load_totals, row_totals, shape_of, strides

KEYS = 64
"""Keys of a tile: sums over the queries are kept for each of them, in registers."""

STAGES = 5
"""Depth of the pipeline of loads: places come before the keys that lie there, and with 4 no key comes ahead of its tile."""

COUNTED = tl.constexpr(1024)
"""Keys of a class that are looked at together to find how many every query sees."""

PHASES = 32
"""Classes of a stride that a program looks at together."""

MEMBERS = 64
"""Members of each of these classes that it looks at together."""

TILE = 1024
"""Rows that a program of `turned_kernel` places."""


@triton.jit
def load_told(query, total, b, h, strides, H, L, D, BLOCK_L: tl.constexpr, BLOCK_D: tl.constexpr):
    """The queries of one head [BLOCK_D, BLOCK_L] and their log-sum-exps, such that nothing weighs where there is none."""
    q = tl.trans(load_queries(query, b, h, strides, L, D, BLOCK_L, BLOCK_D))
    lse = load_totals(total, b, h, H, L, BLOCK_L)
    return q, tl.where(lse == float("-inf"), float("inf"), lse)


@triton.jit(do_not_specialize=["n", "C", "H", "L"])
def classes_kernel(
    query, key, row, at, total, order, start, given, spread, lines, query_strides, key_strides, n, C, H, L,
    scale,
    SCORE: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr, MEMBERS: tl.constexpr, D: tl.constexpr,
    GATHERED: tl.constexpr, PRECISION: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One class of one head, or of the mean of MEMBERS: given [B, h, L, C], what each query gives to the keys before it.

    lines [B, h, 3, C]: of what the columns count for the sum and the largest, and their number; spread [B, h, L, C], with
    ROWS: the part of the class in the entropy of each query's weights. Keys are the rows of a tile, so that what a column
    counts for is summed within few threads; sums of queries are added key by key, and put together at the end.
    """
    heads = H // MEMBERS
    b, one, mine = tl.program_id(0) // heads, tl.program_id(0) % heads, tl.program_id(1)
    r = tl.arange(0, BLOCK_L)
    place_of = tl.load(at + b * L + r, mask=r < L, other=-1).to(tl.int32)
    last = tl.max(place_of, 0)
    least = tl.min(tl.where(r < L, place_of, last), 0)
    begin, end = tl.load(start + b * (C + 1) + mine), tl.load(start + b * (C + 1) + mine + 1)
    q, lse = load_told(query, total, b, one * MEMBERS, query_strides, H, L, D, BLOCK_L, BLOCK_D)
    before = tl.zeros([COUNTED], tl.int32)
    for first in range(begin, end, COUNTED):
        member = first + tl.arange(0, COUNTED)
        place = tl.load(order + b.to(tl.int64) * n + member, mask=member < end, other=0)
        before += ((member < end) & (place < least)).to(tl.int32)
    whole = begin + tl.sum(before, 0) // BLOCK_N * BLOCK_N

    of_keys = tl.zeros([BLOCK_N, BLOCK_L], tl.float32)
    entropy = tl.zeros([BLOCK_N, BLOCK_L if ROWS else 1], tl.float32)
    sums = tl.zeros([BLOCK_N], tl.float32)
    largest = tl.full([BLOCK_N], float("-inf"), tl.float32)
    number = tl.zeros([BLOCK_N], tl.float32)
    d = tl.arange(0, BLOCK_D)
    # Tiles of which all keys are there and every query sees them before it, then those that are tested.
    for TESTED in tl.static_range(2):
        for first in range(whole if TESTED else begin, end if TESTED else whole, BLOCK_N):
            member = first + tl.arange(0, BLOCK_N)
            there = member < end
            of_class = order + b.to(tl.int64) * n + member
            place = tl.load(of_class, mask=there, other=0) if TESTED else tl.load(of_class)
            source = place.to(tl.int64)
            if GATHERED:
                source = tl.load(row + b.to(tl.int64) * n + place)
            group = one if MEMBERS > 1 else one // GROUP
            keys_at = key + b.to(tl.int64) * key_strides[0] + group.to(tl.int64) * key_strides[1]
            keys_at += (source * key_strides[2])[:, None] + (d * key_strides[3])[None, :]
            if TESTED:
                k = tl.load(keys_at, mask=there[:, None] & (d < D)[None, :], other=0.0)
            else:
                k = tl.load(keys_at) if BLOCK_D == D else tl.load(keys_at, mask=(d < D)[None, :], other=0.0)
            if MEMBERS == 1:
                weight = tl.math.exp2(tl.dot(k, q, input_precision=PRECISION) * scale - lse[None, :])
            else:
                weight = tl.zeros([BLOCK_N, BLOCK_L], tl.float32)
                for other in range(MEMBERS):
                    h = one * MEMBERS + other
                    qs, level = load_told(query, total, b, h, query_strides, H, L, D, BLOCK_L, BLOCK_D)
                    weight += tl.math.exp2(tl.dot(k, qs, input_precision=PRECISION) * scale - level[None, :])
                weight = weight / MEMBERS
            if not TESTED:
                of_keys += weight
                askers = L.to(tl.float32)
            else:
                seen = there[:, None] & (place[:, None] <= place_of[None, :])
                weight = tl.where(seen, weight, 0.0)
                of_keys += tl.where(place[:, None] < place_of[None, :], weight, 0.0)
                askers = tl.maximum(tl.sum(seen.to(tl.float32), 1), 1.0)
            if ROWS:
                entropy -= weight * tl.log(tl.where(weight > 0, weight, 1.0))
            value = tl.sum(weight, 1) / askers
            if SCORE == "contrast":
                # From what an even spread counts for, so that nothing is lost where all are near it.
                value = tl.log((value * (last + 1) + 0.1) / 1.1)
            if not TESTED:
                sums += value
                largest = tl.maximum(largest, value)
                number += 1.0
            else:
                asked = there & (place <= last)
                sums += tl.where(asked, value, 0.0)
                largest = tl.maximum(largest, tl.where(asked, value, float("-inf")))
                number += asked.to(tl.float32)
    out = tl.program_id(0).to(tl.int64) * L * C + r * C + mine
    tl.store(given + out, tl.sum(of_keys, 0), mask=r < L)
    if ROWS:
        tl.store(spread + out, tl.sum(entropy, 0), mask=r < L)
    told = lines + tl.program_id(0) * 3 * C + mine
    tl.store(told, tl.sum(sums, 0))
    tl.store(told + C, tl.max(largest, 0))
    tl.store(told + 2 * C, tl.sum(number, 0))


@triton.jit(do_not_specialize=["heads", "room", "C"])
def phases_kernel(
    given, lines, own, members, stride, line, shift, heads, room, C, L,
    SCORE: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
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
    B, H, L, D = query.shape
    C = start.shape[1] - 1
    shape, at = shape_of(query, key, row), at.contiguous()
    if total is None:
        total = row_totals(query, key, row, at, width)
    members_of = shape["GROUP"] if pooled else 1
    shape["BLOCK_N"], shape["num_warps"] = KEYS, 4 if shape["BLOCK_L"] <= 64 else 8
    stages = STAGES if query.element_size() < 4 and D <= 128 else 2
    heads = H // members_of
    given = query.new_empty(B, heads, L, C, dtype=torch.float32)
    spread = torch.empty_like(given) if rows else given
    lines = query.new_empty(B, heads, 3, C, dtype=torch.float32)
    line, shift = (query.new_empty(B, heads, 1, dtype=torch.int64) for _ in range(2))
    classes_kernel[(B * heads, C)](
        query, key, at if row is None else row, at, total, order, start, given, spread, lines,
        strides(query), strides(key), order.shape[1], C, H, L, D**-0.5 * math.log2(math.e),
        SCORE=score, ROWS=rows, MEMBERS=members_of, **shape, num_stages=stages,
    )  # fmt: skip
    phases_kernel[(B * heads,)](
        given, lines, own, members, stride, line, shift, heads, members.shape[1], C, L,
        SCORE=score, BLOCK_L=16, BLOCK_C=triton.next_power_of_2(C), num_warps=8,
    )  # fmt: skip
    return line, shift, spread.sum(-1) if rows else query.new_empty(0, dtype=torch.float32)


@triton.jit(do_not_specialize=["kinds", "heads", "width", "low"])
def strides_kernel(
    value, at, out, kinds, heads, H, width, low,
    SCORE: tl.constexpr, PHASES: tl.constexpr, MEMBERS: tl.constexpr,
):  # fmt: skip
    """out [heads, strides]: the heaviest class of one stride, summed over the kinds of line; value [kinds, heads, width]."""
    head, stride = tl.program_id(1), low + tl.program_id(0)
    last = tl.load(at + head // H).to(tl.int32)
    end = tl.minimum(last + 1, width)
    p, m = tl.arange(0, PHASES), tl.arange(0, MEMBERS)
    whole = tl.zeros([], tl.float32)
    for kind in range(kinds):
        lines = value + (kind * heads + head).to(tl.int64) * width
        best = tl.full([], float("-inf"), tl.float32)
        for first in range(0, stride, PHASES):
            phase = first + p
            total = tl.zeros([PHASES], tl.float32)
            largest = tl.full([PHASES], float("-inf"), tl.float32)
            number = tl.zeros([PHASES], tl.float32)
            for begin in range(0, end, MEMBERS * stride):
                place = begin + m[:, None] * stride + phase[None, :]
                there = (place < end) & (phase < stride)[None, :]
                found = tl.load(lines + place, mask=there, other=0.0)
                total += tl.sum(found, 0)
                largest = tl.maximum(largest, tl.max(tl.where(there, found, float("-inf")), 0))
                number += tl.sum(there.to(tl.float32), 0)
            if SCORE != "sum":
                rest = tl.maximum(number - 1, 1.0)
                rest = tl.sqrt(rest) if SCORE == "contrast" else rest
                total = tl.where(number >= 2, (total - largest) / rest, float("-inf"))
            best = tl.maximum(best, tl.max(tl.where(phase < stride, total, float("-inf")), 0))
        whole += best
    tl.store(out + head * tl.num_programs(0) + tl.program_id(0), whole)


def stride_scores(value: Tensor, at: Tensor, low: int, high: int, score: str) -> Tensor:
    kinds, B, H, width = value.shape
    out = torch.empty(B, H, high - low + 1, dtype=torch.float32, device=value.device)
    strides_kernel[(high - low + 1, B * H)](
        value.contiguous(), at.contiguous(), out, kinds, B * H, H, width, low,
        SCORE=score, PHASES=PHASES, MEMBERS=MEMBERS,
    )  # fmt: skip
    return out


@triton.jit
def _not_after(place, low, high, bound, steps):
    """Where the first of the ascending `place` in low .. high lies that is greater than `bound`."""
    for _ in range(steps):
        middle = (low + high) // 2
        open_ = low < high
        below = open_ & (tl.load(place + middle, mask=open_, other=0) <= bound)
        high = tl.where(open_ & (below == 0), middle, high)
        low = tl.where(below, middle + 1, low)
    return low


@triton.jit(do_not_specialize=["P", "N", "V", "E", "C", "H", "room", "steps"])
def turned_kernel(
    q_row, q_at, q_class, q_begin, k_row, k_place, k_begin, stride, line, shift, dense, out_row, slash_at,
    line_at, line_row, line_place, dense_row, dense_at, P, N, V, E, C, H, room, steps,
    VERTICAL: tl.constexpr, HORIZONTAL: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Rows, places and turned rows of one head; see `index.turned_classes`. No class has 2 ** `steps` keys."""
    head = tl.program_id(1).to(tl.int64)
    b = head // H
    q_begin += b * (C + 1)
    k_begin += b * (C + 1)
    s = tl.load(stride + b).to(tl.int32)
    mine, phase = tl.load(line + head).to(tl.int32), tl.load(shift + head).to(tl.int32)
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    wide = slash_at.dtype.element_ty

    served = tl.load(q_begin + s)
    here = i < served
    source = i + tl.load(q_begin + phase)
    source = tl.where(source >= served, source - served, source)
    row = tl.load(q_row + b * P + source, mask=here, other=-1)
    at = tl.load(q_at + b * P + source, mask=here, other=-1)
    own = tl.load(q_class + b * P + source, mask=here, other=0)
    pair = tl.where(own >= phase, own - phase, own - phase + s)
    begin, end = tl.load(k_begin + pair), tl.load(k_begin + pair + 1)
    led = here
    if VERTICAL:
        led = here & (pair != mine)
    rank = _not_after(k_place + b * N, begin, tl.where(led, end, begin), at, steps) - begin - 1
    if HORIZONTAL:
        row = tl.where(own == tl.load(dense + head).to(tl.int32), -1, row)
    there = row >= 0
    tl.store(out_row + head * P + i, row, mask=i < P)
    tl.store(slash_at + head * P + i, tl.where(there, pair.to(wide) * (2 * room) + rank, -1), mask=i < P)
    if VERTICAL:
        begin, end = tl.load(k_begin + mine), tl.load(k_begin + mine + 1)
        source = begin + i
        some = source < end
        row = tl.load(k_row + b * N + source, mask=some, other=-1)
        tl.store(line_row + head * V + i, row, mask=i < V)
        tl.store(line_place + head * V + i, tl.where(some, i, 0).to(wide), mask=i < V)
        low, high = tl.where(here, begin, 0), tl.where(here, end, 0)
        rank = _not_after(k_place + b * N, low, high, at, steps) - begin - 1
        tl.store(line_at + head * P + i, tl.where(there, rank, -1).to(wide), mask=i < P)

    if HORIZONTAL:
        full = tl.load(dense + head)
        source = tl.load(q_begin + full) + i
        some = source < tl.load(q_begin + full + 1)
        row = tl.load(q_row + b * P + source, mask=some, other=-1)
        at = tl.load(q_at + b * P + source, mask=some, other=-1)
        tl.store(dense_row + head * E + i, row, mask=i < E)
        tl.store(dense_at + head * E + i, at, mask=i < E)


def turned_classes(
    queries: Tensor,
    q_begin: Tensor,
    keys: Tensor,
    k_begin: Tensor,
    stride: Tensor,
    line: Tensor,
    shift: Tensor,
    dense: Tensor,
    room: int,
    wide: bool,
    columns: int,
    rows: int,
) -> list[Tensor]:
    _, B, P = queries.shape
    N, H = keys.shape[2], line.shape[1]
    kind = torch.int64 if wide else torch.int32

    def empty(n: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(B, H, n, dtype=dtype, device=keys.device)

    out = [empty(P), empty(P, kind)]
    of_line = [empty(P, kind), empty(columns), empty(columns, kind)] if columns else []
    of_dense = [empty(rows), empty(rows)] if rows else []
    at_line, line_row, line_place = of_line or (out[1], out[0], out[1])
    dense_row, dense_at = of_dense or (out[0], out[0])
    turned_kernel[(triton.cdiv(max(P, columns, rows), TILE), B * H)](
        *queries.unbind(0), q_begin, keys[0], keys[1], k_begin, stride, line, shift, dense,
        out[0], out[1], at_line, line_row, line_place, dense_row, dense_at,
        P, N, columns, rows, k_begin.shape[1] - 1, H, room, room.bit_length(),
        VERTICAL=columns > 0, HORIZONTAL=rows > 0, TILE=TILE,
    )  # fmt: skip
    return out + of_line + of_dense
