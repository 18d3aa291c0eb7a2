"""Units of keys and values, read by the device out of pinned host memory in one launch (`ops.gather.gather_units`).

The index is on the device, so what a query chose need never be known to the host. Data travel as whole words of up to eight
bytes, whatever their type.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmaccel.backends.ops.gather import grain_of

PROGRAMS = 32
"""Programs of a launch. The wire is full with a few hundred kilobytes under way; more would take the device from the layer
that computes while the next one's units arrive: see "Host memory and streams" in docs/speed.md."""

WORDS = 4096
"""Words a program has under way at once."""

WORD_TYPES = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


@triton.jit(do_not_specialize=["items", "slots"])  # type: ignore[untyped-decorator]
def gather_kernel(  # type: ignore[no-untyped-def]
    out,
    slab,
    base,
    slot,
    items,
    slots,
    side,
    group,
    GROUPS: tl.constexpr,
    RUN: tl.constexpr,
    EACH: tl.constexpr,
    WORD: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Piece after piece: BLOCK words of one head of one side (keys or values) of one unit; RUN words make a head,
    EACH lie between one unit's and the next one's where they are written.

    With PAIRS every head begins at an even word. Unless loads are as wide as stores, sectors cross the wire twice.
    """
    PIECES: tl.constexpr = (RUN + BLOCK - 1) // BLOCK
    for item in tl.range(tl.program_id(0), items, tl.num_programs(0)):
        piece = item % PIECES
        lane = (item // PIECES) % (2 * GROUPS)
        unit = item // (PIECES * 2 * GROUPS)
        at = piece * BLOCK + tl.arange(0, BLOCK)
        inside = at < RUN
        source = tl.load(slot + unit).to(tl.int64)
        held = source >= 0
        source = tl.maximum(source, 0)
        start = tl.load(base + source // slots) // WORD + ((source % slots) * (2 * GROUPS) + lane) * RUN
        if PAIRS:
            start = tl.multiple_of(start, 2)
        words = tl.load(slab + start + at, mask=inside & held, other=0)
        target = (lane // GROUPS) * side + (lane % GROUPS) * group + unit.to(tl.int64) * EACH
        tl.store(out + target + at, words, mask=inside)


def gather_units(
    out: Tensor,
    slab: Sequence[Tensor],
    base: Tensor,
    slot: Tensor,
    grain: int = 0,
    *,
    programs: int = PROGRAMS,
    words: int = WORDS,
) -> None:
    """See `ops.gather.gather_units`; `programs` and `words` as the constants above."""
    slots, _, groups, tokens, size = slab[0].shape
    n = slot.shape[0]
    if n == 0:
        return
    run = tokens * size * out.element_size()
    side, group = (out.stride(i) * out.element_size() for i in (0, 1))
    each = out.stride(2) * out.element_size() if out.dim() == 5 else run
    # A slab that begins anywhere else than the first is told to the kernel in bytes from there, and read by the same words.
    aligned = (run, side, group, each, out.data_ptr(), grain or grain_of(slab))
    word = next(w for w in WORD_TYPES if not any(b % w for b in aligned))
    block = min(words, triton.next_power_of_2(run // word))
    items = n * 2 * groups * triton.cdiv(run // word, block)
    kind = WORD_TYPES[word]
    # The memory from the first element on; what lies between the heads is left alone.
    flat = out.as_strided((out.shape[-2] * out.shape[-1],), (1,))
    gather_kernel[(min(programs, items),)](
        flat.view(kind), slab[0].view(-1).view(kind), base, slot, items, slots, side // word, group // word,
        GROUPS=groups, RUN=run // word, EACH=each // word, WORD=word,
        PAIRS=not any(b % (2 * word) for b in aligned), BLOCK=block, num_warps=8,
    )  # fmt: skip
