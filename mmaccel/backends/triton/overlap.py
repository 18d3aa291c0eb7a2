"""Kernels of one stream that begin before the last one ends (programmatic dependent launch, Hopper and later).

What a decode step launches takes a few microseconds each, and between one kernel's last load and the next one's first the
memory would stand idle for as long. So a kernel lets the next one begin when its own last loads are under way, and the next
one has weights fetched into the L2 cache before it waits for the first one's end.

Two rules make it safe after any other kernel, and every kernel here keeps them: each program waits before anything is read
into registers or shared memory and before anything is written, and no program ends without having waited. Then a kernel that
has ended says that all before it have, too; and what is fetched into L2 is still what is in memory, whoever writes it.
"""

# mypy: ignore-errors

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

AHEAD = 8 << 20
"""Bytes of a product's weights that are fetched before the kernel before it ends, at most: what memory gives in 2 us."""

EARLY = False
"""Whether long kernels, too, let the next one begin when they begin, and not when their last loads are under way."""


@triton.jit
def let_next_begin(OVERLAP: tl.constexpr):
    """The next kernel may begin where there is room, once all programs have come here or ended."""
    if OVERLAP:
        gdc_launch_dependents()


@triton.jit
def let_next_begin_from(place, BEGIN, OVERLAP: tl.constexpr):
    """The same in a loop, from the round at which `place` reaches BEGIN; no branch, so that loads stay pipelined."""
    if OVERLAP:
        tl.inline_asm_elementwise(
            """{
            .reg .pred now;
            setp.ge.s32 now, $1, $2;
            @now griddepcontrol.launch_dependents;
            mov.u32 $0, 0;
            }""",
            "=r,r,r",
            [place, BEGIN],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def wait_for_last(OVERLAP: tl.constexpr):
    """Wait until the kernel launched before has ended, and what it wrote is seen."""
    if OVERLAP:
        gdc_wait()


@triton.jit
def fetch_lines(start, LINES: tl.constexpr, STRIDE: tl.constexpr, BYTES: tl.constexpr):
    """Have the first BYTES of LINES lines, STRIDE bytes apart from `start` on, brought into the L2 cache; a thread a line.

    STRIDE, BYTES and the address are multiples of 16; there are LINES threads at least.
    """
    tl.inline_asm_elementwise(
        """{
        .reg .pred mine;
        .reg .u32 line;
        .reg .u64 address;
        mov.u32 line, %tid.x;
        setp.lt.u32 mine, line, $2;
        mad.wide.u32 address, line, $3, $1;
        @mine cp.async.bulk.prefetch.L2.global [address], $4;
        mov.u32 $0, 0;
        }""",
        "=r,l,r,r,r",
        [start.to(tl.int64, bitcast=True), LINES, STRIDE, BYTES],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@functools.cache
def overlaps(device: torch.device) -> bool:
    """Whether kernels on `device` can begin before the last one ends."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device)[0] >= 9


def launched(overlap: bool) -> dict[str, Any]:
    """How a kernel of these is launched; other devices do not know the option."""
    return {"OVERLAP": overlap, **({"launch_pdl": True} if overlap else {})}


def fetchable(*weight: Tensor) -> bool:
    """Whether lines of `weight` can be fetched: they begin at multiples of 16 bytes, and are such."""
    return all(w.data_ptr() % 16 == 0 and w.shape[-1] * w.element_size() % 16 == 0 for w in weight)
