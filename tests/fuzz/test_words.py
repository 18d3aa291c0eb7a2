"""Questions and chat templates, as odd as text can be; videos and images of which anything may have been changed, and
what is none of them."""

import functools
import os
import random
from pathlib import Path
from typing import Any

import PIL.Image
import pytest

import mmaccel
from mmaccel import media
from mmaccel.cli.questions import parse_question
from mmaccel.media import container
from mmaccel.media.preprocess import load_frames, load_image
from mmaccel.models import chat
from tests.fuzz.trial import Case, damaged, odd, try_apart, try_here
from tests.media.films import write_film
from tests.models.test_session_faults import begun

PIECES = (
    "what", "is", " ", "\n", "?", "@", "@12", "@nan", "@-1", "<image>", "<video>", "<|im_end|>", "<|im_start|>system",
    "<|video_pad|>", "\0", "\x1b[2J", "\ud800", "\udcff", "\u202e", "\ufeff", "\U0001f600", "e" + "\u0301" * 200,
    "{{ 7 * 7 }}", "{% for %}", "\u2028", "%s%n", "a" * 1000, "word " * 200, "\ue000", "\uffff", "../../x", "--help",
    "\\", "'", '"', "<", "null",
)  # fmt: skip


@functools.cache
def processor(name: str, special_tokens: bool = True) -> mmaccel.models.processor.Processor:
    return mmaccel.load_processor(name, special_tokens=special_tokens)


@functools.cache
def session() -> mmaccel.VideoSession:
    return begun("recent", 4)


def question(chance: random.Random) -> Case:
    text = "".join(chance.choice(PIECES) for _ in range(chance.choice((0, 1, 3, 6))))
    given = odd(chance) if chance.random() < 0.1 else text
    way, name, special = chance.randrange(4), chance.choice(("tiny-ov", "tiny-qwen")), chance.random() < 0.5
    if way == 0:
        return lambda: session().ask(given, 1)
    if way == 1:
        return lambda: parse_question(text)
    if way == 2:
        return lambda: processor(name, special).chat(given)
    return lambda: processor(name, special).chat([{"role": "user", "content": given}])


STATEMENTS = (
    "{{ messages }}", "{{ messages[0]['content'][0]['text'] }}", "{{ messages[0].content }}", "{{ bos_token }}",
    "{{ nothing }}", "{{ nothing.at.all }}", "{% for m in messages %}", "{% endfor %}",
    "{% if add_generation_prompt %}", "{% endif %}", "{% else %}", "{{ raise_exception('no') }}", "{{ 1 / 0 }}",
    "{{ 'a' * 999999 }}", "{{ 'a' * 9999999 }}", "{{ 9 ** 999999999 }}", "{# c #}", "{{ range(99999999) }}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "{% macro f() %}",
    "{% endmacro %}", "{{ f() }}", "{% set a = messages * 5 %}", "{{ a }}", "{{ messages.__class__.__mro__ }}",
    "{{ [].append(1) }}", "{{ ''.__class__ }}", "{{ messages | tojson }}", "{{ messages | map('upper') | list }}",
    "{% include '/etc/passwd' %}", "{% import 'os' as os %}", "{% extends 'x' %}", "{% generation %}",
    "{% endgeneration %}", "{% break %}", "{{ cycler() }}", "{{ joiner }}", "{{ namespace(a=1).a }}",
    "{{ strftime_now('%Y') }}", "{{ '%d' | format('x') }}", "{{ 'a'.format(1) }}", "{{ '{0.__class__}'.format(1) }}",
    "{%", "{{", "}}", "{#", "<image>", "<video>", "\0", "\U0001f600", "text", "\n", "{{ messages | sort }}",
    "{{ messages[0]['role'] + 1 }}", "{{ lipsum(9) }}", "{{ 'a' | center(9999) }}", "{% filter upper %}", "{% raw %}",
    "{{ dict(a=1) }}", "{{ " + "(" * 300 + "1" + ")" * 300 + " }}", "{{ " + "[" * 9000 + " }}", "{{ loop.index }}",
)  # fmt: skip


def template(chance: random.Random) -> Case:
    one = processor(chance.choice(("tiny-ov", "tiny-qwen")))
    stock, text = (
        one.chat_template,
        "".join(chance.choice(STATEMENTS) for _ in range(chance.choice((1, 1, 2, 4, 8)))),
    )
    if chance.random() < 0.3:
        at = chance.randrange(len(stock))
        text = stock[:at] + chance.choice((text, "", text)) + stock[at + chance.choice((0, 1, 9)) :]

    def work() -> None:
        one.chat_template = odd(chance) if chance.random() < 0.03 else text
        try:
            one.chat("what is it ?")
        finally:
            one.chat_template = stock

    return work


@pytest.fixture(autouse=True)
def warm() -> None:
    """Models are made before a case is timed."""
    for name in ("tiny-ov", "tiny-qwen"):
        processor(name), processor(name, False)
    session()


def test_questions() -> None:
    assert 0.2 < try_here(question) < 0.95


def test_templates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "SECONDS", 0.1)
    assert 0.1 < try_here(template) < 0.9


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
    b"plain words\n" * 400, b"P6 60000 60000 255\n", b"P6 9999999999 2 255\n", b"GIF89a\xff\xff\xff\xff\0\0\0",
    b"%!PS-Adobe-3.0 EPSF-3.0\n", b"PK\x03\x04", b"RIFF\xff\xff\xff\x7fAVI LIST",
    b"YUV4MPEG2 W99999 H99999 F25:1\nFRAME\n", b"\x1aE\xdf\xa3" + b"\xff" * 64, b"FLV\x01\x05\0\0\0\x09",
)  # fmt: skip
NAMES = (
    "", ".", "/", "/dev/null", "/dev/zero", "/dev/tty", "/proc/self/mem", "\0", "a\0.mp4", "x" * 5000,
    "file:///etc/passwd", "a\nb.mp4", "concat:a|b", "data:video/mp4,", "tcp://127.0.0.1:9/x",
    "http://127.0.0.1:9/x.mp4", "lavfi:testsrc", "\udcff.mp4", "-",
)  # fmt: skip


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
        return lambda: load_image(given)
    how = chance.choice(
        ({"fps": 2.0}, {"frames": 3}, {}, {"fps": 1e9}, {"fps": 1.0, "start": 0.5, "stop": 1.0})
    )
    if chance.random() < 0.2:
        return lambda: next(media.clips(given, fps=2.0, frames_per_clip=2, max_side=64, timeout=0.2))
    if chance.random() < 0.2:
        return lambda: load_frames(given, 2.0, 4)
    most = None if "frames" in how else 6
    return lambda: media.read(given, **how, max_frames=most, max_side=64, timeout=0.2)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(container, "PATIENCE_S", 0.2)


def test_files(tmp_path: Path) -> None:
    assert 0.1 < try_here(lambda chance: file(chance, tmp_path)) < 0.9


@pytest.mark.slow
@pytest.mark.parametrize("make", [question, template, file])
def test_in_processes_with_limits(make: Any, tmp_path: Path) -> None:
    try_apart(functools.partial(make, folder=tmp_path) if make is file else make)
