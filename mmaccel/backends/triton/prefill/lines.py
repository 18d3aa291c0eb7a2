"""Triton kernels of `ops.lines` (strongest columns and diagonals, their key blocks, grid orders), and the functions that
launch them, with the operators' arguments.

`choose_lines` is a radix select: three passes find the score of the weakest chosen line digit by digit from histograms, one
counts per piece, one writes. All counts are integers, so results are deterministic.
"""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mmaccel.backends.ops import block_attend
from mmaccel.backends.triton.prefill.lists import binary_search_step

FULL, ABSENT = tl.constexpr(block_attend.FULL), tl.constexpr(block_attend.ABSENT)

TILE = 4096  # scores that a program looks at together
PIECES = 64  # most pieces into which the scores of a head are cut
DIGITS = 3  # digits of a score that is not negative: eleven bits, ten and ten
BINS = tl.constexpr(2048)  # values of a digit, at most
STEPS = 1024  # steps to earlier key blocks that a program looks at together
ROWS = 256  # blocks of queries, or of keys, that a program serves
MARKED = 1024  # columns, or diagonals, of a head that a program marks
TURNED = 1024  # rows that a program of `_turned_kernel` places


@triton.jit
def _bits(scores, at, n, last, first):
    """Scores as whole numbers of the same order, -1 where there is no line; line 0 is above all where `first`."""
    found = tl.load(scores + at, mask=at < n, other=0.0)
    found = tl.maximum(found, 0.0).to(tl.int32, bitcast=True)
    found = tl.where((at == 0) & first, 0x7FFFFFFF, found)
    return tl.where((at < n) & (at <= last), found, -1)


@triton.jit
def _threshold(counts, head, wanted, DIGITS: tl.constexpr):
    """The first DIGITS digits of the weakest score that is chosen, and how many with these digits are chosen."""
    bins = tl.arange(0, BINS)
    prefix, left = tl.zeros([], tl.int32), wanted
    for digit in tl.static_range(DIGITS):
        found = tl.load(counts + (head * 3 + digit) * BINS + bins)
        above = tl.cumsum(found, 0, reverse=True)
        chosen = tl.max(tl.where(above >= left, bins, 0), 0)
        left -= tl.sum(tl.where(bins > chosen, found, 0), 0)
        prefix = (prefix << 10) | chosen
    return prefix, left


@triton.jit
def _asked(columns, diagonals, last, n, vertical, slash, H):
    """Of this program the number of its head, those of the columns before those of the diagonals; the scores of the head,
    whether line 0 is chosen whatever its score, the last line there is, and how many are chosen."""
    number, heads = tl.program_id(1).to(tl.int64), tl.num_programs(1) // 2
    first = number >= heads
    head = tl.where(first, number - heads, number)
    if first:
        scores, count = diagonals + head * n, slash
    else:
        scores, count = columns + head * n, vertical
    limit = tl.load(last + head // H).to(tl.int32)
    return number, scores, first, limit, tl.minimum(count, tl.maximum(tl.minimum(limit + 1, n), 0))


@triton.jit(do_not_specialize=["n", "vertical", "slash", "piece", "H"])
def _digits_kernel(
    columns, diagonals, last, counts, n, vertical, slash, piece, H, DIGIT: tl.constexpr, TILE: tl.constexpr
):
    """Radix select, one digit: add a piece's histogram of digit DIGIT to counts [2 * heads, 3, BINS] (columns of all heads,
    then diagonals), for lines whose earlier digits equal the threshold's."""
    head, scores, first, limit, wanted = _asked(columns, diagonals, last, n, vertical, slash, H)
    begin = tl.program_id(0) * piece
    if (wanted > 0) & (begin <= limit):
        prefix, _ = _threshold(counts, head, wanted, DIGIT)
        found = tl.zeros([BINS], tl.int32)
        for tile in range(begin, tl.minimum(begin + piece, n), TILE):
            bits = _bits(scores, tile + tl.arange(0, TILE), n, limit, first)
            mine = bits >= 0
            if DIGIT > 0:
                mine = mine & ((bits >> (30 - 10 * DIGIT)) == prefix)
                digit = (bits >> (20 - 10 * DIGIT)) & 1023
            else:
                digit = (bits >> 20) & 2047
            found += tl.histogram(digit, BINS, mask=mine)
        to = counts + (head * 3 + DIGIT) * BINS + tl.arange(0, BINS)
        tl.atomic_add(to, found, mask=found > 0, sem="relaxed")


@triton.jit(do_not_specialize=["n", "vertical", "slash", "piece", "H"])
def _tally_kernel(columns, diagonals, last, counts, tally, n, vertical, slash, piece, H, TILE: tl.constexpr):
    """Count the lines of a piece above and equal to the weakest chosen one: tally [2 * heads, 2, pieces], columns of all
    heads, then diagonals."""
    head, scores, first, limit, wanted = _asked(columns, diagonals, last, n, vertical, slash, H)
    begin = tl.program_id(0) * piece
    above, equal = tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    if (wanted > 0) & (begin <= limit):
        least, _ = _threshold(counts, head, wanted, 3)
        for tile in range(begin, tl.minimum(begin + piece, n), TILE):
            bits = _bits(scores, tile + tl.arange(0, TILE), n, limit, first)
            above += tl.sum((bits > least).to(tl.int32), 0)
            equal += tl.sum((bits == least).to(tl.int32), 0)
    to = tally + head * 2 * tl.num_programs(0) + tl.program_id(0)
    tl.store(to, above)
    tl.store(to + tl.num_programs(0), equal)


@triton.jit(do_not_specialize=["n", "vertical", "slash", "piece", "H"])
def _chosen_kernel(
    columns, diagonals, last, counts, tally, out_columns, out_diagonals, n, vertical, slash, piece, H,
    TILE: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """Write a piece's chosen lines behind those of earlier pieces: out_columns [heads, vertical], out_diagonals [heads,
    slash], padded with n.

    Among lines equal to the weakest chosen one, the first are taken.
    """
    head, scores, first, limit, wanted = _asked(columns, diagonals, last, n, vertical, slash, H)
    begin = tl.program_id(0) * piece
    end = tl.minimum(begin + piece, n)
    heads = tl.num_programs(1) // 2
    if first:
        out, count = out_diagonals + (head - heads) * slash, slash
    else:
        out, count = out_columns + head * vertical, vertical
    if (wanted > 0) & (begin <= limit):
        least, left = _threshold(counts, head, wanted, 3)
        p = tl.arange(0, PIECES)
        told = tally + head * 2 * tl.num_programs(0) + p
        before = p < tl.program_id(0)
        above = tl.sum(tl.load(told, mask=before, other=0), 0)
        equal = tl.sum(tl.load(told + tl.num_programs(0), mask=before, other=0), 0)
        kept = above + tl.minimum(equal, left)
        for tile in range(begin, end, TILE):
            at = tile + tl.arange(0, TILE)
            bits = _bits(scores, at, n, limit, first)
            same = (bits == least).to(tl.int32)
            take = (bits > least) | ((same > 0) & (equal + tl.cumsum(same, 0) <= left))
            slot = kept + tl.cumsum(take.to(tl.int32), 0) - 1
            tl.store(out + slot, at.to(tl.int64), mask=take)
            kept += tl.sum(take.to(tl.int32), 0)
            equal += tl.sum(same, 0)
    for tile in range(begin, end, TILE):
        slot = tile + tl.arange(0, TILE)
        none = (slot >= wanted) & (slot < tl.minimum(count, end))
        tl.store(out + slot, tl.zeros_like(slot).to(tl.int64) + n, mask=none)


def choose_lines(columns, diagonals, last, vertical, slash):
    """Launch `ops.lines.choose_lines`: the key columns and diagonals of highest score, ascending, by radix select."""
    B, H, n = columns.shape
    vertical, slash = min(vertical, n), min(slash, n)
    columns, diagonals, last = columns.contiguous(), diagonals.contiguous(), last.contiguous()
    out = [torch.empty(B, H, k, dtype=torch.int64, device=columns.device) for k in (vertical, slash)]
    piece = TILE * triton.cdiv(triton.cdiv(n, TILE), PIECES)
    pieces = triton.cdiv(n, piece)
    counts = torch.zeros(2 * B * H, DIGITS, BINS.value, dtype=torch.int32, device=columns.device)
    tally = torch.empty(2 * B * H, 2, pieces, dtype=torch.int32, device=columns.device)
    grid, sizes, how = (pieces, 2 * B * H), (n, vertical, slash, piece, H), dict(TILE=TILE, num_warps=8)
    for digit in range(DIGITS):
        _digits_kernel[grid](columns, diagonals, last, counts, *sizes, DIGIT=digit, **how)
    _tally_kernel[grid](columns, diagonals, last, counts, tally, *sizes, **how)
    _chosen_kernel[grid](columns, diagonals, last, counts, tally, *out, *sizes, PIECES=PIECES, **how)
    return out[0], out[1]


@triton.jit(
    do_not_specialize=[
        *("N", "H", "K", "S", "P", "width", "row_b"),
        *("column_b", "column_h", "diagonal_b", "diagonal_h"),
    ]
)
def _mark_kernel(
    row, columns, diagonals, owned, kept, k_row, k_pos, N, H, K, S, P, width, row_b, column_b, column_h,
    diagonal_b, diagonal_h,
    MARKED: tl.constexpr,
):  # fmt: skip
    """For the chosen lines of a head: mark columns in `owned` and diagonals in `kept`; gather the rows and positions of
    columns."""
    head = tl.program_id(1).to(tl.int64)
    b, h = head // H, head % H
    i = tl.program_id(0) * MARKED + tl.arange(0, MARKED)
    column = tl.load(columns + b * column_b + h * column_h + i, mask=i < K, other=N)
    there = column < width
    tl.store(owned + head * N + column, tl.full([MARKED], 1, tl.uint8), mask=there)
    tl.store(k_row + head * P + i, tl.load(row + b * row_b + column, mask=there, other=-1), mask=i < P)
    tl.store(k_pos + head * P + i, tl.where(there, column, 0).to(tl.int32), mask=i < P)
    diagonal = tl.load(diagonals + b * diagonal_b + h * diagonal_h + i, mask=i < S, other=N)
    tl.store(kept + head * N + diagonal, tl.full([MARKED], 1, tl.uint8), mask=diagonal < width)


@triton.jit(do_not_specialize=["N", "H", "row_b"])
def _without_kernel(row, owned, left, kind, N, H, row_b, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """For the keys that are not chosen columns (not in `owned`): their rows, and the kinds of their blocks."""
    head = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = at < N
    found = tl.load(row + (head // H) * row_b + at, mask=inside, other=-1)
    gone = tl.load(owned + head * N + at, mask=inside, other=0)
    found = tl.where(gone != 0, -1, found)
    tl.store(left + head * N + at, found, mask=inside)
    whole = tl.min((found >= 0).to(tl.int32), 1) > 0
    told = tl.where(whole, FULL, ABSENT).to(tl.int8)
    tl.store(kind + head * (N // BLOCK) + block, told, mask=block < N // BLOCK)


@triton.jit
def _kept_before(kept, head, N, at):
    """How many diagonals of a head, and of the heads before it, are kept before the place `at`, moved into 0 .. N.

    kept [B * H * N]: how many are up to each.
    """
    at = head * N + tl.minimum(tl.maximum(at, 0), N)
    return tl.load(kept + at - 1, mask=at > 0, other=0)


@triton.jit(do_not_specialize=["N", "C", "H", "width"])
def _steps_kernel(kept, shape, index, upto, N, C, H, width, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    """For one block shape and head: the steps (key blocks, relative to the query block) that hold a kept diagonal,
    compacted, and how many precede each. `kept` as in `_kept_before`."""
    c, h = tl.program_id(0), tl.program_id(1)
    sequence, offset, length = tl.load(shape + c), tl.load(shape + C + c), tl.load(shape + 2 * C + c)
    head = sequence.to(tl.int64) * H + h
    to = (c * H + h).to(tl.int64)
    count = tl.zeros([], tl.int32)
    for first in range(0, width, STEPS):
        u = first + tl.arange(0, STEPS)
        # Place offset + l of the block, l < length, meets the key block 1 - u after its own on a run of diagonals.
        least, past = (u - 2) * BLOCK + offset + 1, (u - 1) * BLOCK + offset + length
        found = _kept_before(kept, head, N, past) > _kept_before(kept, head, N, least)
        touched = (found & (u < width)).to(tl.int32)
        before = count + tl.cumsum(touched, 0) - touched
        tl.store(upto + to * (width + 1) + u, before, mask=u < width)
        tl.store(index + to * width + before, 1 - u, mask=(touched > 0) & (u < width))
        count += tl.sum(touched, 0)
    tl.store(upto + to * (width + 1) + width, count)


@triton.jit(do_not_specialize=["H", "M", "BM", "width"])
def _rows_kernel(upto, member, home, reach, out, H, M, BM, width, ROWS: tl.constexpr):
    """Block list of each query block, out [B, H, M, 5] (`BlockLists.row`), as a range of its shape's entries."""
    b, h = tl.program_id(1) // H, tl.program_id(1) % H
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = m < M
    at = b * M + m
    shape = tl.load(member + at, mask=inside, other=0).to(tl.int64) * H + h
    ends = upto + shape * (width + 1)
    first = tl.load(ends + tl.load(reach + at, mask=inside, other=0))
    count = tl.load(ends + tl.load(reach + BM + at, mask=inside, other=0)) - first
    head = tl.load(ends + tl.load(reach + 2 * BM + at, mask=inside, other=0)) - first
    to = out + (tl.program_id(1).to(tl.int64) * M + m) * 5
    tl.store(to, shape * width + first, mask=inside)
    tl.store(to + 1, count.to(tl.int64), mask=inside)
    tl.store(to + 2, tl.minimum(tl.maximum(head, 0), count).to(tl.int64), mask=inside)
    tl.store(to + 3, count.to(tl.int64), mask=inside)
    tl.store(to + 4, tl.load(home + at, mask=inside, other=0).to(tl.int64), mask=inside)


@triton.jit(do_not_specialize=["N", "H", "M", "G", "R", "base", "blocks"])
def gapped_block_list_kernel(
    kept, broken, runs, sure, index, out, N, H, M, G, R, base, blocks, BLOCK: tl.constexpr, TILE: tl.constexpr
):
    """Write the list of one query block whose positions are not consecutive, in place of the shared list of its shape.

    kept [B * H * N]: running count of the kept diagonals, over all heads.
    """
    g, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b = head // H
    m = tl.load(broken + b * G + g)
    if m >= M:
        return
    first = base + (head * G + g) * blocks
    last = tl.load(sure + b * G + g)
    count, tail = tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    for begin in range(0, blocks, TILE):
        block = begin + tl.arange(0, TILE)
        touched = tl.zeros([TILE], tl.int32)
        for run in range(R):
            told = runs + ((b * G + g) * R + run) * 2
            least, most = tl.load(told), tl.load(told + 1)
            near = (block < blocks) & (block * BLOCK <= most)
            low = _kept_before(kept, head, N, least - block * BLOCK - BLOCK + 1)
            high = _kept_before(kept, head, N, most + 1 - block * BLOCK)
            touched |= (near & (high > low)).to(tl.int32)
        slot = count + tl.cumsum(touched, 0) - touched
        tl.store(index + first + slot, block, mask=touched > 0)
        count += tl.sum(touched, 0)
        tail += tl.sum(touched * (block < last), 0)
    to = out + (head * M + m) * 5
    tl.store(to, first)
    tl.store(to + 1, count.to(tl.int64))
    tl.store(to + 2, tl.zeros([], tl.int64))
    tl.store(to + 3, tail.to(tl.int64))
    tl.store(to + 4, tl.zeros([], tl.int64))


def split_columns(row, columns, diagonals, width, block):
    """Launch `ops.lines.split_columns`: separate the keys of chosen columns from the others. One kernel marks the columns'
    keys, a second one writes the list of the other keys."""
    (B, H, K), S, N = columns.shape, diagonals.shape[2], row.shape[1]
    P = max(K + -K % block, block)
    columns, diagonals = (t if t.stride(2) == 1 else t.contiguous() for t in (columns, diagonals))
    owned, kept = torch.zeros(2, B, H, N, dtype=torch.uint8, device=row.device).unbind()
    left, k_row, k_pos = (row.new_empty(B, H, n) for n in (N, P, P))
    kind = torch.empty(B, H, N // block, dtype=torch.int8, device=row.device)
    blocks = max(1, 2048 // block)
    _mark_kernel[(triton.cdiv(max(P, S), MARKED), B * H)](
        row, columns, diagonals, owned, kept, k_row, k_pos, N, H, K, S, P, width,
        row.stride(0), *columns.stride()[:2], *diagonals.stride()[:2], MARKED=MARKED,
    )  # fmt: skip
    _without_kernel[(triton.cdiv(N // block, blocks), B * H)](
        row, owned, left, kind, N, H, row.stride(0), BLOCK=block, ROWS=blocks
    )
    return left, kind, kept.view(torch.bool), k_row, k_pos


def list_slash_blocks(kept, queries, block):
    """Launch `ops.lines.list_slash_blocks`: lists of the key blocks that diagonals touch, by shape of query block; then
    the lists of query blocks whose ranks have gaps."""
    shape, member, home, reach, broken, runs, sure = queries
    B, H, N = kept.shape
    C, M, G, blocks = shape.shape[1], member.shape[1], broken.shape[1], N // block
    width = blocks + 2
    index = torch.empty(C * H * width + B * H * G * blocks, dtype=torch.int32, device=kept.device)
    upto = torch.empty(C, H, width + 1, dtype=torch.int32, device=kept.device)
    row = torch.empty(B, H, M, 5, dtype=torch.int64, device=kept.device)
    # One sum over all heads: of each by itself it would be made by one program a head.
    before = kept.reshape(-1).cumsum(0, dtype=torch.int32)
    _steps_kernel[(C, H)](before, shape, index, upto, N, C, H, width, BLOCK=block, STEPS=STEPS, num_warps=4)
    _rows_kernel[(triton.cdiv(M, ROWS), B * H)](upto, member, home, reach, row, H, M, B * M, width, ROWS=ROWS)
    if G:
        gapped_block_list_kernel[(G, B * H)](
            before, broken, runs, sure, index, row, N, H, M, G, runs.shape[2], C * H * width, blocks,
            BLOCK=block, TILE=ROWS, num_warps=1,
        )  # fmt: skip
    return row, index


@triton.jit
def _not_after(place, low, high, bound, steps):
    """Where the first of the ascending `place` in low .. high lies that is greater than `bound`."""
    for _ in range(steps):
        low, high = binary_search_step(place, bound, low, high)
    return low


@triton.jit(do_not_specialize=["P", "N", "V", "E", "C", "H", "room", "steps"])
def _turned_kernel(
    q_row, q_at, q_class, q_begin, k_row, k_pos, k_begin, stride, line, shift, dense, out_row, slash_at,
    line_at, line_row, line_place, dense_row, dense_at, P, N, V, E, C, H, room, steps,
    VERTICAL: tl.constexpr, HORIZONTAL: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Kernel of `ops.lines.sort_by_class` (strided pattern), for one head; `steps`: a class has fewer than 2 ** `steps`
    keys."""
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
    rank = _not_after(k_pos + b * N, begin, tl.where(led, end, begin), at, steps) - begin - 1
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
        rank = _not_after(k_pos + b * N, low, high, at, steps) - begin - 1
        tl.store(line_at + head * P + i, tl.where(there, rank, -1).to(wide), mask=i < P)

    if HORIZONTAL:
        full = tl.load(dense + head)
        source = tl.load(q_begin + full) + i
        some = source < tl.load(q_begin + full + 1)
        row = tl.load(q_row + b * P + source, mask=some, other=-1)
        at = tl.load(q_at + b * P + source, mask=some, other=-1)
        tl.store(dense_row + head * E + i, row, mask=i < E)
        tl.store(dense_at + head * E + i, at, mask=i < E)


def sort_by_class(order, phases, room, wide, columns, rows):
    """Launch `ops.lines.sort_by_class`: sort queries and keys of each head by residue class modulo the stride, then
    position; a program places `TURNED` rows."""
    (queries, q_begin, keys, k_begin, stride), (line, shift, dense) = order, phases
    _, B, P = queries.shape
    N, H, kind = keys.shape[2], line.shape[1], torch.int64 if wide else torch.int32
    # What is not wanted has no elements.
    row, line_row, *of_dense = (queries.new_empty(B, H, n) for n in (P, columns, rows, rows))
    slash_at, line_at, line_place = (
        queries.new_empty(B, H, n, dtype=kind) for n in (P, P if columns else 0, columns)
    )
    _turned_kernel[(triton.cdiv(max(P, columns, rows), TURNED), B * H)](
        *queries.unbind(0), q_begin, keys[0], keys[1], k_begin, stride, line, shift, dense,
        row, slash_at, line_at, line_row, line_place, *of_dense,
        P, N, columns, rows, k_begin.shape[1] - 1, H, room, room.bit_length(),
        VERTICAL=columns > 0, HORIZONTAL=rows > 0, TILE=TURNED,
    )  # fmt: skip
    of_lines = line_at, line_row, line_place
    return [row, slash_at, *(of_lines if columns else ()), *(of_dense if rows else ())]
