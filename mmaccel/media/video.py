"""The result of reading a video: the kept frames, their presentation times, and the ticks that took them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from mmaccel.core.errors import VideoError

Progress = Callable[[int, int | None], None]
"""`progress(done, total)`: called after each kept frame; `total` is None while it is not known."""

Gaps = Literal["hold", "skip", "mark"]
"""What a tick gives when the source shows the same frame as at the tick before:

- "hold": that frame again;
- "skip": no frame;
- "mark": as "hold", and `Video.events` lists gaps and irregular times.
"""

EventKind = Literal["gap", "repeat", "restart", "untimed", "stall"]


@dataclass(frozen=True)
class Event:
    """A gap or an irregularity in the times of a source, at `time` seconds of `Video.clock`, for `seconds`.

    - "gap": the ticks from `time` on, for `seconds`, give the frame of the tick before. A gap over several clips has an
      event in each.
    - "repeat": a frame came with the presentation time of the frame before it, or an earlier one.
    - "restart": the presentation times jumped by `seconds` (back, below 0; or more than a day ahead).
      `Video.times` runs on.
    - "untimed": frames came without presentation times for `seconds`; one frame's length was added for each.
    - "stall": nothing came for `seconds`.
    """

    kind: EventKind
    time: float
    seconds: float


@dataclass(frozen=True, eq=False)
class Video:
    """Frames of a video and their times.

    frames      uint8 [T, 3, H, W]: RGB, upright
    times       float64 [T]: the presentation time of each frame, in seconds from the start of the source; a frame that
                was taken twice has its time twice
    fps         the rate of the kept frames; `source_fps` the mean rate of the source (0.0 when it does not tell)
    duration    the seconds that the source, or this clip of it, covers
    clock       float64 [T]: the seconds at which each frame was taken, always rising. With a rate these are the ticks
                ``start + k / fps``; else the presentation times, spread evenly where several frames have one. Left out,
                it is `times`
    events      gaps and irregular times, in order of time; filled only with ``gaps="mark"``

    Raises `VideoError` where `clock` or `times` does not have one time for each frame.
    """

    frames: Tensor
    times: Tensor
    fps: float
    source_fps: float
    duration: float
    clock: Tensor = None  # type: ignore[assignment]  # never None once made
    events: tuple[Event, ...] = ()

    def __post_init__(self) -> None:
        if self.clock is None:
            object.__setattr__(self, "clock", self.times)
        for name, given in (("times", self.times), ("clock", self.clock)):
            if len(given) != len(self.frames):
                raise VideoError(
                    f"{name}: there are {len(given)} for {len(self.frames)} frames; give one for each frame."
                )

    def __len__(self) -> int:
        return int(self.frames.shape[0])

    def at(self, which: slice | Sequence[int] | Tensor) -> Video:
        """The frames of a slice, or of a list of numbers, with their times; `fps`, `duration` and `events` as they are."""
        chosen = which if isinstance(which, slice) else torch.as_tensor(which)
        return replace(self, frames=self.frames[chosen], times=self.times[chosen], clock=self.clock[chosen])

    def cut(self, start: int, stop: int) -> Video:
        """Frames `start` to `stop`; the video itself where these are all."""
        return self if start == 0 and stop == len(self) else self.at(slice(start, stop))


def pile(frames: list[Tensor]) -> Tensor:
    """Stack `[3, H, W]` frames to `[T, 3, H, W]`, letting go of each as it is copied."""
    stacked = torch.empty((len(frames), *frames[0].shape), dtype=torch.uint8)
    for place in range(len(frames)):
        stacked[place] = frames[place]
        frames[place] = stacked[place]
    return stacked
