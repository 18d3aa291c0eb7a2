"""Ordered queues of device work, and marks between them: what a store needs of streams and events, and no more.

A lane runs what it is given in order; two lanes know nothing of each other but through a mark on one that the other waits
for. The store issues all device work through lanes, so that a test can put lanes in their place that run late and in any
order that the marks admit.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Untyped in PyTorch.
_CUDA: Any = torch.cuda


class Mark(ABC):
    """A point in the order of a lane."""

    @abstractmethod
    def done(self) -> bool:
        """Whether all that was issued before the mark has run."""

    @abstractmethod
    def sync(self) -> None:
        """Block the host until it has."""

    @abstractmethod
    def seconds(self, later: Mark) -> float:
        """From this mark to a later one, both done and both timed."""


class Lane(ABC):
    """An ordered queue of work."""

    @abstractmethod
    def run(self, work: Callable[[], None]) -> None:
        """Issue `work`; what it does may happen later, but not before what was issued earlier."""

    @abstractmethod
    def mark(self, timed: bool = False) -> Mark:
        """The point after all that was issued so far."""

    @abstractmethod
    def wait(self, mark: Mark) -> None:
        """What is issued from now on runs after `mark`."""

    def uses(self, tensor: Tensor) -> None:
        """`tensor`, made on another lane, is read by work issued here: its memory must outlast that."""

    def sync(self) -> None:
        """Block the host until all that was issued has run."""
        self.mark().sync()


class Lanes(ABC):
    """The lane on which the model computes, and the one of the wire."""

    @property
    @abstractmethod
    def compute(self) -> Lane: ...

    @property
    @abstractmethod
    def wire(self) -> Lane: ...

    def join(self) -> None:
        """What computes from now on runs after all that the wire was given."""
        self.compute.wait(self.wire.mark())


@dataclass(frozen=True)
class _Moment(Mark):
    at: float

    def done(self) -> bool:
        return True

    def sync(self) -> None:
        return

    def seconds(self, later: Mark) -> float:
        assert isinstance(later, _Moment)
        return later.at - self.at


class _AtOnce(Lane):
    """The host itself: work is done when it is issued."""

    def run(self, work: Callable[[], None]) -> None:
        work()

    def mark(self, timed: bool = False) -> Mark:
        return _Moment(time.perf_counter())

    def wait(self, mark: Mark) -> None:
        return


class HostLanes(Lanes):
    """Both lanes of a device without streams."""

    def __init__(self) -> None:
        self._lane = _AtOnce()

    @property
    def compute(self) -> Lane:
        return self._lane

    @property
    def wire(self) -> Lane:
        return self._lane


class _Event(Mark):
    def __init__(self, stream: torch.cuda.Stream, timed: bool) -> None:
        self.event = _CUDA.Event(enable_timing=timed)
        self.event.record(stream)

    def done(self) -> bool:
        return bool(self.event.query())

    def sync(self) -> None:
        self.event.synchronize()

    def seconds(self, later: Mark) -> float:
        assert isinstance(later, _Event)
        return float(self.event.elapsed_time(later.event)) / 1000


class _Stream(Lane):
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream

    def run(self, work: Callable[[], None]) -> None:
        with torch.cuda.stream(self.stream):
            work()

    def mark(self, timed: bool = False) -> Mark:
        return _Event(self.stream, timed)

    def wait(self, mark: Mark) -> None:
        assert isinstance(mark, _Event)
        self.stream.wait_event(mark.event)

    def uses(self, tensor: Tensor) -> None:
        tensor.record_stream(self.stream)


class _Current(_Stream):
    """The stream that is current: work goes there as it is."""

    def run(self, work: Callable[[], None]) -> None:
        work()


class CudaLanes(Lanes):
    """The stream that is current when it is asked for, and a stream of the store's own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._wire = _Stream(_CUDA.Stream(device))

    @property
    def compute(self) -> Lane:
        return _Current(torch.cuda.current_stream(self._device))

    @property
    def wire(self) -> Lane:
        return self._wire


def lanes_of(device: torch.device) -> Lanes:
    """The lanes of `device`."""
    return CudaLanes(device) if device.type == "cuda" else HostLanes()


def on_device(numbers: list[int] | Tensor, device: torch.device) -> Tensor:
    """A tensor of the host, or long numbers, on `device`, without waiting for what that computes."""
    here = numbers if isinstance(numbers, Tensor) else torch.tensor(numbers, dtype=torch.long)
    pinned = device.type == "cuda" and here.numel() > 0
    return here.pin_memory().to(device, non_blocking=True) if pinned else here.to(device)
