"""Broken files: each is told in one sentence, or gives what can be read and says what was lost."""

import os
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import av
import pytest

from mmaccel import media
from mmaccel.core.errors import VideoError, VideoWarning
from mmaccel.media import container
from tests.media.films import Film, numbers, write_film
from tests.spies import refusal, returned


def sentence(path: Path | str, **how: Any) -> str:
    """What reading it raises: one line, one sentence."""
    told = refusal(lambda: media.read(path, **how), VideoError)
    assert ". " not in told.replace(str(path), "")
    with pytest.raises(VideoError):
        next(iter(media.clips(path, fps=1, frames_per_clip=2)))
    return told.replace(str(path), "FILE")


def halved(path: Path) -> Path:
    """The file, of which the second half is gone."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    return path


@contextmanager
def as_nobody() -> Iterator[None]:
    """The superuser may read everything, so give the right up for a moment."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


def words(path: Path) -> None:
    path.write_text("what colour was the star?\n" * 200)


def unfinished(path: Path) -> None:
    """Cut before its index."""
    path.write_bytes(write_film(path).read_bytes()[:-1500])


UNREADABLE = "FILE is not a video that can be read: it is another kind of file, or was cut short."
TOLD: dict[str, tuple[Callable[[Path], object], str]] = {
    "none.mp4": (lambda path: None, "there is no file FILE: check the path."),
    "folder.mp4": (Path.mkdir, "FILE is a folder, not a video: name a file in it."),
    "empty.mp4": (Path.touch, "FILE is empty: it has 0 bytes."),
    "notes.mp4": (words, UNREADABLE),
    "notes.mkv": (words, UNREADABLE),
    # Which FFmpeg would draw.
    "notes.txt": (words, "FILE is text, not a video: name a video file."),
    "unfinished.mp4": (unfinished, UNREADABLE),
}


@pytest.mark.parametrize("name", TOLD)
def test_what_is_no_whole_video_is_told(tmp_path: Path, name: str) -> None:
    make, told = TOLD[name]
    make(tmp_path / name)
    assert sentence(tmp_path / name) == told


@pytest.mark.skipif(os.name != "posix", reason="permissions are those of POSIX")
def test_permission_denied(film: Film) -> None:
    path = film(frames=2)
    path.chmod(0)
    with as_nobody():
        assert sentence(path) == "FILE may not be read: permission denied."


@pytest.mark.parametrize("name", ["zero.mkv", "zero.mp4"])
def test_no_frames(film: Film, name: str) -> None:
    told = sentence(film(name, 0, muxer={"movflags": "empty_moov"} if name.endswith("mp4") else None))
    assert told in (
        "FILE has no frames: its video stream is empty.",
        "FILE has no frames: its data ends before the first.",
    )


def test_nobody_at_the_address() -> None:
    told = sentence("http://127.0.0.1:9/film.mp4", timeout=2.0)
    assert told == "FILE cannot be opened: connection refused."


@pytest.mark.parametrize("how", [{}, {"fps": 5}, {"frames": 2}, {"size": (28, 28)}])
def test_frames_of_one_pixel_are_read(film: Film, how: dict[str, Any]) -> None:
    path = film("dot.mkv", 4, height=1, width=1, codec="ffv1", pixels="bgr0")
    with warnings.catch_warnings(action="error"):
        video = media.read(path, **how)
    assert video.frames.shape[1:] == (3, *how.get("size", (1, 1)))


def test_frames_of_8k_are_shrunk_and_told(film: Film) -> None:
    path = film("wide.mp4", 1, height=4320, width=7680)
    with pytest.warns(
        VideoWarning, match="frames of 7680x4320 were shrunk to 4096x2304 and none lost; max_side="
    ):
        video = media.read(path)
    assert video.frames.shape == (1, 3, 2304, 4096) and numbers(video.frames) == [0]
    with warnings.catch_warnings(action="error"):
        assert media.read(path, size=(84, 140)).frames.shape == (1, 3, 84, 140)


@pytest.mark.parametrize("how", [{}, {"fps": 5}, {"frames": 6}, {"max_frames": 6}])
def test_a_truncated_file_gives_its_beginning_and_counts_the_rest(film: Film, how: dict[str, Any]) -> None:
    path = halved(film(muxer={"movflags": "faststart"}))
    with pytest.warns(VideoWarning) as caught:
        video = media.read(path, **how)
    # Some releases of FFmpeg call the place of the cut damaged, others do not.
    told = str(caught[0].message).removesuffix("; it is damaged in 1 place.").rstrip(".")
    found = numbers(video.frames)
    assert 0 < len(video) < 60 and found[-1] < 45
    if "frames" in how or "max_frames" in how:
        counts = re.search(r"only (\d+) of its 60 frames are in the file, (\d+) are lost$", told)
        assert counts is not None and int(counts[1]) + int(counts[2]) == 60 and int(counts[1]) > found[-1]
    else:
        step = 2 if how else 1
        lost = 60 // step - len(video)
        assert told == f"{path}: {len(video)} of {60 // step} frames could be read, {lost} were lost"
        assert found == list(range(0, len(video) * step, step))
    if not how:  # clips tell of it too
        with pytest.warns(VideoWarning, match=r"\d+ of 60 frames could be read, \d+ were lost"):
            assert sum(map(len, media.clips(path, fps=10, frames_per_clip=8))) < 60


def test_a_truncated_file_without_an_index_is_told_by_its_duration(film: Film) -> None:
    path = halved(film("film.mkv"))
    with pytest.warns(VideoWarning) as caught:
        video = media.read(path)
    told = re.search(
        r"(\d+) frames could be read up to ([\d.]+) of 6\.00 s, about (\d+) were lost", str(caught[0].message)
    )
    assert told is not None and int(told[1]) == len(video)
    end = float(video.times[-1]) + 0.1
    assert float(told[2]) == pytest.approx(end) and int(told[3]) == round(10 * (6.0 - end))


@pytest.mark.parametrize(
    "threads",
    [
        1,
        pytest.param(
            16,
            marks=pytest.mark.skipif(
                av.library_versions["libavcodec"][0] < 62,
                reason="FFmpeg before 8 loses the frames that its threads hold where a file breaks off",
            ),
        ),
    ],
)
def test_a_truncated_file_that_ends_after_the_span_asked_for(film: Film, threads: int, monkeypatch) -> None:
    """A decoder of sixteen threads has read to the broken end before it gives the last frame of the span."""

    def more(_: None, source: container.Source) -> None:
        source._stream.codec_context.thread_count = threads

    returned(monkeypatch, container.Source, "_open", more)
    path = halved(film(muxer={"movflags": "faststart"}))
    with warnings.catch_warnings(action="error"):
        assert numbers(media.read(path, fps=5, stop=1.0).frames) == [0, 2, 4, 6, 8]


@pytest.mark.parametrize("how", [{}, {"fps": 2}, {"frames": 12}])
def test_damage_in_the_middle_leaves_the_rest(film: Film, how: dict[str, Any]) -> None:
    path = film(muxer={"movflags": "faststart"}, gop=6)
    data = bytearray(path.read_bytes())
    middle = data.find(b"mdat") + (len(data) - data.find(b"mdat")) // 2
    data[middle : middle + 600] = bytes(value * 37 % 256 for value in range(600))
    path.write_bytes(data)
    with pytest.warns(VideoWarning, match=r"frames could be read.*; it is damaged in \d+ places?\."):
        video = media.read(path, **how)
    found = numbers(video.frames)
    assert found[0] == 0 and video.times[-1] >= 5.0
    assert video.times.tolist() == sorted(video.times.tolist())


def test_a_frame_that_the_decoder_fills_in_is_warned_of(film: Film) -> None:
    path = film(codec="mpeg4", muxer={"movflags": "faststart"}, gop=60)
    with av.open(str(path)) as container:
        place, length = next((packet.pos, packet.size) for packet in container.demux(video=0))
    data = bytearray(path.read_bytes())
    data[place + length // 2 : place + length] = bytes(length - length // 2)
    path.write_bytes(data)
    with pytest.warns(VideoWarning, match=r"60 frames could be read; it is damaged in 1 place\."):
        assert len(media.read(path).frames) == 60


def test_frames_out_of_order_in_a_damaged_file_shift_no_clock(film: Film, monkeypatch) -> None:
    """Of damage that a decoder conceals only the order of frames may tell; the clock of a file does not restart."""
    path, decode = film(), container.Source._decode

    def disordered(source: container.Source) -> Iterator[av.VideoFrame]:
        frames = list(decode(source))
        yield from [*frames[:40], frames[20], *frames[40:]]

    monkeypatch.setattr(container.Source, "_decode", disordered)
    video = media.read(path)
    assert numbers(video.frames)[-1] == 59 and video.times[-1] == pytest.approx(5.9, abs=0.01)
    assert not [
        event
        for clip in media.clips(path, fps=10, frames_per_clip=16, gaps="mark")
        for event in clip.events
        if event.kind == "restart"
    ]
