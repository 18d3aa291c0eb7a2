"""How much memory a generation takes at most: as torch counts it on CUDA, and on a CPU by counting every tensor.

A process that serves a draft answers for its own share: the sum of both is what the two ways of drafting, in one process or
in two, are held against each other by. What CUDA itself takes for a process, its context, is not in it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mmaccel.core.decoding.worker import OWN, Message, MessageSocket, Worker

PEAK = OWN + 100
"""The message that asks for the most bytes on each device and starts counting anew, and its answer."""
WAIT_S = 60.0


class Held(TorchDispatchMode):
    """Counts the bytes of the weights of `models`, and of the tensors made while inside that are still there.

    most  the largest sum there was
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        super().__init__()
        self._known: set[int] = set()
        self.now = 0
        for model in models:
            for one in (*model.parameters(), *model.buffers()):
                self._count(one.untyped_storage())
        self.most = self.now

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for one in tree_leaves(out):
            if isinstance(one, Tensor):
                self._count(one.untyped_storage())
        self.most = max(self.most, self.now)
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._known:
            self._known.add(key)
            self.now += storage.nbytes()
            weakref.finalize(storage, self._gone, key, storage.nbytes())

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


class Peaks:
    """The most bytes on each device since the last `reset`, of this process."""

    def __init__(self, held: Held | None) -> None:
        self._held = held

    def reset(self) -> None:
        if self._held is not None:
            self._held.most = self._held.now
            return
        for number in range(torch.cuda.device_count()):
            torch.cuda.reset_peak_memory_stats(number)

    def read(self) -> list[int]:
        if self._held is not None:
            return [self._held.most]
        return [torch.cuda.max_memory_allocated(number) for number in range(torch.cuda.device_count())]


@contextmanager
def counting(device: torch.device, *models: nn.Module) -> Iterator[Peaks]:
    """While inside, what this process allocates is counted; on a CPU only what this thread does."""
    if device.type == "cuda":
        peaks = Peaks(None)
        peaks.reset()
        yield peaks
        return
    with Held(models) as held:
        yield Peaks(held)


def answering(wire: MessageSocket, peaks: Peaks) -> None:
    """Have the end of a second process answer what it is asked by `asked`, whatever it is at work on."""
    receive = wire.receive_message

    def heard(limit_s: float | None) -> Message | None:
        while (message := receive(limit_s)) is not None and message.kind == PEAK:
            wire.send(PEAK, *peaks.read())
            peaks.reset()
        return message

    wire.receive_message = heard  # type: ignore[method-assign]


def asked(worker: Worker) -> list[int]:
    """The most bytes on each device since this was asked before, of a second process that no sequence waits for."""
    worker.receive_all()
    worker.send(PEAK)
    while (message := worker.receive_message(WAIT_S)) is not None:
        if message.kind == PEAK:
            return list(message.numbers)
    raise RuntimeError("the draft's process did not tell what it holds.")


def together(one: Sequence[int], other: Sequence[int]) -> list[int]:
    """Bytes of two processes on each device."""
    return [a + b for a, b in zip(one, other, strict=True)]
