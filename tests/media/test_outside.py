"""Inputs that are not a readable video or image: each gives one sentence, in time, and no other file is opened."""

import os
import re
import resource
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock, PropertyMock

import av
import numpy
import PIL.Image
import pytest
import torch

from mmaccel import media
from mmaccel.core.errors import VideoError
from mmaccel.media.preprocess import load_frames, load_image
from mmaccel.media.video import orientation_flips
from tests.media.films import png, set_matrix
from tests.spies import beside, finish, refusal

Film = Callable[[str], Path]

FRAMES = torch.full((2, 3, 16, 16), 7)
TENSORS: dict[str, Any] = {
    "int16": FRAMES.to(torch.int16),
    "int32": FRAMES.to(torch.int32),
    "int64": FRAMES,
    "bool": FRAMES.bool(),
    "complex64": FRAMES.to(torch.complex64),
    "the meta device": FRAMES.to("meta"),
    "sparse": FRAMES.float().to_sparse(),
    "<U4": numpy.full((2, 3, 16, 16), "word"),
    "object": numpy.full((2, 3, 16, 16), None),
    ">u4": numpy.full((2, 3, 16, 16), 7, ">u4"),
    "datetime": numpy.zeros((2, 3, 16, 16), "datetime64[s]"),
}


@pytest.mark.parametrize("name", TENSORS)
def test_pixels_of_a_type_that_pictures_have_not_are_refused(name: str) -> None:
    for take, given in ((load_frames, TENSORS[name]), (load_image, TENSORS[name][0])):
        with pytest.raises(VideoError, match=r"^pixels are .*uint8\), 0 to 255\.$") as caught:
            take(given)
        assert name in str(caught.value)


def test_pixels_may_be_turned_around_and_an_image_has_some() -> None:
    array = numpy.arange(2 * 3 * 4 * 5, dtype=numpy.uint8).reshape(2, 3, 4, 5)
    assert torch.equal(load_frames(array[::-1])[0], torch.from_numpy(array[::-1].copy()))
    with pytest.raises(VideoError, match="is empty; give at least one pixel"):
        load_image(torch.zeros(3, 0, 7, dtype=torch.uint8))


def test_an_image_is_refused_by_its_size_before_it_is_decoded(tmp_path: Path) -> None:
    path = tmp_path / "bomb.png"
    for side, told in ((60000, "pixels: make it smaller"), (9000, "9000 x 9000 pixels, more than 67108864")):
        path.write_bytes(png(side, side))
        with pytest.raises(VideoError, match=told):
            load_image(path)


def test_a_damaged_image_and_one_that_another_program_would_draw(tmp_path: Path) -> None:
    whole, part = tmp_path / "whole.jpg", tmp_path / "part.jpg"
    PIL.Image.effect_noise((64, 64), 50).save(whole)
    part.write_bytes(whole.read_bytes()[:900])
    with pytest.raises(
        VideoError, match=r"part\.jpg cannot be read as an image: no known format, or damaged\.$"
    ):
        load_image(part)
    drawn = tmp_path / "drawn.png"
    PIL.Image.new("RGB", (8, 8)).save(drawn, "EPS")
    with pytest.raises(VideoError, match="an image in a format that mmaccel does not read: EPS"):
        load_image(drawn)
    for path, told in ((tmp_path, "is a folder"), ("a\0b.png", "null byte"), ("/dev/zero", "is a device")):
        with pytest.raises(VideoError, match=told):
            load_image(path)


def test_names_that_no_file_has(tmp_path: Path) -> None:
    names = {"clip.mp4\0": "null byte", "/dev/zero": "is a device: name its format", "": "no file"}
    for name, told in names.items():
        assert re.search(told, refusal(lambda name=name: media.read(name), VideoError))


@pytest.mark.parametrize("piped", [False, True])
def test_a_list_of_files_opens_none_of_them(film: Film, tmp_path: Path, piped: bool) -> None:
    whole = film("whole.ts")
    path = whole.parent / "upload.mp4"
    text = f"ffconcat version 1.0\nfile {whole.name}\n"
    if piped:
        path = tmp_path / "pipe.mp4"
        os.mkfifo(path)
        beside(lambda: path.write_text(text))
    else:
        path.write_text(text)
    with pytest.raises(
        VideoError, match=r"upload\.mp4 is a list of other files" if not piped else r"pipe\.mp4 "
    ):
        media.read(path)


@contextmanager
def silent() -> Iterator[str]:
    """An address that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize("scheme", ["http", "tcp"])
def test_a_silent_server_is_told_after_the_timeout(scheme: str) -> None:
    with silent() as address:
        begin = time.monotonic()
        with pytest.raises(VideoError, match="sent nothing in the time allowed"):
            media.read(f"{scheme}://{address}/x.mp4", timeout=0.3)
        assert time.monotonic() - begin < 3


def test_a_pipe_without_a_writer_is_told_after_the_timeout(tmp_path: Path) -> None:
    path = tmp_path / "pipe.ts"
    os.mkfifo(path)
    begin = time.monotonic()
    with pytest.raises(VideoError, match=r"pipe\.ts sent nothing in the time allowed.* raise timeout\."):
        media.read(path, timeout=0.3)
    for follow in (False, True):
        with pytest.raises(VideoError, match=r"sent nothing|nothing came|came for"):
            next(media.clips(path, fps=5, frames_per_clip=4, follow=follow, timeout=0.3))
    assert time.monotonic() - begin < 5
    with pytest.raises(VideoError, match="timeout=0 must be a positive number"):
        media.read(path, timeout=0)


@pytest.mark.parametrize(
    ("suffix", "how"), [("ts", {}), ("mkv", {"timeout": float("inf")}), ("mkv", {"timeout": 1e300})]
)
def test_a_pipe_with_a_writer_is_read_to_its_end(
    film: Film, tmp_path: Path, suffix: str, how: dict[str, float]
) -> None:
    """It may be waited for as long as one likes."""
    whole, path = film(f"whole.{suffix}"), tmp_path / f"pipe.{suffix}"
    os.mkfifo(path)
    writer = beside(lambda: path.write_bytes(whole.read_bytes()))
    assert torch.equal(media.read(path, fps=5, **how).frames, media.read(whole, fps=5).frames)
    finish(writer, 5)


def test_more_frames_than_there_are_can_be_refused(film: Film) -> None:
    whole = film("whole.ts")
    assert len(media.read(whole, fps=20)) > len(media.read(whole))
    with pytest.raises(
        VideoError,
        match=r"fps=1e\+09 is more than the 240 frames a second that can be read of .*; give no more",
    ):
        media.read(whole, fps=1e9, faster=False)


@pytest.mark.parametrize("matrix", [(1, 0, 0, 1), (0, 1, -1, 0), (0, -1, 1, 0), (-1, 0, 0, -1)])
def test_a_frame_with_unknown_data_beside_it_is_set_upright(
    film: Film, matrix: tuple[int, int, int, int]
) -> None:
    with av.open(str(set_matrix(film(frames=2), *matrix))) as container:
        frame = next(container.decode(video=0))
    unknown: Any = Mock(rotation=frame.rotation)  # something is beside it that PyAV has no name for
    type(unknown).side_data = PropertyMock(side_effect=ValueError("31 is not a valid Type"))
    assert orientation_flips(unknown) == orientation_flips(frame)


def test_the_address_of_a_file_is_its_path(film: Film, tmp_path: Path) -> None:
    """A pipe, a device or a list of other files is told under such an address too; opening a pipe would wait for ever."""
    path = film("a.mkv")
    assert len(media.read(f"file://{path}", frames=3)) == 3
    assert len(next(media.clips(f"FILE://{path}", fps=1, frames_per_clip=2, follow=True, timeout=0.2))) == 2
    os.mkfifo(tmp_path / "pipe.mp4")
    for take in (
        media.read,
        lambda name, timeout: next(media.clips(name, fps=1, frames_per_clip=1, timeout=timeout)),
    ):
        with pytest.raises(VideoError):
            take(f"file://{tmp_path}/pipe.mp4", timeout=0.1)
    with pytest.raises(VideoError, match="is a device"):
        media.read("file:///dev/zero")


def test_a_file_is_followed_in_a_program_that_has_many_open(film: Film, tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limits[1] != resource.RLIM_INFINITY and limits[1] < 2048:
        pytest.skip("no more than 2048 files may be open")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], 2048), limits[1]))
    files = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
    try:
        clips = media.clips(film("a.ts"), fps=1, frames_per_clip=4, follow=True, timeout=0.2)
        assert sum(map(len, clips)) > 0
    finally:
        for one in files:
            os.close(one)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize("fps", [1e-300, 1e-310])
def test_a_rate_that_is_next_to_none_gives_the_first_frame(film: Film, fps: float) -> None:
    path = film("a.mkv")
    assert len(media.read(path, fps=fps)) == sum(map(len, media.clips(path, fps=fps, frames_per_clip=9))) == 1
    with pytest.raises(VideoError, match="must be a positive number"):
        media.clips(path, fps=float("inf"), frames_per_clip=1)
