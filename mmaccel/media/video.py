"""What reading gives back: the kept frames and when they were shown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

Progress = Callable[[int, int | None], None]
"""`progress(done, total)`: called after each kept frame; `total` is None while it is not known."""


@dataclass(frozen=True, eq=False)
class Video:
    """Frames of a video and their times.

    `frames` is uint8 `[T, 3, H, W]` (RGB, upright), `times` float64 `[T]`: the presentation time of each
    frame in seconds from the start of the source. `fps` is the rate of the kept frames, `source_fps` the
    mean rate of the source (0.0 when it does not tell), `duration` the seconds that the source, or this clip
    of it, covers.
    """

    frames: Tensor
    times: Tensor
    fps: float
    source_fps: float
    duration: float

    def __len__(self) -> int:
        return int(self.frames.shape[0])
