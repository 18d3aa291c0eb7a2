"""Lanes that run late: a queue each, drained in any order that the marks admit, so that a missing wait is seen on a CPU."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

from mmaccel.policies.kv.store.slabs import Lane, Lanes, Mark


class SimMark(Mark):
    def __init__(self, sim: SimLanes) -> None:
        self.passed = False
        self.at = 0.0
        self._sim = sim

    def sync(self) -> None:
        self._sim.drain(until=lambda: self.passed)

    def seconds(self, later: Mark) -> float:
        assert isinstance(later, SimMark) and self.passed and later.passed
        return later.at - self.at


class SimLane(Lane):
    def __init__(self, sim: SimLanes) -> None:
        super().__init__()
        self.queue: deque[Callable[[], bool]] = deque()
        self._sim = sim

    def run(self, work: Callable[[], None]) -> None:
        self.queue.append(lambda: (work(), True)[1])
        self._sim.maybe()

    def mark(self, timed: bool = False) -> Mark:
        mark = SimMark(self._sim)

        def reach() -> bool:
            mark.passed, mark.at = True, float(self._sim.steps)
            return True

        self.queue.append(reach)
        return mark

    def wait(self, mark: Mark) -> None:
        assert isinstance(mark, SimMark)
        self.queue.append(lambda: mark.passed)

    def go_on(self) -> None:
        """Run until this lane is empty or waits."""
        while self.queue and self.queue[0]():
            self.queue.popleft()


class SimLanes(Lanes):
    """Two lanes; now and then, by a seeded draw, one of them goes on."""

    def __init__(self, seed: int, eager: float = 0.2) -> None:
        self._random, self._eager = random.Random(seed), eager
        self.steps = 0
        self._compute, self._wire = SimLane(self), SimLane(self)

    @property
    def compute(self) -> SimLane:
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
        while self.compute.queue:
            assert self.compute.queue[0](), "the lanes wait for each other for ever"
            self.compute.queue.popleft()
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
