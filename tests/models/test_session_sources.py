"""A session that watches a file, a pipe, an address or a camera: what comes before a silence, an error or an end is
kept."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import mmaccel
from mmaccel import media
from mmaccel.core.errors import MmaccelWarning, ModelError, VideoError, VideoStalled
from mmaccel.core.streams import sources
from mmaccel.core.streams.parts import Clip
from mmaccel.media import Video
from mmaccel.media.container import Source
from tests.media.films import answering, silent_pipe, write_film
from tests.media.odd import even, write
from tests.media.test_live import gone, readers
from tests.models.streams import QUESTION, every_stream, film, logits, open_session
from tests.products import product

FRAMES = 24
AFTER_S, LATE_S = 2.5, 9.0
"""When `watch` is ended, and less than the 10 s after which it would tell a stall."""


def watched(session: mmaccel.VideoSession, path: Path | str, how: str, **more: Any) -> tuple[int, float]:
    """The frames that `watch` takes in, and the seconds it lasts, when it is ended after `AFTER_S`."""
    timer = threading.Timer(AFTER_S, session.cancel)
    if how == "cancel":
        timer.start()
    else:
        more["timeout"] = AFTER_S
    began = time.monotonic()
    told = "was cancelled" if how == "cancel" else "reached its timeout"
    with pytest.warns(
        MmaccelWarning, match=rf"watch: it {told}; it took in \d+ frames and left out"
    ) as caught:
        done = session.watch(path, fps=1.0, **more)
    took = time.monotonic() - began
    timer.join() if how == "cancel" else None
    assert f"took in {done} frames" in str(caught[-1].message)
    return done, took


@pytest.mark.parametrize(("how", "sent"), product(["timeout", "cancel"], [False, True]))
def test_a_silent_pipe_is_left(tmp_path: Path, how: str, sent: bool) -> None:
    film = write(tmp_path / "film.ts", even(FRAMES, 1.0), gop=1)
    data, others = film.read_bytes() if sent else b"", readers()
    with open_session("random-ov", "recent") as session, silent_pipe(tmp_path / "pipe.ts", data):
        done, took = watched(session, tmp_path / "pipe.ts", how)
        assert took < LATE_S and done == session.frames
        assert FRAMES - 4 <= done < FRAMES if sent else done == 0, done
        assert gone(others), "no thread reads on"
        session.watch(film, fps=1.0)
        assert session.frames == done + FRAMES, "the session goes on"


@pytest.mark.parametrize(("how", "timed"), product(["timeout", "cancel"], [False, True]))
def test_a_slow_decoder_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, timed: bool
) -> None:
    film, frames = write(tmp_path / "film.mp4", even(140, 1.0)), Source.frames

    def slow(self: Source, start: float = 0.0) -> Iterator[Any]:
        for number, pair in enumerate(frames(self, start)):
            time.sleep(0.3 if number > 70 else 0)
            yield pair

    monkeypatch.setattr(Source, "frames", slow)
    more = {"times": even(140, 1.0)} if timed else {}
    with open_session("random-ov", "recent") as session:
        done, took = watched(session, film, how, **more)
        assert took < LATE_S and done == session.frames == 64


@pytest.mark.parametrize("how", ["timeout", "cancel"])
def test_an_address_that_never_answers_is_left(how: str) -> None:
    over = threading.Event()
    with open_session("random-ov", "recent") as session, answering(lambda request: over.wait(20)) as site:
        try:
            done, took = watched(session, f"{site}/camera.ts", how)
        finally:
            over.set()
    assert done == 0 and took < LATE_S


TIGHT = every_stream(frames=4, window=6)


@pytest.fixture(scope="module")
def slides(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Frames 0.1 s apart with still moments of 2.5, 4 and 9 s: 18 s."""
    times = [0, 0.1, 2.6, 2.7, 6.7, 6.8, 15.8, *(15.9 + n / 10 for n in range(21))]
    return write_film(tmp_path_factory.mktemp("slides") / "slides.mkv", len(times), times=times)


@pytest.mark.parametrize("kv", ["rekv", "mosaic"])
def test_a_still_moment_is_watched(slides: Path, kv: str) -> None:
    with open_session("random-ov", TIGHT[kv]) as session, open_session("random-ov", TIGHT[kv]) as twin:
        assert session.watch(slides, fps=1.0) == 18
        assert session.shown == [float(tick) for tick in range(18)]
        for clip in media.clips(slides, fps=1.0, frames_per_clip=64, gaps="mark"):
            twin.watch(clip)
        torch.testing.assert_close(logits(session), logits(twin), rtol=0, atol=1e-5)
        assert twin.shown == session.shown


@pytest.mark.parametrize("error", [VideoError("it is silent."), RuntimeError("broken"), KeyboardInterrupt()])
def test_the_clips_before_an_error_are_kept(
    slides: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    inner: Callable[..., Iterator[Video]] = media.clips

    def broken(path: Path, **how: Any) -> Iterator[Video]:
        clips = inner(path, **how | {"frames_per_clip": 4})
        yield from (next(clips), next(clips))
        raise error

    with (
        open_session("random-ov", TIGHT["rekv"]) as session,
        open_session("random-ov", TIGHT["rekv"]) as twin,
    ):
        monkeypatch.setattr(media, "clips", broken)
        with pytest.raises(type(error)) as caught:
            session.watch(slides, fps=1.0)
        told = " ".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
        if not isinstance(error, KeyboardInterrupt):
            assert told.endswith("the 8 frames before it are kept.")
        twin.watch(media.read(slides, fps=1.0).at(slice(8)))
        assert len(session) == 8
        torch.testing.assert_close(logits(session), logits(twin), rtol=0, atol=1e-5)
        with pytest.raises(type(error)):
            session.watch(slides, times=[20.0 + n for n in range(18)], fps=1.0)
        assert len(session) == 8, "of a call with times, all is taken in or nothing"


def test_a_source_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "FIRST_S", 0.05)
    frames, opened = film(12), list[float]()

    def clips(video: Any, fps: Any, check: Any) -> Any:
        opened.append(time.monotonic())
        if len(opened) == 1:
            yield Clip(frames[:3], [0.0, 0.5, 1.0], 2.0, part=True)
            raise VideoStalled("rtsp://camera", 10.0, 3)
        if len(opened) in (2, 3):
            raise VideoError("rtsp://camera cannot be opened; try again.")
        if len(opened) == 4:
            yield Clip(frames[3:6], [0.0, 0.5, 1.0], 2.0, part=True)
        else:
            yield Clip(frames[6:9], [0.0, 0.5, 1.0], 2.0, part=True)
            while True:
                check()
                time.sleep(0.01)

    with open_session("random-ov", TIGHT["rekv"]) as session:
        session._stream_adapter.clips = clips  # type: ignore[method-assign]
        threading.Timer(2.0, session.cancel).start()
        with pytest.warns(MmaccelWarning, match="cancelled; it took in 9 frames"):
            assert session.watch("rtsp://camera", reconnect=True) == 9
        stall, end = session.events
        assert (stall.kind, stall.seconds, end.kind) == ("stall", 1.0, "end")
        assert "nothing came for 10 s" in stall.why and stall.lasted and end.lasted
        assert opened[3] - opened[2] > opened[2] - opened[1] >= 0.1
        times = session.shown
        assert times[3] == pytest.approx(1.0 + stall.lasted) and times[4] == pytest.approx(times[3] + 0.5)
        assert times[6] == pytest.approx(times[5] + end.lasted)
        assert session.ask(QUESTION, 2).ids


def test_without_it_a_stall_is_an_error() -> None:
    def clips(video: Any, fps: Any, check: Any) -> Any:
        yield Clip(film(3), [0.0, 0.5, 1.0], 2.0, part=True)
        raise VideoStalled("rtsp://camera", 10.0, 3)

    with open_session("random-ov", TIGHT["rekv"]) as session:
        session._stream_adapter.clips = clips  # type: ignore[method-assign]
        with pytest.raises(VideoStalled):
            session.watch("rtsp://camera")
        assert session.frames == 3 and not session.events
        for how in ({"video": film(2)}, {"video": "a.mp4", "times": [1.0]}):
            with pytest.raises(ModelError, match="reconnect: it opens a path or URL again"):
                session.watch(**how, reconnect=True)
