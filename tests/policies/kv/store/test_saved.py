"""A save writes what is new: files whose units are as the last save wrote them get another name."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmaccel.policies.kv.store import saved
from tests.policies.kv.store.units import LAYERS, UNIT_BYTES, check, contents, fill, open_store


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved, "FILE_BYTES", 4 * UNIT_BYTES)


def files(folder: Path) -> dict[int, str]:
    return {one.stat().st_ino: one.name for one in folder.glob("store-*")}


def loads(folder: Path, units: list[int]) -> None:
    other = open_store()
    other.load(folder)
    for layer in range(LAYERS):
        assert other.units(layer) == units
        check(other, layer, units)
    other.close()


def test_what_was_written_is_not_written_again(tmp_path: Path) -> None:
    store = open_store()
    fill(store, list(range(6)))
    store.save(tmp_path / "one")
    fill(store, list(range(6, 11)))
    store.save(tmp_path / "two")
    first, second = files(tmp_path / "one"), files(tmp_path / "two")
    assert len(first) == 2 * LAYERS and len(second) == 3 * LAYERS
    assert len(first.keys() & second.keys()) == LAYERS, "of each layer the first file is whole, and stays"
    loads(tmp_path / "one", list(range(6)))
    for one in (tmp_path / "one").iterdir():
        one.unlink()
    loads(tmp_path / "two", list(range(11)))
    store.save(tmp_path / "three")
    assert files(tmp_path / "three").keys() == second.keys()


def test_what_is_cut_is_written_anew(tmp_path: Path) -> None:
    store = open_store()
    fill(store, list(range(8)))
    store.save(tmp_path / "one")
    store.cut(6)
    for layer in range(LAYERS):
        store.put(layer, [6, 7], *contents(layer, [6, 7], salt=1))
    store.save(tmp_path / "two")
    assert len(files(tmp_path / "one").keys() & files(tmp_path / "two").keys()) == LAYERS
    other = open_store()
    other.load(tmp_path / "two")
    check(other, 1, [6, 7], salt=1)


def test_a_file_that_is_gone_or_cut_short_is_written_again(tmp_path: Path) -> None:
    store = open_store()
    fill(store, list(range(8)))
    store.save(tmp_path / "one")
    gone, short, *_ = sorted((tmp_path / "one").glob("store-*"))
    gone.unlink()
    short.write_bytes(short.read_bytes()[:-9])
    store.save(tmp_path / "two")
    loads(tmp_path / "two", list(range(8)))


def test_what_is_forgotten_leaves_the_other_files(tmp_path: Path) -> None:
    store = open_store(cap=16 * UNIT_BYTES * LAYERS, spill="drop_oldest", slots=16 * LAYERS)
    fill(store, list(range(12)))
    store.save(tmp_path / "one")
    fill(store, list(range(12, 18)))
    left = store.units(0)
    assert left[0] > 0
    store.save(tmp_path / "two")
    assert files(tmp_path / "one").keys() & files(tmp_path / "two").keys()
    loads(tmp_path / "two", left)
