"""Prepares frames for a session: reopens a live source that stalls, fails or ends, and records such events; regroups the
clips of a stored video into forward passes; gives frames their times; reports progress."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from mmaccel.core.errors import ModelError, VideoError, VideoStalled
from mmaccel.core.streams.parts import StreamInfo

Part = TypeVar("Part")
Tell = Callable[[int, int | None], None]
GAP, GAP_S = 4.0, 1.0
"""A gap lasts longer than so many times the usual step between frames, and than so many seconds."""
FIRST_S, MOST_S, STEP_S = 0.5, 30.0, 0.05
"""Seconds until a source is opened again: at first, and at most; and between two checks meanwhile."""

WAITING = 1 << 31
"""Bytes of decoded frames that a pass of an ingestion takes at most: frames of a file wait in host memory for their pass."""


@dataclass(frozen=True, eq=False)
class Clip:
    """A clip of a video: `frames` [T, 3, H, W], the seconds at which each was shown (`times`) and frames per second (`fps`),
    None where unknown. `part`: whether it is one piece of a video of unknown length."""

    frames: Tensor
    times: list[float] | None
    fps: float | None
    part: bool = False


@dataclass
class StreamEvent:
    """What happened to a stream.

    stall, fault, end  its source sent nothing, failed or ended after a frame shown at `seconds` of the stream: `why` is the
                       error, `lasted` the seconds until frames came again (None until then)
    gap         no frame was shown for `lasted` seconds after one at `seconds`
    size, rate  from `seconds` on frames have another size, or come at another rate: `why` names the old and the new one
    let_go      the memory forgot frames, which span `lasted` seconds; the last of them was shown at `seconds`
    """

    kind: Literal["stall", "fault", "end", "gap", "size", "rate", "let_go"]
    seconds: float
    why: str = ""
    lasted: float | None = None


class IntakeProgress:
    """Reports progress of one `watch` or `ingest` call: calls ``tell(done, total)``, if given, with the frames read by the
    model so far, and their total (None for a video of unknown length, which comes in pieces). When such a video is ingested,
    a frame counts half once it is decoded, and wholly once the model has read it. `deadline` is that of the call."""

    def __init__(self, tell: Tell | None, deadline: Any) -> None:
        self.deadline, self._tell, self._decoded, self._taken = deadline, tell, 0, 0.0

    def count_decoded_frames(self, clip: Clip) -> None:
        """Count the frames of `clip`, decoded but not yet ingested; raises `CallEnded` at the deadline."""
        self.deadline.check()
        if clip.part:
            self._decoded += len(clip.frames)
            self._show(None)

    def report_frames_read(
        self, clip: Clip, done: int, frames: int, more: int = 0, share: float = 0.0
    ) -> None:
        """Report how many frames the model has read: `done` of earlier clips, the first `frames` of `clip`, and a `share`
        (0 to 1) of the `more` frames of the pass that is running."""
        self._taken = done + frames + share * more
        self._show(None if clip.part else done + len(clip.frames))

    def _show(self, total: int | None) -> None:
        if self._tell is not None:
            self._tell(int(max(self._taken, (self._decoded + self._taken) / 2)), total)


class LayerHook:
    """A callback to be called before each layer of a pass over `count` units (frames) on the `StreamModel` `adapter`.

    It lets waiting answers decode, and reports progress: it calls `moved` with the share of a job's `units` units that is
    done so far. `done` of these units were run before this pass, and this pass's units count by the layers already run.
    """

    def __init__(
        self, adapter: Any, moved: Callable[[float], None], done: int, count: int, units: int
    ) -> None:
        self._adapter, self._moved, self._done, self._count, self._units = adapter, moved, done, count, units
        self._layers = itertools.count()

    def __call__(self) -> None:
        self.within()
        run = next(self._layers) / self._adapter.view.geometry.layers
        with self._adapter.turns.ending(None):  # what it calls may run passes of its own
            self._moved((self._done + self._count * run) / self._units)

    def within(self) -> None:
        """Let waiting answers decode, or end an ingestion, within a layer too."""
        self._adapter.turns.yield_between_layers(self._adapter.device)


def find_clip_events(info: StreamInfo | None, clip: Clip, shown: Sequence[float]) -> list[StreamEvent]:
    """Compare a clip, whose frames are shown at the seconds `shown`, with the stream `info` before it, and return what is
    irregular: gaps longer than `GAP` usual frame intervals and than `GAP_S` seconds, and a change of the frame size or the
    frame rate."""
    if info is None or not info.times or info.raw is None:
        return []
    sizes, rates = (info.raw, (clip.frames.shape[2], clip.frames.shape[3])), (info.rate, clip.fps)
    made, times = list[StreamEvent](), [info.times[-1], *shown]
    steps = [b - a for a, b in itertools.pairwise(times)]
    usual = 1 / rates[1] if rates[1] else statistics.median(steps)
    made += [
        StreamEvent("gap", begin, "no frames came", step)
        for begin, step in zip(times, steps, strict=False)
        if step > max(GAP * usual, GAP_S)
    ]
    if sizes[0] != sizes[1]:
        (before, wide), (now, broad) = sizes
        made.append(
            StreamEvent("size", shown[0], f"frames of {broad}x{now} follow frames of {wide}x{before}")
        )
    if _other_rate(*rates):
        made.append(
            StreamEvent("rate", shown[0], f"{rates[1]:g} frames a second follow {rates[0]:g} frames a second")
        )
    return made


def _other_rate(before: float | None, now: float | None) -> bool:
    return bool(before and now and not 0.9 < now / before < 1.1)


def regroup_clips_by_pass(
    clips: Generator[Clip, None, None], room: Callable[[Clip], int], seen: Callable[[Clip], None]
) -> Generator[Clip, None, None]:
    """Join and cut the `clips` of one stored video so that each clip yielded fills one forward pass; the last may be
    shorter.

    `room(clip)` returns how many frames of the size of those in `clip` fit into the next pass; at most that many frames and
    one clip are held in memory. Frames of another size or rate begin a new pass; so do frames without times after frames
    with times. A clip that is the whole video is yielded as it is. `seen` is called with each incoming clip, and may raise.
    Raises `ModelError` for a clip without frames, or whose frames are not uint8.
    """
    held: list[Clip] = []
    with closing(clips):
        for clip in clips:
            seen(clip)
            check_clip_frames("ingest", clip.frames)
            if not clip.part:
                yield clip
                continue
            if held and not _follows(held[-1], clip):
                yield _joined(held)
            wanted = room(clip) - sum(len(one.frames) for one in held)
            while len(clip.frames) >= wanted:
                held.append(_cut(clip, 0, wanted))
                yield _joined(held)
                clip = _cut(clip, wanted, None)
                wanted = room(clip)
            held += [clip] if len(clip.frames) else []
        if held:
            yield _joined(held)


def _follows(before: Clip, clip: Clip) -> bool:
    one, other = before.frames, clip.frames
    alike = one.shape[1:] == other.shape[1:] and one.device == other.device
    return alike and (before.times is None) == (clip.times is None) and not _other_rate(before.fps, clip.fps)


def _cut(clip: Clip, begin: int, end: int | None) -> Clip:
    times = None if clip.times is None else clip.times[begin:end]
    return replace(clip, frames=clip.frames[begin:end], times=times)


def _joined(held: list[Clip]) -> Clip:
    """The clips `held` as one, with the rate of the first; the list is emptied as their frames are copied."""
    if len(held) == 1:
        return held.pop()
    like, fps = held[0].frames[:0], held[0].fps
    times = None if held[0].times is None else list[float]()
    frames, done = like.new_empty(sum(len(one.frames) for one in held), *like.shape[1:]), 0
    while held:
        one = held.pop(0)
        count = len(one.frames)
        frames[done : done + count] = one.frames
        done += count
        if times is not None:
            times += frame_times(times[-1] if times else None, one.times, count, one.fps, False)
    return Clip(frames, times, fps, part=True)


def shift_clip(clip: Clip, seconds: float) -> Clip:
    """Return the clip with all times increased by `seconds`."""
    assert clip.times is not None
    return replace(clip, times=[moment + seconds for moment in clip.times])


def clips_with_reconnect(
    opens: Callable[[], Any],
    check: Callable[[], None],
    note: Callable[[StreamEvent], None],
    begin: float,
    times: Callable[[Part], Sequence[float]],
    shifted: Callable[[Part, float], Part],
) -> Generator[Part, None, None]:
    """Yield the clips of a live source; if it stalls, fails or ends, call `opens` to open it again, until `check` raises.

    After a break, times continue from the last frame plus the seconds that the break lasted. `note` gets a `StreamEvent`
    when a break begins; `begin` is when the stream's last frame was shown; ``times(clip)`` returns the seconds of a clip's
    frames, and ``shifted(clip, seconds)`` returns the clip with later times.
    """
    last, since, wait = begin, time.monotonic(), FIRST_S
    event: StreamEvent | None = None
    while True:
        kind, why, shift = "end", "", None
        try:
            with closing(opens()) as clips:
                for clip in clips:
                    if event is not None:
                        event.lasted, wait = time.monotonic() - since, FIRST_S
                        shift = last + event.lasted - times(clip)[0]
                        event = None
                    if shift is not None:
                        clip = shifted(clip, shift)
                    yield clip
                    last, since = [last, *times(clip)][-1], time.monotonic()
        except VideoError as error:
            kind, why = "stall" if isinstance(error, VideoStalled) else "fault", str(error)
        if event is None:
            event = StreamEvent(kind, last, why)  # type: ignore[arg-type]
            note(event)
        end = time.monotonic() + wait
        while (left := end - time.monotonic()) > 0:
            check()
            time.sleep(min(STEP_S, left))
        check()
        wait = min(2 * wait, MOST_S)


def check_clip_frames(how: str, frames: Tensor) -> None:
    """Raise `ModelError`, which begins with the call's name `how`, if there are no frames or they are not uint8."""
    if not len(frames):
        raise ModelError(f"{how}: the clip has no frames; give at least one.")
    if frames.dtype != torch.uint8:
        raise ModelError(f"{how}: frames are {frames.dtype}; give uint8, 0 to 255.")


def clip_shown_times(
    how: str, clip: Clip, given: list[float] | None, done: int, info: StreamInfo | None
) -> tuple[list[float], bool]:
    """Return the seconds at which the frames of `clip` are shown, later than those of the stream `info`, and whether these
    are known (False: neither times nor a rate are). `given` are the times that the user passed for all frames of a call, of
    which `done` came in earlier clips. Raises `ModelError`, whose message begins with the name `how` of the call."""
    check_clip_frames(how, clip.frames)
    count = clip.frames.shape[0]
    # Too many are told of before anything is taken in, where the end is known.
    times = clip.times if given is None else given[done : done + count if clip.part else None]
    if times is not None and len(times) != count:
        whose = "of the video " if given is None else ""
        raise ModelError(f"times: there are {len(times)} {whose}for {count} frames; give one for each frame.")
    last = info.times[-1] if info is not None and info.times else None
    rate = clip.fps if clip.fps or info is None else info.fps
    return frame_times(last, times, count, rate, given is not None), times is not None or rate is not None


def frame_times(
    last: float | None, given: list[float] | None, count: int, fps: float | None, strict: bool
) -> list[float]:
    """Return the seconds, ascending, at which `count` new frames are shown, all later than `last` (None: no frame yet).

    They are the `given` times; if these begin at or before `last`, as those of another file do, all are shifted to follow
    it, or with `strict` refused. Without `given` times there is one frame every ``1 / fps`` seconds (fps None: 1 s). Raises
    `ModelError` for times that do not rise, or that `strict` refuses.
    """
    step = 1 / fps if fps else 1.0
    if given is None:
        return [(0.0 if last is None else last + step) + i * step for i in range(count)]
    rising = all(a < b for a, b in itertools.pairwise(given))
    if not rising or (strict and last is not None and given[0] <= last):
        after = "" if last is None else f" and be later than {last:g}, when the last frame was shown"
        raise ModelError(f"times: they must rise{after}; give seconds from the start of the stream.")
    # Another file begins at zero again.
    shift = last + step - given[0] if last is not None and given[0] <= last else 0.0
    return [moment + shift for moment in given]


def frame_size(frames: Tensor) -> tuple[int, int]:
    """Return height and width of frames [T, 3, H, W]."""
    return int(frames.shape[2]), int(frames.shape[3])


def units_per_ingest_pass(frames: Tensor, frames_per_unit: int, most: int) -> int:
    """Return how many units, of frames of the size of `frames` [T, 3, H, W], one pass of an ingestion takes: at
    most `most`, and not more than `WAITING` bytes of decoded frames."""
    return min(most, max(1, WAITING // (frames_per_unit * frames.shape[1:].numel())))


def pad_to_units(frames: Tensor, frames_per_unit: int) -> Tensor:
    """Pad `frames` to whole units of `frames_per_unit` frames by repeating the last one, as processors do."""
    short = -len(frames) % frames_per_unit
    return torch.cat([frames, frames[-1:].expand(short, -1, -1, -1)]) if short else frames
