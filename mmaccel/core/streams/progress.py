"""How far a call is that takes in frames, told to the caller while frames are decoded and while layers run."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from mmaccel.core.attach import StreamModel
from mmaccel.core.decoding.generate import Deadline
from mmaccel.core.streams.sources import Clip

Tell = Callable[[int, int | None], None]


class IntakeProgress:
    """Tells `tell`, if there is one, how many frames a call that ends at `deadline` has taken in, of how many (None for a
    source in pieces). Of such a source that is ingested a frame counts half once it is decoded."""

    def __init__(self, tell: Tell | None, deadline: Deadline) -> None:
        self.deadline, self._tell, self._decoded, self._taken = deadline, tell, 0, 0.0

    def decoded(self, clip: Clip) -> None:
        """Count the frames of a clip that is to be ingested; raises `Ended` at the deadline."""
        self.deadline.check()
        if clip.part:
            self._decoded += len(clip.frames)
            self._show(None)

    def taken(self, clip: Clip, done: int, frames: int, more: int = 0, share: float = 0.0) -> None:
        """Count the first `frames` frames of `clip`, a `share` of the `more` next ones, and the `done` before the clip."""
        self._taken = done + frames + share * more
        self._show(None if clip.part else done + len(clip.frames))

    def _show(self, total: int | None) -> None:
        if self._tell is not None:
            self._tell(int(max(self._taken, (self._decoded + self._taken) / 2)), total)


def each_layer(
    adapter: StreamModel, moved: Callable[[float], None], done: int, count: int, units: int
) -> Callable[[], None]:
    """Return what a pass of `count` units, of `units` in all of which `done` are read, calls before each layer: answers get
    their turns, and `moved` the share of the units that is read."""
    layers, depth = itertools.count(), adapter.view.geometry.layers

    def check() -> None:
        adapter.turns.yield_between_layers(adapter.device)
        moved((done + count * next(layers) / depth) / units)

    return check
