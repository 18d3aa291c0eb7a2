"""Videos and images of which anything may have been changed, and what is none of them."""

from __future__ import annotations

import os
import random
from pathlib import Path

import PIL.Image
import pytest

from mmaccel import media
from mmaccel.media import container
from mmaccel.media.preprocess import as_frames, as_image
from tests.fuzz.trial import Case, damaged, try_apart, try_here
from tests.media.films import write_film

VIDEOS = (
    ("a.mp4", "libx264"),
    ("a.mkv", "libx264"),
    ("a.ts", "mpeg2video"),
    ("a.avi", "mjpeg"),
    ("a.gif", "gif"),
)
IMAGES = ("a.png", "a.jpg", "a.webp", "a.bmp", "a.tiff", "a.ico", "a.eps", "a.pcx", "a.tga")
TEXTS = (
    b"", b"\0" * 4096, b"ffconcat version 1.0\nfile a.mp4\n", b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n",
    b"#EXTM3U\n#EXTINF:1,\na.mp4\n",
    b"v=0\no=- 0 0 IN IP4 127.0.0.1\nm=video 5004 RTP/AVP 96\na=rtpmap:96 H264/90000\n",
    b"<svg xmlns='http://www.w3.org/2000/svg'><image href='a.png'/></svg>", b"<?xml version='1.0'?><MPD></MPD>",
    b"plain words\n" * 400,
    b"P6 60000 60000 255\n", b"P6 9999999999 2 255\n", b"GIF89a\xff\xff\xff\xff\0\0\0", b"%!PS-Adobe-3.0 EPSF-3.0\n",
    b"PK\x03\x04",
    b"RIFF\xff\xff\xff\x7fAVI LIST", b"YUV4MPEG2 W99999 H99999 F25:1\nFRAME\n", b"\x1aE\xdf\xa3" + b"\xff" * 64,
    b"FLV\x01\x05\0\0\0\x09",
)  # fmt: skip
NAMES = ("", ".", "/", "/dev/null", "/dev/zero", "/dev/tty", "/proc/self/mem", "\0", "a\0.mp4", "x" * 5000, "file:///etc/passwd",
    "a\nb.mp4",
         "concat:a|b", "data:video/mp4,", "tcp://127.0.0.1:9/x", "http://127.0.0.1:9/x.mp4", "lavfi:testsrc",
    "\udcff.mp4", "-")  # fmt: skip


def file(chance: random.Random, folder: Path) -> Case:
    whole = folder / "whole"
    if not whole.exists():
        whole.mkdir()
        for name, codec in VIDEOS:
            pixels = {"gif": "rgb8", "mjpeg": "yuvj420p"}.get(codec, "yuv420p")
            write_film(whole / name, 12, codec=codec, pixels=pixels)
        for name in IMAGES:
            PIL.Image.effect_noise((48, 32), 60).convert("RGB").save(whole / name)
        os.mkfifo(folder / "pipe.mp4")
    name = chance.choice((chance.choice(VIDEOS)[0], chance.choice(IMAGES)))
    path, way = folder / name, chance.randrange(10)
    data = (whole / name).read_bytes()
    path.write_bytes(
        chance.choice(TEXTS) if way < 2 else damaged(chance, data) if way < 9 else chance.randbytes(5000)
    )
    given = str(path)
    if way == 2:
        given = chance.choice((*NAMES, str(folder / "pipe.mp4"), str(folder)))
    if chance.random() < 0.4:
        return lambda: as_image(given)
    how = chance.choice(
        ({"fps": 2.0}, {"frames": 3}, {}, {"fps": 1e9}, {"fps": 1.0, "start": 0.5, "stop": 1.0})
    )
    if chance.random() < 0.2:
        return lambda: next(media.clips(given, fps=2.0, frames_per_clip=2, max_side=64, timeout=0.2))
    if chance.random() < 0.2:
        return lambda: as_frames(given, 2.0, 4)
    most = None if "frames" in how else 6
    return lambda: media.read(given, **how, max_frames=most, max_side=64, timeout=0.2)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(container, "PATIENCE_S", 0.2)


def test_files(tmp_path: Path) -> None:
    assert 0.1 < try_here(lambda chance: file(chance, tmp_path)) < 0.9


@pytest.mark.slow
def test_in_processes_with_limits(tmp_path: Path) -> None:
    try_apart(lambda chance: file(chance, tmp_path))
