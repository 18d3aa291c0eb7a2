"""A session that watches a source which is silent: its deadline and `cancel` act, and what was watched stays."""

from __future__ import annotations

import http.server
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import mmaccel
from mmaccel.core.errors import MmaccelWarning
from mmaccel.media.container import Source
from tests.media.odd import even, write
from tests.media.test_live import gone, readers
from tests.models.streams import open_session
from tests.products import product

FRAMES = 24
AFTER_S, LATE_S = 2.5, 9.0
"""When `watch` is ended, and less than the 10 s after which it would tell a stall."""


@contextmanager
def silent_pipe(path: Path, data: bytes) -> Iterator[None]:
    """A pipe that has `data` and stays open."""
    os.mkfifo(path)
    over = threading.Event()

    def feed() -> None:
        with path.open("wb", buffering=0) as file:
            file.write(data)
            over.wait(20)

    writer = threading.Thread(target=feed)
    writer.start()
    try:
        yield
    finally:
        over.set()
        writer.join()


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

    class Silent(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            over.wait(20)

        def log_message(self, *_: object) -> None:
            pass

    with (
        open_session("random-ov", "recent") as session,
        http.server.ThreadingHTTPServer(("127.0.0.1", 0), Silent) as server,
    ):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            address = f"http://127.0.0.1:{server.server_address[1]}/camera.ts"
            done, took = watched(session, address, how)
        finally:
            over.set()
            server.shutdown()
    assert done == 0 and took < LATE_S
