"""A corpus of odd videos: every one is read whole, its clock rises evenly, and its frames are those of its true schedule."""

from __future__ import annotations

import bisect
import itertools
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from mmaccel import media
from mmaccel.core.errors import VideoError, VideoWarning
from mmaccel.core.streams.stream_runner import moments
from mmaccel.media import Video
from tests.media.films import numbers
from tests.media.odd import CASES, Odd

READABLE = [name for name, case in CASES.items() if not case.fails]


def expected(case: Odd, shown: Sequence[float]) -> list[int]:
    """Which of the frames `shown` each tick should have: the nearest, of two as near the earlier; one that is to come
    only within half a tick."""
    found = []
    for tick in itertools.count():
        time = tick / case.fps
        if time > shown[-1] and (time >= case.end - 1e-6 or len(shown) < len(case.shown)):
            return found
        place = bisect.bisect_left(shown, time - 1e-6)
        near = [n for n in (place - 1, place) if 0 <= n < len(shown)]
        if len(near) == 2 and shown[place] - time > 0.5 / case.fps + 1e-6:
            near = [place - 1]
        best = min(near, key=lambda n: (round(abs(shown[n] - time), 5), n))
        # Of frames with one time it may be any.
        found.append(best)


@contextmanager
def loss_is_told(case: Odd) -> Iterator[None]:
    """No warning that is not right."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if case.lossy:
            warnings.simplefilter("ignore", VideoWarning)
        yield


def cards(case: Odd, video: Video) -> list[int]:
    return numbers(video.frames.rot90(case.turned, (2, 3)) if case.turned else video.frames)


class Consumer:
    """Takes clips as a session does."""

    def __init__(self) -> None:
        self.moments: list[float] = []
        self.clips: list[Video] = []

    def watch(self, clip: Video) -> None:
        last = self.moments[-1] if self.moments else None
        assert clip.frames.dtype == torch.uint8 and clip.frames.shape[1] == 3 and len(clip) > 0
        self.moments += moments(last, clip.clock.tolist(), len(clip), clip.fps, True)
        self.clips.append(clip)

    @classmethod
    def of(cls, path: Path, case: Odd, gaps: str) -> Consumer:
        found = cls()
        with loss_is_told(case):
            for clip in media.clips(path, fps=case.fps, frames_per_clip=7, gaps=gaps):  # type: ignore[arg-type]
                found.watch(clip)
        return found

    @property
    def video(self) -> Video:
        frames, times, clock = (
            torch.cat([getattr(clip, name) for clip in self.clips]) for name in ("frames", "times", "clock")
        )
        events = tuple(one for clip in self.clips for one in clip.events)
        return Video(frames, times, self.clips[0].fps, 0.0, 0.0, clock, events)


def test_the_corpus_is_large_enough() -> None:
    assert len(CASES) >= 60 and len({case.suffix for case in CASES.values()}) >= 12


@pytest.mark.parametrize("name", READABLE)
def test_every_odd_video_is_taken_whole(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    path = tmp_path / f"odd.{case.suffix}"
    case.make(path)

    # Every frame, at its time.
    with loss_is_told(case):
        whole = media.read(path, gaps="mark")
    found = cards(case, whole)
    shown = case.shown[: len(found)]
    assert found == list(case.numbers[: len(found)])
    assert len(found) == len(case.numbers) or (case.lossy and len(found) > 5)
    assert whole.times.tolist() == pytest.approx(shown, abs=2e-3)
    assert (whole.clock.diff() > 0).all() and {one.kind for one in whole.events} == case.kinds

    # A few of them, by number: nothing is said to be lost that is not.
    hows = [{"max_frames": 4}]
    distinct = len(set(shown)) == len(shown)
    if case.suffix in ("mp4", "mkv", "mov") and distinct:
        hows.append({"frames": min(3, len(found))})
    for how in hows:
        with loss_is_told(case):
            few = media.read(path, **how)  # type: ignore[arg-type]
        assert 1 <= len(few) <= 4 and (few.clock.diff() > 0).all()
        if distinct:
            near = [min(range(len(shown)), key=lambda n, t=t: abs(shown[n] - t)) for t in few.times.tolist()]
            assert cards(case, few) == [case.numbers[n] for n in near]

    # At a rate, held: what stands at each tick, in clips as in the whole.
    ticks = expected(case, shown)
    held = Consumer.of(path, case, "hold")
    with loss_is_told(case):
        sampled = media.read(path, fps=case.fps)
    assert torch.equal(held.video.frames, sampled.frames) and torch.equal(held.video.clock, sampled.clock)
    assert torch.equal(held.video.times, sampled.times) and sampled.events == held.video.events == ()
    assert sampled.clock.tolist() == [tick / case.fps for tick in range(len(ticks))] == held.moments
    assert sampled.times.tolist() == pytest.approx([shown[n] for n in ticks], abs=2e-3)
    if distinct:
        assert cards(case, sampled) == [case.numbers[n] for n in ticks]

    # Skipped: the same, without the frames that were taken before.
    fresh = [n for n, place in enumerate(ticks) if n == 0 or place != ticks[n - 1]]
    skipped = Consumer.of(path, case, "skip").video
    assert skipped.clock.tolist() == [n / case.fps for n in fresh]
    assert torch.equal(skipped.frames, sampled.frames[fresh]) and len(skipped) == len(fresh)

    # Marked: as held, and what was uneven is listed.
    marked = Consumer.of(path, case, "mark").video
    assert torch.equal(marked.frames, sampled.frames) and torch.equal(marked.clock, sampled.clock)
    gaps = [one for one in marked.events if one.kind == "gap"]
    again = [tick for tick in range(len(ticks)) if tick not in fresh]
    assert sum(one.seconds for one in gaps) * case.fps == pytest.approx(len(again))
    assert {tick for one in gaps for tick in again if one.time <= tick / case.fps + 1e-9} == set(again)
    assert {one.kind for one in marked.events} - {"gap"} <= case.kinds


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.fails])
def test_what_has_no_frames_is_told(name: str, tmp_path: Path) -> None:
    path = tmp_path / f"odd.{CASES[name].suffix}"
    CASES[name].make(path)
    for read in (lambda: media.read(path), lambda: list(media.clips(path, fps=1, frames_per_clip=4))):
        with pytest.raises(VideoError) as caught:
            read()
        assert str(caught.value) == f"{path} {CASES[name].fails}"
