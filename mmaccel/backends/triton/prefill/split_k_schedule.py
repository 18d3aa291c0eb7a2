"""The splitting of long rows of lists into pieces, and the order in which programs take them."""

# mypy: disable-error-code="no-untyped-call, no-untyped-def, untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmaccel.backends.ops import operator as operators
from mmaccel.backends.triton.launch_args import decode_int, encode_ints, lines

LEAST_CHUNK = 32
"""Listed blocks under which splitting a row costs more than it evens out."""

WAVES = 8
"""A row is split where one of its tiles is more than 1 / WAVES of what a place on the device computes in all."""

MOST_PIECES = 64
"""Pieces that a row is split into at the most."""

FEW, MANY = 1024, 8192
"""Rows that a program of `work_kernel` looks at together: of few rows, and of more."""

ALIGNED = 4
"""Numbers of 32 bits to whose multiples tables begin."""


@triton.jit(do_not_specialize=["M", "list_rows"])
def length_kernel(counts, strides, LENGTH, M, list_rows, LISTS: tl.constexpr, TILE: tl.constexpr):
    """How many blocks the lists of some rows hold in all spans; strides as `encode_ints` puts them."""
    row = (tl.program_id(0) * TILE + tl.arange(0, TILE)).to(tl.int64)
    inside = row < list_rows
    b, h, m = row // M // LISTS, row // M % LISTS, row % M
    length = tl.zeros_like(row)
    for s in tl.static_range(len(counts)):
        at = b * decode_int(strides[s][0]) + h * decode_int(strides[s][1]) + m * decode_int(strides[s][2])
        length += tl.load(counts[s] + at, mask=inside, other=0).to(tl.int64)
    tl.store(LENGTH + row, length, mask=inside)


@triton.jit(do_not_specialize=["list_rows", "items", "tiles", "even", "chunk", "longest"])
def work_kernel(
    LENGTH, ITEM, PIECES, SLOT, TOLD, list_rows, items, tiles, even, chunk, longest,
    LEAST: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Program p lists the rows that have a p-th piece, the last program those that are not split; a chunk of its own choice
    unless one is given, so that there is a program for every piece of a row of `longest` blocks."""
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
class Work:
    """The pieces of split rows, in tables made on the device.

    Split rows stand first, so that no piece is the tail of a launch: the first pieces of all of them, then the second ones,
    and so on, since those with one number list the same keys, which then come from the cache. The rest keep their order,
    in which neighbours read the same keys.

    item [items, 2] int32 the list row of each program and which of its pieces, -1 where there is none; pieces [rows] int32;
    slot [rows] int32 where a row's outputs begin, among those of split rows; told [2] int32 the most blocks of a piece,
    and how many programs split rows have. items and slots bound both from host numbers: a row of n blocks makes
    ceil(n / chunk) pieces, at least one, and a split one fewer than 2 n / chunk.
    """

    item: Tensor
    pieces: Tensor
    slot: Tensor
    told: Tensor
    slots: int

    @property
    def items(self) -> int:
        """How many programs there may be."""
        return len(self.item)

    @classmethod
    def of(
        cls,
        counts: Sequence[Tensor],
        B: int,
        lists: int,
        M: int,
        tiles: int,
        longest: int,
        places: int,
        chunk: int | None = None,
    ) -> Work:
        """Pieces of at most `chunk` blocks. By default of none is more than 1 / WAVES of what one of `places` computes, if a
        row then has no more than MOST_PIECES: how many there are is bounded, though how many blocks are listed is not known
        here. counts: of each span [1 or B, 1 or lists, M]; tiles: of a row; longest: the most blocks of a row."""
        rows, device, even = B * lists * M, counts[0].device, WAVES * places
        spare, programs = even // tiles, min(triton.cdiv(longest, LEAST_CHUNK), MOST_PIECES)
        if chunk is not None:
            spare, programs = rows * longest // chunk, triton.cdiv(longest, chunk)
        sizes = (rows, 2 * (rows + spare), rows, rows, 2)
        # Kernels are compiled for how addresses divide.
        room = [n + -n % ALIGNED for n in sizes]
        made = torch.empty(sum(room), dtype=torch.int32, device=device).split(room)
        length, item, pieces, slot, limits = (t[:n] for t, n in zip(made, sizes, strict=True))
        strides = tuple(encode_ints(lines(c)) for c in counts)
        few = rows <= FEW
        length_kernel[(triton.cdiv(rows, 1024),)](
            tuple(counts), strides, length, M, rows, LISTS=lists, TILE=1024
        )
        work_kernel[(max(programs, 1) + 1,)](
            length, item, pieces, slot, limits, rows, rows + spare, tiles, even, chunk or 0, longest,
            LEAST=LEAST_CHUNK, STEP=FEW if few else MANY, num_warps=8 if few else 16,
        )  # fmt: skip
        return cls(item.view(-1, 2), pieces, slot, limits, 2 * spare)


def places_on(device: torch.device) -> int:
    """Programs that run at a time, about."""
    return 2 * operators.resources(device).processors
