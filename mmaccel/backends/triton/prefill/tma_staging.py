"""Where the copy engine finds the keys of each block: in their tensor, or among copies of those that lie apart there.

A block whose keys are neighbours in the tensor stays where it is; the rest (a permuted order's, those at the edges of an
island, those that reach beyond the tensor) are copied once, block by block, into one pool. Which is which is found on the
device, and so is a block's slot. What is read in the place of an absent key must be finite, for its weight of zero is
multiplied with it: a row of the tensor is, and what lies behind its last one in a buffer with room need not be.
"""

# mypy: disable-error-code="no-untyped-call, no-untyped-def, untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmaccel.backends.ops.block_attend import KeySpan
from mmaccel.backends.triton.launch_args import lead, lines

BOX = 64
"""Keys of a block of the copy engine."""

FAR = 2**31 - 1
"""The place of what is not there."""


@triton.jit(do_not_specialize=["home", "blocks", "heads", "keys"])
def home_kernel(
    row,
    row_b,
    row_h,
    home,
    blocks,
    heads,
    keys,
    SHARED: tl.constexpr,
    BOX: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """For BLOCKS blocks the row at which they begin, or -1 for those that are no BOX rows side by side of the `keys` there
    are."""
    b, x = tl.program_id(2), tl.program_id(1)
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    n = tl.arange(0, BOX)
    head = x
    if SHARED:
        head = 0
    at = block[:, None] * BOX + n[None, :]
    own = tl.load(row + b * row_b + head.to(tl.int64) * row_h + at, mask=block[:, None] < blocks, other=-1)
    there = own >= 0
    begin = own - n[None, :]
    low = tl.min(tl.where(there, begin, 2147483647), 1)
    high = tl.max(tl.where(there, begin, -2147483648), 1)
    # A block without a key may be any rows, and where there are two beginnings it is none.
    begin = tl.where(low > high, 0, low)
    told = tl.where((low >= high) & (begin >= 0) & (begin + BOX <= keys), begin, -1)
    tl.store(home + (b * heads + x).to(tl.int64) * blocks + block, told, mask=block < blocks)


@triton.jit(do_not_specialize=["keys"])
def place_kernel(
    row,
    row_b,
    row_h,
    place,
    place_b,
    place_h,
    out,
    out_b,
    out_h,
    keys,
    FAR: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The places of keys, those of absent ones beyond every range."""
    at, x, b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1).to(tl.int64), tl.program_id(2)
    mask = at < keys
    there = tl.load(row + b * row_b + x * row_h + at, mask=mask, other=-1) >= 0
    told = tl.load(place + b * place_b + x * place_h + at, mask=mask, other=0)
    tl.store(out + b * out_b + x * out_h + at, tl.where(there, told, FAR), mask=mask)


@triton.jit(do_not_specialize=["home", "upto", "capacity", "blocks", "heads"])
def copy_kernel(
    key,
    value,
    key_b,
    key_g,
    key_s,
    value_b,
    value_g,
    value_s,
    row,
    row_b,
    row_h,
    home,
    upto,
    k_copies,
    v_copies,
    capacity,
    blocks,
    heads,
    GROUP: tl.constexpr,
    SHARED: tl.constexpr,
    BOX: tl.constexpr,
    D: tl.constexpr,
):
    """One block: if it has no home, its rows go to its slot among the copies, and its home is -2 - slot."""
    block, x, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    at = (b * heads + x).to(tl.int64) * blocks + block
    slot = tl.load(upto + at) - 1
    if (tl.load(home + at) == -1) & (slot < capacity):
        n, d = tl.arange(0, BOX), tl.arange(0, D)
        group, head = x // GROUP, x
        if SHARED:
            group, head = x, 0
        group, batch = group.to(tl.int64), b.to(tl.int64)
        own = tl.load(row + batch * row_b + head * row_h + block * BOX + n)
        there = (own >= 0)[:, None]
        own = tl.maximum(own, 0).to(tl.int64)[:, None]
        target = (slot.to(tl.int64) * BOX + n)[:, None] * D + d[None, :]
        some = tl.load(key + batch * key_b + group * key_g + own * key_s + d[None, :], mask=there, other=0.0)
        tl.store(k_copies + target, some)
        some = tl.load(
            value + batch * value_b + group * value_g + own * value_s + d[None, :], mask=there, other=0.0
        )
        tl.store(v_copies + target, some)
        tl.store(home + at, -2 - slot)


@dataclass(frozen=True)
class Homes:
    """Where a span's keys are.

    home    for each span [b, x, blocks of 64] int32, x the groups where all heads share its keys, or else the heads (1 for
            what stands in the order of the tensor): the row
            in the tensor, or -2 - the slot among the copies, or -1 for none
    place   the places of its keys, FAR for absent ones
    keys, values    copies [slots, 64, D]
    short   [] int32, how many blocks have no home; None where there is a slot for every block
    """

    home: tuple[Tensor, ...]
    place: tuple[Tensor, ...]
    keys: Tensor
    values: Tensor
    short: Tensor | None

    @classmethod
    def of(
        cls,
        key: Tensor,
        value: Tensor,
        spans: Sequence[KeySpan],
        heads: int,
        most: int,
    ) -> Homes:
        """For keys and values [B, G, S, D] and spans of `heads` heads; copies of at most `most` bytes, or as much as there
        is."""
        B, G, S, D = key.shape
        device = key.device
        k_row = [span.k_row for span in spans]
        # What is in the order of the tensor is where it is.
        natural = [s.k_row.shape[2] <= S and s.ordered == s.k_row.shape[2] for s in spans]
        apart = [r for r, there in zip(k_row, natural, strict=True) if not there]
        shapes = [(B, G if r.shape[1] == 1 else heads, r.shape[2] // BOX) for r in apart]
        sizes = [b * x * n for b, x, n in shapes]
        flat = torch.empty(sum(sizes), dtype=torch.int32, device=device)
        home = [t.view(s) for t, s in zip(flat.split(sizes), shapes, strict=True)] if apart else []
        for r, t in zip(apart, home, strict=True):
            grid = (triton.cdiv(t.shape[2], 16), t.shape[1], B)
            shared = r.shape[1] == 1
            home_kernel[grid](r, *lead(r), t, t.shape[2], t.shape[1], S, SHARED=shared, BOX=BOX, BLOCKS=16)
        slot_bytes = 2 * BOX * D * key.element_size()
        keys, values = _pool(min(len(flat), most // slot_bytes), key)
        capacity = len(keys)
        upto = (flat == -1).cumsum(0, dtype=torch.int32) if apart else flat
        for r, t, u in zip(apart, home, upto.split(sizes) if apart else (), strict=True):
            copy_kernel[(t.shape[2], t.shape[1], B)](
                key,
                value,
                *lines(key),
                *lines(value),
                r,
                *lead(r),
                t,
                u,
                keys,
                values,
                capacity,
                t.shape[2],
                t.shape[1],
                GROUP=heads // G,
                SHARED=r.shape[1] == 1,
                BOX=BOX,
                D=D,
                num_warps=8,
            )
        short = (upto[-1] - capacity).clamp(min=0) if capacity < len(flat) else None
        found = iter(home)
        every = [
            _in_order(r.shape[2], device) if there else next(found)
            for r, there in zip(k_row, natural, strict=True)
        ]
        place = tuple(
            s.k_pos if there else _beyond(s.k_row, s.k_pos) for s, there in zip(spans, natural, strict=True)
        )
        return cls(tuple(every), place, keys, values, short)


def _in_order(n: int, device: torch.device) -> Tensor:
    """[1, 1, blocks]: where each block of `n` keys in their order begins."""
    return torch.arange(0, n, BOX, dtype=torch.int32, device=device)[None, None]


def _pool(capacity: int, like: Tensor) -> tuple[Tensor, ...]:
    """Room for copies of `capacity` blocks of keys, and of values, or of fewer where the device is short of memory."""
    while True:
        try:
            return like.new_empty(2, capacity, BOX, like.shape[3]).unbind()
        except torch.OutOfMemoryError:
            if not capacity:
                raise
            capacity //= 2


def _beyond(row: Tensor, place: Tensor) -> Tensor:
    b, h = (max(t.shape[i] for t in (row, place)) for i in (0, 1))
    out = torch.empty(b, h, row.shape[2], dtype=torch.int32, device=row.device)
    grid = (triton.cdiv(row.shape[2], 1024), h, b)
    place_kernel[grid](
        *(row, *lead(row), place, *lead(place), out, *out.stride()[:2], row.shape[2]), FAR=FAR, BLOCK=1024
    )
    return out
