"""What a call makes of a plan alone is kept for the layers to come, as long as the plan is there."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar
from weakref import ref

import torch
from torch import Tensor

T = TypeVar("T")

_kept: dict[Hashable, tuple[tuple[ref[Any], ...], Any]] = {}
"""What is known of something made -> the memory of all it was made of, which goes when any of that does; and itself."""


def kept(made_of: Sequence[Tensor], name: Hashable, make: Callable[[], T]) -> T:
    """`make()`, or what it gave before of the same memory: of tensors of a plan, to which nobody writes."""
    known = name, tuple(_told(t) for t in made_of)
    if known in _kept:
        memory, found = _kept[known]
        if all(one() is not None for one in memory):
            return found  # type: ignore[no-any-return]
    found = make()
    # What is made while a graph is captured holds nothing until it is replayed.
    if not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        memory = tuple(
            ref(t.untyped_storage(), lambda _: _kept.pop(known, None)) for t in made_of if t.numel()
        )
        _kept[known] = memory, found
    return found


def _told(t: Tensor) -> Hashable:
    version = None if t.is_inference() else t._version
    return t.device, t.dtype, t.data_ptr(), t.shape, t.stride(), version
