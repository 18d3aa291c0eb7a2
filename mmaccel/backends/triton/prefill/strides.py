"""How heavy the lines of each stride are, a program for each stride; see `mmaccel.backends.ops.estimate.stride_scores`."""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PHASES = 32
"""Classes of a stride that a program looks at together."""

MEMBERS = 64
"""Members of each of these classes that it looks at together."""


@triton.jit(do_not_specialize=["kinds", "heads", "width", "low"])
def strides_kernel(
    value,
    at,
    out,
    kinds,
    heads,
    H,
    width,
    low,
    SCORE: tl.constexpr,
    PHASES: tl.constexpr,
    MEMBERS: tl.constexpr,
):
    """out [heads, strides]: the heaviest class of one stride, summed over the kinds of line; value [kinds, heads, width]."""
    head, stride = tl.program_id(1), low + tl.program_id(0)
    last = tl.load(at + head // H).to(tl.int32)
    end = tl.minimum(last + 1, width)
    p, m = tl.arange(0, PHASES), tl.arange(0, MEMBERS)
    whole = tl.zeros([], tl.float32)
    for kind in range(kinds):
        lines = value + (kind * heads + head).to(tl.int64) * width
        best = tl.full([], float("-inf"), tl.float32)
        for first in range(0, stride, PHASES):
            phase = first + p
            total = tl.zeros([PHASES], tl.float32)
            largest = tl.full([PHASES], float("-inf"), tl.float32)
            number = tl.zeros([PHASES], tl.float32)
            for begin in range(0, end, MEMBERS * stride):
                place = begin + m[:, None] * stride + phase[None, :]
                there = (place < end) & (phase < stride)[None, :]
                found = tl.load(lines + place, mask=there, other=0.0)
                total += tl.sum(found, 0)
                largest = tl.maximum(largest, tl.max(tl.where(there, found, float("-inf")), 0))
                number += tl.sum(there.to(tl.float32), 0)
            if SCORE != "sum":
                rest = tl.maximum(number - 1, 1.0)
                rest = tl.sqrt(rest) if SCORE == "contrast" else rest
                total = tl.where(number >= 2, (total - largest) / rest, float("-inf"))
            best = tl.maximum(best, tl.max(tl.where(phase < stride, total, float("-inf")), 0))
        whole += best
    tl.store(out + head * tl.num_programs(0) + tl.program_id(0), whole)


def stride_scores(value: Tensor, at: Tensor, low: int, high: int, score: str) -> Tensor:
    """See `mmaccel.backends.ops.estimate.stride_scores`."""
    kinds, B, H, width = value.shape
    out = torch.empty(B, H, high - low + 1, dtype=torch.float32, device=value.device)
    with torch.cuda.device_of(value):
        strides_kernel[(high - low + 1, B * H)](
            value.contiguous(), at.contiguous(), out, kinds, B * H, H, width, low,
            SCORE=score, PHASES=PHASES, MEMBERS=MEMBERS,
        )  # fmt: skip
    return out
