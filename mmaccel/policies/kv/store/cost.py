"""What the ways across the wire cost on a device, measured once a process."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from mmaccel.backends import ops
from mmaccel.policies.kv.store.slabs import Shape

Way = Literal["auto", "copies", "gather", "pieces"]
"""Across the wire: as few large copies as runs of slots allow; one launch that reads host memory by an index; keys and
values of each unit by a copy of their own; or, "auto", the cheaper of the first two."""

REPEATS = 5
LARGE = 32 * 2**20
"""Bytes of the larger of the two transfers that a line is drawn through."""


@dataclass(frozen=True)
class Cost:
    """Seconds of a transfer: so much for each copy or launch, and so much for each byte."""

    copy: float
    copy_byte: float
    launch: float
    launch_byte: float

    def way(self, copies: int, nbytes: int) -> Way:
        """The cheaper way for `nbytes` bytes in `copies` runs."""
        by_copies = copies * self.copy + nbytes * self.copy_byte
        return "gather" if self.launch + nbytes * self.launch_byte < by_copies else "copies"


_known: dict[tuple[str, Shape], Cost] = {}


def measured(device: torch.device, shape: Shape, slab: Tensor) -> Cost:
    """The costs on a CUDA `device`, from transfers out of the pinned slab [slots, 2, G, P, D] of any content."""
    place = str(device), shape
    if place not in _known:
        _known[place] = _measure(device, shape, slab)
    return _known[place]


def _measure(device: torch.device, shape: Shape, slab: Tensor) -> Cost:
    units = max(1, min(slab.shape[0], LARGE // shape.nbytes))
    out = torch.empty(2, shape.groups, units * shape.tokens, shape.size, dtype=shape.dtype, device=device)
    flat = torch.empty(units, *shape.unit, dtype=shape.dtype, device=device)
    base = torch.zeros(1, dtype=torch.long, device=device)
    # Scattered, so that neighbours do not help.
    few = torch.zeros(1, dtype=torch.long, device=device)
    many = (torch.arange(units, device=device) * 7) % slab.shape[0]

    def copies(pieces: int) -> Callable[[], None]:
        edges = [i * units // pieces for i in range(pieces + 1)]

        def work() -> None:
            for begin, end in pairwise(edges):
                flat[begin:end].copy_(slab[begin:end], non_blocking=True)

        return work

    def gather(slot: Tensor) -> Callable[[], None]:
        return lambda: ops.gather_units(out[:, :, : slot.shape[0] * shape.tokens], [slab], base, slot)

    single = _seconds(device, copies(1))
    pieces = min(units, 16)
    split = _seconds(device, copies(pieces))
    one, all_ = _seconds(device, gather(few)), _seconds(device, gather(many))
    copy = max(0.0, (split - single) / max(1, pieces - 1))
    launch_byte = max(0.0, (all_ - one) / max(1, (units - 1) * shape.nbytes))
    return Cost(
        copy=copy,
        copy_byte=max(0.0, single - copy) / (units * shape.nbytes),
        launch=max(0.0, one - launch_byte * shape.nbytes),
        launch_byte=launch_byte,
    )


def _seconds(device: torch.device, work: Callable[[], None]) -> float:
    """The least of some runs: what else the device does only adds."""
    taken = []
    for _ in range(REPEATS + 1):
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        work()
        torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - began)
    return min(taken[1:])
