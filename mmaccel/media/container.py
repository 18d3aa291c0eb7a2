"""Decodes a video source: frames in presentation order with their times, and a record of what is damaged."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from io import RawIOBase
from typing import Any

import av
import av.error
import av.stream
from av.format import Flags

from mmaccel.core.errors import ArgumentNames, VideoError
from mmaccel.media import address
from mmaccel.media.sampling import EventLog

FOREVER = float("inf")
FOLLOWED = "only fragmented mp4, MPEG-TS and Matroska can be followed"
PATIENCE_S = 30.0
"""The default of `timeout`: seconds that a URL or a pipe may be silent."""
BACK = 1.0
"""A clock restarts where times fall by more than this many seconds; less is a frame out of order."""
AHEAD = 86400.0
"""More seconds than this between two frames are no gap: the clock was set, or its counter overflowed."""


class Source(AbstractContextManager["Source"]):
    """A video file, URL or readable object, opened for decoding.

    `rate` frames per second on average (0.0 unknown), `duration` seconds (None unknown), `count` frames by the header (0
    unknown), `width` and `height` as stored. `damaged` has the seconds of the parts that could not be decoded so far;
    `stopped` says how a URL or pipe ended too early (empty if not); `corrupt` has the decoding times of packets that the
    container marks as corrupt; `log` has irregular times. Times start at 0 with the stream.

    Reading ends when a URL, device or pipe has sent no data for `timeout` seconds (None: `PATIENCE_S`). If `wait` is given,
    `wait(timeout)` is called then; if it returns True, the source is opened again and reading continues.

    Raises `VideoError` if there is nothing to read: no file, a folder, no permission, not a video, no video stream; and when
    a `live` source breaks off.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        file: RawIOBase | None = None,
        live: bool = False,
        format: str | None = None,
        options: dict[str, str] | None = None,
        timeout: float | None = None,
        wait: Callable[[float], bool] | None = None,
    ) -> None:
        self._where = where = address.local_path(os.fspath(path))
        self.name = address.format_path_for_error(where)
        self.live = live
        self.local = file is None and not address.is_url(where) and format is None and address.is_file(where)
        if not self.local and timeout is None:
            timeout = PATIENCE_S
        if file is None and format is None and timeout is not None and address.is_pipe(where):
            file = address.Pipe(where, timeout)
        self._timeout, self._wait = timeout, wait
        self._opened_anew = False
        self.damaged: list[float] = []
        self.stopped: tuple[str | ArgumentNames, ...] = ()
        self.corrupt: set[int] = set()
        self._read = 0.0
        self.restarted = False
        self.log = EventLog()
        # Seconds between key frames, the longest seen; None before two were, infinite where seeking fails.
        self.gap: float | None = None
        self._goal: float | None = None
        self.end: float | None = None
        # Seconds before its goal that a seek aims: MPEG-TS lands late, and the margin needed once stays.
        self._back = 0.0
        self._opener = functools.partial(
            av.open,
            file if file is not None else where,
            format=format,
            options=options or {},
            timeout=None if self.local or file is not None else timeout,
        )
        self._open()
        stream = self._stream
        flags = self._container.format.flags
        # Recordings may be joined; and in a stream without times nobody knows where a seek ends.
        self._joined = bool(flags & Flags.ts_discont.value)
        timeless = bool(flags & Flags.no_timestamps.value)
        self._steady: bool | None = False if timeless else None if self._joined else True
        self.comment = str(self._container.metadata.get("comment", ""))
        self.width, self.height = int(stream.codec_context.width), int(stream.codec_context.height)
        self.rate = float(stream.average_rate or stream.guessed_rate or 0)
        self.count = int(stream.frames or 0)
        self._unit = float(stream.time_base or 0)
        self._start: float | None = stream.start_time * self._unit if stream.start_time is not None else None
        self.duration: float | None = None
        whole, begin = self._container.duration, max(self._container.start_time or 0, 0)
        if stream.duration is not None:
            self.duration = float(stream.duration * self._unit)
        # The container's duration is that of its longest stream, which may be sound.
        elif whole is not None and len(self._container.streams) == 1:
            # Where only the header tells, as in Matroska, it tells the end on the clock of the file.
            self.duration = float((whole - begin if begin < whole else whole) / av.time_base)

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file or connection."""
        self._container.close()

    def _open(self) -> None:
        """Open the source, and choose its video; raises `VideoError` where there is none that can be decoded."""
        try:
            self._container: Any = self._opener()
        except (av.error.FFmpegError, OSError, ValueError) as error:
            said: tuple[str | ArgumentNames, ...] = (f"cannot be opened: {address.os_reason(error)}.",)
            if isinstance(error, av.error.InvalidDataError):
                said = ("is not a video that can be read: it is another kind of file, or was cut short.",)
            elif isinstance(error, av.error.EOFError):
                said = ("has no frames: its data ends before the first.",)
            elif address.is_read_timeout(error):
                longer = ArgumentNames("timeout", sign="")
                said = "sent nothing in the time allowed: check the address, or raise ", longer, "."
            raise VideoError(f"{self.name} ", *said) from error
        streams, form, why = self._container.streams, self._container.format.name, ""
        # Containers hold the picture of a piece of music as a video of one frame.
        cover = av.stream.Disposition.attached_pic
        videos = [stream for stream in streams.video if not stream.disposition & cover]
        if form == "concat":
            why = address.LIST
        elif form == "tty":
            # FFmpeg would draw the text as the picture of a terminal.
            why = "is text, not a video: name a video file."
        elif not videos:
            kinds = sorted({stream.type for stream in streams} - {"video"})
            holds = f"only {' and '.join(kinds)}" if kinds else "no streams"
            why = f"has no video: it holds {holds}."
        elif videos[0].codec_context is None:
            why = "has video in a codec that this FFmpeg cannot decode: convert it to H.264."
        if why:
            self._container.close()
            raise VideoError(f"{self.name} {why}")
        self._stream = videos[0]
        # A file that still grows would wait in the decoder for as many frames as there are threads.
        self._stream.thread_type = "SLICE" if self.live else "AUTO"

    def read_frame_times(self) -> list[float] | None:
        """Presentation times of all frames, ascending, from the packets, without decoding.

        For `local` sources only, since they are read twice. None if packets have no times or equal ones, or if their clock
        restarts. Also records the distance between key frames, and `end`, when the last frame ends.
        """
        times, keys, ends, last = [], [], [0.0], -FOREVER
        try:
            for packet, restarts, seconds in self._packets():
                last = seconds
                if packet.is_corrupt:
                    self.corrupt.add(packet.dts or 0)
                if packet.pts is None or restarts:
                    return None
                times.append(packet.pts * self._unit)
                ends.append(times[-1] + (packet.duration or 0) * self._unit)
                if packet.is_keyframe:
                    keys.append(times[-1])
        except av.error.FFmpegError:
            self.damaged.append(last)
        finally:
            try:
                self._container.seek(0)
            except av.error.FFmpegError:
                # Bare streams cannot be sought in; a file can always be opened again.
                self._container.close()
                self._open()
        times.sort()
        if len(set(times)) != len(times):
            return None
        if self._start is None and times:
            self._start = times[0]
        keys.sort()
        self.gap = max((b - a for a, b in itertools.pairwise(keys)), default=FOREVER)
        self.end = max(ends) - (self._start or 0.0)
        return [time - (self._start or 0.0) for time in times]

    def _packets(self) -> Iterator[tuple[Any, bool, float]]:
        """All packets that hold something, whether the clock restarts with each, and when it is decoded, in seconds."""
        last = -FOREVER
        for packet in self._container.demux(self._stream):
            if packet.size and not packet.is_discard:
                before, last = last, self._decoded(packet, last)
                yield packet, before > -FOREVER and not -BACK <= last - before <= AHEAD, last

    def _decoded(self, packet: Any, last: float) -> float:
        """When a packet is decoded, in seconds; `last` where it does not tell."""
        return last if packet.dts is None else float(packet.dts * self._unit)

    def _is_steady(self) -> bool:
        """Whether the clock of a file runs on to its end, from the packets alone: only then can be sought in it."""
        if self._steady is None:
            try:
                with Source(self._where) as other:
                    self._steady = not any(restarts for _, restarts, _ in other._packets())
            except av.error.FFmpegError:
                self._steady = False
        return self._steady

    def frames(self, start: float = 0.0) -> Iterator[tuple[float, av.VideoFrame]]:
        """Yield (time, frame) in presentation order, from the last key frame at or before `start`."""
        if start > 0 and self.local and self._is_steady():
            self._goal = start
        last, shift, key, number, settled = -FOREVER, 0.0, None, 0, True
        length, timed = 0.0, False
        while True:
            goal, self._goal = self._goal, None
            if goal is not None:
                try:
                    seconds = max(goal - self._back, 0.0) + (self._start or 0.0)
                    self._container.seek(int(seconds / self._unit), stream=self._stream, backward=True)
                except (av.error.FFmpegError, OverflowError):
                    self.gap = FOREVER
                key, settled = None, False
            for frame in self._decode():
                if self._opened_anew:
                    # A recording comes from its beginning again, and what was seen of it is passed over.
                    self._opened_anew, settled = False, self.duration is None
                if frame.pts is not None:
                    seconds = float(frame.pts * self._unit)
                    self._start = seconds if self._start is None else self._start
                    time = seconds - self._start + shift
                else:
                    time = last + length if timed else number / (self.rate or 25.0) + shift
                number += 1
                if goal is not None:
                    if time > goal and self._back < goal:
                        break
                    goal = None
                # The clock of a plain file runs on: what is out of order is damage, of which the decoder may say nothing.
                clock_may_restart = settled and last > -FOREVER and (self._joined or self.live)
                restarted = clock_may_restart and not last - BACK <= time <= last + AHEAD
                if time <= last and not restarted and (not settled or self.damaged):
                    # Behind a seek, or out of order after damage.
                    continue
                settled, length = True, self.frame_duration(frame)
                if restarted:
                    self.restarted = True
                    # A camera that restarts, or joined recordings, begin their clock anew; ours goes on.
                    self.log.add("restart", last + length, time - last)
                    shift += last + length - time
                    time, key, self.gap = last + length, None, FOREVER
                elif time <= last:
                    self.log.add("repeat", last, 0.0)
                if frame.pts is None:
                    self.log.add("untimed", max(time, last), length)
                timed = timed or frame.pts is not None
                if frame.key_frame:
                    if key is not None:
                        self.gap = max(self.gap or 0.0, time - key)
                    key = time
                last = max(last, time)
                yield last, frame
                if self._goal is not None:
                    break
            else:
                if goal is None or self._back >= goal:
                    return
            if goal is not None:
                # The seek landed behind its goal, or behind the end.
                self._back = max(2 * self._back, 2 * min(self.gap or 5.0, 5.0))
                self._goal = goal

    def seek(self, place: float, target: float) -> None:
        """Let `frames`, which has read up to second `place`, continue at the last key frame before second `target`, if one
        certainly lies in between.

        Whether one does follows from the distance of key frames so far, so the beginning is always decoded in full.
        """
        if not (self.local and self.gap and target - self._back - place > 1.5 * self.gap):
            return
        if self._is_steady():
            self._goal = target
        else:
            self.gap = FOREVER

    def frame_duration(self, frame: av.VideoFrame) -> float:
        """Seconds for which a video frame is shown."""
        if frame.duration:
            return float(frame.duration * self._unit)
        return 1.0 / self.rate if self.rate else 0.04

    def count_damaged_parts(self, stop: float | None = None) -> int:
        """Number of damaged parts before second `stop`; later ones may be known too, as the decoder's threads read ahead."""
        last = FOREVER if stop is None else stop + (self._start or 0.0)
        # Packets where recordings are joined are marked as corrupt, too; most begin a clock anew.
        corrupt = 0 if self.restarted else sum(dts * self._unit < last for dts in self.corrupt)
        return max(sum(time < last for time in self.damaged), corrupt)

    def is_full_duration(self, end: float) -> bool:
        """Return whether `end` seconds is the source's end, within 1.5 frames; False if its duration is unknown."""
        return self.duration is not None and end > self.duration - 1.5 / (self.rate or 25.0)

    def frame_end_time(self, time: float, frame: av.VideoFrame) -> float:
        """Return when a frame shown at `time` ends: its duration later, but not after the end of the file."""
        end = time + self.frame_duration(frame)
        return end if self.duration is None or time >= self.duration else min(end, self.duration)

    def _decode(self) -> Iterator[av.VideoFrame]:
        """All frames from where the source stands. A live one that went silent is opened anew where `wait` says so; where it
        breaks off, `VideoError` is raised. Why any other ends in the middle is noted: damage, a stall, a lost connection."""
        packets = self._container.demux(self._stream)
        while True:
            try:
                packet = next(packets, None)
            except (av.error.FFmpegError, OSError) as error:
                if self.live:
                    yield from self._flush()
                    if not address.is_read_timeout(error) or self._wait is None:
                        odd = isinstance(error, av.error.InvalidDataError) and os.path.isfile(self.name)
                        why = f"{address.os_reason(error)}{f'; {FOLLOWED}' if odd else ''}"
                        raise VideoError(f"{self.name} broke off: {why}.") from error
                    if not self._wait(self._timeout or 0.0):
                        return
                    self._container.close()
                    self._open()
                    self._opened_anew = True
                    packets = self._container.demux(self._stream)
                    continue
                # The data ends here in the middle of something; what the decoder still holds is good.
                packet = None
                if self.local or isinstance(error, av.error.InvalidDataError):
                    self.damaged.append(self._read)
                elif address.is_read_timeout(error):
                    stalled = f"it stalled: nothing came for {self._timeout:g} s; raise "
                    self.stopped = (stalled, ArgumentNames("timeout", sign=""), " to wait longer")
                else:
                    self.stopped = (f"it broke off: {address.os_reason(error)}",)
            if packet is None:
                return (yield from self._flush())
            if packet.is_corrupt:
                self.corrupt.add(packet.dts or 0)
            self._read = self._decoded(packet, self._read)
            try:
                frames = packet.decode()
            except av.error.EOFError:
                return
            except av.error.FFmpegError:
                self.damaged.append(self._read)
                continue
            yield from self._note_damage(frames)
            if packet.size == 0:
                return

    def _note_damage(self, frames: list[av.VideoFrame]) -> list[av.VideoFrame]:
        """Return `frames`, with those noted as damaged whose missing parts the decoder filled in, without an error."""
        self.damaged += [self._read for frame in frames if frame.is_corrupt]
        return frames

    def _flush(self) -> Iterator[av.VideoFrame]:
        try:
            yield from self._note_damage(self._stream.decode(None))
        except av.error.FFmpegError:
            return
