"""Which files of a save, or of what was loaded, the next save links."""

import os
from pathlib import Path

import pytest

from mmaccel.policies.kv.store import HostStore, saved
from tests.policies.kv.store.test_saved import files, loads, small
from tests.policies.kv.store.units import LAYERS, UNIT_BYTES, check, contents, fill, filled, open_store

__all__ = ["small"]  # files of few units


def saved_as_a_session_does(store: HostStore, folder: Path) -> None:
    store.save(folder)
    for one in folder.iterdir():
        one.chmod(0o600)


def test_a_store_that_was_loaded_writes_what_is_new(tmp_path: Path) -> None:
    saved_as_a_session_does(filled(list(range(6))), tmp_path / "one")
    store = open_store()
    store.load(tmp_path / "one")
    fill(store, [6, 7, 8])
    store.save(tmp_path / "two")
    assert files(tmp_path / "one").keys() < files(tmp_path / "two").keys()
    loads(tmp_path / "two", list(range(9)))
    store.load(tmp_path / "one")
    store.forget_from(5)
    for layer in range(LAYERS):
        store.put_layer(layer, [5], *contents(layer, [5], salt=1))
    store.save(tmp_path / "three")
    assert len(files(tmp_path / "one").keys() & files(tmp_path / "three").keys()) == 1, "4 and 5 are cut"
    other = open_store()
    other.load(tmp_path / "three")
    check(other, 1, [5], salt=1)


def test_another_file_under_its_name_is_not_taken_for_it(tmp_path: Path) -> None:
    """Of the same size, as all units are."""
    store = filled(list(range(4)))
    store.save(tmp_path / "one")
    for one in (tmp_path / "one").glob("store-*"):
        one.with_suffix(".new").write_bytes(one.read_bytes()[::-1])
        one.with_suffix(".new").replace(one)
    store.save(tmp_path / "two")
    loads(tmp_path / "two", list(range(4)))


@pytest.mark.parametrize("when", ["it is read", "it is linked"])
def test_a_file_that_takes_its_name_meanwhile_is_not_taken_for_it(tmp_path: Path, monkeypatch, when) -> None:
    def other() -> None:
        for one in (tmp_path / "one").glob("store-*"):
            one.with_suffix(".new").write_bytes(one.read_bytes()[::-1])
            one.with_suffix(".new").chmod(0o600)
            one.with_suffix(".new").replace(one)

    def swapping(module: object, name: str) -> None:
        plain = getattr(module, name)
        calls = iter([1])

        def swap(*given: object) -> object:
            if next(calls, 0) == 1:
                other()
            return plain(*given)

        monkeypatch.setattr(module, name, swap)

    saved_as_a_session_does(filled(list(range(4))), tmp_path / "one")
    store = open_store()
    if when == "it is read":
        swapping(saved, "_checksum")
    store.load(tmp_path / "one")
    if when == "it is linked":
        swapping(os, "link")
    store.save(tmp_path / "two")
    loads(tmp_path / "two", list(range(4)))


OTHERS = {
    "another user's": lambda one, patch: patch.setattr(
        saved,
        "_identity",
        lambda *given, _plain=saved._identity: (_plain(*given)[0] + 1, *_plain(*given)[1:]),
    ),
    "one that others may read": lambda one, patch: one.chmod(0o644),
    "a link": lambda one, patch: (
        one.replace(one.with_suffix(".file")),
        one.symlink_to(one.with_suffix(".file")),
    ),
}


@pytest.mark.parametrize("what", OTHERS)
def test_a_file_that_a_save_must_not_change_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """A session's save sets the mode of its files, links among them."""
    saved_as_a_session_does(filled(list(range(4))), tmp_path / "one")
    store = open_store()
    for one in (tmp_path / "one").glob("store-*.safetensors"):
        OTHERS[what](one, monkeypatch)
    before = {one.name: one.stat() for one in (tmp_path / "one").glob("store-*.safetensors")}
    store.load(tmp_path / "one")
    saved_as_a_session_does(store, tmp_path / "two")
    assert not files(tmp_path / "one").keys() & files(tmp_path / "two").keys()
    assert all((tmp_path / "one" / name).stat() == then for name, then in before.items())
    loads(tmp_path / "two", list(range(4)))


def test_a_save_after_one_that_failed_late_writes_what_is_new(tmp_path: Path) -> None:
    store = filled(list(range(8)))
    store.save(tmp_path / "one")
    fill(store, [8])
    store.save(tmp_path / "failed")
    for one in (tmp_path / "failed").iterdir():
        one.unlink()
    store.save(tmp_path / "two")
    assert files(tmp_path / "one").keys() < files(tmp_path / "two").keys()
    loads(tmp_path / "two", list(range(9)))


def test_files_of_other_sizes_are_loaded_and_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store()
    monkeypatch.setattr(saved, "FILES", 9)
    for unit in range(4):
        fill(store, [unit])
        saved_as_a_session_does(store, tmp_path / str(unit))
    monkeypatch.setattr(saved, "FILES", 2)
    other = open_store()
    other.load(tmp_path / "3")
    saved_as_a_session_does(other, tmp_path / "few")
    assert len(files(tmp_path / "few")) == 2
    monkeypatch.setattr(saved, "FILE_BYTES", 3 * LAYERS * UNIT_BYTES)
    other.load(tmp_path / "few")
    fill(other, [4, 5])
    other.save(tmp_path / "threes")
    assert len(files(tmp_path / "threes")) == 3
    loads(tmp_path / "threes", list(range(6)))
