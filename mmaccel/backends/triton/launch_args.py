"""Encodes kernel arguments so that Triton does not specialize on their values: a new prompt length then compiles nothing.

Triton specializes on integers that are 1 or multiples of 16. A single argument can be excepted by its name. Entries of a
tuple cannot, so they are passed as odd numbers other than 1.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from collections.abc import Iterable

import triton
import triton.language as tl  # noqa: F401 - the interpreter wants it wherever a kernel is
from torch import Tensor


def encode_int_args(numbers: Iterable[int]) -> tuple[int, ...]:
    """Return 4 * n + 3 for each of `numbers`, for a tuple argument of a kernel; `decode_int_arg` decodes it there. Triton
    compiles a kernel anew for each mixture of ones and multiples of 16, of which these are neither."""
    return tuple(4 * number + 3 for number in numbers)


@triton.jit
def decode_int_arg(number):
    """Inside a kernel: the number that `encode_int_args` encoded."""
    return number >> 2


def leading_strides(t: Tensor) -> tuple[int, int]:
    """Return the strides of the two leading dimensions (sequence, head), 0 where the size is 1 (shared)."""
    if t.dim() < 3:
        return 0, 0
    return (t.stride(0) if t.shape[0] > 1 else 0, t.stride(1) if t.shape[1] > 1 else 0)


def row_strides(t: Tensor) -> tuple[int, int, int]:
    """Return the strides of the sequence, head and row dimensions; 0 where the size is 1, since an unused stride that
    exceeds 32 bits would compile another kernel."""
    return (*leading_strides(t), t.stride(2))
