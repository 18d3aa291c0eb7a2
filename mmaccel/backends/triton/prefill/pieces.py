"""Pieces of tensors put together in two launches; see `mmaccel.backends.ops.pieces.assembled`."""

# mypy: ignore-errors

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmaccel.backends.ops import pieces
from mmaccel.backends.ops.pieces import FIELDS, KINDS, TILE

WIDTH, ROW = tl.constexpr(len(FIELDS)), tl.constexpr(pieces.ROW)


@triton.jit(do_not_specialize=["table", "n", "steps"])
def pieces_kernel(table, narrow, wide, small, n, steps, TILE: tl.constexpr):
    """Some elements of one of n pieces, whose `source` is an address, 0 for none."""
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
    kind, heads, size = tl.load(told + 2), tl.load(told + 5), tl.load(told + 7)
    tiles = (size + TILE - 1) // TILE
    line, at = local // tiles, (local % tiles) * TILE + tl.arange(0, TILE)
    b, h = line // heads, line % heads
    inside = at < size
    source, more = tl.load(told + 8), tl.load(told + 12)
    value = tl.zeros([TILE], tl.int64)
    if source != 0:
        first = b * tl.load(told + 10) + h * tl.load(told + 11)
        from_kind = tl.load(told + 9)
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
    if tl.load(told + 13) != 0:
        column = at % ROW
        value += tl.where(column == 0, more, 0) + tl.where(column == ROW - 1, tl.load(told + 14), 0)
    else:
        value += more
    to = tl.load(told + 1) + b * tl.load(told + 3) + h * tl.load(told + 4) + at
    if kind == 0:
        tl.store(narrow + to, value.to(tl.int32), mask=inside)
    elif kind == 1:
        tl.store(wide + to, value, mask=inside)
    else:
        tl.store(small + to, value.to(tl.int8), mask=inside)


def assembled(
    sources: Sequence[Tensor], table: Sequence[int], fills: int, sizes: Sequence[int]
) -> list[Tensor]:
    """See `mmaccel.backends.ops.pieces.assembled`; the table is sent to the device, and nothing waits for it."""
    device = sources[0].device
    out = [torch.empty(n, dtype=kind, device=device) for n, kind in zip(sizes, KINDS, strict=True)]
    told, width = array("q", table), len(FIELDS)
    address = [*(t.data_ptr() for t in sources), 0]
    at = FIELDS.index("source")
    told[at::width] = array("q", [address[source] for source in told[at::width]])
    tiles = [0, 0]
    for first in range(0, len(told), width):
        lines = told[first + FIELDS.index("heads")] * told[first + FIELDS.index("batch")]
        tiles[first >= fills * width] += lines * -(-told[first + FIELDS.index("size")] // TILE)
    rows = torch.frombuffer(told, dtype=torch.int64).view(-1, width)
    sent = (rows.pin_memory() if device.type == "cuda" else rows).to(device, non_blocking=True)
    with torch.cuda.device_of(sources[0]):
        for some, count in zip((sent[:fills], sent[fills:]), tiles, strict=True):
            if count:
                pieces_kernel[(count,)](some, *out, len(some), len(some).bit_length(), TILE=TILE, num_warps=8)
    return out
