"""The clock that takes frames at even ticks, and the log of gaps and irregular times.

At a tick the frame that stands is taken, the last that has begun. A frame that begins within half a tick after it is taken
instead where that is nearer in time. So of frames that come at the rate of the ticks or faster the nearest is taken, and a
still moment shows its frame until half a tick before the next at the earliest.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from mmaccel.media.video import Event

TOUCHING = 1e-6
"""Events of one kind that are less than this many seconds apart are one."""


class Log:
    """Collects events in reading order; joins those of one kind that touch."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._last: dict[str, int] = {}

    def add(
        self, kind: Literal["gap", "repeat", "restart", "untimed", "stall"], time: float, seconds: float
    ) -> None:
        """Note an event."""
        place = self._last.get(kind)
        if place is not None and kind in ("gap", "untimed"):
            last = self._events[place]
            if abs(last.time + last.seconds - time) < TOUCHING:
                self._events[place] = replace(last, seconds=time + seconds - last.time)
                return
        self._last[kind] = len(self._events)
        self._events.append(Event(kind, time, seconds))

    def give(self, until: float | None = None) -> tuple[Event, ...]:
        """Hand over the events up to `until` seconds, or all, in order of time."""
        events, self._events, self._last = self._events, [], {}
        if until is not None:
            self._events = [one for one in events if one.time > until]
            events = [one for one in events if one.time <= until]
        return tuple(sorted(events, key=lambda one: one.time))


class Ticks:
    """Finds the ticks that show the frame of the tick before: call `again` once for each tick, in order."""

    def __init__(self, start: float, fps: float, log: Log) -> None:
        self._start, self._fps, self._log = start, fps, log
        self._last: Any = None
        self.number = -1

    @property
    def now(self) -> float:
        """The seconds of the last tick."""
        return self._start + self.number / self._fps

    def again(self, frame: object) -> bool:
        """Go to the next tick; True, and an event, when `frame` was shown at the tick before too."""
        self.number += 1
        stands = self.number > 0 and frame is self._last
        self._last = frame
        if stands:
            self._log.add("gap", self.now, 1.0 / self._fps)
        return stands


def rising(times: Sequence[float], step: float) -> list[float]:
    """Strictly rising times from ones that may repeat: equal times are spread evenly up to the next, the last by `step`."""
    found: list[float] = []
    runs = [(time, len(list(run))) for time, run in itertools.groupby(times)]
    for place, (time, count) in enumerate(runs):
        wide = (runs[place + 1][0] - time) / count if place + 1 < len(runs) else step
        found += [time + number * wide for number in range(count)]
    return found
