"""Reads sampled frames of a video file or URL, without keeping the other frames in memory."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, get_args

import av
import torch
from torch import Tensor

from mmaccel.core.errors import ArgumentNames, VideoError, VideoWarning, warn
from mmaccel.core.memory.buffers import free_host_bytes
from mmaccel.media.container import Source
from mmaccel.media.sampling import (
    FASTEST,
    TIE,
    evenly_spaced_frames,
    half_period,
    log_sampling_gaps,
    make_times_increasing,
    pick_nearest,
    sampling_times,
)
from mmaccel.media.video import FrameConverter, Gaps, Progress, Video, stack_frames

Fit = Callable[[int, int, int], tuple[int, int]]
"""`fit(frames, height, width)`: the (height, width) that a model makes of so many frames of that size."""

Rule = Callable[[int, float], int]
"""`rule(frames, rate)`: how many to take of so many frames, at `rate` a second on average (0.0: unknown)."""

AHEAD = 256
"""Frames for which there must still be room, while it is not known how many come."""

ROOM = 2 << 30
"""Bytes that frames may take before those much larger than the model needs are shrunk."""


def read(
    path: str | os.PathLike[str],
    *,
    fps: float | None = None,
    frames: int | Rule | None = None,
    start: float | None = None,
    stop: float | None = None,
    max_frames: int | None = None,
    size: tuple[int, int] | None = None,
    max_side: int | None = 4096,
    fit: Fit | None = None,
    progress: Progress | None = None,
    options: dict[str, str] | None = None,
    timeout: float | None = None,
    gaps: Gaps = "hold",
    faster: bool = True,
    max_bytes: float = math.inf,
) -> Video:
    """Read a video: `fps` frames per second, `frames` evenly spaced frames, or, with neither, every frame.

    - `fps`: at each tick `start + k / fps` (seconds), the frame whose presentation time is nearest, so that a variable frame
      rate is respected. A frame that starts more than half a tick later is not taken, but the frame before it, still shown.
      `Video.clock` has these ticks, `Video.times` the presentation times.
    - `gaps`: at a tick that shows the same frame as the tick before, "hold" takes that frame again, "skip" takes none,
      and "mark" takes it again and lists gaps and irregular times in `Video.events` (`media.Event`).
    - `frames`: of N frames, number `i * N // frames`, as `transformers.video_utils.load_video` does. A function of N and the
      mean rate returns the number; if N is unknown, `fps` (at most the source's) and `max_frames` apply in its place.
    - `start`, `stop`: seconds from the start of the video; the frame at `stop` is excluded.
    - `max_frames`: at most so many: the rate is lowered, the span stays. Where the length is unknown and the source can
      be read only once, every second frame is dropped whenever there are too many.
    - `size` (height, width) scales while decoding; `max_side` only shrinks larger frames (None: no bound).
    - `fit(frames, height, width)` returns the size that the model will resize to: frames over four times as large are
      shrunk to twice that size while decoding, if together they would exceed `ROOM` bytes.
    - `progress(done, total)` is called after each kept frame, also those dropped later; `options` go to PyAV's open.
    - `timeout`: seconds that a URL or a pipe may send nothing (None: 30).
    - `max_bytes`: of all decoded frames; `VideoError` is raised before more are decoded, where their number is known.
    - `faster`: whether `fps` may exceed both the source's mean rate and `FASTEST`; if not, `VideoError` is raised.

    Sparse frames of a local file are reached by seeking. Raises `VideoError` if nothing can be read; warns `VideoWarning` if
    some of the requested frames could not be read: how many, and whether the source is damaged, stalled (a URL or pipe sent
    nothing for `timeout`) or broke off.
    """
    if fps is not None and isinstance(frames, int):
        raise VideoError("fps and frames exclude each other: give one of them.")
    counts = {"frames": None if callable(frames) else frames, "max_frames": max_frames, "max_side": max_side}
    check_read_arguments(fps, gaps, size, timeout, start, stop, **counts)
    with Source(path, options=options, timeout=timeout) as source:
        if fps is not None and not faster and fps > max(FASTEST, 1.001 * source.rate):
            raise VideoError(
                ArgumentNames("fps", value=f"{fps:g}"),
                f" is more than the {max(FASTEST, source.rate):g} frames a second that can be read of "
                f"{source.name}; give no more.",
            )
        picture = FrameConverter(size, max_side)
        if callable(frames):
            if source.count or (source.local and source.read_frame_times()):
                fps, max_frames = None, None
            else:
                frames, fps = None, None if fps is None or fps >= source.rate > 0 else fps
        if fps is not None:
            plan = _by_rate(source, fps, start or 0.0, stop, max_frames, gaps)
        elif frames is None and max_frames is None:
            plan = _all(source, start or 0.0, stop)
        else:
            plan = _by_number(source, frames, start or 0.0, stop, max_frames)
        expected = min((n for n in (plan.total, plan.most) if n is not None), default=None)
        fitted = fit is not None and expected is not None and _fit(source, picture, expected, fit)
        _check_memory(source, picture, None if plan.total is None else expected, max_bytes)
        # Of a source that is longer than it tells, every second frame is let go whenever there are too many.
        kept, step = list[tuple[float, float, Tensor]](), 1
        drawn: av.VideoFrame | None = None
        drawing = torch.empty(0)
        done, skipped, end = 0, 0, 0.0
        for tick, time, frame in plan.stream:
            if frame is None:
                skipped += 1
                continue
            if done % step == 0 and len(kept) == plan.most:
                del kept[1::2]
                step *= 2
            if done % step == 0:
                if drawn is not frame:
                    drawn, drawing = frame, picture.convert(frame)
                kept.append((tick, time, drawing))
            end = source.frame_end_time(time, frame)
            done += 1
            total = plan.total if plan.total is None or done <= plan.total else None
            if progress is not None:
                progress(done, total)
            if total is None and step == 1 and done % AHEAD == 0:
                _check_memory(source, picture, AHEAD if plan.most is None else min(AHEAD, plan.most - done))
        if not kept:
            raise VideoError(*_nothing(source, start, stop))
        warn_of_lost_frames(source, plan, done + skipped, end, stop)
        if not fitted:
            warn_of_shrinking(source, picture)
        clock, times, drawings = (list(of) for of in zip(*kept, strict=True))
        kept.clear()
        del drawing
        if fps is None:
            clock = make_times_increasing(times, 1.0 / (source.rate or 25.0))
        rate = (plan.rate or source.rate) / step or len(times) / max(end - times[0], 1e-9)
        whole = source.duration
        return Video(
            frames=stack_frames(drawings),
            times=torch.tensor(times, dtype=torch.float64),
            fps=float(rate),
            source_fps=source.rate,
            # Joined recordings tell the length of the first alone.
            duration=whole if whole is not None and times[-1] < whole else end,
            clock=torch.tensor(clock, dtype=torch.float64),
            events=source.log.pop_until() if gaps == "mark" else (),
        )


@dataclass(frozen=True)
class FramePlan:
    """Which frames of a file to keep: `total` of them (None: unknown), at `rate` frames per second (0.0: unknown).

    stream   (tick, time, frame) for each wanted frame, in seconds: the moment asked for, and when the frame taken for it
             is shown. The frame is None if there is none for the tick; frames taken by number have tick = time
    missing  text that says which frames promised by the header are not in the file
    slack    up to so many frames fewer than `total` count as rounding, not loss
    end      second at which the last frame should end, if `total` is an estimate (mean rate times length): it then tells
             whether frames are lost, in place of their number
    most     the most frames to keep: whenever there are more, every second one is dropped
    """

    stream: Iterable[tuple[float, float, av.VideoFrame | None]]
    total: int | None
    rate: float
    missing: str = ""
    slack: int = 0
    end: float | None = None
    most: int | None = None


def _by_rate(
    source: Source, fps: float, start: float, stop: float | None, most: int | None, gaps: Gaps
) -> FramePlan:
    end = source.duration
    if end is None and source.local and most is not None:
        index = source.read_frame_times()
        end = index[-1] + (1.0 / source.rate if source.rate else 0.0) if index else None
    if end is not None and stop is not None:
        end = min(end, stop)
    # 3.0000000001 frames are 3: durations are rounded to the time base.
    total = max(0, math.ceil((end - start) * fps - 1e-6)) if end is not None else None
    if total is not None and end is not None and most is not None and total > most:
        fps, total = most / (end - start), most
    times = sampling_times(start, fps, stop)
    each = pick_nearest(source.frames(start), times, source.seek, source.frame_end_time, half_period(fps))
    if most is not None and total == most:
        # A length that is rounded down should not cost every second frame.
        each = drop_item_if_last(each, most)
    return FramePlan(log_sampling_gaps(each, start, fps, source.log, gaps), total, fps, slack=1, most=most)


def drop_item_if_last(stream: Iterable[Any], number: int) -> Iterator[Any]:
    """Yield the items of `stream`, but leave out item `number` (counted from 0) if it is the last one."""
    for place, (item, after) in enumerate(itertools.pairwise(itertools.chain(stream, [None]))):
        if place != number or after is not None:
            yield item


def _by_number(
    source: Source, count: int | Rule | None, start: float, stop: float | None, most: int | None
) -> FramePlan:
    times = source.read_frame_times() if source.local else None
    if count is None and times is None and (not source.count or start > 0 or stop is not None):
        return replace(_all(source, start, stop), most=most)
    missing, slack = "", 0 if source.count else 1
    if times is not None:
        there = due = len(times)
        # A header counts frames that an edit list hides, too.
        whole = source.is_full_duration(source.end or 0.0)
        if source.count and not whole:
            due = source.count
        elif source.duration is not None and times and not whole:
            # A frame may stand as long as the longest before it, whatever the mean rate is.
            longest = max((b - a for a, b in itertools.pairwise(times)), default=0.0)
            left = source.duration - max(source.end or 0.0, times[-1] + longest)
            due += max(0, round(left * source.rate))
        if due - there > slack:
            missing = f"only {there} of its {due} frames are in the file, {due - there} are lost"
        times = [time for time in times if start - TIE <= time and (stop is None or time < stop - TIE)]
        if not times:
            raise VideoError(*_nothing(source, start, stop))
    elif start > 0 or stop is not None:
        raise VideoError(
            f"{source.name} does not tell the time of each frame, so ",
            ArgumentNames("frames"),
            " cannot be combined with start= or stop=: use ",
            ArgumentNames("fps"),
            ", or read the whole.",
        )
    total = len(times) if times is not None else source.count
    if total == 0:
        raise VideoError(
            f"{source.name} does not tell its number of frames: use ",
            ArgumentNames("fps"),
            " instead of ",
            ArgumentNames("frames"),
            ".",
        )
    if callable(count):
        count = count(total, source.rate)
    if count is not None and count > total:
        raise VideoError(
            ArgumentNames("frames", value=count),
            f" is more than the {total} frames of {source.name}: ask for fewer.",
        )
    keep = min(total if count is None else count, total if most is None else most)
    numbers, rate = evenly_spaced_frames(total, keep), keep / total * source.rate
    if times is not None:
        targets = [times[number] for number in numbers]
        kept = pick_nearest(source.frames(targets[0]), targets, source.seek, source.frame_end_time)
        return FramePlan(((time, time, frame) for time, frame in kept), keep, rate, missing, slack)
    numbered = ((float(number), pair) for number, pair in enumerate(source.frames()))
    pairs = (pair for _, pair in pick_nearest(numbered, map(float, numbers)))
    return FramePlan(((time, time, frame) for time, frame in pairs), keep, rate)


def _all(source: Source, start: float, stop: float | None) -> FramePlan:
    def stream() -> Iterator[tuple[float, float, av.VideoFrame]]:
        for time, frame in source.frames(start):
            if stop is not None and time >= stop - TIE:
                return
            if time >= start - TIE:
                yield time, time, frame

    whole = start <= 0 and stop is None
    end = source.duration if stop is None else stop if source.duration is None else min(stop, source.duration)
    if whole and source.count:
        return FramePlan(stream(), source.count, source.rate)
    total = max(0, round((end - start) * source.rate)) if end is not None and source.rate else None
    return FramePlan(stream(), total, source.rate, end=end)


def warn_of_lost_frames(
    source: Source, plan: FramePlan, kept: int, end: float, stop: float | None = None
) -> None:
    """Warn how many frames before `stop` could not be read; `end` is when the last frame that was read ends."""
    told, lost = f"{kept} frames could be read", True
    if plan.missing:
        told = plan.missing
    elif source.restarted:
        # The length is that of a clock that began anew.
        lost = False
    elif plan.end is not None:
        # Two frames' time may be rounding, or a last frame that does not tell how long it stands.
        lost = (missing := (plan.end - end) * source.rate) > 2
        told += f" up to {end:.2f} of {plan.end:.2f} s, about {missing:.0f} were lost" if lost else ""
    elif lost := (plan.total or kept) - kept > plan.slack and not (
        source.is_full_duration(end) and not source.damaged
    ):
        # A header counts frames that an edit list hides, too.
        told = f"{kept} of {plan.total} frames could be read, {(plan.total or 0) - kept} were lost"
    if places := source.count_damaged_parts(stop):
        told += f"; it is damaged in {places} place{'s' if places > 1 else ''}"
    stopped = ("; ", *source.stopped) if source.stopped else ()
    if lost or places or stopped:
        warn(VideoWarning(f"{source.name}: {told}", *stopped, "."))


def warn_of_shrinking(source: Source, picture: FrameConverter) -> None:
    """Warn if frames were larger than `max_side` and were shrunk."""
    if picture.shrunk_from is not None and picture.size is not None:
        (height, width), (rows, columns) = picture.shrunk_from, picture.size
        told = f"{source.name}: frames of {width}x{height} were shrunk to {columns}x{rows} and none lost"
        other = ArgumentNames("max_side", "size", within="; {} sets another size")
        warn(VideoWarning(told, other, "."))


def _nothing(source: Source, start: float | None, stop: float | None) -> tuple[str | ArgumentNames, ...]:
    if source.stopped:
        return (f"{source.name} has no frames: ", *source.stopped, ".")
    if source.damaged:
        return (f"{source.name} is damaged: none of its frames could be decoded.",)
    if (start or stop is not None) and (source.duration or source.count):
        length = f" of {source.duration:.2f} s" if source.duration is not None else ""
        span = f"from start={start or 0}" + (f" to stop={stop}" if stop is not None else "")
        return (f"{source.name}{length} has no frame {span}: choose a span inside it.",)
    return (f"{source.name} has no frames: its video stream is empty.",)


def _fit(source: Source, picture: FrameConverter, frames: int, fit: Fit) -> bool:
    """Bound the sides to twice what the model needs, where that saves much; True when it did."""
    height, width = picture.shape(source.height, source.width)
    if picture.size is not None or frames * 3 * height * width <= ROOM:
        return False
    rows, columns = fit(frames, height, width)
    if min(height / rows, width / columns) <= 4:
        return False
    # One scale for both sides: of the axis that is shrunk less.
    picture.max_side = math.ceil(2 * max(rows / height, columns / width) * max(height, width))
    return True


def _check_memory(source: Source, picture: FrameConverter, total: int | None, most: float = math.inf) -> None:
    height, width = picture.shape(source.height, source.width)
    need, free = (total or 0) * 3 * height * width, min(most, free_host_bytes())
    if need > free:
        raise VideoError(
            f"{total} frames of {width}x{height} from {source.name} need {need / 2**30:.1f} GiB and "
            f"{free / 2**30:.1f} GiB are {'free' if free < most else 'the most'}: give ",
            ArgumentNames("fps", "frames", "max_frames", "size"),
            ".",
        )


def video_metadata(path: str | os.PathLike[str]) -> tuple[int, float, int, int]:
    """Return (number of frames, mean frames a second, height, width) of a video, without decoding; 0 for what is unknown."""
    with Source(path) as source:
        count = source.count or len((source.local and source.read_frame_times()) or ())
        return count, source.rate, source.height, source.width


def read_metadata_comment(path: str | os.PathLike[str]) -> str:
    """Return the comment in the metadata of a local video file; "" if there is none, or no such file."""
    if not os.path.isfile(path):
        return ""
    with Source(path) as source:
        return source.comment


def check_read_arguments(
    fps: float | None,
    gaps: str,
    size: tuple[int, int] | None,
    timeout: float | None,
    start: float | None,
    stop: float | None = None,
    **counts: int | None,
) -> None:
    """Raise `VideoError` for out-of-range arguments of `read` and `clips`; `counts` must be at least 1 or None."""
    if fps is not None and not (fps > 0 and math.isfinite(fps)):
        raise VideoError(ArgumentNames("fps", value=fps), " must be a positive number of frames a second.")
    for name, value in counts.items():
        if value is not None and value < 1:
            raise VideoError(ArgumentNames(name, value=value), " must be at least 1.")
    if timeout is not None and not timeout > 0:
        raise VideoError(
            ArgumentNames("timeout", value=f"{timeout:g}"), " must be a positive number of seconds."
        )
    if start is not None and not (start >= 0 and math.isfinite(start)):
        raise VideoError(f"start={start} must be 0 or more seconds.")
    if stop is not None and not stop > (start or 0.0):
        raise VideoError(f"stop={stop} must lie after start={start or 0}.")
    if size is not None and (len(size) != 2 or min(size) < 1):
        raise VideoError(f"size={size} must be (height, width), each at least 1.")
    if gaps not in get_args(Gaps):
        raise VideoError(f"gaps={gaps!r} must be one of {', '.join(map(repr, get_args(Gaps)))}.")
