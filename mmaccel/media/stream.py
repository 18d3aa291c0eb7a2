"""Clips of a video as it comes: from a file, a file that still grows, a camera or any address PyAV opens."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack

import torch

from mmaccel.core.errors import VideoError
from mmaccel.media.clock import Ticks
from mmaccel.media.container import Source, is_file, is_url
from mmaccel.media.picture import Picture
from mmaccel.media.reader import Plan, check_gaps, pile, warn_of_loss, warn_of_shrinking
from mmaccel.media.sampling import TIE, grid, nearest
from mmaccel.media.video import Event, Gaps, Progress, Video


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
) -> Iterator[Video]:
    """Yield clips of `frames_per_clip` frames: at each tick ``k / fps`` seconds the frame shown nearest to it.

    The last clip may be shorter. `Video.clock` has the ticks, which rise evenly, and `Video.times` the presentation
    times. At a tick at which the frame of the tick before still stands, `gaps` "hold" takes that frame again, "skip"
    takes none, and "mark" is as "hold" and lists in `Video.events` what was uneven (`media.Event`). Ticks before
    `start` seconds are left out; the others come in the same clips as without it, the first of which may be shorter.

    `source` is a file, a file still being written (`follow=True`: it is polled, and over when it has not
    grown for `timeout` seconds), a URL, or a device with its `format` (for instance "v4l2"); a URL or device
    that sends nothing for `timeout` seconds is over too. A file is followed as fragmented mp4, MPEG-TS or
    Matroska: a plain mp4 has no index until it is finished. Times run on from clip to clip; one clip is held
    at a time. `progress(done, None)` counts frames. Arguments are checked at the call, the source is opened
    at the first clip.

    Raises `VideoError` when not one frame can be read; warns `VideoWarning` at the end when parts were
    damaged.
    """
    if not fps > 0:
        raise VideoError(f"fps={fps} must be a positive number of frames a second.")
    if frames_per_clip < 1:
        raise VideoError(f"frames_per_clip={frames_per_clip} must be at least 1.")
    if not timeout > 0:
        raise VideoError(f"timeout={timeout} must be a positive number of seconds.")
    if not 0 <= start < float("inf"):
        raise VideoError(f"start={start} must be 0 or more seconds.")
    check_gaps(gaps)
    if follow and (is_url(source) or format is not None):
        raise VideoError(
            f"follow=True is for a file that grows, and {os.fspath(source)} is none: leave it out."
        )
    return _clips(
        source,
        fps,
        frames_per_clip,
        follow,
        timeout,
        Picture(size, max_side),
        progress,
        format,
        options,
        gaps,
        start,
    )


def _clips(
    path: str | os.PathLike[str],
    fps: float,
    length: int,
    follow: bool,
    timeout: float,
    picture: Picture,
    progress: Progress | None,
    format: str | None,
    options: dict[str, str] | None,
    gaps: Gaps,
    start: float,
) -> Iterator[Video]:
    with ExitStack() as stack:
        source = _open(path, follow, timeout, format, options, stack)
        ticks, taken, skipped = Ticks(0.0, fps, source.log), 0, 0
        clip = _Clip(fps, source.rate)
        for moment, frame in nearest(source.frames(), grid(0.0, fps), source.jump, source.until):
            if ticks.again(frame) and gaps == "skip":
                skipped += 1
                continue
            taken += 1
            if ticks.now >= start - TIE:
                clip.add(picture.draw(frame), moment, ticks)
                if progress is not None:
                    progress(taken, None)
            if taken % length == 0 and clip.frames:
                yield clip.video(source.log.give(ticks.now) if gaps == "mark" else ())
                clip = _Clip(fps, source.rate)
            if taken % length == 0:
                source.log.give(ticks.now)
        if clip.frames:
            yield clip.video(source.log.give() if gaps == "mark" else ())
        if taken == 0:
            raise VideoError(f"{source.name} has no frames: nothing could be decoded from it.")
        due = round(source.duration * fps) if source.duration is not None and not source.live else None
        warn_of_loss(source, Plan((), due, fps, slack=1), taken + skipped, 0.0)
        warn_of_shrinking(source, picture)


class _Clip:
    """A clip in the making."""

    def __init__(self, fps: float, source_fps: float) -> None:
        self.frames: list[torch.Tensor] = []
        self._times: list[float] = []
        self._clock: list[float] = []
        self._numbers: list[int] = []
        self._fps, self._source_fps = fps, source_fps

    def add(self, frame: torch.Tensor, time: float, ticks: Ticks) -> None:
        """Take a frame [3, H, W] shown at `time`, at the last of `ticks`."""
        self.frames.append(frame)
        self._times.append(time)
        self._clock.append(ticks.now)
        self._numbers.append(ticks.number)

    def video(self, events: tuple[Event, ...]) -> Video:
        """The clip."""
        return Video(
            frames=pile(self.frames),
            times=torch.tensor(self._times, dtype=torch.float64),
            fps=float(self._fps),
            source_fps=self._source_fps,
            duration=(self._numbers[-1] - self._numbers[0] + 1) / self._fps,
            clock=torch.tensor(self._clock, dtype=torch.float64),
            events=events,
        )


def _open(
    path: str | os.PathLike[str],
    follow: bool,
    timeout: float,
    format: str | None,
    options: dict[str, str] | None,
    stack: ExitStack,
) -> Source:
    if not follow:
        wait = timeout if is_url(path) or format is not None else None
        live = wait is not None
        return stack.enter_context(Source(path, live=live, format=format, options=options, timeout=wait))
    is_file(os.fspath(path), may_be_empty=True)
    try:
        file = stack.enter_context(Growing(path, timeout))
        return stack.enter_context(Source(path, file=file, live=True, options=options))
    except VideoError as error:
        try:
            # A finished plain mp4 has its index at the end: it can be read, only not followed.
            return stack.enter_context(Source(path, options=options))
        except VideoError:
            told = str(error).rstrip(".")
            raise VideoError(f"{told}; only fragmented mp4, MPEG-TS and Matroska can be followed.") from error


class Growing(io.RawIOBase):
    """A file read like a pipe: at its end `read` waits for more, until nothing came for `timeout` seconds."""

    def __init__(self, path: str | os.PathLike[str], timeout: float, poll: float = 0.02) -> None:
        super().__init__()
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115  closed by close()
        self._timeout = timeout
        self._poll = poll
        self._over = False

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return False

    def read(self, size: int = -1) -> bytes:
        patience = time.monotonic() + self._timeout
        while True:
            data = self._file.read(size)
            if data and not self._over:
                return bytes(data)
            # FFmpeg asks several times before it believes in an end.
            self._over = self._over or time.monotonic() >= patience
            if self._over:
                return b""
            time.sleep(self._poll)

    def close(self) -> None:
        self._file.close()
        super().close()
