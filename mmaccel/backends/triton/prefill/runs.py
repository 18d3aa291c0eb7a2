"""Lists that are runs of blocks in order: those of two neighbours as one, and how many of them need a test."""

# mypy: disable-error-code="no-untyped-call, no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmaccel.backends.ops.block_attend import FULL
from mmaccel.backends.triton.launch_args import lead

NEVER = tl.constexpr(1 << 62)
"""Beyond every block."""


@triton.jit(do_not_specialize=["row_b", "row_h", "M", "pairs"])
def paired_kernel(row, row_b, row_h, OUT, M, pairs, TILE: tl.constexpr):
    """Some pairs of lists of one head: the kernel of `paired`."""
    h, b = tl.program_id(1), tl.program_id(2)
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    first, last = tl.full([TILE], NEVER, tl.int64), tl.full([TILE], -NEVER, tl.int64)
    near, end = tl.full([TILE], -NEVER, tl.int64), tl.full([TILE], NEVER, tl.int64)
    alone = at < 0
    for which in tl.static_range(2):
        mine = 2 * at + which
        told = row + b * row_b + h.to(tl.int64) * row_h + mine.to(tl.int64) * 5
        inside = mine < M
        count = tl.load(told + 1, mask=inside, other=0)
        begin = tl.load(told, mask=inside, other=0) + tl.load(told + 4, mask=inside, other=0)
        some = count > 0
        alone = alone | (some == 0)
        first = tl.minimum(first, tl.where(some, begin, NEVER))
        last = tl.maximum(last, tl.where(some, begin + count, -NEVER))
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


def paired(row: Tensor) -> Tensor:
    """[b, h, ceil(M / 2), 5]: the lists of two neighbours as one, of lists [b, h, M, 5] that are runs of blocks in order.

    What one of them reaches and the other does not is tested pair by pair, and no pair of it passes.
    """
    b, h, M, _ = row.shape
    pairs = -(-M // 2)
    out = row.new_empty(b, h, pairs, 5)
    paired_kernel[(triton.cdiv(pairs, 256), h, b)](row, *lead(row), out, M, pairs, TILE=256)
    return out


@triton.jit(do_not_specialize=["kind_b", "kind_h", "n"])
def unsure_kernel(kind, kind_b, kind_h, OUT, n, FULL: tl.constexpr, STEP: tl.constexpr):
    """The kernel of `unsure`, of one head."""
    h, b = tl.program_id(0), tl.program_id(1)
    told, to = (
        kind + b * kind_b + h.to(tl.int64) * kind_h,
        OUT + (b * tl.num_programs(0) + h).to(tl.int64) * (n + 1),
    )
    tl.store(to, 0)
    before = tl.zeros([], tl.int32)
    for begin in range(0, n, STEP):
        at = begin + tl.arange(0, STEP)
        one = (tl.load(told + at, mask=at < n, other=FULL) != FULL).to(tl.int32)
        tl.store(to + 1 + at, before + tl.cumsum(one, 0), mask=at < n)
        before += tl.sum(one)


def unsure(kind: Tensor) -> Tensor:
    """int32 [b, h, N + 1]: how many of the blocks before each, and in the end of all, are not FULL; kind [b, h, N], or [N]
    without heads."""
    n = kind.shape[-1]
    out = torch.empty(*kind.shape[:-1], n + 1, dtype=torch.int32, device=kind.device)
    b, h = kind.shape[:2] if kind.dim() == 3 else (1, 1)
    unsure_kernel[(h, b)](kind, *lead(kind), out, n, FULL=FULL, STEP=2048, num_warps=8)
    return out
