"""Clips of a video as it arrives: from a file, a file still being written, a camera, or any URL that PyAV opens."""

from __future__ import annotations

import atexit
import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch

from mmaccel.core.errors import VideoError, VideoStalled
from mmaccel.media.address import Pipe, has_no_writer, is_file, is_pipe, is_url, local_path, wait_for_data
from mmaccel.media.container import FOLLOWED, Source
from mmaccel.media.reader import FramePlan, check_read_arguments, warn_of_lost_frames, warn_of_shrinking
from mmaccel.media.sampling import TIE, EventLog, half_period, log_sampling_gaps, pick_nearest, sampling_times
from mmaccel.media.video import Event, FrameConverter, Gaps, Progress, Video, stack_frames

AHEAD = 8
"""Frames that a thread reads ahead of the caller."""
CHECK_S = 0.05
"""Seconds between two calls of `check` while a frame is awaited."""
POLL_S = 0.02
"""Seconds between two looks at a file that grows."""
LEAVE_S, FILE_S = 0.5, 5.0
"""Seconds that `Clips.close`, and the end of the interpreter, wait for a thread; the end for that of a stored file longer,
which stops after the frame that it decodes."""


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
    """Iterate over clips of `frames_per_clip` frames: at each tick ``k / fps`` seconds the frame shown nearest to it, but
    none that comes more than half a tick later.

    The last clip may be shorter. `Video.clock` has the ticks, which rise evenly, and `Video.times` the presentation times.
    At a tick that shows the same frame as the tick before, `gaps` "hold" takes that frame again, "skip" takes none, and
    "mark" takes it again and lists gaps and irregular times in `Video.events` (`media.Event`). Ticks before `start` seconds
    are left out; the other ticks come in the same clips as without `start`, so the first clip may be shorter.

    `source` is a file, a file still being written (`follow=True`), a pipe, a URL, or a device with its `format` (such as
    "v4l2"). A file can be followed as fragmented mp4, MPEG-TS or Matroska: a plain mp4 has no index until it is finished.
    Times continue from clip to clip; at most two clips are in memory. `progress(done, None)` counts frames. Arguments are
    checked by this call; a thread opens the source at the first clip and reads a few frames ahead. While `next` waits for a
    frame, it calls `check` about 20 times a second; what `check` raises ends that `next`, and another continues. `quiet`: if
    a live source sends no frame for so many seconds, the frames so far are returned as a shorter clip.

    The iteration ends in three ways. It stops at the end of the source; a followed file or pipe has ended when no data came
    for `timeout` seconds and no process has it open for writing. A stall raises `VideoStalled`, after a clip of the frames
    so far: no data came for `timeout` seconds, and the source is still open (or the system cannot tell). Ask for the next
    clip to wait longer; a URL or device is then opened again. An error raises `VideoError`, for example when a connection
    breaks or no frame can be read. Damaged parts of a file are left out, with a `VideoWarning` at the end.
    """
    source, counts = local_path(os.fspath(source)), {"frames_per_clip": frames_per_clip, "max_side": max_side}
    check_read_arguments(gaps=gaps, fps=fps, start=start, size=size, timeout=timeout, **counts)
    if follow and (is_url(source) or format is not None):
        raise VideoError(f"follow=True is for a file that grows, and {source} is none: leave it out.")
    follow, picture = follow or is_pipe(source), FrameConverter(size, max_side)
    reading = _Reading(source, fps, frames_per_clip, follow, timeout, picture, format, options, gaps, start)
    return Clips(reading, progress, check, quiet if reading.live else None)


@dataclass(frozen=True, eq=False)
class _Taken:
    """A frame [3, H, W], None before `start`; its presentation time, its tick, and the events up to it."""

    frame: torch.Tensor | None
    time: float
    tick: float
    events: tuple[Event, ...]
    ends: bool


class FrameQueue:
    """Bounded queue of `most` frames from the thread that reads `path` to the caller; it also passes errors and stalls.

    `closed`: the caller has stopped reading; `taken`: number of frames that it got.
    """

    def __init__(self, path: str, most: int) -> None:
        self._path, self._most, self.taken = path, most, 0
        self._items: deque[_Taken | BaseException] = deque()
        self._changed = threading.Condition()
        self.closed = self._awaited = False
        self._stall_s: float | None = None

    def put(self, item: _Taken | BaseException) -> bool:
        """Add a frame or error, waiting for room; returns False once the queue is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self.closed or len(self._items) < self._most)
            if not self.closed:
                self._items.append(item)
                self._changed.notify_all()
            return not self.closed

    def get(self, check: Callable[[float], bool]) -> _Taken | None:
        """Wait for the next frame; `check(seconds)` is called with the time waited so far, and None returned once it is
        True. Raises errors put into the queue, `VideoStalled`, `StopIteration` once closed, and what `check` raises."""
        began = time.monotonic()
        try:
            while True:
                with self._changed:
                    self._awaited = True
                    self._changed.notify_all()
                    if self._changed.wait_for(lambda: self.closed or self._items or self._stall_s, CHECK_S):
                        break
                if check(time.monotonic() - began):  # without the lock: it may run anything
                    return None
        finally:
            self._awaited = False
        with self._changed:
            if self.closed:
                raise StopIteration
            if not self._items and self._stall_s is not None:
                seconds, self._stall_s = self._stall_s, None
                raise VideoStalled(self._path, seconds, self.taken)
            item = self._items.popleft()
            self._changed.notify_all()
            if isinstance(item, BaseException):
                self.closed = True
                raise item
            self.taken += 1
            return item

    def is_starved(self) -> bool:
        """Whether the caller is waiting for a frame of an empty queue, or the queue is closed."""
        with self._changed:
            return self.closed or (self._awaited and not self._items)

    def wait(self, seconds: float) -> bool:
        """Report a stall of `seconds` once all frames are taken; True when the caller asks for more, False if it closes."""
        with self._changed:
            self._stall_s = seconds
            self._changed.notify_all()
            self._changed.wait_for(lambda: self.closed or (self._stall_s is None and self._awaited))
            return not self.closed

    def close(self) -> None:
        """Close the queue and wake all threads that wait on it."""
        with self._changed:
            self.closed = True
            self._changed.notify_all()

    def reset_after_fork(self) -> None:
        """Make the queue usable in a forked process, without a reading thread: it gives frames already read, then fails."""
        self._changed = threading.Condition()
        message = f"{self._path} is read by the process that this one was forked from; call clips anew here."
        self._items.append(VideoError(message))


class GrowingFile(Pipe):
    """A file that is still being written: at its end `read` waits for more data.

    After `timeout` seconds without data the file has ended if no process has it open for writing. Otherwise, or if the
    system cannot tell, `queue.wait(timeout)` is called, and reading continues if it returns True. If the caller still has
    frames to take, reading continues at once. If the queue is closed, the file has ended.
    """

    def __init__(self, path: str, timeout: float, queue: FrameQueue) -> None:
        super().__init__(path, timeout)
        self._queue, self._over = queue, False

    def read(self, size: int = -1) -> bytes:
        patience = time.monotonic() + self._timeout
        while not (self._over or self._queue.closed):
            # A file is always ready; a pipe is when there is data or nobody writes any more.
            is_ready = wait_for_data(self._number, POLL_S)
            with suppress(BlockingIOError):  # another reader of the pipe was first
                if is_ready and (data := self._data(size)):
                    return data
            if time.monotonic() >= patience:
                # FFmpeg asks several times before it believes in an end.
                self._over = (is_ready and has_no_writer(self._number)) or (
                    self._queue.is_starved() and not self._queue.wait(self._timeout)
                )
                patience = time.monotonic() + self._timeout
            elif is_ready:
                time.sleep(POLL_S)
        return b""


@dataclass(eq=False)
class _Reading:
    """What the thread reads: the arguments of `clips`, the `source` once it is open, and how many ticks were `seen`.

    It knows nothing of `Clips`, so that those that are dropped close the queue and end the thread.
    """

    path: str
    fps: float
    length: int
    follow: bool
    timeout: float
    picture: FrameConverter
    format: str | None
    options: dict[str, str] | None
    gaps: Gaps
    start: float
    source: Source | None = None
    seen: int = 0

    @property
    def live(self) -> bool:
        return self.follow or is_url(self.path) or self.format is not None

    def run(self, queue: FrameQueue) -> None:
        """Body of the reading thread: put frames, and then the error or end, into the queue."""
        taken = 0
        try:
            with ExitStack() as stack:
                self.source = source = self._open(stack, queue)
                frames = itertools.takewhile(lambda _: not queue.closed, source.frames())
                each = pick_nearest(
                    frames,
                    sampling_times(0.0, self.fps),
                    source.seek,
                    source.frame_end_time,
                    half_period(self.fps),
                )
                for tick, time, frame in log_sampling_gaps(each, 0.0, self.fps, source.log, self.gaps):
                    self.seen += 1
                    if frame is None:
                        continue
                    taken += 1
                    drawn = self.picture.convert(frame) if tick >= self.start - TIE else None
                    events, ends = source.log.pop_until(tick), taken % self.length == 0
                    if not queue.put(_Taken(drawn, time, tick, events, ends)):
                        return
            queue.put(StopIteration())
        except BaseException as error:
            queue.put(error)

    def _open(self, stack: ExitStack, queue: FrameQueue) -> Source:
        path, options, enter = self.path, self.options, stack.enter_context
        if not self.follow:
            how: dict[str, Any] = {"format": self.format, "timeout": self.timeout, "wait": queue.wait}
            return enter(Source(path, live=self.live, options=options, **how))
        regular = is_file(path, may_be_empty=True)
        try:
            return enter(
                Source(path, file=enter(GrowingFile(path, self.timeout, queue)), live=True, options=options)
            )
        except VideoError as error:
            if not regular:
                raise
            try:
                # A finished plain mp4 has its index at the end: it can be read, only not followed.
                return enter(Source(path, options=options))
            except VideoError:
                why = str(error).rstrip(".")
                message = f"{why}; {FOLLOWED}."
                raise VideoError(message) from error


_running: dict[threading.Thread, tuple[ref[FrameQueue], float]] = {}
"""The queue of each reading thread, and how many seconds the end of the interpreter waits for it. A thread that has read
all stays until another one starts: it frees its frames last, and that takes the interpreter's lock too."""


@atexit.register
def _leave() -> None:
    """End all reading before the interpreter goes: it ends the process where a thread comes back into torch later."""
    running, now = list(_running.items()), time.monotonic()
    for queue in filter(None, [held() for _, (held, _) in running]):
        queue.close()
    for thread, (_, seconds) in running:
        thread.join(max(0.0, now + seconds - time.monotonic()))


def _forked() -> None:
    for queue in filter(None, [held() for held, _ in list(_running.values())]):
        queue.reset_after_fork()
    _running.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


class Clips(Iterator[Video]):
    """Iterator over the clips of a source; `close` releases the source early."""

    def __init__(
        self,
        reading: _Reading,
        progress: Progress | None,
        check: Callable[[], None] | None,
        quiet: float | None,
    ) -> None:
        self._reading, self._progress, self._check, self._quiet = reading, progress, check, quiet
        self._queue = FrameQueue(reading.path, min(reading.length, AHEAD))
        self._thread = threading.Thread(
            target=reading.run, args=(self._queue,), name="mmaccel-media", daemon=True
        )
        self._clip, self._log = list[_Taken](), EventLog()
        self._end: Exception | None = None
        self._silent_since: float | None = None

    def __next__(self) -> Video:
        if self._end is None:
            if self._thread.ident is None:
                for one in [one for one in list(_running) if one.ident is not None and not one.is_alive()]:
                    _running.pop(one, None)
                _running[self._thread] = ref(self._queue), LEAVE_S if self._reading.live else FILE_S
                try:
                    self._thread.start()
                except RuntimeError:  # no more threads: the next call tries again
                    del _running[self._thread]
                    raise
            try:
                while not self._takes(self._queue.get(self._gives_up)):
                    pass
                return self._made()
            except StopIteration:
                nothing = VideoError(f"{self._reading.path} has no frames: nothing could be decoded from it.")
                self._end = StopIteration() if self._queue.taken else nothing
            except VideoError as error:
                self._end = error
            if self._clip:
                # The frames so far come before the error.
                return self._made()
        end, source = self._end, self._reading.source
        if isinstance(end, VideoStalled):
            self._end = None
            self._silent_since = self._silent_since or time.monotonic() - end.seconds
            raise end
        if source is not None and not isinstance(end, VideoError):
            fps = self._reading.fps
            due = round(source.duration * fps) if source.duration and not source.live else None
            warn_of_lost_frames(source, FramePlan((), due, fps, slack=1), self._reading.seen, 0.0)
            warn_of_shrinking(source, self._reading.picture)
        self._reading.source, self._end = None, StopIteration()
        raise end

    def close(self) -> None:
        """Stop reading the video, within a second; a second call does nothing. If a URL sends nothing, its reading thread
        ends only when data comes or `timeout` is over."""
        self._reading.source, self._end = None, StopIteration()
        self._queue.close()
        if self._thread.ident is not None and threading.current_thread() is not self._thread:
            self._thread.join(LEAVE_S)

    def __del__(self) -> None:
        self._queue.close()

    def _gives_up(self, seconds: float) -> bool:
        """Called while a frame is awaited: whether the frames so far are to be given as a clip."""
        if self._check is not None:
            self._check()
        return bool(self._clip) and self._quiet is not None and seconds > self._quiet

    def _takes(self, item: _Taken | None) -> bool:
        """Take a frame; True when a clip is whole, or is given as it is (None)."""
        if item is None:
            return True
        if self._silent_since is not None:
            self._log.add("stall", item.tick, time.monotonic() - self._silent_since)
            self._silent_since = None
        if item.frame is not None:
            for one in item.events:
                self._log.add(one.kind, one.time, one.seconds)
            self._clip.append(item)
            if self._progress is not None:
                self._progress(self._queue.taken, None)
        return item.ends and bool(self._clip)

    def _made(self) -> Video:
        """A clip of the frames taken since the last one."""
        taken, self._clip = self._clip, []
        events, fps, source = self._log.pop_until(), self._reading.fps, self._reading.source
        return Video(
            frames=stack_frames([one.frame for one in taken if one.frame is not None]),
            times=torch.tensor([one.time for one in taken], dtype=torch.float64),
            fps=float(fps),
            source_fps=0.0 if source is None else source.rate,
            duration=(round((taken[-1].tick - taken[0].tick) * fps) + 1) / fps,
            clock=torch.tensor([one.tick for one in taken], dtype=torch.float64),
            events=events if self._reading.gaps == "mark" else (),
        )
