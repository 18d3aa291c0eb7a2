"""A save of a store and of a memory's window: a unit is written once, though the store gets it after the save."""

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from mmaccel.core.errors import StoreError
from mmaccel.core.files import checkpoint_io
from mmaccel.policies.kv.store import HostStore, Rows, Window
from tests.policies.kv.store.test_saved import files, small
from tests.policies.kv.store.units import LAYERS, UNIT_BYTES, check, contents, fill, filled, open_store
from tests.spies import heard

__all__ = ["small"]  # files of few units


def window(units: list[int], salt: int = 0) -> Window:
    made = (contents(layer, units, salt) for layer in range(LAYERS))
    return Window(units[0], [(key[None], value[None]) for key, value in made])


def rows_of(units: list[int], salts: dict[int, int]) -> Rows:
    told = torch.tensor([[unit, salts.get(unit, 0)] for unit in units], dtype=torch.long).view(-1, 2)
    return Rows(units, {"number": told, "half": told[:, :, None].half() / 2})


def loads(
    folder: Path, held: list[int], first: int, end: int, salts: dict[int, int], rows: list[int] | None = None
) -> None:
    other, none = open_store(64), rows_of([], {}).tensors
    found, told = other.load(folder, end, first, none)
    assert (found is None) == (first == end) and told is not None
    wanted = rows_of(rows or [], salts)
    assert told.units == wanted.units
    assert all(torch.equal(told.tensors[name], one) for name, one in wanted.tensors.items())
    for layer in range(LAYERS):
        assert other.units(layer) == held
        for unit in held:
            check(other, layer, [unit], salts.get(unit, 0))
        for at in range(first, end):
            want = contents(layer, [at], salts.get(at, 0))
            for side, own in zip(found[layer] if found else (), want, strict=True):
                tokens = own.shape[1]
                assert torch.equal(side[0, :, (at - first) * tokens : (at - first + 1) * tokens], own)
    other.close()


def new_bytes(folder: Path) -> int:
    """Bytes of units in files that no other save has."""
    found = (load_file(one) for one in folder.glob("store-*") if one.stat().st_nlink == 1)
    return sum(tensor.nbytes for one in found for tensor in one.values())


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
        for side in (side for pair in held.pairs for side in pair):
            side.zero_()
        for one in (tmp_path / "one").glob("store-*"):
            one.unlink()
    loads(tmp_path / "two", [0, 1], 2, 5, {})


def test_a_window_that_is_not_whole_is_told(tmp_path: Path) -> None:
    store = filled([0, 1])
    store.save(tmp_path, window([2, 3]))
    with pytest.raises(StoreError, match=r"units of the window, 2 to 4, are missing.*save it again\.$"):
        open_store().load(tmp_path, 5, 2)


def test_a_unit_of_the_window_that_is_there_twice_is_told(tmp_path: Path) -> None:
    store = filled([0, 1])
    store.save(tmp_path, window([2, 3]))
    told = json.loads((tmp_path / "store.json").read_text())
    first = next(piece for piece in told["pieces"] if piece["units"] == [0, 1])
    first["units"] = [0, 3]
    (tmp_path / "store.json").write_text(json.dumps(told))
    with pytest.raises(StoreError, match=r"a unit of the window twice.*save it again\.$"):
        open_store().load(tmp_path, 4, 2)


def test_nothing_is_copied_before_a_save_knows_where_there_is_room(tmp_path: Path, monkeypatch) -> None:
    """A device may have none: `write_tensors` falls back to the host, if it gets views."""
    given: list[dict[str, Tensor]] = []
    heard(monkeypatch, checkpoint_io, "write_tensors", lambda path, tensors, then: given.append(tensors))
    store, late, rows = filled([0, 1]), window([2, 3]), rows_of([0, 2, 3, 5], {})
    with checkpoint_io.defer_writes():
        store.save(tmp_path, late, rows)
        own = {one.untyped_storage().data_ptr() for pair in late.pairs for one in pair}
        own |= {one.untyped_storage().data_ptr() for one in rows.tensors.values()}
        assert len(given) == 2
        assert all(one.untyped_storage().data_ptr() in own for some in given for one in some.values())


def test_a_save_that_fails_at_once_gives_the_store_back(tmp_path: Path) -> None:
    store = filled([0])
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError), checkpoint_io.defer_writes():
        store.save(tmp_path / "file" / "within", window([1]))
    store.drop_units([0])  # which waits for saves
    assert not store.units()


@pytest.mark.parametrize("seed", range(8))
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
        # What an index keeps of units goes later, and all at once.
        kept = [unit for unit in range(count) if unit >= (lost if draw.random() < 0.2 else lost // 4 * 4)]
        if draw.random() < 0.3 and number:
            for one in draw.sample(there := sorted(tmp_path.rglob("store-*")), len(there) // 2):
                one.unlink()
        each = [window([unit], salts[unit]).pairs for unit in range(first, count)]
        layers = (zip(*(one[layer] for one in each), strict=True) for layer in range(LAYERS))
        pairs = [(torch.cat(key, 2), torch.cat(value, 2)) for key, value in layers]
        with checkpoint_io.defer_writes():
            store.save(tmp_path / str(number), Window(first, pairs), own := rows_of(kept, salts))
            for one in (*(side for pair in pairs for side in pair), *own.tensors.values()):
                one.zero_()
        loads(tmp_path / str(number), store.units(), first, count, salts, kept)
        if draw.random() < 0.2:
            for one in (tmp_path / str(number)).iterdir():
                one.chmod(0o600)
            store.close()
            store = open_store(64)
            store.load(tmp_path / str(number), count, first, own.tensors)


def test_layers_that_hold_other_units_have_files_of_their_own(tmp_path: Path) -> None:
    store = filled([0, 1])
    store.put_layer(1, [2], *contents(1, [2]))
    store.save(tmp_path / "one", window([3]))
    other = open_store()
    found, _ = other.load(tmp_path / "one", 4, 3)
    assert found is not None and [other.units(layer) for layer in range(LAYERS)] == [
        [0, 1],
        [0, 1, 2],
        [0, 1],
    ]
    for layer in range(LAYERS):
        check(other, layer, other.units(layer))
        assert all(
            torch.equal(side[0], own) for side, own in zip(found[layer], contents(layer, [3]), strict=True)
        )
