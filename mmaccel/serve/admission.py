"""Which streams are let in: those whose frames and memory leave the others what they were promised."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from mmaccel.core.recipe import Recipe
from mmaccel.serve.settings import Limits, Refused

TIMED = 16
"""Calls whose fastest one says what a frame costs: others may have waited for their turn."""


@dataclass(eq=False)
class Promise:
    """What a stream under `recipe` is promised: `fps` frames a second are taken in, for `seconds`. It holds `held` bytes."""

    recipe: str
    fps: float
    seconds: float
    held: int = 0


class Admission:
    """Predicts what streams take, by what frames under their recipes were measured to take. A recipe of which no frame was
    measured yet costs nothing, as far as is known."""

    def __init__(self, recipes: Mapping[str, Recipe], limits: Limits) -> None:
        self._recipes, self._limits = recipes, limits
        self._promises = list[Promise]()
        self._seconds: defaultdict[str, deque[float]] = defaultdict(partial(deque, maxlen=TIMED))
        self._grown = dict[str, tuple[int, int, float]]()

    def took(self, promise: Promise, seconds: float, before: tuple[int, int], now: tuple[int, int]) -> None:
        """A call took `seconds`; frames that the stream had taken in, and bytes that it held, before it and `now`."""
        promise.held, new = now[1], now[0] - before[0]
        if new > 0:
            self._seconds[promise.recipe].append(seconds / new)
            self._grown[promise.recipe] = *now, max(0, now[1] - before[1]) / new

    def busy(self, promise: Promise) -> float:
        """Seconds of the model that the frames of a second take."""
        return promise.fps * min(self._seconds[promise.recipe], default=0.0)

    def bytes(self, promise: Promise) -> float:
        """Bytes that the stream will come to hold: it grows as the last one of its recipe did, to what the recipe keeps."""
        seen, held, each = self._grown.get(promise.recipe, (1, 0, 0.0))
        kv: Any = self._recipes[promise.recipe].kv
        seconds = min(promise.seconds, getattr(kv, "keep_seconds", None) or promise.seconds)
        frames = promise.fps * seconds
        whole = held + each * (frames - seen) if frames > seen else held * frames / seen
        return max(promise.held, min(whole, getattr(kv, "host_bytes", None) or whole))

    def admit(self, recipe: str, fps: float | None, seconds: float) -> Promise:
        """The promise to a new stream; `end` takes it back. `fps` None: a stream that goes on here, which is not refused.
        Raises `Refused` where the promises to all others would not be kept."""
        new, limits = Promise(recipe, fps or 1.0, seconds), self._limits
        busy, own = sum(map(self.busy, self._promises)), self.busy(new)
        if fps is not None and busy + own > limits.busy and own:
            raise Refused(
                503,
                f"fps: {fps:g} frames a second of this stream take {own:.3f} s of each second and those of the open ones "
                f"{busy:.3f} s, of {limits.busy:g} s for all; send fewer frames a second, or come later.",
                "no_time",
            )
        held, more = sum(map(self.bytes, self._promises)), self.bytes(new)
        cap = getattr(self._recipes[recipe].kv, "process_bytes", None)
        if fps is not None and cap is None and held + more > limits.memory_bytes and more:
            raise Refused(
                503,
                f"seconds: this stream will hold {more:.0f} bytes after {seconds:g} s and the open ones {held:.0f}, of "
                f"{limits.memory_bytes} for all; ask for fewer seconds, or come later.",
                "no_room",
            )
        self._promises.append(new)
        return new

    def end(self, promise: Promise) -> None:
        """The stream is closed; a second call does nothing."""
        self._promises = [one for one in self._promises if one is not promise]
