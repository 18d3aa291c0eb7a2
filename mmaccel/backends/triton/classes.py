"""Queries and keys in the order (class, position), turned by each head's phase, in one launch (`index.turned_classes`)."""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 1024
"""Rows that a program places."""


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


@triton.jit(do_not_specialize=["P", "N", "E", "C", "H", "room", "steps"])
def turned_kernel(
    q_row,
    q_at,
    q_class,
    q_begin,
    k_row,
    k_place,
    k_class,
    k_begin,
    stride,
    line,
    shift,
    dense,
    out_row,
    slash_at,
    line_at,
    slash_row,
    slash_place,
    line_row,
    line_place,
    dense_row,
    dense_at,
    P,
    N,
    E,
    C,
    H,
    room,
    steps,
    VERTICAL: tl.constexpr,
    HORIZONTAL: tl.constexpr,
    TILE: tl.constexpr,
):
    """Rows, places and turned rows of one head; see `index.turned_classes`."""
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
    rank = _not_after(k_place + b * N, begin, tl.where(here, end, begin), at, steps) - begin - 1
    if HORIZONTAL:
        row = tl.where(own == tl.load(dense + head).to(tl.int32), -1, row)
    there = row >= 0
    tl.store(out_row + head * P + i, row, mask=i < P)
    tl.store(slash_at + head * P + i, tl.where(there, pair.to(wide) * (2 * room) + rank, -1), mask=i < P)
    if VERTICAL:
        begin, end = tl.load(k_begin + mine), tl.load(k_begin + mine + 1)
        low, high = tl.where(here, begin, 0), tl.where(here, end, 0)
        rank = _not_after(k_place + b * N, low, high, at, steps) - begin - 1
        tl.store(line_at + head * P + i, tl.where(there, rank, -1).to(wide), mask=i < P)

    inside = i < N
    row = tl.load(k_row + b * N + i, mask=inside, other=-1)
    number = tl.load(k_class + b * N + i, mask=inside, other=0)
    begin = tl.load(k_begin + tl.minimum(number, C))
    if VERTICAL:
        own_row = tl.where(number == mine, row, -1)
        place = tl.where(own_row >= 0, i - tl.load(k_begin + mine), 0)
        tl.store(line_row + head * N + i, own_row, mask=inside)
        tl.store(line_place + head * N + i, place.to(wide), mask=inside)
        row = tl.where(number == mine, -1, row)
    place = tl.where(row >= 0, number.to(wide) * (2 * room) + i - begin, 0)
    tl.store(slash_row + head * N + i, row, mask=inside)
    tl.store(slash_place + head * N + i, place.to(wide), mask=inside)

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
    vertical: bool,
    rows: int,
) -> list[Tensor]:
    """See `mmaccel.backends.index.turned_classes`."""
    _, B, P = queries.shape
    N, H = keys.shape[2], line.shape[1]
    kind = torch.int64 if wide else torch.int32

    def empty(n: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(B, H, n, dtype=dtype, device=keys.device)

    out = [empty(P), empty(P, kind), empty(N), empty(N, kind)]
    of_line = [empty(P, kind), empty(N), empty(N, kind)] if vertical else []
    of_dense = [empty(rows), empty(rows)] if rows else []
    at_line, line_row, line_place = of_line or (out[1], out[2], out[3])
    dense_row, dense_at = of_dense or (out[0], out[0])
    with torch.cuda.device_of(keys):
        turned_kernel[(triton.cdiv(max(P, N, rows), TILE), B * H)](
            *queries.unbind(0), q_begin, *keys.unbind(0), k_begin, stride, line, shift, dense,
            out[0], out[1], at_line, out[2], out[3], line_row, line_place, dense_row, dense_at,
            P, N, rows, k_begin.shape[1] - 1, H, room, N.bit_length(),
            VERTICAL=vertical, HORIZONTAL=rows > 0, TILE=TILE,
        )  # fmt: skip
    return out + of_line + of_dense
