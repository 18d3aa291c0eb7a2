"""Admission control for streams: a new one is refused if it would take compute time or memory promised to open ones."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import Any, NamedTuple

from mmaccel.core.recipe import Recipe
from mmaccel.serve.settings import Limits, Refused

TIMED = 64
"""Calls, of which the last of a recipe say what a frame costs, and the last of a stream how fast its frames come."""
SPAN_S = 10.0
"""Seconds from which on calls say how fast frames come."""


class StreamUsageCounts(NamedTuple):
    """Counts of a stream at one moment: frames taken in, bytes held in all and on the `device`, and questions so far."""

    frames: int
    bytes: int
    device: int = 0
    questions: int = 0


NOTHING = StreamUsageCounts(0, 0)


@dataclass(eq=False)
class StreamPromise:
    """What the server has promised a stream, and what the stream has used.

    recipe, fps, seconds  the promise: compute for `fps` frames per second under `recipe`, for so many seconds of video
    first, last           first and last `StreamUsageCounts`; `first` also has the bytes that the first question added
    calls                 (`time.monotonic()`, live frames so far) after each of the last calls with frames
    """

    recipe: str
    fps: float
    seconds: float
    first: StreamUsageCounts | None = None
    last: StreamUsageCounts = NOTHING
    calls: deque[tuple[float, int]] = field(default_factory=partial(deque, maxlen=TIMED))

    @property
    def rate(self) -> float:
        """Frames per second to plan for a stream: the promised or the observed rate, whichever is higher."""
        if not self.calls or (span := monotonic() - self.calls[0][0]) < SPAN_S:
            return self.fps
        return max(self.fps, (self.calls[-1][1] - self.calls[0][1]) / span)

    def memory_bytes_per_frame(self, device: bool = False) -> float:
        """Return by how many bytes per frame the stream's memory (`device`: only that on the device) has grown since the
        first measurement; memory grows in steps, by slabs of frames."""
        first, last = self.first or self.last, self.last
        grown = last[1 + device] - first[1 + device]
        return max(0, grown) / (last.frames - first.frames) if last.frames > first.frames else 0.0


class AdmissionController:
    """Decides whether a new stream may open: predicts the compute time and memory of streams from what frames under the same
    recipe took before. A recipe without measurements counts as free, as nothing is known against it."""

    def __init__(
        self,
        recipes: Mapping[str, Recipe],
        limits: Limits,
        device_bytes: float = math.inf,
        kept: Callable[[], int] = lambda: 0,
    ) -> None:
        """`device_bytes`: most bytes on the devices that all streams may take, with those that `kept` says videos hold."""
        self._recipes, self._limits, self._device_bytes, self._kept = recipes, limits, device_bytes, kept
        self._promises = list[StreamPromise]()
        self._costs: defaultdict[str, deque[tuple[float, int]]] = defaultdict(partial(deque, maxlen=TIMED))
        self._longest = dict[str, StreamPromise]()

    def record_call(
        self,
        promise: StreamPromise,
        seconds: float,
        before: StreamUsageCounts,
        now: StreamUsageCounts,
        live: bool = True,
    ) -> None:
        """Record a call on a stream that took `seconds` (without waiting), and its `StreamUsageCounts` `before` it and
        `now`. `live`: whether it counts in the recipe's mean seconds per live frame and in the stream's rate; calls with a
        stored video do not."""
        before, now = StreamUsageCounts(*before), StreamUsageCounts(*now)
        new, promise.last = now.frames - before.frames, now
        first = (promise.first or before) if before.frames else now
        if before.frames and now.questions > before.questions == 0:
            # What a question takes comes with the first one, and is no growth by frames.
            first = StreamUsageCounts(
                *(one + more - less for one, more, less in zip(first, now, before, strict=True))
            )
        promise.first = first
        if live:
            promise.calls.append((monotonic(), new + (promise.calls[-1][1] if promise.calls else 0)))
            if new > 0:
                self._costs[promise.recipe].append((seconds, new))
        if (longest := self._longest.get(promise.recipe)) is None or now.frames >= longest.last.frames:
            self._longest[promise.recipe] = promise

    def predicted_load(self, promise: StreamPromise) -> float:
        """Predict the share of compute time (seconds per second) that the stream's frames take."""
        costs = self._costs[promise.recipe]
        return promise.rate * sum(seconds for seconds, _ in costs) / max(1, sum(new for _, new in costs))

    def predicted_bytes(self, promise: StreamPromise, device: bool = False) -> float:
        """Predict how many bytes (`device`: on the device only) a stream will hold when its promised time ends: by its own
        growth, or, before it has any frames, by that of the longest stream of its recipe."""
        model = promise if promise.last.frames else self._longest.get(promise.recipe, promise)
        seen, held, each = model.last.frames, model.last[1 + device], model.memory_bytes_per_frame(device)
        kv: Any = self._recipes[promise.recipe].kv
        seconds = min(promise.seconds, getattr(kv, "keep_seconds", None) or promise.seconds)
        frames = promise.fps * seconds
        whole = held + each * (frames - seen) if frames > seen or device else held * frames / seen
        store = getattr(kv, "store", None)
        most = None if getattr(store, "spill", None) == "disk" else getattr(store, "host_bytes", None)
        return max(promise.last[1 + device], min(whole, (None if device else most) or whole))

    def admit_stream(self, recipe: str, fps: float | None, seconds: float, saved: int = 0) -> StreamPromise:
        """Admit a new stream and return its `StreamPromise`, valid until `release_promise`. `fps` None: a stream moved from
        another replica, which is never refused. `saved`: bytes of a saved stream that is resumed. Raises `Refused` if
        promises to open streams could not be kept."""
        new, limits = StreamPromise(recipe, fps or 1.0, seconds), self._limits
        new.last = StreamUsageCounts(0, saved)
        busy, own = sum(map(self.predicted_load, self._promises)), self.predicted_load(new)
        if fps is not None and busy + own > limits.busy and own:
            later = ", or come later" if own <= limits.busy else ""
            raise Refused(
                503,
                f"fps: {fps:g} frames a second of this stream take {own:.3f} s of each second and those of the open ones "
                f"{busy:.3f} s, of {limits.busy:g} s for all; send fewer frames a second{later}.",
                "no_time",
            )
        held, more = sum(map(self.predicted_bytes, self._promises)), self.predicted_bytes(new)
        cap = getattr(getattr(self._recipes[recipe].kv, "store", None), "process_bytes", None)
        if fps is not None and cap is None and held + more > limits.memory_bytes and more:
            raise Refused(
                503,
                f"seconds: this stream will hold {more:.0f} bytes after {seconds:g} s and the open ones {held:.0f}, of "
                f"{limits.memory_bytes} for all; ask for fewer seconds, or come later.",
                "no_room",
            )
        of = partial(self.predicted_bytes, device=True)
        held, more = (sum(map(of, some)) for some in (self._promises, [new]))
        if fps is not None and held + more > (most := self._device_bytes - self._kept()) and more:
            raise Refused(
                503,
                f"seconds: this stream will hold {more:.0f} bytes of the device and the open ones {held:.0f}, of "
                f"{most:.0f} for all; ask for fewer seconds, or come later.",
                "no_room",
            )
        self._promises.append(new)
        return new

    def release_promise(self, promise: StreamPromise) -> None:
        """Take back what was promised (device time and bytes) to a stream that is closed now; a second call does nothing."""
        self._promises = [one for one in self._promises if one is not promise]
