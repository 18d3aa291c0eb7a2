"""Triton kernels of a decode step, and the functions that launch them, with the arguments of the operators in
`ops.layer_ops`.

Attention is split over the cache as in flash-decoding (Dao et al. 2023): the cached tokens of each sequence and key/value
head are divided into as many pieces as keep the device busy, each program reduces one piece, a second kernel merges them.
The length of pieces is computed on the device from the new rows' columns, so that the launch is the same at every length.

A linear layer on a few rows is bound by reading its weights, so nothing else may take time: the same program also applies
gate and residual and computes the inputs of the next RMSNorm; the first norm is a kernel of 2 us. The program that computes
a head's queries, keys or values also applies RoPE and writes the cache: it computes both halves of each rotated pair, so it
needs no other program. As a kernel of its own RoPE moves 10 KB and takes as long as reading 10 MB of weights.

On an H200 a step of a 7B model after 25,088 tokens takes 4.05 ms, 1.12 times the time of reading weights and cache. Slower
were larger tiles, the norm in every program, cuBLAS, programmatic dependent launch, one launch between attentions
(lab/LOG.md).
"""

# mypy: ignore-errors

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmaccel.backends.ops import operator as operators
from mmaccel.backends.triton.launch_args import row_strides
from mmaccel.backends.triton.pointwise import rms_norm_kernel

LEAST = 2  # tiles of keys that a piece has at least: shorter ones cost more to merge than they save
# Programs of a multiprocessor at work together; with their loads under way memory is read at its rate.
RESIDENT = 2
MERGED = 32  # elements of a row that one program merges, all pieces at once
HELD = 2048  # parts of sums of squares that a program holds while it makes a product
# Inputs at a time and steps of a product under way, the most first.
UNDER_WAY = ((512, 4), (512, 3), (256, 4))
# Rows up to which small tiles of weights are read fastest; of more rows each tile is to serve more outputs.
FEW = 16


@triton.jit
def _pieces(columns, b, n, SPLITS, BLOCK_N: tl.constexpr, LEAST: tl.constexpr):
    """What sequence `b` holds: its columns, the tiles they fill, the pieces these are dealt to."""
    length = tl.load(columns + b * n + n - 1).to(tl.int32) + 1
    tiles = tl.cdiv(length, BLOCK_N)
    return length, tiles, tl.minimum(SPLITS, tl.cdiv(tiles, LEAST))


@triton.jit
def _begins(table, b, which: tl.constexpr, head, lines, mask, EACH: tl.constexpr):
    """Where the keys (`which` 0) or values (1) of a head of sequence `b` begin. If EACH is not 0, every sequence has a cache
    of its own, whose place the table tells in multiples of EACH elements (`ops.layer_ops.SeparateKVCaches`)."""
    if EACH:
        at = tl.where(mask, b, 0) * 4 + 2 * which
        begin = tl.load(table + at) + head * tl.load(table + at + 1)
        # Loads are wide only from places that are known to be even.
        begin = tl.multiple_of(begin, EACH)
    else:
        begin = b * lines[0] + head * lines[1]
    return begin


@triton.jit(do_not_specialize=["n", "biased", "bias_line"])
def flash_decode_kernel(
    query, key, value, columns, sees, bias, table, part, lse, scale, n, biased, bias_line, query_lines,
    key_lines, value_lines,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, LEAST: tl.constexpr, TREE: tl.constexpr,
    BIAS: tl.constexpr, WINDOW: tl.constexpr, EACH: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Compute attention of the new tokens over one piece of the KV cache, for the query heads of one key/value head.

    Row r of a program is head r % GROUP of new token r // GROUP. BIAS: `bias` is added to the scores of the first `biased`
    cache slots; that of the next sequence begins `bias_line` elements on. TREE: each number in `sees` has a bit for each of
    the newest WINDOW slots, set if the token sees that slot. EACH, if not 0: each sequence has its own cache, found by
    `table`. query_lines, key_lines, value_lines: strides (`row_strides`). part [B, H, n, SPLITS, D] and lse [B, H, n,
    SPLITS] (base 2) float32: the results of the pieces, 0 and -inf for rows that see nothing of a piece.
    """
    split = tl.program_id(0)
    g, b = tl.program_id(1) % GROUPS, tl.program_id(1) // GROUPS
    length, tiles, used = _pieces(columns, b, n, SPLITS, BLOCK_N, LEAST)
    if split >= used:
        return
    first, last = split * tiles // used, (split + 1) * tiles // used
    r = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    i, head = r // GROUP, g * GROUP + r % GROUP
    mine = i < n
    d, k = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    wide = d < D
    source = query + b.to(tl.int64) * query_lines[0] + (head * query_lines[1] + i * query_lines[2])[:, None]
    q = tl.load(source + d[None, :], mask=mine[:, None] & wide[None, :], other=0.0)
    own = tl.load(columns + b * n + i, mask=mine, other=-1).to(tl.int32)
    key += _begins(table, b.to(tl.int64), 0, g.to(tl.int64), key_lines, True, EACH)
    value += _begins(table, b.to(tl.int64), 1, g.to(tl.int64), value_lines, True, EACH)
    bits = tl.load(sees + i, mask=mine & TREE, other=0)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for tile in tl.range(first, last, num_stages=STAGES):
        at = tile * BLOCK_N + k
        held = at < length
        inside = held[None, :] & wide[:, None]
        keys = tl.load(key + (at * key_lines[2])[None, :] + d[:, None], mask=inside, other=0.0)
        score = tl.dot(q, keys, input_precision=PRECISION) * (scale * 1.4426950408889634)
        if BIAS:  # noqa: SIM102 - what is constant leaves no trace
            if tile * BLOCK_N < biased:
                more = tl.load(bias + b * bias_line + at, mask=at < biased, other=0.0)
                score += (more * 1.4426950408889634)[None, :]
        if TREE:
            if (tile + 1) * BLOCK_N > length - WINDOW:
                late = at - (length - WINDOW)
                told = bits[:, None] >> tl.maximum(tl.minimum(late, WINDOW - 1), 0)[None, :]
                seen = (late < 0)[None, :] | ((told & 1) != 0)
                score = tl.where(seen & held[None, :], score, float("-inf"))
        else:
            score = tl.where(at[None, :] <= own[:, None], score, float("-inf"))
        top = tl.maximum(peak, tl.max(score, 1))
        level = tl.where(top == float("-inf"), 0.0, top)
        weight = tl.exp2(score - level[:, None])
        shrink = tl.exp2(peak - level)
        total = total * shrink + tl.sum(weight, 1)
        acc = acc * shrink[:, None]
        inside = held[:, None] & wide[None, :]
        values = tl.load(value + (at * value_lines[2])[:, None] + d[None, :], mask=inside, other=0.0)
        acc = tl.dot(weight.to(values.dtype), values, acc, input_precision=PRECISION)
        peak = top
    seen = total > 0
    whole = tl.where(seen, total, 1.0)
    place = ((b * GROUPS * GROUP + head) * n + i).to(tl.int64) * SPLITS + split
    tl.store(lse + place, tl.where(seen, peak + tl.log2(whole), float("-inf")), mask=mine)
    tl.store(part + place[:, None] * D + d[None, :], acc / whole[:, None], mask=mine[:, None] & wide[None, :])


@triton.jit
def merge_kernel(
    part, lse, columns, out, n, out_lines,
    HEADS: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr, BLOCK_S: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    """Merge the pieces of one new token and head by their log-sum-exps; a program computes BLOCK_D of the D elements."""
    row, head, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    BLOCKS: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    i, d = row // BLOCKS, row % BLOCKS * BLOCK_D + tl.arange(0, BLOCK_D)
    _, _, used = _pieces(columns, b, n, SPLITS, BLOCK_N, LEAST)
    place = ((b * HEADS + head) * n + i).to(tl.int64) * SPLITS
    s = tl.arange(0, BLOCK_S)
    inside = s < used
    some = tl.load(
        part + (place + s)[:, None] * D + d[None, :], mask=inside[:, None] & (d < D)[None, :], other=0.0
    )
    level = tl.load(lse + place + s, mask=inside, other=float("-inf"))
    share = tl.exp2(level - tl.max(level, 0))
    answer = tl.sum(share[:, None] * some, 0) / tl.sum(share, 0)
    out += b.to(tl.int64) * out_lines[0] + head * out_lines[1] + i * out_lines[2]
    tl.store(out + d, answer.to(out.dtype.element_ty), mask=d < D)


def decode_attend(
    query, key, value, columns, scale, sees=None, bias=None, *, splits=None, block_n=None, each=None
):
    """Launch `ops.layer_ops.decode_attend`: at most `splits` pieces per sequence and key/value head, in tiles of `block_n`
    keys. `each`: the `SeparateKVCaches` of `decode_attend_each`."""
    B, H, n, D = query.shape
    G = key.shape[1]
    group = H // G
    item, here = query.element_size(), operators.find_device_limits(query.device)
    block_m = min(max(triton.next_power_of_2(n * group), 16), 64)
    block_d = max(triton.next_power_of_2(D), 16)
    block_n = block_n or (64 if item == 2 else 16)
    while (2 * block_n * block_d + block_m * (block_d + block_n)) * item > here.shared and block_m > 16:
        block_m, block_n = (block_m, block_n // 2) if block_n > 16 else (block_m // 2, block_n)
    stages = here.max_pipeline_stages(3, 2 * block_n * block_d * item, block_m * (block_d + block_n) * item)
    tiles = triton.cdiv(n * group, block_m)
    splits = splits or max(1, RESIDENT * here.processors // (B * G * tiles))
    out = torch.empty(B, n, H, D, dtype=query.dtype, device=query.device).transpose(1, 2)
    part = torch.empty(B, H, n, splits, D, dtype=torch.float32, device=query.device)
    lse = torch.empty(B, H, n, splits, dtype=torch.float32, device=query.device)
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    columns, tree = columns.contiguous(), sees is not None
    sees = sees.contiguous() if tree else columns
    table, aligned = (columns, 0) if each is None else (each.table, each.aligned)
    biased, line = (0, 0) if bias is None else (bias.shape[-1], bias.shape[-1] if bias.dim() == 2 else 0)
    flash_decode_kernel[(splits, B * G, tiles)](
        query, key, value, columns, sees, lse if bias is None else bias.contiguous(), table, part, lse, scale,
        n, biased, line, row_strides(query), row_strides(key), row_strides(value),
        GROUPS=G, GROUP=group, D=D, SPLITS=splits, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_D=block_d,
        LEAST=LEAST, TREE=tree, BIAS=bias is not None, WINDOW=torch.iinfo(sees.dtype).bits, EACH=aligned,
        PRECISION="ieee", STAGES=stages, num_warps=4,
    )  # fmt: skip
    merge_kernel[(n * triton.cdiv(D, MERGED), H, B)](
        part, lse, columns, out, n, out.stride()[:3],
        HEADS=H, D=D, SPLITS=splits, BLOCK_S=triton.next_power_of_2(splits), BLOCK_N=block_n,
        BLOCK_D=MERGED, LEAST=LEAST, num_warps=4,
    )  # fmt: skip
    return out


def decode_attend_each(query, caches, columns, scale, bias=None):
    """Launch `ops.layer_ops.decode_attend_each`: attention of query [B, H, n, D], each sequence over its own cache, which
    kernels find by `caches.table`; columns [B, n] as in `decode_attend`, bias [B, m]."""
    return decode_attend(query, caches.home, caches.home, columns, scale, bias=bias, each=caches)


@triton.jit
def _sums_of(
    x, weight, other_weight, line, r, mine,
    K: tl.constexpr, GATED: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Products [BLOCK_O, BLOCK_R] of rows `r` with the weight rows at `line`; under GATED also with those of a second
    weight. The caller issues other loads before, which then overlap with it."""
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
def _squares_of(squares, r, mine, begin, PARTS: tl.constexpr, CHUNK: tl.constexpr):
    """Load CHUNK of the PARTS partial sums of squares of rows `r`, from `begin` on: [BLOCK_R, CHUNK]."""
    part = begin + tl.arange(0, CHUNK)
    there = mine[:, None] & (part < PARTS)[None, :]
    return tl.load(squares + r[:, None] * PARTS + part[None, :], mask=there, other=0.0)


@triton.jit
def _over_mean(first, squares, r, mine, eps, K: tl.constexpr, PARTS: tl.constexpr, CHUNK: tl.constexpr):
    """1 / RMS [BLOCK_R] of rows `r` from their partial sums of squares; the first CHUNK of these, `first`, are loaded
    already."""
    total = tl.sum(first, 1)
    for begin in tl.range(CHUNK, PARTS, CHUNK):
        total += tl.sum(_squares_of(squares, r, mine, begin, PARTS, CHUNK), 1)
    return tl.rsqrt(total / K + eps)


@triton.jit(do_not_specialize=["rows", "eps"])
def _project_kernel(
    x, weight_0, weight_1, weight_2, bias_0, bias_1, bias_2, residual, squares, gain, out, gained,
    squares_out, rows, eps,
    K: tl.constexpr, WIDTH_0: tl.constexpr, WIDTH_1: tl.constexpr, WIDTH_2: tl.constexpr,
    WIDTH: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr, RESIDUAL: tl.constexpr,
    AHEAD: tl.constexpr, PARTS: tl.constexpr, CHUNK: tl.constexpr, BLOCKS: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Kernel of `ops.layer_ops.project_rows`: BLOCK_O outputs of one of up to three concatenated weights.

    EVEN: blocks divide the outputs. PARTS: partial sums of squares per row of `x`; 0: no division by the RMS. AHEAD: also
    write `gained` and `squares_out` for the next norm (`residual_linear`). BLOCKS: number of programs.
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
        first = _squares_of(squares, r, mine, 0, PARTS, CHUNK)
    acc, up = _sums_of(
        x, weight, weight_1, line, r, mine, K, GATED, BLOCK_O, BLOCK_K, BLOCK_R, PRECISION, STAGES
    )
    if PARTS:
        shrink = _over_mean(first, squares, r, mine, eps, K, PARTS, CHUNK)[None, :]
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


def rms_normed_rows(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """RMSNorm of rows `x` with weight `gain`, rounded as the model's own norm rounds."""
    (rows, K), out = x.shape, torch.empty_like(x)
    rms_norm_kernel[(rows,)](x, gain, out, eps, E=K, BLOCK=triton.next_power_of_2(K), num_warps=8)
    return out


class TileConfig(NamedTuple):
    """Tile sizes of a decode kernel (outputs, inputs, rows), warps, and pipeline stages."""

    outputs: int
    inputs: int
    rows: int
    warps: int
    stages: int


def _tile_of(x: Tensor, outputs: int, weights: int, block_k: int | None = None) -> TileConfig:
    """Choose the `TileConfig` for rows `x` [R, K] and `outputs` outputs, of one weight or, gated, two `weights` each;
    `block_k` inputs if given.

    Memory bandwidth is reached if enough loads are in flight and all programs start at once: so loads in flight are as many
    as shared memory allows with all programs resident. If there are too many programs, they run in waves with fewer loads
    each.
    """
    R, K = x.shape
    here = operators.find_device_limits(x.device)
    rows = max(triton.next_power_of_2(R), here.columns)
    if R > FEW:
        made = TileConfig(32, 128, rows, 2, 4)
    else:
        made = TileConfig(16, 256 // weights, rows, 1, 5 - weights)
        each = triton.cdiv(triton.cdiv(outputs, 16), here.processors)
        for inputs, steps in UNDER_WAY:
            if each * steps * inputs * (16 * weights + rows) * x.element_size() <= here.resident:
                made = TileConfig(16, inputs, rows, 1, steps)
                break
    inputs = block_k or min(made.inputs, max(triton.next_power_of_2(K), 16))
    stages = here.max_pipeline_stages(
        made.stages, inputs * (made.outputs * weights + rows) * x.element_size()
    )
    return made._replace(inputs=inputs, stages=stages)


def partial_sum_sizes(squares: Tensor | None, block_r: int) -> tuple[int, int]:
    """Return (PARTS, CHUNK): the number of partial sums per row of `squares`, and how many a program loads at a time."""
    parts = 0 if squares is None else squares.shape[1]
    return parts, min(triton.next_power_of_2(max(parts, 1)), max(HELD // block_r, 1))


def project_rows(
    x, weight, bias=(), gain=None, eps=0.0, residual=None, gated=False, squares=None, *, block_k=None,
    next_gain=None,
):  # fmt: skip
    """Linear layers on x [R, K] by one kernel (`ops.layer_ops.project_rows`); a program reads `block_k` inputs at a time.
    With `next_gain` [O], the weight of the following norm, returns sums, gained sums and squares, as `residual_linear`."""
    rows, K = x.shape
    widths = [w.shape[0] for w in weight]
    width = widths[0] if gated else sum(widths)
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    # The kernel knows rows that follow each other alone; a model's weights are such, and nothing is copied.
    x, *weight = (t.contiguous() for t in (x, *weight))
    bias = [t.contiguous() for t in bias]
    gain, residual, squares, next_gain = (
        None if t is None else t.contiguous() for t in (gain, residual, squares, next_gain)
    )
    missing = [x] * (3 - len(weight))
    block_o, block_k, block_r, warps, stages = _tile_of(x, width, 1 + gated, block_k)
    parts, chunk = partial_sum_sizes(squares, block_r)
    grid = triton.cdiv(widths[0], block_o) if gated else sum(triton.cdiv(w, block_o) for w in widths)
    even = all(w % block_o == 0 for w in widths)
    gained, sums = out, out
    if next_gain is not None:
        gained = torch.empty_like(out)
        sums = torch.empty(rows, grid, dtype=torch.float32, device=x.device)
    if gain is not None:
        x = rms_normed_rows(x, gain, eps)
    _project_kernel[(grid,)](
        x, *weight, *missing, *(bias or weight), *missing, x if residual is None else residual,
        x if squares is None else squares, x if next_gain is None else next_gain, out, gained, sums, rows, eps,
        K=K, WIDTH_0=widths[0], WIDTH_1=widths[1] if len(weight) > 1 else 0,
        WIDTH_2=widths[2] if len(weight) > 2 else 0, WIDTH=width, BIAS=bool(bias), GATED=gated,
        RESIDUAL=residual is not None, AHEAD=next_gain is not None, PARTS=parts, CHUNK=chunk, BLOCKS=grid,
        EVEN=even, BLOCK_O=block_o, BLOCK_K=block_k, BLOCK_R=block_r, PRECISION="ieee", STAGES=stages,
        num_warps=warps,
    )  # fmt: skip
    return out if next_gain is None else (out, gained, sums)


def residual_linear(x, weight, bias, residual, gain, *, block_k=None):
    """Launch `ops.layer_ops.residual_linear` (linear, residual, norm inputs); a program reads `block_k` inputs at a time."""
    return project_rows(x, [weight], bias, residual=residual, block_k=block_k, next_gain=gain)


@triton.jit(do_not_specialize=["rows", "n", "eps"])
def _enter_kernel(
    x, weight_q, weight_k, weight_v, bias_q, bias_k, bias_v, squares, turn, columns, table, query, key,
    value, rows, n, eps, key_lines, value_lines,
    K: tl.constexpr, HEADS: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr, BIAS: tl.constexpr,
    PARTS: tl.constexpr, CHUNK: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr, EACH: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Kernel of `ops.layer_ops.qkv_rope_rows`: compute BLOCK_O outputs of one head as RoPE pairs ``(d, d + D / 2)``, rotate
    queries and keys, and write to the query output or the cache."""
    HALF: tl.constexpr = D // 2
    PAIRS: tl.constexpr = BLOCK_O // 2
    BLOCKS: tl.constexpr = (HALF + PAIRS - 1) // PAIRS
    block = tl.program_id(0)
    head, block = block // BLOCKS, block % BLOCKS
    weight, bias, number = weight_q, bias_q, head
    if head >= HEADS + GROUPS:
        weight, bias, number = weight_v, bias_v, head - HEADS - GROUPS
    elif head >= HEADS:
        weight, bias, number = weight_k, bias_k, head - HEADS
    j, r = tl.arange(0, BLOCK_O), tl.arange(0, BLOCK_R)
    pair = block * PAIRS + j % PAIRS
    there, mine = pair < HALF, r < rows
    o = number * D + tl.where(there, pair, 0) + j // PAIRS * HALF
    # What the end needs is on its way meanwhile.
    if BIAS:
        offset = tl.load(bias + o)
    if PARTS:
        first = _squares_of(squares, r, mine, 0, PARTS, CHUNK)
    d = block * PAIRS + tl.arange(0, PAIRS)
    inside = mine[None, :] & (d < HALF)[:, None]
    turns = inside & (head < HEADS + GROUPS)
    angle = turn + r[None, :] * D + d[:, None]
    cos_1, cos_2 = tl.load(angle, mask=turns, other=1.0), tl.load(angle + HALF, mask=turns, other=1.0)
    angle += rows * D
    sin_1, sin_2 = tl.load(angle, mask=turns, other=0.0), tl.load(angle + HALF, mask=turns, other=0.0)
    column = tl.load(columns + r, mask=mine, other=0)
    line = o.to(tl.int64) * K
    acc, _ = _sums_of(
        x, weight, weight, line, r, mine, K, False, BLOCK_O, BLOCK_K, BLOCK_R, PRECISION, STAGES
    )
    if PARTS:
        acc *= _over_mean(first, squares, r, mine, eps, K, PARTS, CHUNK)[None, :]
    if BIAS:
        acc += offset.to(tl.float32)[:, None]
    # As if the product had been written before it is turned.
    kind = query.dtype.element_ty
    halves = tl.permute(tl.reshape(acc, [2, PAIRS, BLOCK_R]), [1, 2, 0])
    one, two = tl.split(halves.to(kind).to(tl.float32))
    turned_1 = one * cos_1.to(tl.float32) - two * sin_1.to(tl.float32)
    turned_2 = two * cos_2.to(tl.float32) + one * sin_2.to(tl.float32)
    b = (r // n).to(tl.int64)
    to = query + (r * (HEADS * D) + head * D)[None, :] + d[:, None]
    if head >= HEADS + GROUPS:
        some = _begins(table, b, 1, number, value_lines, mine, EACH) + column * value_lines[2]
        to = value + some[None, :] + d[:, None]
    elif head >= HEADS:
        some = _begins(table, b, 0, number, key_lines, mine, EACH) + column * key_lines[2]
        to = key + some[None, :] + d[:, None]
    tl.store(to, turned_1.to(kind), mask=inside)
    tl.store(to + HALF, turned_2.to(kind), mask=inside)


@triton.jit(do_not_specialize=["n", "count"])
def _rope_kernel(
    rows, cos, sin, positions, columns, table, query, key, value, n, count, key_lines, value_lines,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    EACH: tl.constexpr,
):  # fmt: skip
    """Kernel of `rope_rows`: rotate one head of one row if it is a query or key; write keys and values to the cache."""
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
        angle = (b * count + tl.load(positions + b * n + i)) * D + d
        turned = x.to(tl.float32) * tl.load(cos + angle, mask=wide, other=0.0).to(tl.float32)
        turned += tl.where(d < half, -other, other) * tl.load(sin + angle, mask=wide, other=0.0).to(
            tl.float32
        )
        x = turned.to(x.dtype)
    if head < HEADS:
        tl.store(query + ((b * n + i) * HEADS + head) * D + d, x, mask=wide)
    elif head < HEADS + GROUPS:
        key += _begins(table, b, 0, head - HEADS, key_lines, True, EACH) + column * key_lines[2]
        tl.store(key + d, x, mask=wide)
    else:
        number = head - HEADS - GROUPS
        value += _begins(table, b, 1, number, value_lines, True, EACH) + column * value_lines[2]
        tl.store(value + d, x, mask=wide)


def qkv_rope_rows(x, weight, bias, gain, squares, eps, turn, columns, key, value, *, block_k=None, each=None):
    """Launch `ops.layer_ops.qkv_rope_rows` (project, RoPE, write cache); a program reads `block_k` inputs at a time. `each`:
    the `SeparateKVCaches` of `qkv_rope_rows_each`."""
    rows, K = x.shape
    B, n = columns.shape
    G, D = key.shape[1], key.shape[-1]
    heads = weight[0].shape[0] // D
    query = torch.empty(B, n, heads, D, dtype=x.dtype, device=x.device)
    x, turn, columns, *weight = (t.contiguous() for t in (x, turn, columns, *weight))
    bias = [t.contiguous() for t in bias]
    gain, squares = (None if t is None else t.contiguous() for t in (gain, squares))
    block_o, block_k, block_r, warps, stages = _tile_of(x, sum(map(len, weight)), 1, block_k)
    parts, chunk = partial_sum_sizes(squares, block_r)
    table, aligned = (columns, 0) if each is None else (each.table, each.aligned)
    if gain is not None:
        x = rms_normed_rows(x, gain, eps)
    _enter_kernel[((heads + 2 * G) * triton.cdiv(D, block_o),)](
        x, *weight, *(bias or weight), x if squares is None else squares, turn, columns, table, query, key,
        value, rows, n, eps, row_strides(key), row_strides(value),
        K=K, HEADS=heads, GROUPS=G, D=D, BIAS=bool(bias), PARTS=parts, CHUNK=chunk, BLOCK_O=block_o,
        BLOCK_K=block_k, BLOCK_R=block_r, EACH=aligned, PRECISION="ieee", STAGES=stages, num_warps=warps,
    )  # fmt: skip
    return query.transpose(1, 2)


def qkv_rope_rows_each(x, weight, bias, gain, squares, eps, turn, columns, caches):
    """Launch `ops.layer_ops.qkv_rope_rows_each`: `qkv_rope_rows` with a cache for each sequence, found by `caches.table`."""
    home = caches.home
    return qkv_rope_rows(x, weight, bias, gain, squares, eps, turn, columns, home, home, each=caches)


def rope_rows(rows, cos, sin, positions, columns, key, value, *, each=None):
    """Launch `ops.layer_ops.rope_rows` (RoPE, write cache): one kernel, a program for each head of each row. `each`: the
    `SeparateKVCaches` of `rope_rows_each`."""
    B, n, width = rows.shape
    G, D = key.shape[1], key.shape[-1]
    heads = width // D - 2 * G
    query = torch.empty(B, n, heads, D, dtype=rows.dtype, device=rows.device)
    table, aligned = (columns, 0) if each is None else (each.table, each.aligned)
    _rope_kernel[(heads + 2 * G, n, B)](
        rows.contiguous(), cos.contiguous(), sin.contiguous(), positions.contiguous(),
        columns.contiguous(), table, query, key, value, n, cos.shape[1], row_strides(key), row_strides(value),
        HEADS=heads, GROUPS=G, D=D, BLOCK_D=triton.next_power_of_2(D), EACH=aligned, num_warps=1,
    )  # fmt: skip
    return query.transpose(1, 2)


def rope_rows_each(rows, cos, sin, positions, columns, caches):
    """Launch `ops.layer_ops.rope_rows_each`: `rope_rows` with a cache for each sequence, found by `caches.table`."""
    home = caches.home
    return rope_rows(rows, cos, sin, positions, columns, home, home, each=caches)
