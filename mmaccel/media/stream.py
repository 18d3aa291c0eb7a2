"""Clips of a video as it comes: from a file, a file that still grows, a camera or any address PyAV opens."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from mmaccel.core.errors import VideoError, VideoStalled
from mmaccel.media.address import is_file, is_pipe, is_url, plain
from mmaccel.media.container import Source
from mmaccel.media.picture import Picture
from mmaccel.media.reader import Plan, check_arguments, warn_of_loss, warn_of_shrinking
from mmaccel.media.reader_thread import Forked, Growing, Line, Pump, Stall
from mmaccel.media.sampling import TIE, Log, Ticks, grid, half_tick, nearest
from mmaccel.media.video import Event, Gaps, Progress, Video, pile

AHEAD = 8
"""Frames that a thread reads ahead of the caller."""


def clips(
    source: str | os.PathLike[str],
    *,
    fps: float,
    frames_per_clip: int,
    follow: bool = False,
    timeout: float = 10.0,
    size: tuple[int, int] | None = None,
    max_side: int | None = 4096,
    progress: Progress | None = None,
    format: str | None = None,
    options: dict[str, str] | None = None,
    gaps: Gaps = "hold",
    start: float = 0.0,
    check: Callable[[], None] | None = None,
    quiet: float | None = None,
) -> Clips:
    """Give clips of `frames_per_clip` frames: at each tick ``k / fps`` seconds the frame shown nearest to it, but none that
    comes more than half a tick later.

    The last clip may be shorter. `Video.clock` has the ticks, which rise evenly, and `Video.times` the presentation
    times. At a tick that shows the same frame as the tick before, `gaps` "hold" takes that frame again, "skip" takes
    none, and "mark" takes it again and lists gaps and irregular times in `Video.events` (`media.Event`). Ticks before
    `start` seconds are left out; the others come in the same clips as without it, the first of which may be shorter.

    `source` is a file, a file still being written (`follow=True`), a pipe, a URL, or a device with its `format` (for
    instance "v4l2"). A file is followed as fragmented mp4, MPEG-TS or Matroska: a plain mp4 has no index until it is
    finished. Times run on from clip to clip; at most two clips are held at a time. `progress(done, None)` counts frames.
    Arguments are checked at the call. A thread opens the source at the first clip and reads a few frames ahead. While a
    frame is awaited, `check` is called some 20 times a second; what it raises ends the call, and the next one goes on.
    `quiet`: when a live source sent no frame for so many seconds, the frames so far are given as a shorter clip.

    There are three endings. At the end of the source the iteration stops. A followed file or a pipe has ended when nothing
    came for `timeout` seconds and no process has it open for writing. A stall raises `VideoStalled`, after a clip of the
    frames so far: nothing came for `timeout` seconds, and the source is still open (or the system cannot say). Ask for
    the next clip to wait longer; a URL or device is then opened again. A fault raises `VideoError`, for example when a
    connection breaks or no frame can be read. Damaged parts of a file are left out, and a `VideoWarning` at the end says so.
    """
    source, counts = plain(os.fspath(source)), {"frames_per_clip": frames_per_clip, "max_side": max_side}
    check_arguments(gaps=gaps, fps=fps, start=start, size=size, timeout=timeout, **counts)
    if follow and (is_url(source) or format is not None):
        raise VideoError(f"follow=True is for a file that grows, and {source} is none: leave it out.")
    follow, picture = follow or is_pipe(source), Picture(size, max_side)
    opened = _Opened(source, fps, frames_per_clip, follow, timeout, picture, format, options, gaps, start)
    return Clips(opened, progress, check, quiet if opened.live else None)


@dataclass(eq=False)
class _Opened:
    """The arguments of `clips`, and the `source` once it is open."""

    path: str
    fps: float
    length: int
    follow: bool
    timeout: float
    picture: Picture
    format: str | None
    options: dict[str, str] | None
    gaps: Gaps
    start: float
    source: Source | None = None
    seen: int = 0

    @property
    def live(self) -> bool:
        return self.follow or is_url(self.path) or self.format is not None

    def items(self, line: Line[_Taken]) -> Iterator[_Taken]:
        """The frames that are taken."""
        with ExitStack() as stack:
            source = self.source = self._open(stack, line)
            ticks, taken = Ticks(0.0, self.fps, source.log), 0
            frames = itertools.takewhile(lambda _: not line.left, source.frames())
            ticked = nearest(frames, grid(0.0, self.fps), source.jump, source.until, half_tick(self.fps))
            for moment, frame in ticked:
                self.seen += 1
                if ticks.again(frame) and self.gaps == "skip":
                    continue
                taken += 1
                late = ticks.now >= self.start - TIE
                drawn = self.picture.draw(frame) if late else None
                events = source.log.give(ticks.now)
                yield _Taken(drawn, moment, ticks.now, ticks.number, events, taken % self.length == 0)

    def _open(self, stack: ExitStack, line: Line[_Taken]) -> Source:
        path, options, enter = self.path, self.options, stack.enter_context
        if not self.live:
            return enter(Source(path, options=options, timeout=self.timeout))
        if not self.follow:
            timeout, format = self.timeout, self.format
            return enter(
                Source(path, live=True, format=format, options=options, timeout=timeout, wait=line.wait)
            )
        regular = is_file(path, may_be_empty=True)
        try:
            file = enter(Growing(path, self.timeout, line))
            return enter(Source(path, file=file, live=True, options=options))
        except VideoError as error:
            if not regular:
                raise
            try:
                # A finished plain mp4 has its index at the end: it can be read, only not followed.
                return enter(Source(path, options=options))
            except VideoError:
                told = str(error).rstrip(".")
                raise VideoError(
                    f"{told}; only fragmented mp4, MPEG-TS and Matroska can be followed."
                ) from error


@dataclass(frozen=True, eq=False)
class _Taken:
    """A frame [3, H, W], None before `start`; its presentation time, its tick, and the events up to it."""

    frame: torch.Tensor | None
    time: float
    tick: float
    number: int
    events: tuple[Event, ...]
    ends: bool


class _Quiet(Exception):
    """No frame came for a while."""


class Clips(Iterator[Video]):
    """The clips of a source; `close` gives it back before its end."""

    def __init__(
        self,
        opened: _Opened,
        progress: Progress | None,
        check: Callable[[], None] | None,
        quiet: float | None,
    ) -> None:
        self._opened, self._progress, self._check, self._quiet = opened, progress, check, quiet
        self._items = Pump(opened.items, min(opened.length, AHEAD))
        self._clip: list[_Taken] = []
        self._log = Log()
        self._taken = 0
        self._end: Exception | None = None
        self._silent_since: float | None = None

    def __next__(self) -> Video:
        if self._end is None:
            try:
                while not self._takes(self._items.get(self._awaits)):
                    pass
                return self._made()
            except _Quiet:
                return self._made()
            except StopIteration:
                self._end = StopIteration() if self._taken else self._nothing()
            except (Stall, VideoError) as error:
                self._end = error
            except Forked:
                self._end = VideoError(
                    f"{self._opened.path} is read by the process that this one was forked from; "
                    "call clips anew here."
                )
            if self._clip:
                # The frames so far come before the error.
                return self._made()
        end, source = self._end, self._opened.source
        if isinstance(end, Stall):
            self._end = None
            self._silent_since = self._silent_since or time.monotonic() - end.seconds
            raise VideoStalled(self._opened.path, end.seconds, self._taken)
        if source is not None and not isinstance(end, VideoError):
            due = None
            if source.duration is not None and not source.live:
                due = round(source.duration * self._opened.fps)
            warn_of_loss(source, Plan((), due, self._opened.fps, slack=1), self._opened.seen, 0.0)
            warn_of_shrinking(source, self._opened.picture)
        self._opened.source, self._end = None, StopIteration()
        raise end

    def close(self) -> None:
        """Stop reading, within a second; a second call does nothing. While an address is silent, the thread that reads it
        ends only when it sends something or `timeout` is over."""
        self._opened.source, self._end = None, StopIteration()
        self._items.close()

    def _awaits(self, seconds: float) -> None:
        """Called while a frame is awaited."""
        if self._check is not None:
            self._check()
        if self._clip and self._quiet is not None and seconds > self._quiet:
            raise _Quiet

    def _takes(self, item: _Taken) -> bool:
        """Take a frame; True when a clip is whole."""
        if self._silent_since is not None:
            self._log.add("stall", item.tick, time.monotonic() - self._silent_since)
            self._silent_since = None
        self._taken += 1
        if item.frame is not None:
            for one in item.events:
                self._log.add(one.kind, one.time, one.seconds)
            self._clip.append(item)
            if self._progress is not None:
                self._progress(self._taken, None)
        return item.ends and bool(self._clip)

    def _nothing(self) -> VideoError:
        return VideoError(f"{self._opened.path} has no frames: nothing could be decoded from it.")

    def _made(self) -> Video:
        """A clip of the frames taken since the last one."""
        taken, self._clip = self._clip, []
        events, opened, source = self._log.give(), self._opened, self._opened.source
        return Video(
            frames=pile([one.frame for one in taken if one.frame is not None]),
            times=torch.tensor([one.time for one in taken], dtype=torch.float64),
            fps=float(opened.fps),
            source_fps=0.0 if source is None else source.rate,
            duration=(taken[-1].number - taken[0].number + 1) / opened.fps,
            clock=torch.tensor([one.tick for one in taken], dtype=torch.float64),
            events=events if opened.gaps == "mark" else (),
        )
