"""Frame sampling from a stream that is read once: by number, or at the ticks of a regular clock.

At a tick the frame then shown is taken. A frame that starts at most half a tick later is taken instead if it is nearer in
time. So of frames at the rate of the ticks or faster the nearest is taken, and a still scene repeats its frame until half a
tick before the next frame.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from mmaccel.media.video import Event, EventKind, Gaps

Item = TypeVar("Item")

TIE = 1e-9
"""Distances that differ by less are equal: times are sums of rounded fractions of a second."""

FASTEST = 240.0
"""Frames a second, as of a fast camera, that are given of any video: its mean rate is no bound, for rare slides are held."""

ROUNDED = 1e-3
"""Seconds: Matroska and FLV give times in whole milliseconds, so that even frames are not quite even."""

TOUCHING = 1e-6
"""Events of one kind that are less than this many seconds apart are one."""


def half_period(fps: float) -> float:
    """Half the interval of rate `fps`, in seconds: a frame may start so much later than a tick and still be taken for it."""
    return 0.5 / fps + ROUNDED


def evenly_spaced_frames(total: int, count: int) -> list[int]:
    """`count` of `total` frame numbers, evenly spaced: number i is `i * total // count`.

    As `transformers.video_utils.load_video(num_frames=count)` does from release 5.23 on.
    """
    return [number * total // count for number in range(count)]


def sampling_times(start: float, fps: float, stop: float | None = None) -> Iterator[float]:
    """Yield the sampling times `start + k / fps` before `stop`; without end if that is None."""
    times = (start + step / fps for step in itertools.count())
    return times if stop is None else itertools.takewhile(lambda time: time < stop, times)


def pick_nearest(
    stream: Iterable[tuple[float, Item]],
    targets: Iterable[float],
    jump: Callable[[float, float], None] | None = None,
    until: Callable[[float, Item], float] | None = None,
    early: float = float("inf"),
) -> Iterator[tuple[float, Item]]:
    """For each target position yield the item of `stream` nearest to it (ties: the earlier). An item more than `early` after
    a target is not taken for it if there is one before.

    `stream` yields (position, item) in order and is read only as far as needed, two items at a time. `targets` do not
    decrease. `jump(position, target)` may skip items, to a position not after the target. `until(position, item)` is where
    the last item ends: later targets get no item.
    """
    wanted = iter(targets)
    target = next(wanted, None)
    before: tuple[float, Item] | None = None
    if target is None:
        return
    for place, item in stream:
        while place >= target:
            ahead = place - target
            if before is not None and (target - before[0] <= ahead + TIE or ahead > early + TIE):
                yield before
            else:
                yield place, item
            target = next(wanted, None)
            if target is None:
                return
        before = (place, item)
        if jump is not None:
            jump(place, target)
    if before is not None:
        end = until(*before) if until else before[0]
        while target is not None and target < end - TIE:
            yield before
            target = next(wanted, None)


class EventLog:
    """Collects events in reading order; joins adjacent ones of one kind."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._last: dict[str, int] = {}

    def add(self, kind: EventKind, time: float, seconds: float) -> None:
        """Log an event at `time` seconds that lasts `seconds`. A "gap" or "untimed" event that begins where the last one of
        its kind ends extends that one."""
        place = self._last.get(kind)
        if place is not None and kind in ("gap", "untimed"):
            last = self._events[place]
            if abs(last.time + last.seconds - time) < TOUCHING:
                self._events[place] = replace(last, seconds=time + seconds - last.time)
                return
        self._last[kind] = len(self._events)
        self._events.append(Event(kind, time, seconds))

    def pop_until(self, until: float = math.inf) -> tuple[Event, ...]:
        """Remove and return the logged events up to `until` seconds, ordered by time."""
        given = [one for one in self._events if one.time <= until]
        self._events, self._last = [one for one in self._events if one.time > until], {}
        return tuple(sorted(given, key=lambda one: one.time))


def log_sampling_gaps(
    stream: Iterable[tuple[float, Item]], start: float, fps: float, log: EventLog, gaps: Gaps
) -> Iterator[tuple[float, float, Item | None]]:
    """Turn the (time, item) taken for each tick ``start + k / fps`` into (tick, time, item). If an item repeats that of the
    tick before, a gap is added to `log`, and with `gaps` "skip" the item becomes None."""
    last = None
    for number, (time, item) in enumerate(stream):
        tick, stands = start + number / fps, number > 0 and item is last
        last = item
        if stands:
            log.add("gap", tick, 1.0 / fps)
        yield tick, time, None if stands and gaps == "skip" else item


def make_times_increasing(times: Sequence[float], step: float) -> list[float]:
    """Make times strictly increasing: equal times are spread evenly up to the next time, the last ones `step` apart."""
    found: list[float] = []
    runs = [(time, len(list(run))) for time, run in itertools.groupby(times)]
    for place, (time, count) in enumerate(runs):
        wide = (runs[place + 1][0] - time) / count if place + 1 < len(runs) else step
        found += [time + number * wide for number in range(count)]
    return found
