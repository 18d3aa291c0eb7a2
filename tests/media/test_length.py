"""Sources that tell a wrong length, or none: the whole span is read, once, and nothing is said to be lost."""

from __future__ import annotations

import functools
import http.server
import itertools
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mmaccel import media
from mmaccel.media import reader
from mmaccel.media.container import Source
from tests.media.films import Film, numbers


@pytest.fixture(autouse=True)
def silence() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """The test's folder behind HTTP, without ranges: what is read once cannot be sought in."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            return

    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Quiet, directory=str(tmp_path))
    )
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


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
    assert video.times[0] == 0


def test_the_last_of_too_many_by_one_is_left_out() -> None:
    assert [list(reader.unless_last(range(n), 3)) for n in (3, 4, 5)] == [
        [0, 1, 2],
        [0, 1, 2],
        [0, 1, 2, 3, 4],
    ]


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
    assert [done for done, _ in seen] == list(range(1, len(seen) + 1)) and {total for _, total in seen} == {
        None
    }


@pytest.mark.parametrize("name", ["film.mkv", "live.mkv", "film.ts"])
@pytest.mark.parametrize(
    "how", [{"max_frames": 8}, {"fps": 5, "max_frames": 8}, {"max_frames": 8, "stop": 5.05}]
)
def test_an_address_without_an_index_is_read_once(
    film: Film, address: str, name: str, how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    film(name, muxer={"live": "1"} if name == "live.mkv" else None)
    opened = []
    real = Source._open
    monkeypatch.setattr(Source, "_open", lambda self: (opened.append(self.name), real(self))[1])
    monkeypatch.setattr(Source, "index", lambda self: pytest.fail("it was read twice"))
    video = media.read(f"{address}/{name}", **how)
    found = numbers(video.frames)
    steps = {after - before for before, after in itertools.pairwise(found)}
    assert len(opened) == 1 and found[0] == 0 and 4 < len(found) <= 8
    assert max(steps) - min(steps) <= 1
    assert found[-1] + max(steps) >= (51 if "stop" in how else 60)


def test_joined_recordings_are_thinned_to_the_end(film: Film, tmp_path: Path) -> None:
    first, second = film("a.ts", 20), film("b.ts", 60)
    path = tmp_path / "joined.ts"
    path.write_bytes(first.read_bytes() + second.read_bytes())
    whole = media.read(path)
    for how in ({"max_frames": 8}, {"fps": 5, "max_frames": 8}):
        video = media.read(path, **how)
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


def test_progress_never_passes_its_total(film: Film, tmp_path: Path) -> None:
    path = tmp_path / "joined.ts"
    path.write_bytes(film("a.ts", 20).read_bytes() + film("b.ts", 60).read_bytes())
    for how in ({}, {"fps": 5}, {"fps": 5, "max_frames": 8}):
        seen: list[tuple[int, int | None]] = []
        media.read(path, **how, progress=lambda done, total, seen=seen: seen.append((done, total)))
        assert seen and all(total is None or done <= total for done, total in seen)


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
