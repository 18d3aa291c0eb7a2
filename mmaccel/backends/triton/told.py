"""Numbers in a tuple of a launch, of which no kernel is made anew.

Triton compiles a kernel apart for an integer that is one, or a multiple of 16. An argument can be excepted by its name, the
entries of a tuple cannot: they are told as odd numbers, of which none is one.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from collections.abc import Iterable

import triton
import triton.language as tl  # noqa: F401 - the interpreter wants it wherever a kernel is


def telling(numbers: Iterable[int]) -> tuple[int, ...]:
    """What is passed for `numbers`."""
    return tuple(4 * number + 3 for number in numbers)


@triton.jit
def told(number):
    """The number that was passed so."""
    return number >> 2
