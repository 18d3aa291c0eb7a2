"""Sources that tell a wrong length or none, and a corpus of odd videos: each is read whole, once, by its true schedule."""

from __future__ import annotations

import bisect
import itertools
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from mmaccel import media
from mmaccel.core.errors import VideoError, VideoWarning
from mmaccel.core.streams.sources import frame_times
from mmaccel.media import Video, reader
from mmaccel.media.container import Source
from tests.media.films import Film, answering, numbers, send
from tests.media.odd import CASES, Odd
from tests.spies import heard, product, refusal


@pytest.fixture(autouse=True)
def silence() -> Iterator[None]:
    with warnings.catch_warnings(action="error"):
        yield


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """The test's folder behind HTTP, without ranges: what is read once cannot be sought in."""

    with answering(lambda request: send(request, (tmp_path / request.path[1:]).read_bytes())) as url:
        yield url


def evenly(found: list[int], step: int, total: int) -> bool:
    return found == list(range(0, total, step))


@pytest.mark.parametrize("name", ["film.mkv", "film.mp4", "film.ts"])
@pytest.mark.parametrize(
    ("how", "step"),
    [
        ({}, 1),
        ({"fps": 1}, 10),
        ({"frames": 4}, 15),
        ({"max_frames": 6}, 10),
        ({"fps": 5, "max_frames": 6}, 10),
    ],
)
def test_a_clock_that_starts_late(film: Film, name: str, how: dict[str, Any], step: int) -> None:
    path = film(name, times=[10 + number / 10 for number in range(60)])
    video = media.read(path, **how)
    assert evenly(numbers(video.frames), step, 60)
    assert video.duration == pytest.approx(6.0) and video.fps == pytest.approx(10 / step)
    assert video.times[0] == 0 and video.source_fps == pytest.approx(10.0)


def test_the_last_of_too_many_by_one_is_left_out() -> None:
    left = [list(reader.drop_item_if_last(range(n), 3)) for n in (3, 4, 5)]
    assert left == [[0, 1, 2], [0, 1, 2], [0, 1, 2, 3, 4]]


@pytest.mark.parametrize(
    ("how", "step"),
    [
        *(({"max_frames": most}, step) for most, step in ((1, 64), (2, 32), (3, 32), (6, 16), (7, 16))),
        *(({"max_frames": most}, step) for most, step in ((8, 8), (59, 2), (60, 1), (100, 1))),
        ({"fps": 12.5, "max_frames": 8}, 8),
    ],
)
def test_bare_h264_is_thinned_over_its_whole_span(film: Film, how: dict[str, Any], step: int) -> None:
    seen: list[tuple[int, int | None]] = []
    video = media.read(
        film("film.h264", format="h264"), **how, progress=lambda done, total: seen.append((done, total))
    )
    assert evenly(numbers(video.frames), step, 60)
    # A bare stream does not tell its rate: 25 is assumed.
    assert video.fps == pytest.approx(25 / step)
    assert [done for done, _ in seen] == list(range(1, len(seen) + 1))
    assert {total for _, total in seen} == {None}


@pytest.mark.parametrize(
    ("name", "how"),
    product(
        ["film.mkv", "live.mkv", "film.ts"],
        [{"max_frames": 8}, {"fps": 5, "max_frames": 8}, {"max_frames": 8, "stop": 5.05}],
    ),
)
def test_an_address_without_an_index_is_read_once(
    film: Film, address: str, name: str, how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    film(name, muxer={"live": "1"} if name == "live.mkv" else None)
    opened = heard(monkeypatch, Source, "_open", lambda self: self.name)
    monkeypatch.setattr(Source, "read_frame_times", lambda self: pytest.fail("it was read twice"))
    video = media.read(f"{address}/{name}", **how)
    found = numbers(video.frames)
    steps = {after - before for before, after in itertools.pairwise(found)}
    assert len(opened) == 1 and found[0] == 0 and 4 < len(found) <= 8
    assert max(steps) - min(steps) <= 1
    assert found[-1] + max(steps) >= (51 if "stop" in how else 60)


def test_joined_recordings_are_thinned_to_the_end(film: Film, tmp_path: Path) -> None:
    """And progress never passes its total."""
    path = tmp_path / "joined.ts"
    path.write_bytes(film("a.ts", 20).read_bytes() + film("b.ts", 60).read_bytes())
    whole = media.read(path)
    for how in ({}, {"fps": 5}, {"max_frames": 8}, {"fps": 5, "max_frames": 8}):
        seen: list[tuple[int, int | None]] = []
        video = media.read(path, **how, progress=lambda done, total, seen=seen: seen.append((done, total)))
        assert seen and all(total is None or done <= total for done, total in seen)
        if "max_frames" in how:
            assert 4 < len(video) <= 8 and video.times[-1] + 1.7 > whole.times[-1]
    assert whole.duration == pytest.approx(float(whole.times[-1]) + 0.1, abs=0.05)


@pytest.mark.parametrize("name", ["slides.mp4", "slides.mkv"])
def test_the_last_frame_ends_with_the_video(film: Film, name: str) -> None:
    seen: list[tuple[int, int | None]] = []
    path = film(name, 4, times=[0, 10, 20, 30])
    video = media.read(path, fps=1, progress=lambda done, total: seen.append((done, total)))
    assert numbers(video.frames) == [0] * 10 + [1] * 10 + [2] * 10 + [3]
    assert seen == [(done, 31) for done in range(1, 32)]
    assert sum(map(len, media.clips(path, fps=1, frames_per_clip=8))) == 31
    assert numbers(media.read(path, fps=1, max_frames=8).frames) == [0, 0, 0, 1, 1, 2, 2, 2]


@pytest.mark.parametrize(
    ("need", "shape"),
    [
        # Twice the needed height; the width follows, so that the picture keeps its shape.
        ((6, 8), (12, 24)),
        ((4, 16), (16, 32)),
        # Four times the size is not over four times it.
        ((16, 32), (64, 128)),
    ],
)
def test_frames_far_larger_than_the_model_needs_are_shrunk(
    film: Film, need: tuple[int, int], shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, asked = film(), []

    def fit(frames: int, height: int, width: int) -> tuple[int, int]:
        asked.append((frames, height, width))
        return need

    room = 30 * 3 * 64 * 128
    monkeypatch.setattr(reader, "ROOM", room)
    assert media.read(path, fps=5, fit=fit).frames.shape == (30, 3, 64, 128) and asked == []
    monkeypatch.setattr(reader, "ROOM", room - 1)
    assert media.read(path, fps=5, fit=fit).frames.shape == (30, 3, *shape)
    assert asked == [(30, 64, 128)]
    assert media.read(path, fps=5, size=(60, 100), fit=fit).frames.shape == (30, 3, 60, 100)


READABLE = [name for name, case in CASES.items() if not case.fails]


def expected(case: Odd, shown: Sequence[float]) -> list[int]:
    """Which of the frames `shown` each tick should have: the nearest, of two the earlier; a later one within half a tick."""
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
    with warnings.catch_warnings(action="error"):
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
        self.moments += frame_times(last, clip.clock.tolist(), len(clip), clip.fps, True)
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


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=[pytest.mark.always(every=True)] * (one == "avi")) for one in READABLE]
)
def test_every_odd_video_is_taken_whole(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    path = tmp_path / f"odd.{case.suffix}"
    case.make(path)

    # Every frame, at its time.
    with loss_is_told(case):
        whole = media.read(path, gaps="mark")
    found = cards(case, whole)
    assert whole.frames.dtype == torch.uint8 and whole.times.dtype == torch.float64
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
        assert refusal(read, VideoError) == f"{path} {CASES[name].fails}"
