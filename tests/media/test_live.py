"""A consumer slower than its source, and one that leaves while the source is silent."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from mmaccel import media
from mmaccel.core.errors import VideoError, VideoWarning
from mmaccel.media.preprocess import load_frames
from tests.media.films import Film, answering, halting, numbers, send, silent_pipe
from tests.spies import Pause, beside, finish


def readers() -> set[threading.Thread]:
    return {one for one in threading.enumerate() if one.name == "mmaccel-media"}


def gone(others: set[threading.Thread]) -> bool:
    """Whether all readers but `others` end, on however slow a machine."""
    late = time.monotonic() + 15
    while readers() - others and time.monotonic() < late:
        time.sleep(0.01)
    return not readers() - others


def test_a_silence_that_a_slow_consumer_does_not_wait_for_is_no_stall(film: Film, tmp_path: Path) -> None:
    path = tmp_path / "halt.ts"
    with halting(film("whole.ts").read_bytes(), path) as go:
        stream = media.clips(path, fps=5, frames_per_clip=8, follow=True, timeout=0.6)
        parts = [next(stream)]
        time.sleep(0.9)
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
        assert list(stream) == [] and gone(others)
        assert time.monotonic() - began < 15, "the source may be silent for 20 s"


def test_clips_that_are_dropped_leave_no_thread(film: Film) -> None:
    others = readers()
    stream = media.clips(film(), fps=10, frames_per_clip=4)
    with pytest.raises(ZeroDivisionError):
        for _ in stream:
            assert readers() - others, "it reads ahead"
            raise ZeroDivisionError
    del stream
    next(media.clips(film(), fps=10, frames_per_clip=4))
    assert gone(others)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_forked_process_is_told_that_its_parent_reads(film: Film) -> None:
    """The lock of the queue is held by a thread that the new process lacks."""
    path = film()
    stream, other = (media.clips(path, fps=10, frames_per_clip=4) for _ in range(2))
    parts = [next(stream)]
    next(other)
    pause = Pause()

    def hold() -> None:
        with stream._queue._changed, other._queue._changed:
            pause()

    holder = beside(hold)
    assert pause.reached.wait(20)
    gc.collect()  # FFmpeg waits for its own threads where an encoder is freed, and the new process has none
    child = os.fork()
    if not child:
        signal.alarm(15)
        try:
            other.close()
            try:
                list(stream)
            except VideoError as error:
                told = f"{path} is read by the process that this one was forked from; call clips anew here."
                anew = list(media.clips(path, fps=10, frames_per_clip=4))
                os._exit(0 if str(error) == told and len(anew) == 15 and list(stream) == [] else 1)
        finally:
            os._exit(2)
    pause.go_on.set()
    finish(holder, 20)
    parts += list(stream)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert numbers(torch.cat([part.frames for part in parts])) == list(range(60))


def test_a_thread_that_cannot_be_started_is_told_and_tried_again(film: Film, monkeypatch) -> None:
    stream = media.clips(film(), fps=10, frames_per_clip=60)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
        for _ in range(2):
            with pytest.raises(RuntimeError, match="can't start"):
                next(stream)
    assert numbers(next(stream).frames) == list(range(60)) and list(stream) == []


def test_check_may_wait_for_a_thread_that_closes(film: Film, tmp_path: Path) -> None:
    path = tmp_path / "halt.ts"

    def check() -> None:
        finish(beside(stream.close), 15)

    with halting(film("whole.ts").read_bytes(), path):
        stream = media.clips(path, fps=5, frames_per_clip=50, follow=True, timeout=20, check=check)
        assert sum(map(len, stream)) < 30


def test_what_check_raises_ends_the_wait_and_loses_no_frame(film: Film, tmp_path: Path) -> None:
    path, until = tmp_path / "halt.ts", [time.monotonic() + 0.4]

    def check() -> None:
        if time.monotonic() > until[0]:
            raise InterruptedError

    with halting(film("whole.ts").read_bytes(), path) as go:
        stream = media.clips(path, fps=5, frames_per_clip=50, follow=True, timeout=1, check=check)
        with pytest.raises(InterruptedError):
            next(stream)
        until[0] += 60
        go.set()
        assert numbers(next(stream).frames) == list(range(0, 60, 2)) and list(stream) == []


def test_an_address_waits_for_a_slow_consumer(film: Film) -> None:
    """The frames wait in the socket for longer than the source may be silent."""
    path = film("film.mkv", height=128, width=256, gop=6, options={"preset": "ultrafast", "qp": "1"})
    data = path.read_bytes()

    parts = []
    with answering(lambda request: send(request, data)) as url:
        for clip in media.clips(f"{url}/film.mkv", fps=10, frames_per_clip=20, timeout=0.8):
            parts.append(clip)
            time.sleep(1.2 if len(parts) == 1 else 0)
    assert numbers(torch.cat([part.frames for part in parts])) == list(range(60))


@pytest.mark.parametrize("how", ["stall", "cut"])
@pytest.mark.parametrize("share", [2, 1000])
def test_a_read_tells_a_stall_and_a_fault_from_damage(film: Film, how: str, share: int) -> None:
    path = film("film.ts", height=128, width=256, gop=6, options={"preset": "ultrafast", "qp": "5"})
    data, over = path.read_bytes(), threading.Event()

    def part(request: Any) -> None:
        send(request, data, share)
        if how == "stall":
            over.wait(20)

    with answering(part) as url:
        try:
            if share == 2:
                told = (
                    r"it stalled: nothing came for 0\.7 s" if how == "stall" else "it broke off: input/output"
                )
                with pytest.warns(VideoWarning, match=told) as caught:
                    video = media.read(f"{url}/film.ts", timeout=0.7)
                assert 20 < len(video) < 40 and "damaged" not in str(caught[0].message)
                assert numbers(video.frames)[:-1] == list(range(len(video) - 1)), "the last was cut"
            else:
                told = (
                    "sent nothing in the time allowed" if how == "stall" else "cannot be opened: input/output"
                )
                with pytest.raises(VideoError, match=told):
                    media.read(f"{url}/film.ts", timeout=0.7)
        finally:
            over.set()


def test_a_read_of_a_pipe_that_falls_silent_tells_a_stall(film: Film, tmp_path: Path) -> None:
    data, told = film("whole.ts").read_bytes(), r"could be read; it stalled: nothing came for 0\.7 s"
    with (
        silent_pipe(tmp_path / "pipe.ts", data[: len(data) // 2]),
        pytest.warns(VideoWarning, match=told) as caught,
    ):
        video = media.read(tmp_path / "pipe.ts", fps=5, timeout=0.7)
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


def test_clips_where_a_video_is_asked_for_are_refused_with_what_to_do(film: Film) -> None:
    with (
        closing(media.clips(film(), fps=5, frames_per_clip=4)) as clips,
        pytest.raises(VideoError, match="each of its clips by itself"),
    ):
        load_frames(clips, 1.0)
