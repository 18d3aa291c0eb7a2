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


@triton.jit(do_not_specialize=["P", "N", "V", "E", "C", "H", "room", "steps"])
def turned_kernel(
    q_row,
    q_at,
    q_class,
    q_begin,
    k_row,
    k_place,
    k_begin,
    stride,
    line,
    shift,
    dense,
    out_row,
    slash_at,
    line_at,
    line_row,
    line_place,
    dense_row,
    dense_at,
    P,
    N,
    V,
    E,
    C,
    H,
    room,
    steps,
    VERTICAL: tl.constexpr,
    HORIZONTAL: tl.constexpr,
    TILE: tl.constexpr,
):
    """Rows, places and turned rows of one head; see `index.turned_classes`. No class has 2 ** `steps` keys."""
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
    rank = _not_after(k_place + b * N, begin, tl.where(led, end, begin), at, steps) - begin - 1
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
        rank = _not_after(k_place + b * N, low, high, at, steps) - begin - 1
        tl.store(line_at + head * P + i, tl.where(there, rank, -1).to(wide), mask=i < P)

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
    columns: int,
    rows: int,
) -> list[Tensor]:
    """See `mmaccel.backends.ops.classes.turned_classes`."""
    _, B, P = queries.shape
    N, H = keys.shape[2], line.shape[1]
    kind = torch.int64 if wide else torch.int32

    def empty(n: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(B, H, n, dtype=dtype, device=keys.device)

    out = [empty(P), empty(P, kind)]
    of_line = [empty(P, kind), empty(columns), empty(columns, kind)] if columns else []
    of_dense = [empty(rows), empty(rows)] if rows else []
    at_line, line_row, line_place = of_line or (out[1], out[0], out[1])
    dense_row, dense_at = of_dense or (out[0], out[0])
    with torch.cuda.device_of(keys):
        turned_kernel[(triton.cdiv(max(P, columns, rows), TILE), B * H)](
            *queries.unbind(0), q_begin, keys[0], keys[1], k_begin, stride, line, shift, dense,
            out[0], out[1], at_line, line_row, line_place, dense_row, dense_at,
            P, N, columns, rows, k_begin.shape[1] - 1, H, room, room.bit_length(),
            VERTICAL=columns > 0, HORIZONTAL=rows > 0, TILE=TILE,
        )  # fmt: skip
    return out + of_line + of_dense
