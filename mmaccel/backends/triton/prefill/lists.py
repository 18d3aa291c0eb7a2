"""Lists of key blocks made by three small kernels, where PyTorch needs some forty: see `ops.block_lists.reach`,
`ops.block_lists.listed_area`."""

# mypy: ignore-errors

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmaccel.backends.ops import block_attend

FULL, ABSENT = tl.constexpr(block_attend.FULL), tl.constexpr(block_attend.ABSENT)

BEYOND = tl.constexpr(1 << 60)
"""More than any place: wide places exceed 32 bits."""

TOKENS = 1024
"""Tokens that a program looks at together."""

STEP = 1024
"""Blocks, or entries of a list, that a program looks at together."""

SEARCHED = 128
"""Blocks of queries that a program finds the runs of, one a thread."""

STRIDES = ("row_b", "row_h", "place_b", "place_h")


@triton.jit
def _greater(x, y):
    return tl.maximum(x, y)


@triton.jit
def _less(x, y):
    return tl.minimum(x, y)


@triton.jit
def _edges(
    row,
    place,
    row_b,
    row_h,
    place_b,
    place_h,
    LEAST,
    MOST,
    lead,
    H,
    blocks,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """Store the least and the greatest place in TILE blocks of one head; how many tokens of each are there, and where in
    LEAST it is. Places of 32 bits are compared as such: 64 take twice the exchanges."""
    b, h = (lead // H).to(tl.int64), (lead % H).to(tl.int64)
    block = tl.program_id(0) * TILE + tl.arange(0, TILE)
    at = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = block < blocks
    here = tl.load(row + b * row_b + h * row_h + at, mask=inside[:, None], other=-1) >= 0
    place = tl.load(place + b * place_b + h * place_h + at, mask=inside[:, None], other=0)
    far = BEYOND if place.dtype == tl.int64 else 2147483647
    count = tl.sum(here.to(tl.int32), 1)
    least = tl.min(tl.where(here, place, far), 1).to(tl.int64)
    most = tl.max(tl.where(here, place, -far), 1).to(tl.int64)
    to = lead.to(tl.int64) * blocks + block
    tl.store(LEAST + to, tl.where(count > 0, least, BEYOND), mask=inside)
    tl.store(MOST + to, tl.where(count > 0, most, -BEYOND), mask=inside)
    return count, to, inside


@triton.jit(
    do_not_specialize=[f"{of}_{name}" for of in "qk" for name in (*STRIDES, "blocks", "H")]
    + ["leads", "Q_MOST", "K_MOST"]
)
def edges_kernel(
    q_row,
    q_place,
    q_row_b,
    q_row_h,
    q_place_b,
    q_place_h,
    Q_LEAST,
    Q_MOST,
    q_blocks,
    q_H,
    k_row,
    k_place,
    k_row_b,
    k_row_h,
    k_place_b,
    k_place_h,
    K_LEAST,
    K_MOST,
    KIND,
    k_blocks,
    k_H,
    leads,
    BLOCK_Q: tl.constexpr,
    TILE_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """What a block of queries or of keys spans, and of what kind a block of keys is; `leads` are the heads of queries."""
    lead = tl.program_id(1)
    if lead < leads:
        if tl.program_id(0) * TILE_Q < q_blocks:
            _edges(
                q_row, q_place, q_row_b, q_row_h, q_place_b, q_place_h,
                Q_LEAST, Q_MOST, lead, q_H, q_blocks, BLOCK_Q, TILE_Q,
            )  # fmt: skip
    elif tl.program_id(0) * TILE_K < k_blocks:
        count, to, inside = _edges(
            k_row, k_place, k_row_b, k_row_h, k_place_b, k_place_h,
            K_LEAST, K_MOST, lead - leads, k_H, k_blocks, BLOCK_K, TILE_K,
        )  # fmt: skip
        tl.store(KIND + to, tl.where(count == BLOCK_K, FULL, ABSENT).to(tl.int8), mask=inside)


@triton.jit(do_not_specialize=["blocks", "MOST"])
def settle_kernel(LEAST, MOST, blocks, STEP: tl.constexpr):
    """A block without a key lies where its neighbours do: then what blocks begin and end with ascends."""
    lead = tl.program_id(0).to(tl.int64) * blocks
    steps = (blocks + STEP - 1) // STEP
    most = tl.full([], -BEYOND, tl.int64)
    least = tl.full([], BEYOND, tl.int64)
    for step in range(steps):
        at = step * STEP + tl.arange(0, STEP)
        inside = at < blocks
        found = tl.load(MOST + lead + at, mask=inside, other=-BEYOND)
        found = tl.maximum(tl.associative_scan(found, 0, _greater), most)
        tl.store(MOST + lead + at, found, mask=inside)
        most = tl.max(found, 0)
    for step in range(steps):
        at = (steps - 1 - step) * STEP + tl.arange(0, STEP)
        inside = at < blocks
        found = tl.load(LEAST + lead + at, mask=inside, other=BEYOND)
        found = tl.minimum(tl.associative_scan(found, 0, _less, reverse=True), least)
        tl.store(LEAST + lead + at, found, mask=inside)
        least = tl.min(found, 0)


@triton.jit
def _halved(values, bound, low, high):
    """One step of a search: a half of low .. high that holds the first of the ascending `values` above `bound`."""
    middle = (low + high) >> 1
    open_ = low < high
    below = open_ & (tl.load(values + middle, mask=open_, other=0) <= bound)
    return tl.where(below, middle + 1, low), tl.where(open_ & (below == 0), middle, high)


@triton.jit(
    do_not_specialize=[
        *("lo", "hi", "M", "blocks", "H", "steps", "q_b", "q_h", "k_b", "k_h"),
        *("Q_MOST", "K_MOST"),
    ]
)
def reach_kernel(
    Q_LEAST,
    Q_MOST,
    q_b,
    q_h,
    K_LEAST,
    K_MOST,
    k_b,
    k_h,
    OUT,
    lo,
    hi,
    M,
    blocks,
    H,
    steps,
    TILE: tl.constexpr,
):
    """The run of key blocks that each block of queries reaches. Its four bounds are searched together: each step waits for
    memory once."""
    lead = tl.program_id(1)
    block = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = block < M
    queries = ((lead // H) * q_b + (lead % H) * q_h).to(tl.int64) * M + block
    keys = ((lead // H) * k_b + (lead % H) * k_h).to(tl.int64) * blocks
    first_place = tl.load(Q_LEAST + queries, mask=inside, other=BEYOND)
    last_place = tl.load(Q_MOST + queries, mask=inside, other=-BEYOND)
    none = tl.zeros([TILE], tl.int32)
    first, count, head, tail = none, none, none, none
    first_end, count_end, head_end, tail_end = none + blocks, none + blocks, none + blocks, none + blocks
    for _ in range(steps):
        first, first_end = _halved(K_MOST + keys, first_place - hi, first, first_end)
        count, count_end = _halved(K_LEAST + keys, last_place - lo, count, count_end)
        head, head_end = _halved(K_LEAST + keys, last_place - hi, head, head_end)
        tail, tail_end = _halved(K_MOST + keys, first_place - lo, tail, tail_end)
    count = tl.maximum(count - first, 0)
    to = (lead.to(tl.int64) * M + block) * 5
    tl.store(OUT + to, tl.minimum(first, blocks - 1).to(tl.int64), mask=inside)
    tl.store(OUT + to + 1, count.to(tl.int64), mask=inside)
    tl.store(OUT + to + 2, tl.minimum(tl.maximum(head - first, 0), count).to(tl.int64), mask=inside)
    tl.store(OUT + to + 3, tl.minimum(tl.maximum(tail - first, 0), count).to(tl.int64), mask=inside)
    tl.store(OUT + to + 4, tl.zeros_like(count).to(tl.int64), mask=inside)


@triton.jit(do_not_specialize=["k_b", "k_h", "H", "blocks", "leads"])
def present_kernel(
    k_row, k_b, k_h, nk, OUT, H, blocks, leads, BLOCK: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr
):
    """How many keys of each of TILE blocks of one head there are; nothing yet is what every head of OUT has."""
    lead = tl.program_id(1)
    block = tl.program_id(0) * TILE + tl.arange(0, TILE)
    at = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    b, h = (lead // H).to(tl.int64), (lead % H).to(tl.int64)
    found = tl.load(k_row + b * k_b + h * k_h + at, mask=(block < blocks)[:, None], other=-1)
    count = tl.sum((found >= 0).to(tl.int32), 1)
    tl.store(nk + lead.to(tl.int64) * blocks + block, count, mask=block < blocks)
    if (tl.program_id(0) == 0) & (lead == 0):
        for first in range(0, leads, STEP):
            i = first + tl.arange(0, STEP)
            tl.store(OUT + i, tl.zeros([STEP], tl.int64), mask=i < leads)


@triton.jit(do_not_specialize=["row_b", "row_h", "q_b", "q_h", "nk_b", "nk_h", "H"])
def area_kernel(
    row,
    index,
    q_row,
    nk,
    row_b,
    row_h,
    q_b,
    q_h,
    nk_b,
    nk_h,
    OUT,
    H,
    PLAIN: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
):
    """Queries of a block times the keys of the blocks that it lists, added to what its head has."""
    m, lead = tl.program_id(0), tl.program_id(1)
    b, h = (lead // H).to(tl.int64), (lead % H).to(tl.int64)
    of_list = row + b * row_b + h * row_h + m * 5
    begin, count, shift = tl.load(of_list), tl.load(of_list + 1), tl.load(of_list + 4)
    own = tl.load(q_row + b * q_b + h * q_h + m * BLOCK + tl.arange(0, BLOCK))
    queries = tl.sum((own >= 0).to(tl.int64), 0)
    if queries * count == 0:
        return
    keys = tl.zeros([STEP], tl.int64)
    for first in range(0, count, STEP):
        e = first + tl.arange(0, STEP)
        there = e < count
        if PLAIN:
            block = begin + e + shift
        else:
            block = tl.load(index + begin + e, mask=there, other=0) + shift
        keys += tl.load(nk + b * nk_b + h * nk_h + block, mask=there, other=0).to(tl.int64)
    tl.atomic_add(OUT + lead, queries * tl.sum(keys, 0))


def reach(
    q_row: Tensor,
    k_row: Tensor,
    q_place: Tensor,
    k_place: Tensor,
    lo: int,
    hi: int,
    block_q: int,
    block_k: int,
) -> tuple[Tensor, Tensor]:
    """See `ops.block_lists.reach`."""
    q_row, k_row, q_place, k_place = (
        t if t.stride(-1) == 1 else t.contiguous() for t in (q_row, k_row, q_place, k_place)
    )
    m, n = q_row.shape[-1] // block_q, k_row.shape[-1] // block_k
    of_queries, of_keys = _broad(q_row, q_place), _broad(k_row, k_place)
    b, h = (max(x, y) for x, y in zip(of_queries, of_keys, strict=True))
    row = q_row.new_empty(b, h, m, 5, dtype=torch.int64)
    q_least, q_most = q_row.new_empty(2, *of_queries, m, dtype=torch.int64)
    k_least, k_most = q_row.new_empty(2, *of_keys, n, dtype=torch.int64)
    kind = q_row.new_empty(*of_keys, n, dtype=torch.int8)
    tile_q, tile_k = (max(1, TOKENS // block) for block in (block_q, block_k))
    leads = math.prod(of_queries)
    with torch.cuda.device_of(q_row):
        edges_kernel[(max(triton.cdiv(m, tile_q), triton.cdiv(n, tile_k)), leads + math.prod(of_keys))](
            *(q_row, q_place, *_lead(q_row, q_place), q_least, q_most, m, of_queries[1]),
            *(k_row, k_place, *_lead(k_row, k_place), k_least, k_most, kind, n, of_keys[1]),
            leads,
            BLOCK_Q=block_q,
            TILE_Q=tile_q,
            BLOCK_K=block_k,
            TILE_K=tile_k,
        )
        settle_kernel[(math.prod(of_keys),)](k_least, k_most, n, STEP=STEP)
        reach_kernel[(triton.cdiv(m, SEARCHED), b * h)](
            *(q_least, q_most, *_step(of_queries)),
            *(k_least, k_most, *_step(of_keys)),
            row,
            lo,
            hi,
            m,
            n,
            h,
            n.bit_length(),
            TILE=SEARCHED,
        )
    return row, kind


def listed_area(
    row: Tensor, index: Tensor, q_row: Tensor, k_row: Tensor, block_q: int, block_k: int
) -> Tensor:
    """See `ops.block_lists.listed_area`; sums of whole numbers, the same in any order."""
    row = row if row.stride()[2:] == (5, 1) else row.contiguous()
    q_row, k_row = (t if t.stride(-1) == 1 else t.contiguous() for t in (q_row, k_row))
    b, h = (max(*of) for of in zip(row.shape[:2], q_row.shape[:2], k_row.shape[:2], strict=True))
    out, (key_b, key_h, blocks) = row.new_empty(b, h), (*k_row.shape[:2], k_row.shape[2] // block_k)
    nk = k_row.new_empty(key_b, key_h, blocks)
    tile = max(1, TOKENS // block_k)
    with torch.cuda.device_of(row):
        present_kernel[(triton.cdiv(blocks, tile), key_b * key_h)](
            *(k_row, *_lead(k_row), nk, out, key_h, blocks, b * h), BLOCK=block_k, TILE=tile, STEP=STEP
        )
        area_kernel[(row.shape[2], b * h)](
            row,
            index,
            q_row,
            nk,
            *_lead(row, q_row, nk),
            out,
            h,
            PLAIN=not index.shape[0],
            BLOCK=block_q,
            STEP=STEP // 4,
            num_warps=1,
        )
    return out


def _broad(*tensors: Tensor) -> tuple[int, int]:
    b, h = (max(sizes) for sizes in zip(*(t.shape[:2] for t in tensors), strict=True))
    return b, h


def _step(leads: tuple[int, int]) -> tuple[int, int]:
    """Lines between sequences and between heads, where `leads` are those that there are; 0 where all share one."""
    b, h = leads
    return h if b > 1 else 0, 1 if h > 1 else 0


def _lead(*tensors: Tensor) -> Sequence[int]:
    """Strides of the sequence and the head of each; 0 where all share one."""
    return tuple(t.stride(i) if t.shape[i] > 1 else 0 for t in tensors for i in (0, 1))
