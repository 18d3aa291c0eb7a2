"""What the words of a question say in the mean, in few launches: for code that nobody compiles.

Of n rows the first are words, as many as `count` [1] long on the device says; the others may be anything. The plain forms
are in `mmaccel.backends.reference.words`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def folded(rows: Tensor, count: Tensor | None, groups: int) -> Tensor:
    """[G * D] float32: the mean of rows [H, n, D] over the words (None: over all), the H / G heads of a group summed."""
    return _of(rows).folded(rows, count, groups)  # type: ignore[no-any-return]


def moved(words: Tensor, count: Tensor, known: Tensor, before: Tensor, seen: Tensor | None) -> Tensor:
    """[n, E]: rows `words` plus `known` [E] float32, rounded first. The mean of the words goes into `before` [E]; what it is
    more than what was there, into `seen` [E]."""
    return _of(words).moved(words, count, known, before, seen)  # type: ignore[no-any-return]


def foretold(table: Tensor, entries: Tensor, slots: Tensor, begin: Tensor) -> Tensor:
    """[n] `table` [m] at `entries` [n], different ones (-1: the last place), if that is below `slots` [1] and not negative;
    -1 otherwise. Where it is, the i-th is now at `begin` [1] + i, says the table. All long; the last place is anything."""
    return _of(table).foretold(table, entries, slots, begin)  # type: ignore[no-any-return]


def _of(x: Tensor) -> Any:
    from mmaccel.backends import triton

    if x.dtype != torch.float64 and triton.usable(x.device) is None:
        from mmaccel.backends.triton.stream import words as kernels

        return kernels
    from mmaccel.backends.reference import words as plain

    return plain
