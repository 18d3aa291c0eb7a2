"""Clips: from a file, from one that grows, from an address."""

import errno
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from mmaccel import media
from mmaccel.core.errors import VideoError, VideoStalled
from mmaccel.media import stream
from mmaccel.media.stream import GrowingFile
from tests.media.films import Film, answering, halting, numbers, send
from tests.spies import beside, broken, finish, nth, refusal

FRAGMENTED = {"movflags": "frag_keyframe+empty_moov+default_base_moof"}


def test_clips_are_the_frames_of_the_whole(film: Film) -> None:
    path = film()
    whole = media.read(path, fps=4)
    parts = list(media.clips(path, fps=4, frames_per_clip=7))
    assert [len(part) for part in parts] == [7, 7, 7, 3]
    assert torch.equal(torch.cat([part.frames for part in parts]), whole.frames)
    assert torch.equal(torch.cat([part.times for part in parts]), whole.times)
    assert {(part.fps, part.source_fps) for part in parts} == {(4.0, 10.0)}
    assert [part.duration for part in parts] == [1.75, 1.75, 1.75, 0.75]
    seen: list[tuple[int, int | None]] = []
    how = dict(fps=1, frames_per_clip=4, size=(20, 30))
    parts = media.clips(film(), **how, progress=lambda done, total: seen.append((done, total)))
    assert [tuple(part.frames.shape) for part in parts] == [(4, 3, 20, 30), (2, 3, 20, 30)]
    assert seen == [(k, None) for k in range(1, 7)]


def test_the_end_of_the_interpreter_waits_for_a_slow_frame(film: Film, monkeypatch) -> None:
    """A thread that comes back into torch after the end would end the process by a signal."""
    slow, convert = threading.Event(), stream.FrameConverter.convert

    def slowly(*given: Any) -> Any:
        if first.is_set():
            slow.set()
            time.sleep(2 * stream.LEAVE_S)
        first.set()
        return convert(*given)

    first = threading.Event()
    monkeypatch.setattr(stream.FrameConverter, "convert", slowly)
    clips = media.clips(film(), fps=4, frames_per_clip=1)
    next(clips)
    assert slow.wait(20)
    stream._leave()
    assert not any(thread.is_alive() for thread in stream._running)


def test_the_end_of_the_interpreter_waits_for_frames_that_a_thread_frees(film: Film) -> None:
    """What has been read is freed after the thread's last line, and torch takes the interpreter's lock for that."""
    freed, begun = threading.Event(), threading.Event()

    class Slow:
        def __del__(self) -> None:
            begun.set()
            time.sleep(stream.LEAVE_S / 2)
            freed.set()

    clips = media.clips(film(), fps=4, frames_per_clip=1)
    next(clips)
    clips._queue._items.append(Slow())  # type: ignore[arg-type]
    del clips
    assert begun.wait(20)
    stream._leave()
    assert freed.is_set()


@pytest.mark.parametrize("name", ["grow.ts", "grow.mkv", "grow.mp4"])
def test_a_growing_file_is_followed_to_its_end(film: Film, tmp_path: Path, name: str) -> None:
    data = film("whole-" + name, muxer=FRAGMENTED if name.endswith("mp4") else None).read_bytes()
    path = tmp_path / name
    with halting(data, path, 12, 0.03) as go:
        stream = media.clips(path, fps=5, frames_per_clip=5, follow=True, timeout=0.6)
        first = next(stream)
        early = not go.is_set()
        rest = list(stream)
    assert early, "the first clip came only when the file was complete"
    frames = torch.cat([first.frames, *(part.frames for part in rest)])
    assert numbers(frames) == list(range(0, 60, 2))


def test_a_file_that_stops_growing_ends_after_the_timeout(film: Film) -> None:
    path = film("film.ts", 20)
    begun = time.monotonic()
    assert sum(map(len, media.clips(path, fps=10, frames_per_clip=8, follow=True, timeout=0.5))) == 20
    assert 0.5 <= time.monotonic() - begun < 10
    path = film(frames=20)
    parts = list(media.clips(path, fps=10, frames_per_clip=8, follow=True, timeout=0.1))
    assert numbers(torch.cat([part.frames for part in parts])) == list(range(20))
    path, large = film("making.mp4"), film("large.mp4", 80, height=256, width=512, options={"qp": "0"})
    path.write_bytes(path.read_bytes()[:2000])
    for one, why in ((path, "cut short"), (large, "broke off: invalid data")):
        with pytest.raises(
            VideoError, match=f"{why}.*; only fragmented mp4, MPEG-TS and Matroska can be followed"
        ):
            list(media.clips(one, fps=1, frames_per_clip=1, follow=True, timeout=0.1))


@pytest.mark.parametrize("name", ["halt.ts", "halt.mkv", "halt.mp4"])
def test_a_stall_is_told_and_waited_out(film: Film, tmp_path: Path, name: str) -> None:
    data = film("whole-" + name, muxer=FRAGMENTED if name.endswith("mp4") else None).read_bytes()
    path = tmp_path / name
    with halting(data, path) as go:
        stream = media.clips(path, fps=5, frames_per_clip=5, follow=True, timeout=0.3, gaps="mark")
        parts = []
        with pytest.raises(VideoStalled) as caught:
            parts.extend(stream)  # type: ignore[arg-type]  # what came before the stall stays
        taken = sum(map(len, parts))
        assert 0 < taken < 30 and (caught.value.frames, caught.value.seconds) == (taken, 0.3)
        told = f"{path} stalled: nothing came for 0.3 s after {taken} frames, and it has not ended; to wait longer, ask "
        assert str(caught.value) == told + "media.clips for the next clip, or call watch again."
        with pytest.raises(VideoStalled):
            next(stream)
        go.set()
        parts += list(stream)
    frames = torch.cat([part.frames for part in parts])
    assert numbers(frames) == list(range(0, 60, 2))
    assert torch.cat([part.clock for part in parts]).tolist() == [k / 5 for k in range(30)]
    stalls = [one for part in parts for one in part.events if one.kind == "stall"]
    assert len(stalls) == 1 and stalls[0].time == taken / 5 and 0.6 <= stalls[0].seconds < 5
    assert list(stream) == []


def test_a_stream_that_is_left_in_a_stall_ends_its_thread(film: Film, tmp_path: Path) -> None:
    path, others = tmp_path / "halt.ts", set(threading.enumerate())
    with halting(film("whole.ts").read_bytes(), path):
        stream = media.clips(path, fps=5, frames_per_clip=50, follow=True, timeout=0.2)
        assert 0 < len(next(stream)) < 30
        with pytest.raises(VideoStalled):
            next(stream)
        stream.close()
        assert list(stream) == []
        left = set(threading.enumerate()) - others
        assert not [one for one in left if one.name == "mmaccel-media" and one.is_alive()]


@pytest.mark.parametrize("follow", [False, True])
def test_a_pipe_is_over_when_its_writer_closes_it(
    film: Film, tmp_path: Path, follow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, path = film("whole.ts").read_bytes(), tmp_path / "pipe.ts"
    os.mkfifo(path)
    broken(monkeypatch, GrowingFile, "_data", BlockingIOError, nth(1))
    writer = beside(lambda: path.write_bytes(data))
    parts = list(media.clips(path, fps=5, frames_per_clip=8, follow=follow, timeout=0.3))
    finish(writer)
    assert numbers(torch.cat([part.frames for part in parts])) == list(range(0, 60, 2))


def test_a_file_that_cannot_be_read_on_is_a_fault(film: Film, tmp_path: Path, monkeypatch) -> None:
    path, fails = film("film.ts"), OSError(errno.EIO, "Input/output error")
    broken(monkeypatch, GrowingFile, "read", fails, nth(*range(3, 999)))
    parts, stream = [], media.clips(path, fps=5, frames_per_clip=4, follow=True, timeout=0.3)
    with pytest.raises(VideoError, match=r"film\.ts broke off: input/output error\.") as caught:
        parts.extend(stream)  # type: ignore[arg-type]
    assert not isinstance(caught.value, VideoStalled)
    found = numbers(torch.cat([part.frames for part in parts]))
    assert 0 < len(found) < 30 and found == list(range(0, 2 * len(found), 2))
    assert list(stream) == []


def test_an_address(film: Film) -> None:
    path = film("film.mp4", 20, muxer={"movflags": "faststart"})

    with answering(lambda request: send(request, path.read_bytes())) as url:
        parts = list(media.clips(f"{url}/film.mp4", fps=5, frames_per_clip=4, timeout=5.0))
        assert numbers(torch.cat([part.frames for part in parts])) == list(range(0, 20, 2))
        assert numbers(media.read(f"{url}/film.mp4", frames=4, timeout=5.0).frames) == [0, 5, 10, 15]


@pytest.mark.parametrize(("name", "how"), [("film.mkv", "stall"), ("film.ts", "stall"), ("film.mkv", "cut")])
def test_an_address_that_stalls_or_breaks_off(film: Film, name: str, how: str) -> None:
    path = film(name, height=128, width=256, gop=6, options={"preset": "ultrafast", "qp": "5"})
    data, served = path.read_bytes(), threading.Event()

    def halting(request: Any) -> None:
        whole = served.is_set()
        send(request, data, 1 if whole else 2)
        if how == "stall" and not whole:
            served.wait(20)

    with answering(halting) as site:
        url, parts = f"{site}/{name}", []
        try:
            stream = media.clips(url, fps=5, frames_per_clip=5, timeout=0.7, gaps="mark")
            with pytest.raises(VideoError) as caught:
                parts.extend(stream)  # type: ignore[arg-type]  # what came before stays
            taken = sum(map(len, parts))
            assert 0 < taken < 30 and isinstance(caught.value, VideoStalled) == (how == "stall")
            served.set()
            if how == "cut":
                assert str(caught.value) == f"{url} broke off: input/output error." and list(stream) == []
                return
            assert caught.value.frames == taken  # type: ignore[attr-defined]
            rest = list(stream)
        finally:
            served.set()
    clock = torch.cat([part.clock for part in parts + rest])
    assert clock.tolist() == [k / 5 for k in range(len(clock))]
    kinds = {one.kind for part in rest for one in part.events}
    found = numbers(torch.cat([part.frames for part in rest]))
    if name == "film.mkv":
        # It tells its length, so that it is a recording and goes on where it was.
        assert kinds == {"stall"} and taken + len(found) == 30
        assert found[1:] == list(range(2 * taken + 2, 60, 2))
    else:
        assert kinds == {"stall", "restart"} and found[-1] >= 57 and len(found) >= 29


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"fps": 0}, "fps=0 must be a positive number of frames a second."),
        ({"frames_per_clip": 0}, "frames_per_clip=0 must be at least 1."),
        ({"timeout": 0}, "timeout=0 must be a positive number of seconds."),
        (
            {"source": "rtsp://camera/1", "follow": True},
            "follow=True is for a file that grows, and rtsp://camera/1 is none: leave it out.",
        ),
    ],
)
def test_wrong_arguments_are_told_at_the_call(wrong: dict[str, object], told: str) -> None:
    how = {"source": "none.mp4", "fps": 1, "frames_per_clip": 1, **wrong}
    assert refusal(lambda: media.clips(**how), VideoError) == told
