"""Saved sessions of which anything may have been changed, by chance or on purpose."""

from __future__ import annotations

import functools
import json
import os
import random
import shutil
import zlib
from pathlib import Path
from typing import Any

import pytest

import mmaccel
from mmaccel.core import record
from tests.fuzz.trial import Case, damaged, try_apart, try_here
from tests.fuzz.values import changed
from tests.models.streams import QUESTION
from tests.models.test_session_faults import begun

KINDS = ("recent", "mosaic")


@functools.cache
def session(kv: str) -> mmaccel.VideoSession:
    return begun(kv, 6)


def load(kv: str, place: Path, ask: bool) -> Case:
    def work() -> None:
        record.recipe_of(place)
        session(kv).load(place)
        if ask:
            session(kv).ask(QUESTION, 1)

    return work


def saved(chance: random.Random, folder: Path) -> Case:
    kv = chance.choice(KINDS)
    whole, place = folder / kv, folder / "case"
    if not whole.exists():
        with begun(kv, 6) as one:
            one.save(whole)
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(whole, place)
    facts = json.loads((place / "session.json").read_text())
    name = chance.choice([*facts["files"], *["session.json"] * 3])
    path, way = place / name, chance.randrange(6)
    if name == "session.json" and way < 4:
        told: Any = changed(chance, facts)
        sealed = way and isinstance(told, dict)
        path.write_text(json.dumps(record.sealed(told) if sealed else told))
    elif way < 5:
        path.write_bytes(damaged(chance, path.read_bytes()))
        if name != "session.json":
            # Who changes a file on purpose changes its checksum.
            kept = facts["files"][name][1]
            facts["files"][name] = [path.stat().st_size, kept and zlib.crc32(path.read_bytes())]
            (place / "session.json").write_text(json.dumps(record.sealed(facts)))
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
