"""A save of a store and of a memory's window: a unit is written once, though the store gets it after the save."""

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mmaccel.core.errors import StoreError
from mmaccel.core.files import checkpoint_io
from mmaccel.policies.kv.store import HostStore, Window
from tests.policies.kv.store.test_saved import files, small
from tests.policies.kv.store.units import LAYERS, UNIT_BYTES, check, contents, fill, filled, open_store

__all__ = ["small"]  # files of few units


def window(units: list[int], salt: int = 0) -> Window:
    sides = zip(*(contents(layer, units, salt) for layer in range(LAYERS)), strict=True)
    key, value = (torch.stack(side) for side in sides)
    return Window(units[0], (key, value))


def loads(folder: Path, held: list[int], first: int, end: int, salts: dict[int, int]) -> None:
    other = open_store(64)
    found = other.load(folder, end, first)
    assert (found is None) == (first == end)
    for layer in range(LAYERS):
        assert other.units(layer) == held
        for unit in held:
            check(other, layer, [unit], salts.get(unit, 0))
        for at in range(first, end):
            want = contents(layer, [at], salts.get(at, 0))
            for side, own in zip(found or (), want, strict=True):
                tokens = own.shape[1]
                assert torch.equal(side[layer, :, (at - first) * tokens : (at - first + 1) * tokens], own)
    other.close()


def new_bytes(folder: Path) -> int:
    """Bytes of units in files that no other save has."""
    found = [one.stat() for one in folder.glob("store-*")]
    headers = 200
    return sum(one.st_size - headers for one in found if one.st_nlink == 1)


def test_a_unit_of_the_window_is_written_once(tmp_path: Path) -> None:
    store = filled([0, 1])
    store.save(tmp_path / "one", window([2, 3, 4]))
    loads(tmp_path / "one", [0, 1], 2, 5, {})
    fill(store, [2, 3])
    store.save(tmp_path / "two", window([4, 5]))
    assert files(tmp_path / "one").keys() < files(tmp_path / "two").keys()
    assert new_bytes(tmp_path / "two") <= UNIT_BYTES * LAYERS
    loads(tmp_path / "two", [0, 1, 2, 3], 4, 6, {})
    other = open_store()
    other.load(tmp_path / "two", 6, 4)
    other.save(tmp_path / "three", window([4, 5]))
    loads(tmp_path / "three", [0, 1, 2, 3], 4, 6, {})


@pytest.mark.parametrize("gone", [False, True])
def test_the_window_is_kept_as_it_was(tmp_path: Path, gone: bool) -> None:
    """It goes on before the files are written; also where a file of the save before is not there any more."""
    store = filled([0, 1])
    store.save(tmp_path / "one", window([2, 3]))
    if gone:
        for one in (tmp_path / "one").iterdir():
            one.unlink()
    with checkpoint_io.defer_writes():
        store.save(tmp_path / "two", held := window([2, 3, 4]))
        for side in held.sides:
            side.zero_()
        for one in (tmp_path / "one").glob("store-*"):
            one.unlink()
    loads(tmp_path / "two", [0, 1], 2, 5, {})


def test_a_window_that_is_not_whole_is_told(tmp_path: Path) -> None:
    store = filled([0, 1])
    store.save(tmp_path, window([2, 3]))
    with pytest.raises(StoreError, match=r"units of the window, 2 to 4, are missing.*save it again\.$"):
        open_store().load(tmp_path, 5, 2)


def test_a_save_that_fails_at_once_gives_the_store_back(tmp_path: Path) -> None:
    store = filled([0])
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot write to"), checkpoint_io.defer_writes():
        store.save(tmp_path / "file" / "within", window([1]))
    store.drop_units([0])  # which waits for saves
    assert not store.units()


@pytest.mark.parametrize("seed", range(12))
def test_whatever_comes_between_saves_they_hold_what_is_there(tmp_path: Path, seed: int) -> None:
    """Units come, leave the window, are forgotten, and are taken back and come anew; files of saves before disappear."""
    draw = random.Random(seed)
    size, most = draw.randint(1, 6), draw.choice([0, 9])
    store: HostStore = open_store(64)
    salts, first, count, lost = dict[int, int](), 0, 0, 0
    for number in range(25):
        if draw.random() < 0.2 and count:
            # Back to where the window began at some unit, as after a call that failed.
            count = draw.randint(first, count)
            store.forget_from(first)
        begin, count = count, count + draw.randint(1, 5)
        for unit in range(begin, count):
            salts[unit] = draw.randint(0, 99)
        for unit in range(first, max(first, count - size)):
            for layer in range(LAYERS):
                store.put_layer(layer, [unit], *contents(layer, [unit], salts[unit]))
        first = max(first, count - size)
        if most:
            lost = max(lost, first - most)
            store.drop_units([unit for unit in store.units() if unit < lost])
        if draw.random() < 0.3 and number:
            for one in draw.sample(there := sorted(tmp_path.rglob("store-*")), len(there) // 2):
                one.unlink()
        sides = [window([unit], salts[unit]).sides for unit in range(first, count)]
        key, value = (torch.cat(side, 2) for side in zip(*sides, strict=True))
        with checkpoint_io.defer_writes():
            store.save(tmp_path / str(number), Window(first, (key, value)))
            key.zero_()
        loads(tmp_path / str(number), store.units(), first, count, salts)
        if draw.random() < 0.2:
            for one in (tmp_path / str(number)).iterdir():
                one.chmod(0o600)
            store.close()
            store = open_store(64)
            store.load(tmp_path / str(number), count, first)


def test_layers_that_hold_other_units_have_files_of_their_own(tmp_path: Path) -> None:
    store = filled([0, 1])
    store.put_layer(1, [2], *contents(1, [2]))
    store.save(tmp_path / "one", window([3]))
    other = open_store()
    found = other.load(tmp_path / "one", 4, 3)
    assert found is not None and [other.units(layer) for layer in range(LAYERS)] == [
        [0, 1],
        [0, 1, 2],
        [0, 1],
    ]
    for layer in range(LAYERS):
        check(other, layer, other.units(layer))
        wanted: tuple[Tensor, Tensor] = contents(layer, [3])
        assert all(torch.equal(side[layer], own) for side, own in zip(found, wanted, strict=True))
