"""Stores of small units whose numbers tell layer, unit, head, token and place; and lanes that run late.

A lane is a queue, drained in any order that the marks admit, so that a missing wait is seen on a CPU.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mmaccel.core.memory.buffers import CopyQueues, DeviceQueue, QueueMark
from mmaccel.policies.kv.store import HostStore, UnitShape

LAYERS, GROUPS, TOKENS, SIZE = 3, 2, 5, 4
UNIT_BYTES = 2 * GROUPS * TOKENS * SIZE * 4


def open_store(slots: int = 16, **fields: Any) -> HostStore:
    """A store whose slabs hold `slots` units of a layer."""
    shape = dict(layers=LAYERS, groups=GROUPS, tokens=TOKENS, size=SIZE, dtype=torch.float32)
    shape |= {name: fields.pop(name) for name in list(fields) if name in shape}
    return HostStore(UnitShape(**shape), **{"device": "cpu", "slab_bytes": slots * UNIT_BYTES, **fields})  # type: ignore[arg-type]


def contents(layer: int, units: list[int], salt: int = 0, tokens: int = TOKENS) -> tuple[Tensor, Tensor]:
    """Keys and values [G, n * P, D]; no two numbers of a store are the same."""
    rows = torch.arange(tokens) + tokens * torch.tensor(units, dtype=torch.long)[:, None]
    base = rows.reshape(-1)[None, :, None] * 64.0 + layer * 16 + salt / 16
    key = base + 8 * torch.arange(GROUPS)[:, None, None] + torch.arange(SIZE) / 64
    return key, -key - 0.5


REAL_EMPTY = torch.empty


def poisoned(*sizes: Any, **named: Any) -> Tensor:
    """`torch.empty` whose memory holds what no test expects: old memory may hold the very numbers that are wanted."""
    made = REAL_EMPTY(*sizes, **named)
    return made.fill_(torch.nan if made.is_floating_point() else 77)


def check(store: HostStore, layer: int, units: list[int], salt: int = 0, out: Tensor | None = None) -> None:
    found = store.fetch(layer, units, out)
    for ours, theirs in zip(found, contents(layer, units, salt), strict=True):
        assert torch.equal(ours, theirs)


def check_all(store: HostStore, held: list[int], order: list[int] | None = None) -> None:
    """Each layer holds these units; they come back, or some of them in another `order`."""
    for layer in range(LAYERS):
        assert store.units(layer) == held
        check(store, layer, held if order is None else order)


def fill(store: HostStore, units: list[int]) -> None:
    for layer in range(LAYERS):
        store.put_layer(layer, units, *contents(layer, units))


def filled(units: list[int], slots: int = 16, **fields: Any) -> HostStore:
    """A store with these units in all layers."""
    store = open_store(slots, **fields)
    fill(store, units)
    return store


class SimMark(QueueMark):
    def __init__(self, sim: SimLanes) -> None:
        self.passed = False
        self.at = 0.0
        self._sim = sim

    def wait_on_host(self) -> None:
        self._sim.drain(until=lambda: self.passed)

    def seconds(self, later: QueueMark) -> float:
        assert isinstance(later, SimMark) and self.passed and later.passed
        return later.at - self.at


class SimLane(DeviceQueue):
    def __init__(self, sim: SimLanes) -> None:
        super().__init__()
        self.queue: deque[Callable[[], bool]] = deque()
        self._sim = sim

    def run(self, work: Callable[[], None]) -> None:
        self.queue.append(lambda: (work(), True)[1])
        self._sim.maybe()

    def record_mark(self, timed: bool = False) -> QueueMark:
        mark = SimMark(self._sim)

        def reach() -> bool:
            mark.passed, mark.at = True, float(self._sim.steps)
            return True

        self.queue.append(reach)
        return mark

    def wait(self, mark: QueueMark) -> None:
        assert isinstance(mark, SimMark)
        self.queue.append(lambda: mark.passed)

    def go_on(self) -> None:
        """Run until this lane is empty or waits."""
        while self.queue and self.queue[0]():
            self.queue.popleft()


class SimLanes(CopyQueues):
    """Two lanes; now and then, by a seeded draw, one of them goes on."""

    def __init__(self, seed: int, eager: float = 0.2) -> None:
        self._random, self._eager = random.Random(seed), eager
        self.steps = 0
        self._compute, self._wire = SimLane(self), SimLane(self)

    @property
    def compute_queue(self) -> SimLane:
        return self._compute

    @property
    def wire(self) -> SimLane:
        return self._wire

    def maybe(self) -> None:
        while self._random.random() < self._eager and self._step():
            pass

    def drain(self, until: Callable[[], bool] | None = None) -> None:
        """Go on until `until` holds, or nothing is left."""
        until = until or (lambda: not (self._compute.queue or self._wire.queue))
        while not until():
            assert self._step(), "the lanes wait for each other for ever"

    def rush(self) -> None:
        """Drain with a wire that is as fast as the marks let it be."""
        self.wire.go_on()
        while self.compute_queue.queue:
            assert self.compute_queue.queue[0](), "the lanes wait for each other for ever"
            self.compute_queue.queue.popleft()
            self.wire.go_on()

    def _step(self) -> bool:
        lanes = [self._compute, self._wire]
        self._random.shuffle(lanes)
        for lane in lanes:
            # A wait whose mark has not passed stays at the head of its lane.
            if lane.queue and lane.queue[0]():
                lane.queue.popleft()
                self.steps += 1
                return True
        return False
