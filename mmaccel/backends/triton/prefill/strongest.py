"""The strongest columns and diagonals of each head, by many programs a head; see `mmaccel.backends.ops.lines.strongest`.

The score of the weakest line that is chosen is found digit by digit, from how many lines have each: three passes over the
scores, one that counts what each piece of them holds, and one that writes. Counts are whole numbers: their sums have one
value in any order.
"""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 4096
"""Scores that a program looks at together."""

PIECES = 64
"""Most pieces into which the scores of a head are cut."""

DIGITS = 3
"""Digits of a score that is not negative: eleven bits, ten and ten."""

BINS = tl.constexpr(2048)
"""Values of a digit, at most."""


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
def digits_kernel(
    columns, diagonals, last, counts, n, vertical, slash, piece, H, DIGIT: tl.constexpr, TILE: tl.constexpr
):
    """counts [heads, 3, BINS]: how many lines of a piece have each value of a digit, of those with the digits before it."""
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
def tally_kernel(columns, diagonals, last, counts, tally, n, vertical, slash, piece, H, TILE: tl.constexpr):
    """tally [heads, 2, pieces]: how many lines of a piece are above the weakest that is chosen, and how many equal it."""
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
def chosen_kernel(
    columns,
    diagonals,
    last,
    counts,
    tally,
    out_columns,
    out_diagonals,
    n,
    vertical,
    slash,
    piece,
    H,
    TILE: tl.constexpr,
    PIECES: tl.constexpr,
):
    """out_columns [heads, vertical], out_diagonals [heads, slash]: the chosen lines of a piece after those of the pieces
    before it, and n past the last of all.

    Of lines that equal the weakest the first are taken.
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


def strongest(
    columns: Tensor, diagonals: Tensor, last: Tensor, vertical: int, slash: int
) -> tuple[Tensor, Tensor]:
    """See `mmaccel.backends.ops.lines.strongest`."""
    B, H, n = columns.shape
    vertical, slash = min(vertical, n), min(slash, n)
    columns, diagonals, last = columns.contiguous(), diagonals.contiguous(), last.contiguous()
    out = [torch.empty(B, H, k, dtype=torch.int64, device=columns.device) for k in (vertical, slash)]
    piece = TILE * triton.cdiv(triton.cdiv(n, TILE), PIECES)
    pieces = triton.cdiv(n, piece)
    counts = torch.zeros(2 * B * H, DIGITS, BINS.value, dtype=torch.int32, device=columns.device)
    tally = torch.empty(2 * B * H, 2, pieces, dtype=torch.int32, device=columns.device)
    grid, sizes, how = (pieces, 2 * B * H), (n, vertical, slash, piece, H), dict(TILE=TILE, num_warps=8)
    with torch.cuda.device_of(columns):
        for digit in range(DIGITS):
            digits_kernel[grid](columns, diagonals, last, counts, *sizes, DIGIT=digit, **how)
        tally_kernel[grid](columns, diagonals, last, counts, tally, *sizes, **how)
        chosen_kernel[grid](columns, diagonals, last, counts, tally, *out, *sizes, PIECES=PIECES, **how)
    return out[0], out[1]
