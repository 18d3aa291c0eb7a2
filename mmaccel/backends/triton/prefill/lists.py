"""Triton kernels of `ops.block_lists`, and the functions that launch them, with the operators' arguments: lists of key
blocks by a few small kernels, where PyTorch needs some forty. Also, for the attention kernels: joining the runs of two
neighbouring blocks, counting blocks that need a mask, and a cache of values that are computed once for a plan."""

# mypy: ignore-errors

from __future__ import annotations

import math
from array import array
from typing import Any
from weakref import ref

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmaccel.backends.ops import block_attend
from mmaccel.backends.ops.block_attend import common_batch_and_heads
from mmaccel.backends.ops.operator import REPLAYED_ON
from mmaccel.backends.triton.launch_args import leading_strides

FULL, ABSENT = tl.constexpr(block_attend.FULL), tl.constexpr(block_attend.ABSENT)

BEYOND = tl.constexpr(1 << 60)  # beyond every position, and every block
WIDTH = tl.constexpr(14)  # numbers of a piece
TILE = 4096  # elements of a piece that a program moves
TOKENS = 1024  # tokens that a program looks at together
STEP = 1024  # blocks, or entries of a list, that a program looks at together
SEARCHED = 128  # blocks of queries that a program finds the runs of, one a thread

STRIDES = ("row_b", "row_h", "pos_b", "pos_h")


@triton.jit
def _greater(x, y):
    return tl.maximum(x, y)


@triton.jit
def _less(x, y):
    return tl.minimum(x, y)


@triton.jit
def _edges(
    row, pos, row_b, row_h, pos_b, pos_h, LEAST, MOST, lead, H, blocks,
    BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Store the least and the greatest position in TILE blocks of one head; how many tokens of each are there, and where in
    LEAST it is. Places of 32 bits are compared as such: 64 take twice the exchanges."""
    b, h = (lead // H).to(tl.int64), (lead % H).to(tl.int64)
    block = tl.program_id(0) * TILE + tl.arange(0, TILE)
    at = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = block < blocks
    here = tl.load(row + b * row_b + h * row_h + at, mask=inside[:, None], other=-1) >= 0
    pos = tl.load(pos + b * pos_b + h * pos_h + at, mask=inside[:, None], other=0)
    far = BEYOND if pos.dtype == tl.int64 else 2147483647
    count = tl.sum(here.to(tl.int32), 1)
    least = tl.min(tl.where(here, pos, far), 1).to(tl.int64)
    most = tl.max(tl.where(here, pos, -far), 1).to(tl.int64)
    to = lead.to(tl.int64) * blocks + block
    tl.store(LEAST + to, tl.where(count > 0, least, BEYOND), mask=inside)
    tl.store(MOST + to, tl.where(count > 0, most, -BEYOND), mask=inside)
    return count, to, inside


@triton.jit(
    do_not_specialize=[f"{of}_{name}" for of in "qk" for name in (*STRIDES, "blocks", "H")]
    + ["leads", "Q_MOST", "K_MOST"]
)
def _edges_kernel(
    q_row, q_pos, q_row_b, q_row_h, q_pos_b, q_pos_h, Q_LEAST, Q_MOST, q_blocks, q_H, k_row, k_pos,
    k_row_b, k_row_h, k_pos_b, k_pos_h, K_LEAST, K_MOST, KIND, k_blocks, k_H, leads,
    BLOCK_Q: tl.constexpr, TILE_Q: tl.constexpr, BLOCK_K: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """Minimum and maximum position in blocks of queries or keys, and the kind of key blocks; `leads`: heads of queries."""
    lead = tl.program_id(1)
    if lead < leads:
        if tl.program_id(0) * TILE_Q < q_blocks:
            _edges(
                q_row, q_pos, q_row_b, q_row_h, q_pos_b, q_pos_h,
                Q_LEAST, Q_MOST, lead, q_H, q_blocks, BLOCK_Q, TILE_Q,
            )  # fmt: skip
    elif tl.program_id(0) * TILE_K < k_blocks:
        count, to, inside = _edges(
            k_row, k_pos, k_row_b, k_row_h, k_pos_b, k_pos_h,
            K_LEAST, K_MOST, lead - leads, k_H, k_blocks, BLOCK_K, TILE_K,
        )  # fmt: skip
        tl.store(KIND + to, tl.where(count == BLOCK_K, FULL, ABSENT).to(tl.int8), mask=inside)


@triton.jit(do_not_specialize=["blocks", "MOST"])
def _settle_kernel(LEAST, MOST, blocks, STEP: tl.constexpr):
    """Fill the position bounds of empty key blocks with those of their neighbours, so that minima and maxima ascend."""
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
def binary_search_step(values, bound, low, high):
    """Do one step of a binary search in `values`, ascending, for the first above `bound`: return the new low and high."""
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
def _reach_kernel(
    Q_LEAST, Q_MOST, q_b, q_h, K_LEAST, K_MOST, k_b, k_h, OUT, lo, hi, M, blocks, H, steps,
    TILE: tl.constexpr,
):  # fmt: skip
    """For each query block the run of key blocks in which a pair can pass lo <= q - k < hi, and of these the ones to test:
    four binary searches over block bounds, in lockstep, so that each step waits for memory once."""
    lead = tl.program_id(1)
    block = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = block < M
    queries = ((lead // H) * q_b + (lead % H) * q_h).to(tl.int64) * M + block
    keys = ((lead // H) * k_b + (lead % H) * k_h).to(tl.int64) * blocks
    first_pos = tl.load(Q_LEAST + queries, mask=inside, other=BEYOND)
    last_pos = tl.load(Q_MOST + queries, mask=inside, other=-BEYOND)
    none = tl.zeros([TILE], tl.int32)
    first, count, head, tail = none, none, none, none
    first_end, count_end, head_end, tail_end = none + blocks, none + blocks, none + blocks, none + blocks
    for _ in range(steps):
        first, first_end = binary_search_step(K_MOST + keys, first_pos - hi, first, first_end)
        count, count_end = binary_search_step(K_LEAST + keys, last_pos - lo, count, count_end)
        head, head_end = binary_search_step(K_LEAST + keys, last_pos - hi, head, head_end)
        tail, tail_end = binary_search_step(K_MOST + keys, first_pos - lo, tail, tail_end)
    count = tl.maximum(count - first, 0)
    to = (lead.to(tl.int64) * M + block) * 5
    tl.store(OUT + to, tl.minimum(first, blocks - 1).to(tl.int64), mask=inside)
    tl.store(OUT + to + 1, count.to(tl.int64), mask=inside)
    tl.store(OUT + to + 2, tl.minimum(tl.maximum(head - first, 0), count).to(tl.int64), mask=inside)
    tl.store(OUT + to + 3, tl.minimum(tl.maximum(tail - first, 0), count).to(tl.int64), mask=inside)
    tl.store(OUT + to + 4, tl.zeros_like(count).to(tl.int64), mask=inside)


@triton.jit(do_not_specialize=["k_b", "k_h", "H", "blocks", "leads"])
def _present_kernel(
    k_row, k_b, k_h, nk, OUT, H, blocks, leads, BLOCK: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr
):
    """Count the keys, without padding (-1), in each of TILE key blocks of one head; also sets the totals in OUT to 0 at the
    start."""
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
def _area_kernel(
    row, index, q_row, nk, row_b, row_h, q_b, q_h, nk_b, nk_h, OUT, H,
    PLAIN: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Add to a head's total the queries of one block times the keys of the blocks that it lists."""
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


def list_band(q_row, k_row, q_pos, k_pos, lo, hi, block_q, block_k):
    """Launch `ops.block_lists.list_band`: the run of key blocks that each query block reaches; three kernels."""
    q_row, k_row, q_pos, k_pos = (
        t if t.stride(-1) == 1 else t.contiguous() for t in (q_row, k_row, q_pos, k_pos)
    )
    m, n = q_row.shape[-1] // block_q, k_row.shape[-1] // block_k
    of_queries, of_keys = common_batch_and_heads(q_row, q_pos), common_batch_and_heads(k_row, k_pos)
    b, h = common_batch_and_heads(q_row, q_pos, k_row, k_pos)
    row = q_row.new_empty(b, h, m, 5, dtype=torch.int64)
    q_least, q_most = q_row.new_empty(2, *of_queries, m, dtype=torch.int64)
    k_least, k_most = q_row.new_empty(2, *of_keys, n, dtype=torch.int64)
    kind = q_row.new_empty(*of_keys, n, dtype=torch.int8)
    tile_q, tile_k = (max(1, TOKENS // block) for block in (block_q, block_k))
    leads = math.prod(of_queries)
    _edges_kernel[(max(triton.cdiv(m, tile_q), triton.cdiv(n, tile_k)), leads + math.prod(of_keys))](
        q_row, q_pos, *leading_strides(q_row), *leading_strides(q_pos), q_least, q_most, m, of_queries[1], k_row, k_pos,
        *leading_strides(k_row), *leading_strides(k_pos), k_least, k_most, kind, n, of_keys[1], leads,
        BLOCK_Q=block_q, TILE_Q=tile_q, BLOCK_K=block_k, TILE_K=tile_k,
    )  # fmt: skip
    _settle_kernel[(math.prod(of_keys),)](k_least, k_most, n, STEP=STEP)
    _reach_kernel[(triton.cdiv(m, SEARCHED), b * h)](
        q_least, q_most, *_step(of_queries), k_least, k_most, *_step(of_keys), row, lo, hi, m, n, h,
        n.bit_length(),
        TILE=SEARCHED,
    )  # fmt: skip
    return row, kind


def listed_pairs(row, index, q_row, k_row, block_q, block_k):
    """Launch `ops.block_lists.listed_pairs`: number of pairs in listed blocks, [b, h]; integer sums, so the result is
    deterministic."""
    row = row if row.stride()[2:] == (5, 1) else row.contiguous()
    q_row, k_row = (t if t.stride(-1) == 1 else t.contiguous() for t in (q_row, k_row))
    b, h = common_batch_and_heads(row, q_row, k_row)
    out, (key_b, key_h, blocks) = row.new_empty(b, h), (*k_row.shape[:2], k_row.shape[2] // block_k)
    nk = k_row.new_empty(key_b, key_h, blocks)
    tile = max(1, TOKENS // block_k)
    _present_kernel[(triton.cdiv(blocks, tile), key_b * key_h)](
        *(k_row, *leading_strides(k_row), nk, out, key_h, blocks, b * h), BLOCK=block_k, TILE=tile, STEP=STEP
    )
    _area_kernel[(row.shape[2], b * h)](
        row, index, q_row, nk, *leading_strides(row), *leading_strides(q_row), *leading_strides(nk), out, h,
        PLAIN=not index.shape[0], BLOCK=block_q, STEP=STEP // 4, num_warps=1,
    )  # fmt: skip
    return out


def _step(leads: tuple[int, int]) -> tuple[int, int]:
    """Lines between sequences and between heads, where `leads` are those that there are; 0 where all share one."""
    b, h = leads
    return h if b > 1 else 0, 1 if h > 1 else 0


@triton.jit(do_not_specialize=["row_b", "row_h", "M", "pairs"])
def merge_pairs_kernel(row, row_b, row_h, OUT, M, pairs, TILE: tl.constexpr):
    """Kernel of `merge_adjacent_query_blocks`: joins some pairs of lists of one head."""
    h, b = tl.program_id(1), tl.program_id(2)
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    first, last = tl.full([TILE], BEYOND, tl.int64), tl.full([TILE], -BEYOND, tl.int64)
    near, end = tl.full([TILE], -BEYOND, tl.int64), tl.full([TILE], BEYOND, tl.int64)
    alone = at < 0
    for which in tl.static_range(2):
        mine = 2 * at + which
        told = row + b * row_b + h.to(tl.int64) * row_h + mine.to(tl.int64) * 5
        inside = mine < M
        count = tl.load(told + 1, mask=inside, other=0)
        begin = tl.load(told, mask=inside, other=0) + tl.load(told + 4, mask=inside, other=0)
        some = count > 0
        alone = alone | (some == 0)
        first = tl.minimum(first, tl.where(some, begin, BEYOND))
        last = tl.maximum(last, tl.where(some, begin + count, -BEYOND))
        near = tl.maximum(near, begin + tl.load(told + 2, mask=inside, other=0))
        end = tl.minimum(end, begin + tl.load(told + 3, mask=inside, other=0))
    length = tl.maximum(last - first, 0)
    first = tl.where(length > 0, first, 0)
    # Rows of a block without a list see nothing of their neighbour's.
    head = tl.minimum(tl.where(alone, length, tl.maximum(near - first, 0)), length)
    tail = tl.minimum(tl.where(alone, length, tl.maximum(end - first, 0)), length)
    to = OUT + ((b * tl.num_programs(1) + h).to(tl.int64) * pairs + at) * 5
    inside = at < pairs
    tl.store(to, first, mask=inside)
    tl.store(to + 1, length, mask=inside)
    tl.store(to + 2, head, mask=inside)
    tl.store(to + 3, tail, mask=inside)
    tl.store(to + 4, tl.zeros_like(first), mask=inside)


def merge_adjacent_query_blocks(row: Tensor) -> Tensor:
    """Merge the block lists of each two neighbouring query blocks: `row` [b, h, M, 5] long, whose lists are runs of key
    blocks, to [b, h, ceil(M / 2), 5].

    Key blocks that are in only one of the two lists get a mask, so that queries of the other block do not see them.
    """
    b, h, M, _ = row.shape
    pairs = -(-M // 2)
    out = row.new_empty(b, h, pairs, 5)
    merge_pairs_kernel[(triton.cdiv(pairs, 256), h, b)](row, *leading_strides(row), out, M, pairs, TILE=256)
    return out


def get_cached_on_plan(plan: list[Tensor], name: Any, make: Any) -> Any:
    """Return what `make` computes from the tensors `plan` of an attention plan. It is cached on the first of them, for each
    CUDA stream, and shared by all layers and passes; after a tensor was written to it is computed again. The result must not
    refer to the tensors, since that would keep them alive."""
    device = plan[0].device
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    stream = REPLAYED_ON.get(stream, stream)
    made = getattr(plan[0], "derived", None)
    if made is None:
        made = plan[0].derived = {}
    for known, (of, _) in list(made.items()):
        if any(one() is None for one in of):
            made.pop(known, None)
    versions = (0 if t.is_inference() else t._version for t in plan)
    name = stream, name, *map(id, plan), *versions
    return block_attend.memoize(made, name, lambda: ([ref(t) for t in plan], make()))[1]


def prefix_count_masked_blocks(kind: Tensor) -> Tensor:
    """Count the blocks before each block (and all, at the end) that are not FULL: int32 [b, h, N + 1] from kind [b, h,
    N], or [N + 1] from [N]."""
    return torch.nn.functional.pad((kind != block_attend.FULL).cumsum(-1, dtype=torch.int32), (1, 0))


@triton.jit(do_not_specialize=["table", "n", "steps"])
def assemble_slices_kernel(table, narrow, wide, small, n, steps, TILE: tl.constexpr):
    """Kernel of `assemble_slices`: write some elements of one of n slices. `table` has the `ops.block_lists.FIELDS` of each
    slice, but `batch` is replaced by the number of tiles of all slices before, and `source` by an address (0: a fill)."""
    tile = tl.program_id(0)
    low, high = tl.zeros([], tl.int32), tl.zeros([], tl.int32) + n
    for _ in range(steps):
        # The last piece that begins no later: it has tiles, those before it that begin as early have none.
        middle = (low + high) // 2
        below = (middle < high) & (tl.load(table + tl.minimum(middle, n - 1) * WIDTH) <= tile)
        high = tl.where(below, high, tl.minimum(middle, high))
        low = tl.where(below, middle + 1, low)
    told = table + (low - 1) * WIDTH
    local = tile - tl.load(told).to(tl.int32)
    heads, size, source, kind = tl.load(told + 1), tl.load(told + 2), tl.load(told + 3), tl.load(told + 5)
    tiles = (size + TILE - 1) // TILE
    line, at = local // tiles, (local % tiles) * TILE + tl.arange(0, TILE)
    b, h = line // heads, line % heads
    inside = at < size
    more = tl.load(told + 11)
    value = tl.zeros([TILE], tl.int64)
    if source != 0:
        first = b * tl.load(told + 9) + h * tl.load(told + 10)
        from_kind = tl.load(told + 8)
        if from_kind == 0:
            value = tl.load(source.to(tl.pointer_type(tl.int32)) + first + at, mask=inside, other=0).to(
                tl.int64
            )
        elif from_kind == 1:
            value = tl.load(source.to(tl.pointer_type(tl.int64)) + first + at, mask=inside, other=0)
        else:
            value = tl.load(source.to(tl.pointer_type(tl.int8)) + first + at, mask=inside, other=0).to(
                tl.int64
            )
    if tl.load(told + 12) != 0:
        column = at % 5
        value += tl.where(column == 0, more, 0) + tl.where(column == 4, tl.load(told + 13), 0)
    else:
        value += more
    to = tl.load(told + 4) + b * tl.load(told + 6) + h * tl.load(told + 7) + at
    if kind == 0:
        tl.store(narrow + to, value.to(tl.int32), mask=inside)
    elif kind == 1:
        tl.store(wide + to, value, mask=inside)
    else:
        tl.store(small + to, value.to(tl.int8), mask=inside)


def assemble_slices(sources, table, fills, sizes):
    """Launch `ops.block_lists.assemble_slices`: assemble tensors from slices of `sources`; the table is copied to the device
    asynchronously."""
    device, kinds = sources[0].device, (torch.int32, torch.int64, torch.int8)
    out = [torch.empty(n, dtype=kind, device=device) for n, kind in zip(sizes, kinds, strict=True)]
    told, tiles = array("q", table), [0, 0]
    address = [*(t.data_ptr() for t in sources), 0]
    for number, at in enumerate(range(0, len(told), WIDTH.value)):
        batch, heads, size, source = told[at : at + 4]
        told[at], told[at + 3] = tiles[number >= fills], address[source]
        tiles[number >= fills] += batch * heads * -(-size // TILE)
    rows = torch.frombuffer(told, dtype=torch.int64).view(-1, WIDTH.value)
    sent = (rows.pin_memory() if device.type == "cuda" else rows).to(device, non_blocking=True)
    for some, count in zip((sent[:fills], sent[fills:]), tiles, strict=True):
        if count:
            assemble_slices_kernel[(count,)](
                some, *out, len(some), len(some).bit_length(), TILE=TILE, num_warps=8
            )
    return out
