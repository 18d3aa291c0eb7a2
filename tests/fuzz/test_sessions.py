"""Saved sessions of which anything may have been changed, by chance or on purpose."""

from __future__ import annotations

import functools
import json
import os
import random
import shutil
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load as tensors_of
from safetensors.torch import save_file

import mmaccel
from mmaccel.core.streams import session_io
from tests.fuzz.trial import Case, damaged, try_apart, try_here
from tests.fuzz.values import changed
from tests.models.streams import QUESTION
from tests.models.test_session_faults import begun

KINDS = ("recent", "rekv", "mosaic")
FRAMES = 12
"""Of a saved session: a mosaic has clusters by then, and units on the host."""


@functools.cache
def session(kv: str) -> mmaccel.VideoSession:
    return begun(kv, 6)


def load(kv: str, place: Path, ask: bool) -> Case:
    def work() -> None:
        session_io.recipe_of(place)
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
    facts = json.loads((place / "session.json").read_text())
    for index in place.rglob("store.json"):
        with suppress(ValueError, LookupError, TypeError, AttributeError, OSError):
            told = json.loads(index.read_text())
            for piece in told["pieces"]:
                units = tensors_of((index.parent / piece["file"]).read_bytes())["units"]
                piece["crc"] = zlib.crc32(units.contiguous().view(-1).view(torch.uint8).numpy())
            index.write_text(json.dumps(told))
    for name, (_, checksum) in facts["files"].items():
        data = (place / name).read_bytes()
        facts["files"][name] = [len(data), None if checksum is None else zlib.crc32(data)]
    (place / "session.json").write_text(json.dumps(session_io.sealed(facts)))


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
        path.write_text(json.dumps(session_io.sealed(told) if sealed else told))
    elif way < 5:
        path.write_bytes(damaged(chance, path.read_bytes()))
        if name != "session.json":
            # Who changes a file on purpose changes its checksum.
            kept = facts["files"][name][1]
            facts["files"][name] = [path.stat().st_size, kept and zlib.crc32(path.read_bytes())]
            (place / "session.json").write_text(json.dumps(session_io.sealed(facts)))
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
def warm() -> None:
    """Models are made before a case is timed."""
    for kv in KINDS:
        session(kv)


def test_saved_sessions(tmp_path: Path) -> None:
    assert try_here(lambda chance: saved(chance, tmp_path)) < 0.6


@pytest.mark.slow
def test_in_processes_with_limits(tmp_path: Path) -> None:
    try_apart(lambda chance: saved(chance, tmp_path))
