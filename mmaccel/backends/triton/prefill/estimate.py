"""Triton kernels that reduce the attention of the last queries (`ops.lines`), and the functions that launch them, with the
operators' arguments.

Weights are reduced tile by tile and never stored: one pass over the keys finds each query's log-sum-exp, a second recomputes
the weights and sums them. Each sum is made by one program in a fixed order, so results are deterministic. For strided (grid)
heads one program processes the keys of one residue class, so that sums need no exchange; a second kernel compares the
classes of a head.
"""

# mypy: ignore-errors

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from mmaccel.backends.ops import operator as operators
from mmaccel.backends.triton.launch_args import row_strides

SPLITS = 64  # most pieces into which the keys are cut, in the first pass
LEAST_PIECE = 1024  # keys of a piece, at least
LINES = 64  # columns and diagonals of a program; gathers of longer rows spill registers
BEYOND = tl.constexpr(2**31 - 1)  # no place is as far
KEYS = 64  # keys of a tile: sums over the queries are kept for each of them, in registers
# Depth of the pipeline of loads: places come before the keys that lie there, and with 4 no key comes ahead of its tile.
STAGES = 5
# Keys of a class that are looked at together to find how many every query sees.
COUNTED = tl.constexpr(1024)
PHASES = 32  # classes of a stride that a program looks at together
MEMBERS = 64  # members of each of these classes that it looks at together


@triton.jit
def _load_queries(query, b, h, strides, L, D, BLOCK_L: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load the queries of one head, [BLOCK_L, BLOCK_D]."""
    r, d = tl.arange(0, BLOCK_L), tl.arange(0, BLOCK_D)
    at = query + b.to(tl.int64) * strides[0] + h.to(tl.int64) * strides[1]
    at += (r.to(tl.int64) * strides[2])[:, None] + (d * strides[3])[None, :]
    return tl.load(at, mask=(r < L)[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def _tile_scores(
    q, key, row, place, there, b, g, strides, n, D,
    GATHERED: tl.constexpr, PRECISION: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Dot products [BLOCK_L, BLOCK_N] of queries q and the keys at positions `place`, masked by `there`."""
    d = tl.arange(0, BLOCK_D)
    source = place.to(tl.int64)
    if GATHERED:
        source = tl.load(row + b.to(tl.int64) * n + place, mask=there, other=0).to(tl.int64)
    at = key + b.to(tl.int64) * strides[0] + g.to(tl.int64) * strides[1]
    at += (source * strides[2])[None, :] + (d * strides[3])[:, None]
    k = tl.load(at, mask=there[None, :] & (d < D)[:, None], other=0.0)
    return tl.dot(q, k, input_precision=PRECISION)


@triton.jit
def _tile_weights(score, total, seen, scale):
    """Softmax weights [BLOCK_L, BLOCK_N] where `seen`, from scores and log-sum-exps `total` [BLOCK_L] (base 2)."""
    seen = seen & (total > float("-inf"))[:, None]
    return tl.where(seen, tl.math.exp2(score * scale - total[:, None]), 0.0)


@triton.jit
def _load_totals(total, b, h, H, L, BLOCK_L: tl.constexpr):
    """Load the log-sum-exps of one head, converted to base 2: [BLOCK_L]."""
    r = tl.arange(0, BLOCK_L)
    found = tl.load(total + (b * H + h) * L + r, mask=r < L, other=float("-inf"))
    return found * 1.4426950408889634


@triton.jit(do_not_specialize=["n", "piece"])
def _totals_kernel(
    query, key, row, at, out, query_strides, key_strides, n, piece, H, L, scale,
    GROUP: tl.constexpr, D: tl.constexpr, GATHERED: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_L: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Log-sum-exps (base 2) of each query over pieces of the keys, out [splits, B, H, L]; -inf for none."""
    b, h = tl.program_id(0) // H, tl.program_id(0) % H
    r = tl.arange(0, BLOCK_L)
    q = _load_queries(query, b, h, query_strides, L, D, BLOCK_L, BLOCK_D)
    place_of = tl.load(at + b * L + r, mask=r < L, other=-1).to(tl.int32)
    begin = tl.program_id(1) * piece
    end = tl.minimum(tl.minimum(begin + piece, n), tl.max(place_of, 0) + 1)
    peak = tl.full([BLOCK_L], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_L], tl.float32)
    # What every query sees needs no test.
    least = tl.min(tl.where(r < L, place_of, end), 0)
    whole = begin + tl.maximum(tl.minimum(end, least + 1) - begin, 0) // BLOCK_N * BLOCK_N
    for first in range(begin, whole, BLOCK_N):
        place = first + tl.arange(0, BLOCK_N)
        score = _tile_scores(
            q, key, row, place, place < n, b, h // GROUP, key_strides, n, D, GATHERED, PRECISION, BLOCK_D
        )
        top = tl.maximum(peak, tl.max(score, 1) * scale)
        part = tl.sum(tl.math.exp2(score * scale - top[:, None]), 1)
        total = total * tl.math.exp2(peak - top) + part
        peak = top
    for first in range(whole, end, BLOCK_N):
        place = first + tl.arange(0, BLOCK_N)
        score = _tile_scores(
            q, key, row, place, place < end, b, h // GROUP, key_strides, n, D, GATHERED, PRECISION, BLOCK_D
        )
        seen = (place[None, :] <= place_of[:, None]) & (place < end)[None, :]
        score = tl.where(seen, score * scale, float("-inf"))
        top = tl.maximum(peak, tl.max(score, 1))
        floor = tl.where(top == float("-inf"), 0.0, top)
        total = total * tl.math.exp2(peak - floor) + tl.sum(tl.math.exp2(score - floor[:, None]), 1)
        peak = top
    found = tl.where(total > 0, peak + tl.log2(tl.where(total > 0, total, 1.0)), float("-inf"))
    tl.store(out + (tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)) * L + r, found, mask=r < L)


@triton.jit(do_not_specialize=["splits"])
def merge_kernel(part, out, rows, splits, BLOCK: tl.constexpr, SPLITS: tl.constexpr):
    """Merge log-sum-exps of pieces, part [splits, rows] (base 2), to out [rows] (natural)."""
    at, s = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, SPLITS)
    some = (s < splits)[:, None] & (at < rows)[None, :]
    found = tl.load(part + s[:, None] * rows + at[None, :], mask=some, other=float("-inf"))
    top = tl.max(found, 0)
    floor = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.math.exp2(found - floor[None, :]), 0)
    lse = tl.where(total > 0, floor + tl.log2(tl.where(total > 0, total, 1.0)), float("-inf"))
    tl.store(out + at, lse * 0.6931471805599453, mask=at < rows)


@triton.jit(do_not_specialize=["n"])
def _lines_kernel(
    query, key, row, at, total, columns, diagonals, query_strides, key_strides, n, H, L, scale,
    GROUP: tl.constexpr, MEMBERS: tl.constexpr, D: tl.constexpr, GATHERED: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Sum attention weights over BLOCK_N columns and as many diagonals, averaged over MEMBERS heads: [B, H / MEMBERS, n].

    Queries at positions within a run of BLOCK_N cross these diagonals in 2 * BLOCK_N keys, in one round per run. In a tile
    of weights a diagonal shifts by one from query to query, which a gather undoes.
    """
    b, one = tl.program_id(0) // (H // MEMBERS), tl.program_id(0) % (H // MEMBERS)
    r, c = tl.arange(0, BLOCK_L), tl.arange(0, BLOCK_N)
    place_of = tl.load(at + b * L + r, mask=r < L, other=-1).to(tl.int32)
    last = tl.max(place_of, 0)
    line = tl.program_id(1) * BLOCK_N + c
    column = tl.zeros([BLOCK_N], tl.float32)
    diagonal = tl.zeros([BLOCK_N], tl.float32)
    if tl.program_id(1) * BLOCK_N <= last:
        for member in range(MEMBERS):
            h = one * MEMBERS + member
            q = _load_queries(query, b, h, query_strides, L, D, BLOCK_L, BLOCK_D)
            lse = _load_totals(total, b, h, H, L, BLOCK_L)
            there = line < n
            score = _tile_scores(
                q, key, row, line, there, b, h // GROUP, key_strides, n, D, GATHERED, PRECISION, BLOCK_D
            )
            seen = (line[None, :] <= place_of[:, None]) & there[None, :]
            column += tl.sum(_tile_weights(score, lse, seen, scale), 0)
            base = tl.min(tl.where(place_of >= 0, place_of, BEYOND), 0)
            while base < BEYOND:
                mine = (place_of >= base) & (place_of - base < BLOCK_N)
                for half in tl.static_range(2):
                    # The key of diagonal line[c] of a query at `base` is at base - line[c].
                    first = base - tl.program_id(1) * BLOCK_N + (half - 1) * BLOCK_N + 1
                    place = first + c
                    there = (place >= 0) & (place < n)
                    score = _tile_scores(
                        q, key, row, place, there, b, h // GROUP, key_strides, n, D, GATHERED, PRECISION,
                        BLOCK_D,
                    )  # fmt: skip
                    seen = mine[:, None] & there[None, :] & (place[None, :] <= place_of[:, None])
                    weight = _tile_weights(score, lse, seen, scale)
                    source = place_of[:, None] - line[None, :] - first
                    inside = mine[:, None] & (source >= 0) & (source < BLOCK_N)
                    moved = tl.gather(weight, tl.where(inside, source, 0), 1)
                    diagonal += tl.sum(tl.where(inside, moved, 0.0), 0)
                base = tl.min(tl.where(place_of - base >= BLOCK_N, place_of, BEYOND), 0)
    out = tl.program_id(0).to(tl.int64) * n + line
    tl.store(columns + out, column / MEMBERS, mask=line < n)
    tl.store(diagonals + out, diagonal / MEMBERS, mask=line < n)


def _tensor_strides(t):
    """Strides of all four dimensions of t [B, H, n, D] as kernel arguments."""
    return (*row_strides(t), t.stride(3))


def _kernel_constants(query, key, row):
    """Compile-time (constexpr) arguments of the kernels in this file; `row` is None if keys are adjacent."""
    L, D = query.shape[2:]
    wide = query.dtype == torch.float32
    return dict(
        GROUP=query.shape[1] // key.shape[1],
        D=D,
        GATHERED=row is not None,
        PRECISION="ieee" if wide else "tf32",
        BLOCK_L=max(16, triton.next_power_of_2(L)),
        BLOCK_N=64 if wide or L > 64 or D > 128 else 128,
        BLOCK_D=max(16, triton.next_power_of_2(D)),
        num_warps=4,
    )


def rowwise_logsumexp(query, key, row, at, width):
    """Launch `ops.lines.rowwise_logsumexp`: each query's log-sum-exp [B, H, L], over up to `SPLITS` pieces of the keys,
    which a second kernel merges."""
    B, H, L, D = query.shape
    shape, at = _kernel_constants(query, key, row), at.contiguous()
    piece = max(LEAST_PIECE, -(-width // SPLITS))
    piece += -piece % shape["BLOCK_N"]
    splits = max(1, -(-width // piece))
    part = query.new_empty(splits, B * H * L, dtype=torch.float32)
    out = query.new_empty(B, H, L, dtype=torch.float32)
    scale = D**-0.5 * math.log2(math.e)
    row_bytes = shape["BLOCK_D"] * query.element_size()
    here = operators.find_device_limits(query.device)
    stages = here.max_pipeline_stages(3, shape["BLOCK_N"] * row_bytes, shape["BLOCK_L"] * row_bytes)
    _totals_kernel[(B * H, splits)](
        query, key, at if row is None else row, at, part, _tensor_strides(query), _tensor_strides(key),
        width, piece, H, L, scale, **shape, num_stages=stages,
    )  # fmt: skip
    merge_kernel[(triton.cdiv(B * H * L, 64),)](part, out, B * H * L, splits, BLOCK=64, SPLITS=SPLITS)
    return out


def line_weights(query, key, row, at, total, width, pooled):
    """Launch `ops.lines.line_weights`: attention weight of columns and diagonals, [B, h, n] each; a program sums `LINES` of
    both."""
    B, H, L, D = query.shape
    shape, at = _kernel_constants(query, key, row), at.contiguous()
    # Those of some heads of a batch may be a view.
    total = rowwise_logsumexp(query, key, row, at, width) if total is None else total.contiguous()
    shape["BLOCK_N"] = LINES
    members = shape["GROUP"] if pooled else 1
    columns = query.new_empty(B, H // members, width, dtype=torch.float32)
    diagonals = torch.empty_like(columns)
    _lines_kernel[(B * H // members, triton.cdiv(width, shape["BLOCK_N"]))](
        query, key, at if row is None else row, at, total, columns, diagonals, _tensor_strides(query), _tensor_strides(key),
        width, H, L, D**-0.5 * math.log2(math.e), MEMBERS=members, **shape, num_stages=1,
    )  # fmt: skip
    return columns, diagonals


@triton.jit
def _load_query_totals(query, total, b, h, strides, H, L, D, BLOCK_L: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load the queries [BLOCK_D, BLOCK_L] of one head and their log-sum-exps; these are inf for absent queries, so that
    their weights are 0."""
    q = tl.trans(_load_queries(query, b, h, strides, L, D, BLOCK_L, BLOCK_D))
    lse = _load_totals(total, b, h, H, L, BLOCK_L)
    return q, tl.where(lse == float("-inf"), float("inf"), lse)


@triton.jit(do_not_specialize=["n", "C", "H", "L"])
def _classes_kernel(
    query, key, row, at, total, order, start, given, spread, lines, query_strides, key_strides, n, C, H, L,
    scale,
    SCORE: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr, MEMBERS: tl.constexpr, D: tl.constexpr,
    GATHERED: tl.constexpr, PRECISION: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Sum the attention of one head (or the mean of MEMBERS heads) over the keys of one residue class: given [B, h, L, C],
    each query's weight on the class.

    lines [B, h, 3, C]: sum, maximum and number of column weights; spread [B, h, L, C], under ROWS: the class's part of each
    query's entropy. Keys are the rows of a tile, so that a column is summed within few threads; sums per query are
    accumulated key by key and reduced at the end.
    """
    heads = H // MEMBERS
    b, one, mine = tl.program_id(0) // heads, tl.program_id(0) % heads, tl.program_id(1)
    r = tl.arange(0, BLOCK_L)
    place_of = tl.load(at + b * L + r, mask=r < L, other=-1).to(tl.int32)
    last = tl.max(place_of, 0)
    least = tl.min(tl.where(r < L, place_of, last), 0)
    begin, end = tl.load(start + b * (C + 1) + mine), tl.load(start + b * (C + 1) + mine + 1)
    q, lse = _load_query_totals(query, total, b, one * MEMBERS, query_strides, H, L, D, BLOCK_L, BLOCK_D)
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
                    qs, level = _load_query_totals(
                        query, total, b, h, query_strides, H, L, D, BLOCK_L, BLOCK_D
                    )
                    weight += tl.math.exp2(tl.dot(k, qs, input_precision=PRECISION) * scale - level[None, :])
                weight = weight / MEMBERS
            if not TESTED:
                of_keys += weight
                query_counts = L.to(tl.float32)
            else:
                seen = there[:, None] & (place[:, None] <= place_of[None, :])
                weight = tl.where(seen, weight, 0.0)
                of_keys += tl.where(place[:, None] < place_of[None, :], weight, 0.0)
                query_counts = tl.maximum(tl.sum(seen.to(tl.float32), 1), 1.0)
            if ROWS:
                entropy -= weight * tl.log(tl.where(weight > 0, weight, 1.0))
            value = tl.sum(weight, 1) / query_counts
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
def _phases_kernel(
    given, lines, own, members, stride, line, shift, heads, room, C, L,
    SCORE: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Choose the lines of a strided (grid) pattern: line [B, h], the class of columns with the highest score, and shift [B,
    h], the phase of slashes with the highest score.

    A class is a key's residue modulo the stride; a phase is the query's class minus the key's, modulo the stride. given [B *
    h, L, C]: weight of each of L queries on each class; lines [B * h, 3, C]: sum, maximum and number of column weights of a
    class; own [B, L]: class of each query; stride [B].
    """
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


def choose_grid_lines(query, key, row, at, total, width, pooled, pairing, score, rows):
    """Launch `ops.lines.choose_grid_lines` (best column class and slash phase of grid heads): one kernel sums over each
    class, one compares the classes."""
    order, start, own, members, stride = pairing
    B, H, L, D = query.shape
    C = start.shape[1] - 1
    shape, at = _kernel_constants(query, key, row), at.contiguous()
    # Those of some heads of a batch may be a view.
    total = rowwise_logsumexp(query, key, row, at, width) if total is None else total.contiguous()
    members_of = shape["GROUP"] if pooled else 1
    shape["BLOCK_N"], shape["num_warps"] = KEYS, 4 if shape["BLOCK_L"] <= 64 else 8
    stages = STAGES if query.element_size() < 4 and D <= 128 else 2
    heads = H // members_of
    given = query.new_empty(B, heads, L, C, dtype=torch.float32)
    spread = torch.empty_like(given) if rows else given
    lines = query.new_empty(B, heads, 3, C, dtype=torch.float32)
    line, shift = (query.new_empty(B, heads, 1, dtype=torch.int64) for _ in range(2))
    _classes_kernel[(B * heads, C)](
        query, key, at if row is None else row, at, total, order, start, given, spread, lines,
        _tensor_strides(query), _tensor_strides(key), order.shape[1], C, H, L, D**-0.5 * math.log2(math.e),
        SCORE=score, ROWS=rows, MEMBERS=members_of, **shape, num_stages=stages,
    )  # fmt: skip
    _phases_kernel[(B * heads,)](
        given, lines, own, members, stride, line, shift, heads, members.shape[1], C, L,
        SCORE=score, BLOCK_L=16, BLOCK_C=triton.next_power_of_2(C), num_warps=8,
    )  # fmt: skip
    return line, shift, spread.sum(-1) if rows else query.new_empty(0, dtype=torch.float32)


@triton.jit(do_not_specialize=["kinds", "heads", "width", "low"])
def _strides_kernel(
    value, at, out, kinds, heads, H, width, low,
    SCORE: tl.constexpr, PHASES: tl.constexpr, MEMBERS: tl.constexpr,
):  # fmt: skip
    """out [heads, strides]: best score of a residue class for one stride, summed over kinds; value [kinds, heads, n]."""
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


def score_strides(value, at, low, high, score):
    """Launch `ops.lines.score_strides`: the best residue class's score for each stride, [B, H, strides]; a program per
    stride and head."""
    kinds, B, H, width = value.shape
    out = torch.empty(B, H, high - low + 1, dtype=torch.float32, device=value.device)
    _strides_kernel[(high - low + 1, B * H)](
        value.contiguous(), at.contiguous(), out, kinds, B * H, H, width, low,
        SCORE=score, PHASES=PHASES, MEMBERS=MEMBERS,
    )  # fmt: skip
    return out
