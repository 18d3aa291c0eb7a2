"""Lists of key blocks made by three small kernels, where PyTorch needs some forty: see `ops.reach`, `ops.listed_area`."""

# mypy: ignore-errors

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmaccel.backends import ops

FULL, ABSENT = tl.constexpr(ops.FULL), tl.constexpr(ops.ABSENT)

BEYOND = tl.constexpr(1 << 60)
"""More than any place: wide places exceed 32 bits."""

TOKENS = 2048
"""Tokens that a program looks at together."""

STEP = 1024
"""Blocks, or entries of a list, that a program looks at together."""

STRIDES = ("row_b", "row_h", "place_b", "place_h")


@triton.jit
def _greater(x, y):
    return tl.maximum(x, y)


@triton.jit
def _less(x, y):
    return tl.minimum(x, y)


@triton.jit
def _spans(row, place, row_b, row_h, place_b, place_h, lead, H, block, blocks, BLOCK: tl.constexpr):
    """The least and the greatest place in some blocks, and whether all of each is there."""
    b, h = (lead // H).to(tl.int64), (lead % H).to(tl.int64)
    at = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (block < blocks)[:, None]
    here = tl.load(row + b * row_b + h * row_h + at, mask=inside, other=-1) >= 0
    place = tl.load(place + b * place_b + h * place_h + at, mask=inside, other=0).to(tl.int64)
    least = tl.min(tl.where(here, place, BEYOND), 1)
    most = tl.max(tl.where(here, place, -BEYOND), 1)
    return least, most, tl.min(here.to(tl.int32), 1) > 0


@triton.jit(do_not_specialize=[*STRIDES, "blocks", "H"])
def edges_kernel(
    row,
    place,
    row_b,
    row_h,
    place_b,
    place_h,
    LEAST,
    MOST,
    KIND,
    blocks,
    H,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """What a block of keys spans, and of what kind it is."""
    lead = tl.program_id(1)
    block = tl.program_id(0) * TILE + tl.arange(0, TILE)
    least, most, whole = _spans(row, place, row_b, row_h, place_b, place_h, lead, H, block, blocks, BLOCK)
    to, inside = lead.to(tl.int64) * blocks + block, block < blocks
    tl.store(LEAST + to, least, mask=inside)
    tl.store(MOST + to, most, mask=inside)
    tl.store(KIND + to, tl.where(whole, FULL, ABSENT).to(tl.int8), mask=inside)


@triton.jit(do_not_specialize=["blocks"])
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
def _not_above(values, bound, n, steps):
    """How many of the n ascending `values` are at most `bound`."""
    low = tl.zeros_like(bound).to(tl.int32)
    high = low + n
    for _ in range(steps):
        middle = (low + high) // 2
        open_ = low < high
        below = open_ & (tl.load(values + middle, mask=open_, other=0) <= bound)
        high = tl.where(open_ & (below == 0), middle, high)
        low = tl.where(below, middle + 1, low)
    return low


@triton.jit(do_not_specialize=[*STRIDES, "lo", "hi", "M", "blocks", "H", "steps", "key_b", "key_h"])
def reach_kernel(
    row,
    place,
    row_b,
    row_h,
    place_b,
    place_h,
    LEAST,
    MOST,
    OUT,
    key_b,
    key_h,
    lo,
    hi,
    M,
    blocks,
    H,
    steps,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """The run of key blocks that each block of queries reaches."""
    lead = tl.program_id(1)
    block = tl.program_id(0) * TILE + tl.arange(0, TILE)
    first_place, last_place, _ = _spans(row, place, row_b, row_h, place_b, place_h, lead, H, block, M, BLOCK)
    keys = ((lead // H) * key_b + (lead % H) * key_h).to(tl.int64) * blocks
    first = _not_above(MOST + keys, first_place - hi, blocks, steps)
    count = tl.maximum(_not_above(LEAST + keys, last_place - lo, blocks, steps) - first, 0)
    head = _not_above(LEAST + keys, last_place - hi, blocks, steps) - first
    tail = _not_above(MOST + keys, first_place - lo, blocks, steps) - first
    to, inside = (lead.to(tl.int64) * M + block) * 5, block < M
    tl.store(OUT + to, tl.minimum(first, blocks - 1).to(tl.int64), mask=inside)
    tl.store(OUT + to + 1, count.to(tl.int64), mask=inside)
    tl.store(OUT + to + 2, tl.minimum(tl.maximum(head, 0), count).to(tl.int64), mask=inside)
    tl.store(OUT + to + 3, tl.minimum(tl.maximum(tail, 0), count).to(tl.int64), mask=inside)
    tl.store(OUT + to + 4, tl.zeros_like(count).to(tl.int64), mask=inside)


@triton.jit(do_not_specialize=["row_b", "row_h", "nq_b", "nq_h", "nk_b", "nk_h", "H"])
def area_kernel(
    row,
    index,
    nq,
    nk,
    row_b,
    row_h,
    nq_b,
    nq_h,
    nk_b,
    nk_h,
    OUT,
    H,
    PLAIN: tl.constexpr,
    STEP: tl.constexpr,
):
    """Queries of a block times the keys of the blocks that it lists, added to what its head has."""
    m, lead = tl.program_id(0), tl.program_id(1)
    b, h = (lead // H).to(tl.int64), (lead % H).to(tl.int64)
    of_list = row + b * row_b + h * row_h + m * 5
    begin, count, shift = tl.load(of_list), tl.load(of_list + 1), tl.load(of_list + 4)
    queries = tl.load(nq + b * nq_b + h * nq_h + m).to(tl.int64)
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
    """See `mmaccel.backends.ops.reach`."""
    q_row, k_row, q_place, k_place = (
        t if t.stride(-1) == 1 else t.contiguous() for t in (q_row, k_row, q_place, k_place)
    )
    m, n = q_row.shape[-1] // block_q, k_row.shape[-1] // block_k
    key_b, key_h = _broad(k_row, k_place)
    b, h = (max(x, y) for x, y in zip(_broad(q_row, q_place), (key_b, key_h), strict=True))
    row = q_row.new_empty(b, h, m, 5, dtype=torch.int64)
    least, most = q_row.new_empty(2, key_b, key_h, n, dtype=torch.int64)
    kind = q_row.new_empty(key_b, key_h, n, dtype=torch.int8)
    of_keys, of_queries = (TOKENS // block for block in (block_k, block_q))
    with torch.cuda.device_of(q_row):
        edges_kernel[(triton.cdiv(n, of_keys), key_b * key_h)](
            k_row, k_place, *_lead(k_row, k_place), least, most, kind, n, key_h, BLOCK=block_k, TILE=of_keys
        )
        settle_kernel[(key_b * key_h,)](least, most, n, STEP=STEP)
        reach_kernel[(triton.cdiv(m, of_queries), b * h)](
            q_row,
            q_place,
            *_lead(q_row, q_place),
            least,
            most,
            row,
            key_h if key_b > 1 else 0,
            1 if key_h > 1 else 0,
            lo,
            hi,
            m,
            n,
            h,
            n.bit_length(),
            BLOCK=block_q,
            TILE=of_queries,
        )
    return row, kind


def listed_area(row: Tensor, index: Tensor, nq: Tensor, nk: Tensor) -> Tensor:
    """See `mmaccel.backends.ops.listed_area`; sums of whole numbers, the same in any order."""
    row = row if row.stride()[2:] == (5, 1) else row.contiguous()
    nq, nk = (t if t.stride(-1) == 1 else t.contiguous() for t in (nq, nk))
    b, h = (max(*of) for of in zip(row.shape[:2], nq.shape[:2], nk.shape[:2], strict=True))
    out = row.new_zeros(b, h)
    with torch.cuda.device_of(row):
        area_kernel[(row.shape[2], b * h)](
            row,
            index,
            nq,
            nk,
            *_lead(row, nq, nk),
            out,
            h,
            PLAIN=not index.shape[0],
            STEP=STEP // 4,
            num_warps=1,
        )
    return out.double()


def _broad(*tensors: Tensor) -> tuple[int, int]:
    b, h = (max(sizes) for sizes in zip(*(t.shape[:2] for t in tensors), strict=True))
    return b, h


def _lead(*tensors: Tensor) -> Sequence[int]:
    """Strides of the sequence and the head of each; 0 where all share one."""
    return tuple(t.stride(i) if t.shape[i] > 1 else 0 for t in tensors for i in (0, 1))
