"""Arguments of kernel launches, in a form that Triton does not specialize on, so that another prompt length compiles
nothing.

Triton compiles a kernel apart for an integer that is one, or a multiple of 16. An argument can be excepted by its name, the
entries of a tuple cannot: they are passed as odd numbers, of which none is one.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from collections.abc import Iterable

import triton
import triton.language as tl  # noqa: F401 - the interpreter wants it wherever a kernel is
from torch import Tensor


def encode_ints(numbers: Iterable[int]) -> tuple[int, ...]:
    """Encode `numbers` so that a kernel can take them in a tuple."""
    return tuple(4 * number + 3 for number in numbers)


@triton.jit
def decode_int(number):
    """The number that `encode_ints` was given."""
    return number >> 2


def lead(t: Tensor) -> tuple[int, int]:
    """Strides of the sequence and the head; 0 where all share one."""
    if t.dim() < 3:
        return 0, 0
    return (t.stride(0) if t.shape[0] > 1 else 0, t.stride(1) if t.shape[1] > 1 else 0)


def lines(t: Tensor) -> tuple[int, int, int]:
    """Strides of the sequence, the head and the row; 0 where there is one: what nothing is multiplied with would be wide in
    a long prompt, and a wide number is another kernel."""
    return (*lead(t), t.stride(2))
