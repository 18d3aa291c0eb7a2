"""Portable Triton kernels: block-sparse attention over listed key blocks, the splitting of long lists into pieces, the order
in which programs take them, and the merging of pieces.

A *list row* is one query block of one sequence and one head, or of one sequence where all heads share the lists. A *tile* is
what one program computes: rows of one list row, of `PACK` heads of a key/value group where lists are shared, so that each
loaded tile of keys serves them all. The spans of a part are processed as one list, in one loop.
"""

# What follows is Triton's language, not Python's: it knows no unpacking of tuples into tuples, and tells constant
# conditions, which leave no trace in the machine code, from the rest by their nesting.
# mypy: ignore-errors
# ruff: noqa: RUF005, RUF059, SIM102

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmaccel.backends.ops import block_attend
from mmaccel.backends.ops import operator as operators
from mmaccel.backends.triton.launch_args import decode_int_arg, encode_int_args, row_strides

FULL, TEST = tl.constexpr(block_attend.FULL), tl.constexpr(block_attend.TEST)

# Spans walked in one loop. Each costs a few scalar instructions a step; a loop of its own would empty the pipeline.
TOGETHER = tl.constexpr(4)
LEAST_CHUNK = 32  # listed blocks under which splitting a row costs more than it evens out
# A row is split where one of its tiles is more than 1 / WAVES of what a place on the device computes in all.
WAVES = 8
MOST_PIECES = 64  # pieces that a row is split into at the most
FEW, MANY = (
    1024,
    8192,
)  # rows that a program of `work_items_kernel` looks at together: of few rows, and of more
ALIGNED = 4  # numbers of 32 bits to whose multiples tables begin


@triton.jit
def _tile(tile, row, q_row, q_row_b, q_row_h, M, GROUP, LISTS, BLOCK_Q, ROWS, PACK):
    """Where the rows of a tile lie: sequence, head of each row, place in the part, row of the query tensor (or -1)."""
    m = row % M
    b = row // M // LISTS
    h = row // M % LISTS
    sub = tile % (BLOCK_Q // ROWS)
    tile = tile // (BLOCK_Q // ROWS)
    r = tl.arange(0, ROWS * PACK)
    if LISTS == 1:
        packs = (GROUP + PACK - 1) // PACK
        g = tile // packs
        member = tile % packs * PACK + r // ROWS
        head = g * GROUP + member
        mine = member < GROUP
    else:
        g = h // GROUP
        head = h + 0 * r
        mine = r >= 0
    place = m * BLOCK_Q + sub * ROWS + r % ROWS
    at = tl.load(q_row + b.to(tl.int64) * q_row_b + h.to(tl.int64) * q_row_h + place)
    return b, h, g, head, mine, place, at


@triton.jit
def _store(OUT, LSE, acc, peak, total, b, head, mine, place, at, ends, DV, BLOCK_DV, PLACED):
    """Normalise and store the rows of a tile; those that are padding, or saw nothing, as zero and -inf.

    In the order of the part; PLACED, in that of the query, where padding has no place.
    """
    out_b, out_h, out_s, lse_b, lse_h = ends
    d = tl.arange(0, BLOCK_DV)
    seen = (total > 0) & (at >= 0)
    out = tl.where(seen, 1.0 / tl.where(seen, total, 1.0), 0.0)[:, None] * tl.where(seen[:, None], acc, 0.0)
    lse = tl.where(seen, (peak + tl.log2(tl.where(seen, total, 1.0))) * 0.6931471805599453, float("-inf"))
    b, head = b.to(tl.int64), head.to(tl.int64)
    row = place
    if PLACED:
        row = tl.maximum(at, 0)
        mine = mine & (at >= 0)
    row = row.to(tl.int64)
    tl.store(LSE + b * lse_b + head * lse_h + row, lse, mask=mine)
    tl.store(
        OUT + (b * out_b + head * out_h + row * out_s)[:, None] + d[None, :],
        out.to(OUT.dtype.element_ty),
        mask=mine[:, None] & (d < DV)[None, :],
    )


@triton.jit(do_not_specialize=["M", "lse_b", "lse_h", "sinks", "edge"])
def attend_kernel(
    Q, K, V, SHORT, OUT, LSE, PART_OUT, PART_LSE, ITEM, PIECES, SLOT, TOLD, q_row, q_row_b, q_row_h,
    k_row, q_pos, k_pos, offset, index, kind, lo, hi, plain, strides, extra,
    q_b, q_h, q_s, q_d, k_b, k_h, k_s, k_d, v_b, v_h, v_s, v_d, out_b, out_h, out_s, lse_b, lse_h, M, scale,
    sinks, edge,
    D: tl.constexpr, DV: tl.constexpr, GROUP: tl.constexpr, LISTS: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr, ROWS: tl.constexpr, PACK: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, PLACED: tl.constexpr, SPLIT: tl.constexpr, GATED: tl.constexpr,
    WIDE: tl.constexpr, PRECISION: tl.constexpr, BLOCK_N: tl.constexpr, EXTRA: tl.constexpr = 0,
    NARROW: tl.constexpr = False,
):  # fmt: skip
    """Attention of one tile over its listed key blocks, or under SPLIT over one piece of at most `chunk` of them.

    `scale` includes log2(e) and is positive. Tuples have an entry per span; `strides` has ten: sequence and head strides of
    k_row, q_pos, k_pos, offset, kind; the last four of them and `hi` by `encode_int_args`. Later rows, which are longer, run
    first. With EXTRA, `extra` has each span's keys, values, biases and strides (by `encode_int_args`); EXTRA is 2 if all
    rows of keys and values start at 16-byte boundaries. NARROW: masked blocks also apply the part's `sinks` and `edge`.
    PLACED: rows are stored in the query's order, not the part's. GATED: runs only if SHORT says that `hopper` could not.
    """
    if GATED:
        if tl.load(SHORT) == 0:  # another kernel has computed this, and was short of nothing
            return
    if SPLIT:
        # The pieces of split rows, of all tiles, before anything else.
        tiles, before = tl.num_programs(1), tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        chunk, held = tl.load(TOLD), tl.load(TOLD + 1)
        after, rest = before - held * tiles, tl.maximum(tl.num_programs(0) - held, 1)
        item = tl.where(after < 0, before // tiles, held + after % rest)
        tile = tl.where(after < 0, before % tiles, after // rest)
        row = tl.load(ITEM + 2 * item)
        if row < 0:
            return
        piece, pieces = tl.load(ITEM + 2 * item + 1), tl.load(PIECES + row)
    else:
        row, tile = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    b, h, g, head, mine, place, at = _tile(
        tile, row, q_row, q_row_b, q_row_h, M, GROUP, LISTS, BLOCK_Q, ROWS, PACK
    )
    b64, h64 = b.to(tl.int64), h.to(tl.int64)
    m = row % M
    d, dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    here = mine & (at >= 0)
    source = b64 * q_b + head.to(tl.int64) * q_h + tl.maximum(at, 0).to(tl.int64) * q_s
    mask = here[:, None] & (d < D)[None, :]
    q = tl.load(Q + source[:, None] + (d * q_d)[None, :], mask=mask, other=0.0)
    keys = K + b64 * k_b + g.to(tl.int64) * k_h
    values = V + b64 * v_b + g.to(tl.int64) * v_h
    peak = tl.full([ROWS * PACK], float("-inf"), tl.float32)
    total = tl.zeros([ROWS * PACK], tl.float32)
    acc = tl.zeros([ROWS * PACK, BLOCK_DV], tl.float32)
    # Entry e of the list row is entry e + shift of the span that it falls into.
    count = 0
    for group in tl.static_range(0, len(k_row), TOGETHER):
        begun = count
        ends = ()
        indices = ()
        plains = ()
        shifts = ()
        kinds = ()
        heads = ()
        tails = ()
        k_rows = ()
        q_positions = ()
        k_positions = ()
        lows = ()
        highs = ()
        own_keys = ()
        own_values = ()
        biases = ()
        k_steps = ()
        v_steps = ()
        bias_steps = ()
        for s in tl.static_range(group, group + TOGETHER if group + TOGETHER < len(k_row) else len(k_row)):
            of_list = (
                offset[s] + b64 * decode_int_arg(strides[s][6]) + h64 * decode_int_arg(strides[s][7]) + m * 5
            )
            begin, held = tl.load(of_list), tl.load(of_list + 1).to(tl.int32)
            indices = indices + (index[s] + (begin - count),)
            plains = plains + (plain[s],)
            moved = tl.where(plain[s] != 0, begin - count, 0).to(tl.int32)
            shifts = shifts + (tl.load(of_list + 4).to(tl.int32) + moved,)
            kinds = kinds + (
                kind[s] + b64 * decode_int_arg(strides[s][8]) + h64 * decode_int_arg(strides[s][9]),
            )
            heads = heads + (count + tl.load(of_list + 2).to(tl.int32),)
            tails = tails + (count + tl.load(of_list + 3).to(tl.int32),)
            k_rows = k_rows + (k_row[s] + b64 * strides[s][0] + h64 * strides[s][1],)
            q_positions = q_positions + (q_pos[s] + b64 * strides[s][2] + h64 * strides[s][3],)
            k_positions = k_positions + (k_pos[s] + b64 * strides[s][4] + h64 * strides[s][5],)
            lows = lows + (lo[s],)
            highs = highs + (decode_int_arg(hi[s]).to(q_pos[s].dtype.element_ty),)
            if EXTRA:
                steps, g64 = extra[3][s], g.to(tl.int64)
                own_keys = own_keys + (
                    extra[0][s] + b64 * decode_int_arg(steps[0]) + g64 * decode_int_arg(steps[1]),
                )
                own_values = own_values + (
                    extra[1][s] + b64 * decode_int_arg(steps[3]) + g64 * decode_int_arg(steps[4]),
                )
                biases = biases + (
                    extra[2][s] + b64 * decode_int_arg(steps[6]) + h64 * decode_int_arg(steps[7]),
                )
                k_steps = k_steps + (decode_int_arg(steps[2]),)
                v_steps = v_steps + (decode_int_arg(steps[5]),)
                bias_steps = bias_steps + (decode_int_arg(steps[8]),)
            count = count + held
            ends = ends + (count,)
        first, last = begun, count
        if SPLIT:
            first, last = tl.maximum(begun, piece * chunk), tl.minimum(count, piece * chunk + chunk)
        # The running softmax over these spans, walked as one list.
        n = tl.arange(0, BLOCK_N)
        for j in range(first * (BLOCK_K // BLOCK_N), last * (BLOCK_K // BLOCK_N)):
            e = j // (BLOCK_K // BLOCK_N)
            index_at, kind_at, rows_at = indices[0], kinds[0], k_rows[0]
            shift, sure, unsure = shifts[0], heads[0], tails[0]
            run = plains[0]
            for s in tl.static_range(1, len(ends)):
                later = e >= ends[s - 1]
                index_at = tl.where(later, indices[s], index_at)
                kind_at = tl.where(later, kinds[s], kind_at)
                rows_at = tl.where(later, k_rows[s], rows_at)
                shift, run = tl.where(later, shifts[s], shift), tl.where(later, plains[s], run)
                sure, unsure = tl.where(later, heads[s], sure), tl.where(later, tails[s], unsure)
            block = tl.load(index_at + e, mask=run == 0, other=0) + tl.where(run != 0, e, 0) + shift
            column = block * BLOCK_K + j % (BLOCK_K // BLOCK_N) * BLOCK_N + n
            sort = tl.load(kind_at + block)
            sort = tl.where((e >= sure) & (e < unsure), sort, TEST)
            key_row = tl.load(rows_at + column)
            there = key_row >= 0
            if WIDE:
                key_row = key_row.to(tl.int64)
            if EXTRA:
                keys_at, values_at, bias_at = own_keys[0], own_values[0], biases[0]
                k_step, v_step, bias_step = k_steps[0], v_steps[0], bias_steps[0]
                for s in tl.static_range(1, len(ends)):
                    later = e >= ends[s - 1]
                    keys_at = tl.where(later, own_keys[s], keys_at)
                    values_at = tl.where(later, own_values[s], values_at)
                    bias_at = tl.where(later, biases[s], bias_at)
                    k_step, v_step = tl.where(later, k_steps[s], k_step), tl.where(later, v_steps[s], v_step)
                    bias_step = tl.where(later, bias_steps[s], bias_step)
                if EXTRA == 2:
                    # All rows of keys and values begin at 16 bytes.
                    keys_at, values_at = tl.multiple_of(keys_at, 16), tl.multiple_of(values_at, 16)
                    k_step, v_step = tl.multiple_of(k_step, 8), tl.multiple_of(v_step, 8)
            else:
                keys_at, values_at, k_step, v_step = keys, values, k_s, v_s
            inside = there[None, :] & (d < D)[:, None]
            k = tl.load(keys_at + (key_row * k_step)[None, :] + (d * k_d)[:, None], mask=inside, other=0.0)
            score = tl.dot(q, k, input_precision=PRECISION)
            if sort != FULL:
                score = tl.where(there[None, :], score, float("-inf"))
            if sort == TEST:
                q_at, k_at, low, high = q_positions[0], k_positions[0], lows[0], highs[0]
                for s in tl.static_range(1, len(ends)):
                    later = e >= ends[s - 1]
                    q_at, k_at = tl.where(later, q_positions[s], q_at), tl.where(later, k_positions[s], k_at)
                    low, high = tl.where(later, lows[s], low), tl.where(later, highs[s], high)
                gap = tl.load(q_at + place)[:, None] - tl.load(k_at + column)[None, :]
                score = tl.where((gap >= low) & (gap < high), score, float("-inf"))
                if NARROW:
                    # Rows of a query and of a key are columns of the sequence.
                    late = key_row[None, :] > (at + edge)[:, None]
                    score = tl.where((key_row < sinks)[None, :] | late, score, float("-inf"))
            if EXTRA:
                bias = tl.load(bias_at + column * bias_step) * 1.4426950408889634
                score = score * scale + bias[None, :]
                top = tl.maximum(peak, tl.max(score, 1))
            else:
                top = tl.maximum(peak, tl.max(score, 1) * scale)
            floor = tl.where(top == float("-inf"), 0.0, top)
            if EXTRA:
                p = tl.math.exp2(score - floor[:, None])
            else:
                p = tl.math.exp2(score * scale - floor[:, None])
            fade = tl.math.exp2(peak - floor)
            total = total * fade + tl.sum(p, 1)
            inside = there[:, None] & (dv < DV)[None, :]
            v = tl.load(values_at + (key_row * v_step)[:, None] + (dv * v_d)[None, :], mask=inside, other=0.0)
            acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision=PRECISION)
            peak = top

    if SPLIT:
        if pieces > 1:
            slot = (tl.load(SLOT + row).to(tl.int64) + piece) * tl.num_programs(1) + tile
            r = slot * (ROWS * PACK) + tl.arange(0, ROWS * PACK)
            seen = total > 0
            tl.store(PART_LSE + r, tl.where(seen, peak + tl.log2(tl.where(seen, total, 1.0)), float("-inf")))
            part = acc / tl.where(seen, total, 1.0)[:, None]
            tl.store(PART_OUT + r[:, None] * DV + dv[None, :], part, mask=(dv < DV)[None, :])
            return
    ends = (out_b, out_h, out_s, lse_b, lse_h)
    _store(OUT, LSE, acc, peak, total, b, head, mine, place, at, ends, DV, BLOCK_DV, PLACED)


@triton.jit(do_not_specialize=["M", "lse_b", "lse_h"])
def merge_kernel(
    PART_OUT, PART_LSE, PIECES, SLOT, OUT, LSE, q_row, q_row_b, q_row_h, out_b, out_h, out_s, lse_b, lse_h,
    M,
    DV: tl.constexpr, GROUP: tl.constexpr, LISTS: tl.constexpr, BLOCK_Q: tl.constexpr, ROWS: tl.constexpr,
    PACK: tl.constexpr, BLOCK_DV: tl.constexpr, PLACED: tl.constexpr,
):  # fmt: skip
    """Merge the pieces of a tile by their log-sum-exps; a tile that was not split is left unchanged."""
    row, tile = tl.program_id(0), tl.program_id(1)
    pieces = tl.load(PIECES + row)
    if pieces < 2:
        return
    b, h, g, head, mine, place, at = _tile(
        tile, row, q_row, q_row_b, q_row_h, M, GROUP, LISTS, BLOCK_Q, ROWS, PACK
    )
    dv = tl.arange(0, BLOCK_DV)
    peak = tl.full([ROWS * PACK], float("-inf"), tl.float32)
    total = tl.zeros([ROWS * PACK], tl.float32)
    acc = tl.zeros([ROWS * PACK, BLOCK_DV], tl.float32)
    slot = tl.load(SLOT + row).to(tl.int64)
    for piece in range(pieces):
        r = ((slot + piece) * tl.num_programs(1) + tile) * (ROWS * PACK) + tl.arange(0, ROWS * PACK)
        lse = tl.load(PART_LSE + r)
        part = tl.load(PART_OUT + r[:, None] * DV + dv[None, :], mask=(dv < DV)[None, :], other=0.0)
        top = tl.maximum(peak, lse)
        floor = tl.where(top == float("-inf"), 0.0, top)
        weight, fade = tl.math.exp2(lse - floor), tl.math.exp2(peak - floor)
        acc = acc * fade[:, None] + part * weight[:, None]
        total = total * fade + weight
        peak = top
    ends = (out_b, out_h, out_s, lse_b, lse_h)
    _store(OUT, LSE, acc, peak, total, b, head, mine, place, at, ends, DV, BLOCK_DV, PLACED)


@triton.jit(do_not_specialize=["M", "list_rows"])
def _length_kernel(counts, strides, LENGTH, M, list_rows, LISTS: tl.constexpr, TILE: tl.constexpr):
    """Number of key blocks that each query block lists, summed over spans; strides by `encode_int_args`."""
    row = (tl.program_id(0) * TILE + tl.arange(0, TILE)).to(tl.int64)
    inside = row < list_rows
    b, h, m = row // M // LISTS, row // M % LISTS, row % M
    length = tl.zeros_like(row)
    for s in tl.static_range(len(counts)):
        at = (
            b * decode_int_arg(strides[s][0])
            + h * decode_int_arg(strides[s][1])
            + m * decode_int_arg(strides[s][2])
        )
        length += tl.load(counts[s] + at, mask=inside, other=0).to(tl.int64)
    tl.store(LENGTH + row, length, mask=inside)


@triton.jit(do_not_specialize=["list_rows", "items", "tiles", "even", "chunk", "longest"])
def work_items_kernel(
    LENGTH, ITEM, PIECES, SLOT, TOLD, list_rows, items, tiles, even, chunk, longest,
    LEAST: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Split long list rows into pieces, and list the pieces as work items.

    Program p lists the rows that have a p-th piece; the last program lists rows that are not split. If `chunk` is 0, it is
    chosen so that a row of `longest` blocks has a program for every piece.
    """
    mine, rest = tl.program_id(0), tl.num_programs(0) - 1
    every = tl.arange(0, STEP)
    steps = (list_rows + STEP - 1) // STEP
    chunk = tl.zeros([], tl.int64) + chunk
    if chunk == 0:
        total = tl.zeros([], tl.int64)
        for step in range(steps):
            row = step * STEP + every
            total += tl.sum(tl.load(LENGTH + row, mask=row < list_rows, other=0).to(tl.int64))
        chunk = tl.maximum((total * tiles + even - 1) // even, (longest + rest - 1) // rest)
        chunk = tl.maximum(chunk, LEAST)
    # The pieces before this program's.
    begun = tl.zeros([], tl.int64)
    for step in range(steps):
        row = step * STEP + every
        length = tl.load(LENGTH + row, mask=row < list_rows, other=0).to(tl.int64)
        pieces = (length + chunk - 1) // chunk
        begun += tl.sum(tl.where(pieces > 1, tl.minimum(pieces, mine), 0))
    if mine == rest:
        tl.store(TOLD, chunk)
        tl.store(TOLD + 1, begun)
    slots = tl.zeros([], tl.int64)
    for step in range(steps):
        # The last rows, which see most, first.
        row = list_rows - 1 - (step * STEP + every)
        length = tl.load(LENGTH + row, mask=row >= 0, other=0).to(tl.int64)
        pieces = (length + chunk - 1) // chunk
        taken = (row >= 0) & (((mine == rest) & (pieces <= 1)) | ((pieces > 1) & (pieces > mine)))
        count = taken.to(tl.int64)
        at = begun + tl.cumsum(count, 0) - count
        begun += tl.sum(count)
        tl.store(ITEM + 2 * at, row, mask=taken)
        tl.store(ITEM + 2 * at + 1, tl.where(mine == rest, 0, mine) + tl.zeros_like(row), mask=taken)
        if mine == rest:
            held = tl.where(pieces > 1, pieces, 0)
            tl.store(PIECES + row, tl.maximum(pieces, 1), mask=row >= 0)
            tl.store(SLOT + row, slots + tl.cumsum(held, 0) - held, mask=row >= 0)
            slots += tl.sum(held)
    if mine == rest:
        # Programs without work.
        for at in range(begun, items, STEP):
            tl.store(ITEM + 2 * (at + every), tl.full([STEP], -1, tl.int32), mask=at + every < items)


@dataclass(frozen=True)
class SplitListPieces:
    """The pieces of split list rows, as tables on the device.

    Split rows come first, so that no piece runs at the end of a launch: the first pieces of all of them, then the second
    ones, and so on, since equally numbered pieces list the same keys, which are then in the L2 cache. Other rows keep their
    order, in which neighbours read the same keys.

    item [items, 2] int32: list row and piece of each program, -1 for none; pieces [rows] int32: pieces of each row; slot
    [rows] int32: first output slot of a split row; split_sizes [2] int32: blocks per piece, and programs of split rows.
    `items` and `slots`, the number of output slots, are upper bounds that the host knows: a row of n blocks makes at most
    max(1, ceil(n / chunk)) pieces, and a split row fewer than 2 n / chunk.
    """

    item: Tensor
    pieces: Tensor
    slot: Tensor
    split_sizes: Tensor
    slots: int

    @property
    def max_programs(self) -> int:
        """Maximum number of Triton programs that the pieces of work need."""
        return len(self.item)

    @classmethod
    def split(
        cls,
        counts: Sequence[Tensor],
        B: int,
        lists: int,
        M: int,
        tiles: int,
        longest: int,
        places: int,
        chunk: int | None = None,
    ) -> SplitListPieces:
        """Split long block lists into pieces of at most `chunk` blocks. By default a piece is at most 1 / WAVES of the work
        of one of `places` resident programs, with at most MOST_PIECES per row, as the host does not know how many blocks are
        listed. counts: per span [1 or B, 1 or lists, M]; tiles: per row; longest: most blocks of a row."""
        rows, device, even = B * lists * M, counts[0].device, WAVES * places
        spare, programs = even // tiles, min(triton.cdiv(longest, LEAST_CHUNK), MOST_PIECES)
        if chunk is not None:
            spare, programs = rows * longest // chunk, triton.cdiv(longest, chunk)
        sizes = (rows, 2 * (rows + spare), rows, rows, 2)
        # Kernels are compiled for how addresses divide.
        room = [n + -n % ALIGNED for n in sizes]
        made = torch.empty(sum(room), dtype=torch.int32, device=device).split(room)
        length, item, pieces, slot, limits = (t[:n] for t, n in zip(made, sizes, strict=True))
        strides = tuple(encode_int_args(row_strides(c)) for c in counts)
        few = rows <= FEW
        _length_kernel[(triton.cdiv(rows, 1024),)](
            tuple(counts), strides, length, M, rows, LISTS=lists, TILE=1024
        )
        work_items_kernel[(max(programs, 1) + 1,)](
            length, item, pieces, slot, limits, rows, rows + spare, tiles, even, chunk or 0, longest,
            LEAST=LEAST_CHUNK, STEP=FEW if few else MANY, num_warps=8 if few else 16,
        )  # fmt: skip
        return cls(item.view(-1, 2), pieces, slot, limits, 2 * spare)


def count_resident_programs(device: torch.device) -> int:
    """Approximate number of programs that run at the same time on `device`."""
    return 2 * operators.find_device_limits(device).processors


def split_kernel_args(work: SplitListPieces | None, rows: int, size: int, like: Tensor) -> tuple[Tensor, ...]:
    """Return kernel arguments for query blocks whose lists are split: empty outputs of pieces [slots * rows, size] and their
    log-sum-exps [slots * rows], float32, then the four tables of `work`. A piece has `rows` rows of width `size`. With
    `work` None nothing is split, and kernels read none of these. `like`: a tensor on the device."""
    slots = 0 if work is None else work.slots * rows
    part = (like.new_empty(*of, dtype=torch.float32) for of in ((slots, size), (slots,)))
    return *part, *([like] * 4 if work is None else (work.item, work.pieces, work.slot, work.split_sizes))
