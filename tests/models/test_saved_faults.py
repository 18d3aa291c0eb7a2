"""Faults while a session is saved or loaded: each is told in one sentence, and what was there stays whole."""

from __future__ import annotations

import json
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from mmaccel.core import record, saving
from mmaccel.core.errors import MmaccelError, ModelError, StoreError
from tests.models.streams import logits, open_session, pair
from tests.models.test_session_faults import NAME, TIGHT, begun, unharmed


def saved(folder: Path, kv: str = "rekv") -> Path:
    with begun(kv) as session:
        session.save(folder)
    return folder


@pytest.mark.parametrize("kv", ["rekv", "mosaic"])
def test_damaged_sessions_are_refused(tmp_path: Path, kv: str) -> None:
    whole = saved(tmp_path / "whole", kv)
    files = [p.relative_to(whole) for p in sorted(whole.rglob("*")) if p.is_file()]
    assert len(files) >= 6
    for number, file in enumerate(files):
        for damage in ("truncated", "missing", "flipped", "late"):
            folder = tmp_path / f"{number}-{damage}"
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
            with begun(kv) as session:
                before = logits(session)
                with pytest.raises(MmaccelError) as caught:
                    session.load(folder)
                told = str(caught.value)
                assert told.endswith(".") and "\n" not in told, told
                if file.name != "session.json" and damage == "truncated":
                    assert f"{len(data) // 2} bytes of {len(data)}" in told
                assert torch.equal(logits(session), before), f"{file} {damage}"


@pytest.mark.parametrize(
    "wrong",
    [{"raw": 7}, {"raw": [42]}, {"size": ["a", 70]}, {"size": [42, -1]}, {"pending": None}, {"fps": "2"}],
    ids=str,
)
def test_facts_that_cannot_be_are_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    facts = saved(tmp_path / "whole") / "session.json"
    facts.write_text(json.dumps({**json.loads(facts.read_text()), **wrong}))
    with begun() as session, unharmed(session, ModelError, "damaged"):
        session.load(tmp_path / "whole")


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
    (whole / "session.json").write_text(json.dumps({**facts, "dtype": "bfloat16"}))
    with begun() as session, unharmed(session, ModelError, "in bfloat16"):
        session.load(whole)


def test_a_save_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = saved(tmp_path / "whole")
    before = {p.relative_to(whole): p.read_bytes() for p in whole.rglob("*") if p.is_file()}

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with begun() as session, unharmed(session, ModelError, "no space left"), monkeypatch.context() as patch:
        patch.setattr(saving, "write_tensors", full)
        session.save(whole)
    assert {p.relative_to(whole): p.read_bytes() for p in whole.rglob("*") if p.is_file()} == before
    assert [p.name for p in tmp_path.iterdir()] == ["whole"]
    with begun("recent") as session:
        (tmp_path / "other").mkdir()
        (tmp_path / "other" / "letter.txt").write_text("dear")
        for path in (tmp_path / "other", tmp_path / "other" / "letter.txt"):
            with pytest.raises(ModelError, match="no saved session"):
                session.save(path)
        assert (tmp_path / "other" / "letter.txt").read_text() == "dear"
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


def test_a_failure_of_the_store_alone_is_told_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from safetensors import SafetensorError
    from safetensors import torch as library

    def full(*_: Any) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    with begun() as session, monkeypatch.context() as patch:
        patch.setattr(library, "save_file", full)
        with pytest.raises(StoreError, match=r"cannot write to .*No space left.*\.$"):
            session._live.state.store.save(tmp_path / "store")  # type: ignore[union-attr]


def test_a_save_after_one_that_was_killed_keeps_the_whole_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between its two moves, a save leaves the old session beside its place."""
    whole = saved(tmp_path / "whole")
    whole.rename(record.beside(whole)[1])

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with begun() as session, monkeypatch.context() as patch:
        patch.setattr(saving, "write_tensors", full)
        with pytest.raises(ModelError, match="no space left"):
            session.save(whole)
        session.load(whole)


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
