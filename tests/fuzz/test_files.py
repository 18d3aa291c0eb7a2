"""Recipes, tables of heads and saved sessions of which anything may have been changed, by chance or on purpose; questions
and chat templates, as odd as text can be; videos and images that are changed, and what is none of them."""

import dataclasses
import functools
import json
import os
import random
import shutil
import zlib
from contextlib import suppress
from importlib import resources
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
import torch
import yaml
from safetensors.torch import load as tensors_of
from safetensors.torch import save_file

import mmaccel
from mmaccel import Recipe, media
from mmaccel.cli.questions import parse_question
from mmaccel.core.registry import BASES, registry
from mmaccel.core.streams import session_io
from mmaccel.media import container
from mmaccel.media.preprocess import load_frames, load_image
from mmaccel.models import chat
from mmaccel.policies.kv.store import saved as stored
from tests.fuzz.trial import Case, changed, damaged, odd, try_apart, try_here
from tests.media.films import write_film
from tests.models.streams import QUESTION
from tests.models.test_saved_folder import resealed
from tests.models.test_session_faults import begun

SHIPPED = resources.files("mmaccel").joinpath("recipes").iterdir()
PRESETS = [file.read_bytes() for file in SHIPPED if file.name.endswith(".yaml")]
FIELDS = [field.name for field in dataclasses.fields(Recipe)]
BOMB = "a: &a [1,1,1,1,1,1,1,1,1]\n" + "".join(
    f"{b}: &{b} [{','.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)
RAW = (
    BOMB.replace("a:", "sparse:", 1), BOMB + "sparse: *i\n", "sparse: &a [*a]\n", "sparse: &a {name: *a}\n",
    "sparse: " + "[" * 3000, "sparse: " + "[" * 60 + "]" * 60, "sparse: " + "{a: " * 3000, "chunk: " + "9" * 5000,
    "dense_tail: 0x" + "f" * 5000, "chunk: 1:1:1:1:1:1:1:1:1:1:1:1:1:1:1:1:1:1:1:1:1", "sparse: " + "x" * 250_000,
    "sparse: " + "x" * 300_000, "sparse: !!python/object/apply:os.system ['exit 1']", "sparse: !!timestamp x",
    "sparse: !!int x", "sparse: !!int ''", "sparse: !!bool x", "sparse: !!binary =", "sparse: !!float x",
    "sparse: 2020-99-99", "sparse: !!set {a, b}", "? [a, b]\n: 1", "? {a: b}\n: 1", "<<: 5", "<<: [*x]",
    "<<: {sparse: grid}", "a: &a {sparse: grid}\n<<: [*a, *a]", "- a\n- b", "sparse: {name: [grid]}",
    "sparse: {[a]: b}", "1: 2", "null: 3", "%YAML 9.9\n---\nsparse: grid", "---\nsparse: grid\n---\nsparse: grid",
    "sparse: |\n  grid", "\tsparse: grid", "sparse: grid\0", "sparse: {name: per_head, table: /dev/zero}",
    "sparse: {name: per_head, table: PIPE}", "sparse: {name: per_head, table: .}",
    "sparse: {name: per_head, table: {0: {0: grid}, x: 5}}", "sparse: \u2028", "@", "`", "*", "&", "!", "%", "{", "}",
    "draft: off", "sparse: {name: grid, block: 1000000000000}", "dense_layers: [true]", "dense_tail: true",
)  # fmt: skip


def recipe(chance: random.Random, folder: Path) -> Case:
    way, path = chance.randrange(4), folder / "recipe.yaml"
    if way == 0:
        data = damaged(chance, chance.choice(PRESETS))
    elif way == 1:
        text = chance.choice(RAW).replace("PIPE", str(folder / "pipe"))
        data = text.encode(chance.choice(("utf-8",) * 6 + ("utf-16",)))
    else:
        fields = {}
        for _ in range(chance.choice((1, 1, 2, 4))):
            name = chance.choice(FIELDS)
            fields[name] = odd(chance)
            if name in BASES and way == 3:
                policy = chance.choice(sorted(registry(name)))
                known = [
                    field.name for field in dataclasses.fields(registry(name)[policy]) if field.init
                ] or ["x"]
                fields[name] = {"name": policy, **{chance.choice(known): odd(chance) for _ in range(2)}}
        data = yaml.safe_dump(fields, allow_unicode=True).encode("utf-8", "surrogatepass")
    path.write_bytes(data)
    return lambda: repr(Recipe.load(path))


HEAD = dict(kind="no_boundary", pattern=dict(name="a_shape", sink=16, window=128), errors={}, score=0.1)
TABLE = {
    "kind": "mmaccel heads", "schema": 1, "block": 64, "context": 600, "sample": {"tokens": 600},
    "model": {"type": "llava_onevision", "layers": 2, "heads": 2}, "layers": [[HEAD, HEAD], [HEAD, HEAD]],
}  # fmt: skip
TABLES = (
    b"", b"[]", b"null", b"[" * 100_000, b'{"a":' * 100_000, b"9" * 5000, b'{"kind": 1e999}', b"NaN", b"\xff\xfe{}",
    b'"\\ud800"', b"[[],[],[],[]" * 50_000, b"\0" * 4096,
)  # fmt: skip


def table(chance: random.Random, folder: Path) -> Case:
    path, way = folder / "heads.json", chance.randrange(8)
    whole = json.dumps(TABLE).encode()
    data = json.dumps(changed(chance, TABLE)).encode("utf-8", "surrogatepass")
    path.write_bytes(damaged(chance, whole) if way == 0 else chance.choice(TABLES) if way == 1 else data)

    def load() -> None:
        recipe = Recipe.load(str(path))
        recipe.sparse.for_layer(0).head_pattern_names(2)
        repr(recipe.to_dict())

    return load


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / "pipe")
    return tmp_path


def test_recipes(folder: Path) -> None:
    assert 0.02 < try_here(lambda chance: recipe(chance, folder)) < 0.6


def test_tables(folder: Path) -> None:
    assert 0.02 < try_here(lambda chance: table(chance, folder)) < 0.6


KINDS = ("recent", "rekv", "mosaic")
FRAMES = 12
"""Of a saved session: a mosaic has clusters by then, and units on the host."""


@functools.cache
def session(kv: str) -> mmaccel.VideoSession:
    return begun(kv, 6)


def load(kv: str, place: Path, ask: bool) -> Case:
    def work() -> None:
        session_io.saved_recipe(place)
        session(kv).load(place)
        if ask:
            session(kv).ask(QUESTION, 1)

    return work


def rewrite(chance: random.Random, path: Path) -> None:
    """Change what a file says, so that it is a file of its kind all the same."""
    if path.suffix == ".json":
        path.write_text(json.dumps(changed(chance, json.loads(path.read_text()))))
        return
    tensors = tensors_of(path.read_bytes())
    for name in chance.sample(list(tensors), min(len(tensors), chance.choice((1, 1, 3)))):
        one, way = tensors[name], chance.randrange(8)
        if way == 0:
            del tensors[name]
        elif way == 1 and one.ndim:
            tensors[name] = one[: chance.randrange(len(one) + 1)].clone()
        elif way == 2:
            tensors[name] = one.to(chance.choice((torch.float32, torch.float16, torch.int64, torch.uint8)))
        elif way == 3:
            tensors[name] = torch.cat([one[None], one[None]]).flatten(0, min(one.ndim, 1))
        elif one.numel():
            # A scalar of the kind that the tensor has.
            values = (0, 1, -1, 7, 10**6, 2**31, -(2**63), 2**63 - 1, float("nan"), float("inf"), -1e30)
            fits = [value for value in values if one.is_floating_point() or isinstance(value, int)]
            where = chance.choice((slice(None), chance.randrange(one.numel())))
            flat = one.clone().flatten()
            flat[where] = torch.tensor(chance.choice(fits)).to(one.dtype)
            tensors[name] = flat.view(one.shape)
    save_file(tensors, path)


def reseal(place: Path) -> None:
    """Let each checksum of a saved session be that of what is there, as one does who changes a file on purpose."""
    for index in place.rglob("store.json"):
        with suppress(ValueError, LookupError, TypeError, AttributeError, OSError):
            told = json.loads(index.read_text())
            for piece in told["pieces"]:
                piece["crc"] = stored._checksum(tensors_of((index.parent / piece["file"]).read_bytes()))
            index.write_text(json.dumps(told))
    resealed(place)


def saved(chance: random.Random, folder: Path) -> Case:
    kv = chance.choice(KINDS)
    whole, place = folder / kv, folder / "case"
    if not whole.exists():
        with begun(kv, FRAMES) as one:
            one.save(whole)
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(whole, place)
    facts = json.loads((place / "session.json").read_text())
    name = chance.choice([*facts["files"], *["session.json"] * 3])
    path, way = place / name, chance.randrange(6)
    if chance.random() < 0.5:
        rewrite(chance, place / chance.choice([*facts["files"]]))
        reseal(place)
    elif name == "session.json" and way < 4:
        told: Any = changed(chance, facts)
        sealed = way and isinstance(told, dict)
        path.write_text(json.dumps(session_io.add_checksum(told) if sealed else told))
    elif way < 5:
        path.write_bytes(damaged(chance, path.read_bytes()))
        if name != "session.json":
            # Who changes a file on purpose changes its checksum.
            kept = facts["files"][name][1]
            facts["files"][name] = [path.stat().st_size, kept and zlib.crc32(path.read_bytes())]
            (place / "session.json").write_text(json.dumps(session_io.add_checksum(facts)))
    else:
        path.unlink()
        kind = chance.randrange(4)
        if kind == 0:
            os.mkfifo(path)
        elif kind == 1:
            path.mkdir()
        elif kind == 2:
            path.symlink_to("/dev/zero")
    return load(kv, place, ask=chance.random() < 0.3)


@pytest.fixture(autouse=True)
def warm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models are made before a case is timed, and no silence is waited for long."""
    monkeypatch.setattr(container, "PATIENCE_S", 0.2)
    for kv in KINDS:
        session(kv)
    for name in ("tiny-ov", "tiny-qwen"):
        processor(name), processor(name, False)
    stream()


def test_saved_sessions(tmp_path: Path) -> None:
    assert try_here(lambda chance: saved(chance, tmp_path)) < 0.6


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
def stream() -> mmaccel.VideoSession:
    return begun("recent", 4)


def question(chance: random.Random) -> Case:
    text = "".join(chance.choice(PIECES) for _ in range(chance.choice((0, 1, 3, 6))))
    given = odd(chance) if chance.random() < 0.1 else text
    way, name, special = chance.randrange(4), chance.choice(("tiny-ov", "tiny-qwen")), chance.random() < 0.5
    if way == 0:
        return lambda: stream().ask(given, 1)
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
    stock = one.chat_template
    text = "".join(chance.choice(STATEMENTS) for _ in range(chance.choice((1, 1, 2, 4, 8))))
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


def test_questions() -> None:
    assert 0.2 < try_here(question) < 0.95


def test_templates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "SECONDS", 0.1)
    assert 0.1 < try_here(template) < 0.9


VIDEOS = {"a.mp4": "libx264", "a.mkv": "libx264", "a.ts": "mpeg2video", "a.avi": "mjpeg", "a.gif": "gif"}
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
        for name, codec in VIDEOS.items():
            pixels = {"gif": "rgb8", "mjpeg": "yuvj420p"}.get(codec, "yuv420p")
            write_film(whole / name, 12, codec=codec, pixels=pixels)
        for name in IMAGES:
            PIL.Image.effect_noise((48, 32), 60).convert("RGB").save(whole / name)
        os.mkfifo(folder / "pipe.mp4")
    name = chance.choice((chance.choice([*VIDEOS]), chance.choice(IMAGES)))
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


def test_files(tmp_path: Path) -> None:
    assert 0.1 < try_here(lambda chance: file(chance, tmp_path)) < 0.9


@pytest.mark.slow
@pytest.mark.parametrize("make", [recipe, table, saved, question, template, file])
def test_in_processes_with_limits(make: Any, folder: Path) -> None:
    try_apart(make if make in (question, template) else functools.partial(make, folder=folder))
