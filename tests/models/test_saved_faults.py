"""Faults while a session is saved or loaded, and other processes in its folder: one sentence, and nothing is lost."""

import errno
import fcntl
import itertools
import json
import os
import re
import resource
import shutil
import threading
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from mmaccel.core import recipe
from mmaccel.core.errors import MmaccelError, MmaccelWarning, ModelError
from mmaccel.core.files import checkpoint_io
from mmaccel.core.streams import saved_stream, session_io
from mmaccel.core.streams.session import VideoSession
from tests.models.streams import FPS, film, logits, open_session, pair
from tests.models.test_session_faults import NAME, TIGHT, begun, unharmed
from tests.spies import crossed, heard, refusal, returned


def saved(folder: Path, kv: str = "rekv") -> Path:
    with begun(kv) as session:
        session.save(folder)
    return folder


@pytest.mark.parametrize("kv", ["rekv", "mosaic"])
def test_damaged_sessions_are_refused(tmp_path: Path, kv: str) -> None:
    whole = saved(tmp_path / "whole", kv)
    files = [p.relative_to(whole) for p in sorted(whole.rglob("*")) if p.is_file()]
    assert len(files) >= 6
    with begun(kv) as session:
        before = logits(session)
        for number, (file, damage) in enumerate(itertools.product(files, DAMAGES)):
            folder = tmp_path / f"{number}"
            shutil.copytree(whole, folder)
            data = (whole / file).read_bytes()
            if damage == "missing":
                (folder / file).unlink()
            elif damage == "truncated":
                (folder / file).write_bytes(data[: len(data) // 2])
            elif damage == "late":
                (folder / file).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
            elif file.suffix == ".safetensors":
                (folder / file).write_bytes(bytes(b ^ 255 for b in data[:64]) + data[64:])
            else:
                (folder / file).write_bytes(b"[" + data[1:])
            told = refusal(lambda folder=folder: session.load(folder))
            if file.name != "session.json" and damage == "truncated":
                assert f"{len(data) // 2} bytes of {len(data)}" in told
            assert torch.equal(logits(session), before), f"{file} {damage}"


DAMAGES = ("truncated", "missing", "flipped", "late")
WRONG: list[dict[str, Any]] = [
    {"raw": 7}, {"raw": [42]}, {"raw": ...}, {"size": ["a", 70]}, {"size": [42, -1]}, {"pending": None}, {"pending": -1},
    {"fps": "2"}, {"fps": ...}, {"fps": True}, {"fps": 0.0}, {"fps": -1.0}, {"frames": -1}, {"frames": 9}, {"units": -1},
    {"marks": -1}, {"unit": 0}, {"files": {}}, {"files": {"film.safetensors": [1, 1]}}, {"files": ...},
]  # fmt: skip
"""Each fact as it cannot be; ...: it is missing."""


@pytest.mark.always
def test_facts_that_cannot_be_are_refused(tmp_path: Path) -> None:
    """Also where their checksum is right, and in a file of the version that had none."""
    path = saved(tmp_path / "whole") / "session.json"
    right = json.loads(path.read_text())
    with begun() as session:
        before = logits(session)
        for wrong in WRONG:
            facts = {name: value for name, value in {**right, **wrong}.items() if value is not ...}
            older = {name: value for name, value in facts.items() if name != "checksum"} | {"version": 2}
            for written, told in (
                (facts, "damaged"),
                (session_io.add_checksum(facts), "damaged|of another stream"),
                (older, "damaged|of another stream"),
            ):
                path.write_text(json.dumps(written))
                assert re.search(told, refusal(lambda: session.load(tmp_path / "whole"), ModelError)), wrong
                assert torch.equal(logits(session), before), wrong
        path.write_text(json.dumps(right))
        session.load(tmp_path / "whole")
        assert torch.equal(logits(session), before), "what is right is read after all of them"


def test_a_saved_memory_that_cannot_be_opened_is_told_with_its_folder(tmp_path: Path, monkeypatch) -> None:
    path = saved(tmp_path / "whole") / "session.json"
    facts = json.loads(path.read_text())
    kept = facts["recipe"]["kv"]
    for kv, why in (
        ({"name": "mosaic", "levels": "none"}, "the field levels is gone"),
        ({"name": "nobody"}, "unknown kv 'nobody'"),
        ({**kept, "window": "x"}, "give a whole number"),
        (None, "is not a KVPolicy"),
    ):
        facts["recipe"]["kv"] = kv
        path.write_text(json.dumps(session_io.add_checksum(facts)))
        told = f"{re.escape(str(path.parent))} was saved with a recipe that cannot be opened: .*{why}"
        with begun() as session, unharmed(session, ModelError, told):
            session.load(path.parent)
        with pytest.raises(ModelError, match=told):
            VideoSession.resume(*pair(NAME), path.parent)
    facts["recipe"]["kv"] = {**kept, "copies": "frame"}
    path.write_text(json.dumps(session_io.add_checksum(facts)))
    monkeypatch.setattr(recipe, "_heard", set())
    with begun() as session, pytest.warns(MmaccelWarning, match="copies is gone"):
        session.load(path.parent)
    for _ in range(2):  # each resume warns, and once
        with pytest.warns(MmaccelWarning, match="copies is gone") as warned:
            VideoSession.resume(*pair(NAME), path.parent).close()
        assert len(warned) == 1


@pytest.mark.always
def test_no_bit_of_the_facts_goes_unseen(tmp_path: Path) -> None:
    path = saved(tmp_path / "whole", "recent") / "session.json"
    data, seen = path.read_bytes(), 0
    for place in range(len(data)):
        for bit in (1 << place % 8, 32):
            path.write_bytes(data[:place] + bytes([data[place] ^ bit]) + data[place + 1 :])
            try:
                session_io.saved_recipe(tmp_path / "whole")
            except ModelError as error:
                assert str(error).endswith(".") and "\n" not in str(error)
                seen += 1
            else:
                assert json.loads(path.read_bytes()) == json.loads(data), "white space"
    assert seen > len(data)


def test_a_session_of_the_version_without_a_checksum_is_read(tmp_path: Path) -> None:
    path = saved(tmp_path / "whole") / "session.json"
    facts = json.loads(path.read_text())
    del facts["checksum"]
    with begun() as session, begun(frames=3) as other:
        with unharmed(session, ModelError, "checksum"):
            path.write_text(json.dumps(facts))
            session.load(tmp_path / "whole")
        path.write_text(json.dumps({**facts, "version": 2}))
        other.load(tmp_path / "whole")
        with begun() as twin:
            assert torch.equal(logits(other), logits(twin))


def test_sessions_of_other_models_and_memories_are_refused(tmp_path: Path) -> None:
    whole = saved(tmp_path / "whole")
    for name in ("random-qwen", "tiny-ov"):
        with (
            open_session(name, TIGHT["rekv"]) as other,
            pytest.raises(ModelError, match="from another model"),
        ):
            other.load(whole)
    words = pair(NAME)[0].get_input_embeddings().weight
    with begun("recent") as session, unharmed(session, ModelError, "saved with kv"):
        session.load(whole)
    with begun() as session:
        before = words.data.clone()
        words.data[:] *= 1.5
        try:
            with pytest.raises(ModelError, match="from another model"):
                session.load(whole)
        finally:
            words.data[:] = before
    facts = json.loads((whole / "session.json").read_text())
    (whole / "session.json").write_text(json.dumps({**facts, "version": 99}))
    with begun() as session, unharmed(session, ModelError, "version 99"):
        session.load(whole)
    (whole / "session.json").write_text(json.dumps(session_io.add_checksum({**facts, "dtype": "bfloat16"})))
    with begun() as session, unharmed(session, ModelError, "in bfloat16"):
        session.load(whole)


def test_a_save_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = saved(tmp_path / "whole")
    before = {p.relative_to(whole): p.read_bytes() for p in whole.rglob("*") if p.is_file()}

    with begun() as session, unharmed(session, ModelError, "no space left"), monkeypatch.context() as patch:
        patch.setattr(
            checkpoint_io, "write_tensors", Mock(side_effect=OSError(28, "No space left on device"))
        )
        session.save(whole)
    assert {p.relative_to(whole): p.read_bytes() for p in whole.rglob("*") if p.is_file()} == before
    assert [p.name for p in tmp_path.iterdir()] == ["whole"]
    with begun("recent") as session:
        session.save(whole)
    with begun("recent", 3) as session:
        session.load(whole)
        assert len(session) == 10


@pytest.mark.parametrize("kv", ["full", "rekv", "mosaic"])
def test_a_disk_that_fills_up_in_the_middle_of_a_file_is_told(tmp_path: Path, kv: str) -> None:
    most = resource.getrlimit(resource.RLIMIT_FSIZE)
    with begun(kv) as session, unharmed(session, MmaccelError, "file too large"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, most[1]))
        try:
            session.save(tmp_path / "stream")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, most)
    assert not list(tmp_path.iterdir())


def test_a_save_leaves_what_lies_beside_it_alone(tmp_path: Path) -> None:
    """A copy that somebody made of a saved session is theirs, whatever its name."""
    whole = saved(tmp_path / "whole")
    for name in ("whole.old", "whole.part"):
        shutil.copytree(whole, tmp_path / name)
    saved(whole)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["whole", "whole.old", "whole.part"]
    with begun() as session:
        session.load(tmp_path / "whole.old")


def test_a_save_goes_where_a_link_leads_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, link = tmp_path / "disk", tmp_path / "link"
    disk.mkdir()
    link.symlink_to(disk)
    for _ in range(2):
        saved(link)
        assert link.is_symlink() and (disk / "session.json").is_file()
    assert sorted(one.name for one in tmp_path.iterdir()) == ["disk", "link"]
    monkeypatch.chdir(disk)
    saved(Path())
    assert (disk / "session.json").is_file()


def watched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Path]]:
    """What is synced, moved and removed from now on, in order."""
    found: list[tuple[str, Path]] = []

    def place(handle: int) -> Path:
        return Path(os.readlink(f"/proc/self/fd/{handle}"))

    heard(monkeypatch, os, "fsync", lambda handle: found.append(("sync", place(handle))))
    returned(monkeypatch, os, "replace", lambda _, old, new, **__: found.append(("move", Path(new))))
    returned(monkeypatch, os, "unlink", lambda _, path, **__: found.append(("remove", Path(path))))
    return found


def test_files_are_on_the_disk_before_their_list_and_the_former_ones_go_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "a" / "stream"
    with begun("mosaic", 6) as session:
        found = watched(monkeypatch)
        session.save(place)
        move = found.index(("move", place / "session.json"))
        written = {p for p in (place / "data-1").rglob("*") if p.is_file()}
        folders = {p for p in (place / "data-1").rglob("*") if p.is_dir()} | {place / "data-1"}
        before = {path for what, path in found[:move] if what == "sync"}
        note = place / ".mmaccel-saving.json"
        assert len(written) > 5 and written | folders | {note, place / "data-1/session.json"} <= before
        assert {place.parent, tmp_path} <= before and ("sync", place) in found[move:]
        del found[:]
        session.save(place)
        move, removed = found.index(("move", place / "session.json")), found.index(("remove", min(written)))
        assert ("sync", place) in found[move:removed]


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP])
def test_a_file_system_that_cannot_sync_is_saved_to(tmp_path: Path, monkeypatch, number: int) -> None:
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(number, os.strerror(number))))
    with begun("recent", 3) as session:
        session.save(tmp_path / "s")
        session.load(tmp_path / "s")


def test_a_disk_that_fails_while_it_syncs_leaves_the_former_session(tmp_path: Path, monkeypatch) -> None:
    with begun("recent", 3) as session:
        session.save(tmp_path / "s")
        session.watch(film(5)[3:], fps=FPS)
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", Mock(side_effect=OSError(errno.EIO, os.strerror(errno.EIO))))
            with pytest.raises(ModelError, match=r"cannot be written \(input/output error\); give a path"):
                session.save(tmp_path / "s")
        session.load(tmp_path / "s")
        assert len(session) == 3


def while_it_loads(monkeypatch: pytest.MonkeyPatch, place: str, work: Callable[[], None]) -> None:
    """Do `work` when a load first reaches `place` of the modules that read a session."""
    module = session_io if hasattr(session_io, place) else saved_stream
    left = [work]
    heard(monkeypatch, module, place, lambda *_: left.pop()() if left else None)


@crossed(kv=["recent", "mosaic"], place=["_check_file", "_print_of", "_read_info"])
def test_a_load_beside_a_save_reads_what_was_saved(tmp_path: Path, monkeypatch, kv: str, place: str) -> None:
    with begun(kv, 4) as session, begun(kv, 6) as other, begun(kv, 3) as reader:
        session.save(tmp_path / "s")
        while_it_loads(monkeypatch, place, lambda: other.save(tmp_path / "s"))
        reader.load(tmp_path / "s")
        assert len(reader) == 6


def test_a_load_of_a_damaged_session_does_not_try_for_ever(tmp_path: Path, monkeypatch) -> None:
    with begun("recent", 3) as session, begun("recent", 4) as reader:
        session.save(tmp_path / "s")
        (tmp_path / "s" / "data-1" / "film.safetensors").unlink()
        facts, times = tmp_path / "s" / "session.json", count()
        with pytest.raises(ModelError, match=r"film.safetensors is missing"):
            reader.load(tmp_path / "s")

        def touch(*_: Any) -> None:
            os.utime(facts, ns=(now := next(times), now))

        tries = heard(monkeypatch, session_io, "_check_file", touch)
        with pytest.raises(ModelError, match=r"film.safetensors is missing"):
            reader.load(tmp_path / "s")
        assert len(tries) == session_io.READS and len(reader) == 4


def test_a_save_waits_for_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "s"
    with begun("recent", 3) as session:
        session.save(place)
        handle = os.open(place, os.O_RDONLY)
        fcntl.flock(handle, fcntl.LOCK_EX)
        other = threading.Timer(0.3, os.close, (handle,))
        other.start()
        session.watch(film(5)[3:], fps=FPS)
        session.save(place)
        other.join()
        session.load(place)
        assert len(session) == 5
        handle = os.open(place, os.O_RDONLY)
        fcntl.flock(handle, fcntl.LOCK_EX)
        monkeypatch.setattr(checkpoint_io, "WAIT_S", 0.2)
        begin = time.monotonic()
        with pytest.raises(ModelError, match=r"another save writes to .* has not ended after 0.2 s; "):
            session.save(place)
        os.close(handle)
        assert 0.2 <= time.monotonic() - begin < 5
