"""A consumer slower than its source, and one that leaves while the source is silent."""

from __future__ import annotations

import http.server
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from mmaccel import media
from mmaccel.core.errors import VideoError, VideoWarning
from tests.media.films import Film, numbers
from tests.media.test_stream import halting


def readers() -> set[threading.Thread]:
    return {one for one in threading.enumerate() if one.name == "mmaccel-media"}


def test_a_silence_that_a_slow_consumer_does_not_wait_for_is_no_stall(film: Film, tmp_path: Path) -> None:
    path = tmp_path / "halt.ts"
    with halting(film("whole.ts").read_bytes(), path) as go:
        stream = media.clips(path, fps=5, frames_per_clip=8, follow=True, timeout=0.3)
        parts = [next(stream)]
        time.sleep(0.8)
        go.set()
        parts += list(stream)
    assert numbers(torch.cat([part.frames for part in parts])) == list(range(0, 60, 2))


@pytest.mark.parametrize("frames", [1, 50])
def test_close_leaves_no_thread_at_a_silent_file(film: Film, tmp_path: Path, frames: int) -> None:
    """With a clip at hand the reader waits for data or for room; without one the caller waited too."""
    path, others = tmp_path / "halt.ts", readers()
    with halting(film("whole.ts").read_bytes(), path):
        stream = media.clips(path, fps=5, frames_per_clip=frames, follow=True, timeout=20, quiet=0.2)
        assert 0 < len(next(stream)) <= frames
        began = time.monotonic()
        stream.close()
        assert time.monotonic() - began < 1 and list(stream) == []
        assert not readers() - others


class Late(Exception):
    pass


def test_what_check_raises_ends_the_wait_and_loses_no_frame(film: Film, tmp_path: Path) -> None:
    path, until = tmp_path / "halt.ts", [time.monotonic() + 0.5]

    def check() -> None:
        if time.monotonic() > until[0]:
            raise Late

    with halting(film("whole.ts").read_bytes(), path) as go:
        stream = media.clips(path, fps=5, frames_per_clip=50, follow=True, timeout=1.5, check=check)
        with pytest.raises(Late):
            next(stream)
        until[0] += 60
        go.set()
        assert numbers(next(stream).frames) == list(range(0, 60, 2)) and list(stream) == []


def test_an_address_waits_for_a_slow_consumer(film: Film) -> None:
    """The frames wait in the socket for longer than the source may be silent."""
    path = film("film.mkv", height=128, width=256, gop=6, options={"preset": "ultrafast", "qp": "1"})
    data = path.read_bytes()

    class Whole(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Whole) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            url = f"http://127.0.0.1:{server.server_address[1]}/film.mkv"
            parts = []
            for clip in media.clips(url, fps=10, frames_per_clip=20, timeout=0.5):
                parts.append(clip)
                time.sleep(0.8)
        finally:
            server.shutdown()
    assert numbers(torch.cat([part.frames for part in parts])) == list(range(60))


@pytest.mark.parametrize("how", ["stall", "cut"])
@pytest.mark.parametrize("share", [2, 1000])
def test_a_read_tells_a_stall_and_a_fault_from_damage(film: Film, how: str, share: int) -> None:
    path = film("film.ts", height=128, width=256, gop=6, options={"preset": "ultrafast", "qp": "5"})
    data, over = path.read_bytes(), threading.Event()

    class Part(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data[: len(data) // share])
            if how == "stall":
                over.wait(20)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Part) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}/film.ts"
        try:
            if share == 2:
                told = (
                    r"it stalled: nothing came for 0\.6 s" if how == "stall" else "it broke off: input/output"
                )
                with pytest.warns(VideoWarning, match=told) as caught:
                    video = media.read(url, timeout=0.6)
                assert 20 < len(video) < 40 and "damaged" not in str(caught[0].message)
                assert numbers(video.frames)[:-1] == list(range(len(video) - 1)), "the last was cut"
            else:
                told = (
                    "sent nothing in the time allowed" if how == "stall" else "cannot be opened: input/output"
                )
                with pytest.raises(VideoError, match=told):
                    media.read(url, timeout=0.6)
        finally:
            over.set()
            server.shutdown()


def test_a_read_of_a_pipe_that_falls_silent_tells_a_stall(film: Film, tmp_path: Path) -> None:
    data, over = film("whole.ts").read_bytes(), threading.Event()
    os.mkfifo(tmp_path / "pipe.ts")

    def feed() -> None:
        with (tmp_path / "pipe.ts").open("wb", buffering=0) as file:
            file.write(data[: len(data) // 2])
            over.wait(20)

    writer = threading.Thread(target=feed)
    writer.start()
    with pytest.warns(VideoWarning, match=r"could be read; it stalled: nothing came for 0\.4 s") as caught:
        video = media.read(tmp_path / "pipe.ts", fps=5, timeout=0.4)
    over.set()
    writer.join()
    assert 10 < len(video) < 30 and "damaged" not in str(caught[0].message)


def test_a_process_ends_its_reading_first(film: Film) -> None:
    """A thread that comes back into torch while the interpreter goes would abort the process."""
    code = (
        "import atexit, threading\n"
        "atexit.register(lambda: print([one.name for one in threading.enumerate()]))\n"
        "from mmaccel import media\n"
        f"stream = media.clips({str(film())!r}, fps=10, frames_per_clip=4)\n"
        "print(len(next(stream)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "4\n['MainThread']\n", "")
