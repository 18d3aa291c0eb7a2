"""Attention of a decode step in Triton (`ops.decode.decode_attend`): the cache is read once, by the whole device.

As flash-decoding does (Dao et al. 2023): the columns of each sequence and key/value head are split into as many pieces as
keep the device busy, each program folds one piece into a partial answer, a second kernel merges them. How long the pieces
are is settled on the device, from the columns the new rows take: the launch is the same at every length.
"""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmaccel.backends.ops import operator as operators
from mmaccel.backends.ops.decode import WINDOW
from mmaccel.backends.triton.launch_args import lines

LEAST = 2
"""Tiles of keys that a piece has at least: shorter ones cost more to merge than they save."""

RESIDENT = 2
"""Programs of a multiprocessor at work together; with their loads under way memory is read at its rate."""

MERGED = 32
"""Elements of a row that one program merges, all pieces at once."""


@triton.jit
def _pieces(columns, b, n, SPLITS, BLOCK_N: tl.constexpr, LEAST: tl.constexpr):
    """What sequence `b` holds: its columns, the tiles they fill, the pieces these are dealt to."""
    length = tl.load(columns + b * n + n - 1).to(tl.int32) + 1
    tiles = tl.cdiv(length, BLOCK_N)
    return length, tiles, tl.minimum(SPLITS, tl.cdiv(tiles, LEAST))


@triton.jit(do_not_specialize=["n", "biased"])
def piece_kernel(
    query, key, value, columns, sees, bias, part, lse, scale, n, biased, query_lines, key_lines,
    value_lines,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, LEAST: tl.constexpr, TREE: tl.constexpr,
    BIAS: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Rows of all heads of a key/value head, over one piece of the columns; row r is head r % GROUP of new row r // GROUP.
    Under BIAS the first `biased` columns have one. `lines` are strides, as `launch_args.lines` gives them.

    part [B, H, n, SPLITS, D] and lse [B, H, n, SPLITS] (base 2) in float32; a row that sees nothing of a piece is 0, -inf.
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
    key += b.to(tl.int64) * key_lines[0] + g.to(tl.int64) * key_lines[1]
    value += b.to(tl.int64) * value_lines[0] + g.to(tl.int64) * value_lines[1]
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
                more = tl.load(bias + at, mask=at < biased, other=0.0)
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
    """BLOCK_D elements of one row of one head: its partial answers, each by its share of the sum."""
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
    query: Tensor,
    key: Tensor,
    value: Tensor,
    columns: Tensor,
    scale: float,
    sees: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    splits: int | None = None,
    block_n: int | None = None,
) -> Tensor:
    """See `ops.decode.decode_attend`; at most `splits` pieces a sequence and head, of tiles of `block_n` keys."""
    B, H, n, D = query.shape
    G = key.shape[1]
    group = H // G
    item, here = query.element_size(), operators.resources(query.device)
    block_m = min(max(triton.next_power_of_2(n * group), 16), 64)
    block_d = max(triton.next_power_of_2(D), 16)
    block_n = block_n or (64 if item == 2 else 16)
    while (2 * block_n * block_d + block_m * (block_d + block_n)) * item > here.shared and block_m > 16:
        block_m, block_n = (block_m, block_n // 2) if block_n > 16 else (block_m // 2, block_n)
    stages = here.stages(3, 2 * block_n * block_d * item, block_m * (block_d + block_n) * item)
    tiles = triton.cdiv(n * group, block_m)
    splits = splits or max(1, RESIDENT * here.processors // (B * G * tiles))
    out = torch.empty(B, n, H, D, dtype=query.dtype, device=query.device).transpose(1, 2)
    part = torch.empty(B, H, n, splits, D, dtype=torch.float32, device=query.device)
    lse = torch.empty(B, H, n, splits, dtype=torch.float32, device=query.device)
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    columns = columns.contiguous()
    piece_kernel[(splits, B * G, tiles)](
        query, key, value, columns, columns if sees is None else sees.contiguous(),
        lse if bias is None else bias.contiguous(), part, lse, scale, n,
        0 if bias is None else len(bias), lines(query), lines(key), lines(value),
        GROUPS=G, GROUP=group, D=D, SPLITS=splits, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_D=block_d,
        LEAST=LEAST, TREE=sees is not None, BIAS=bias is not None, WINDOW=WINDOW, PRECISION="ieee",
        STAGES=stages, num_warps=4,
    )  # fmt: skip
    merge_kernel[(n * triton.cdiv(D, MERGED), H, B)](
        part, lse, columns, out, n, out.stride()[:3],
        HEADS=H, D=D, SPLITS=splits, BLOCK_S=triton.next_power_of_2(splits), BLOCK_N=block_n,
        BLOCK_D=MERGED, LEAST=LEAST, num_warps=4,
    )  # fmt: skip
    return out
