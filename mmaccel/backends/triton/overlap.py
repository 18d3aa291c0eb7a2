"""Kernels of one stream that begin before the last one ends (programmatic dependent launch, Hopper and later).

What a decode step launches takes a few microseconds each, and between one kernel's last write and the next one's first
read memory would stand idle for as long. So a kernel lets the next one begin at once, has what does not depend on the last
one (weights) fetched into the L2 cache, and only then waits for the last one's end. Before that wait nothing is read into
registers or shared memory, and nothing is written: a kernel may stand after any other, whatever that one writes.
"""

# mypy: ignore-errors

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def let_next_begin(OVERLAP: tl.constexpr):
    """The next kernel may begin where there is room; it waits for this one's end before it reads."""
    if OVERLAP:
        gdc_launch_dependents()


@triton.jit
def wait_for_last(OVERLAP: tl.constexpr):
    """Wait until all that was launched before has ended, and what it wrote is seen."""
    if OVERLAP:
        gdc_wait()


@triton.jit
def fetch_lines(start, LINES: tl.constexpr, STRIDE: tl.constexpr, BYTES: tl.constexpr):
    """Have the first BYTES of LINES lines, STRIDE bytes apart from `start` on, brought into the L2 cache; a thread a line.

    STRIDE, BYTES and the address are multiples of 16.
    """
    if BYTES > 0:
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
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9
