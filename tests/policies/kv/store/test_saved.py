"""Saves write what is new; and faults a store survives: a full disk, a host without memory, a damaged save."""

import errno
import itertools
import json
import os
import threading
import zlib
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mmaccel.core.errors import StoreError
from mmaccel.core.files import checkpoint_io
from mmaccel.core.memory import buffers
from mmaccel.policies.kv.store import saved, slabs
from tests.policies.kv.store.units import (
    LAYERS,
    UNIT_BYTES,
    check,
    check_all,
    contents,
    fill,
    filled,
    open_store,
)
from tests.spies import broken, crossed


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved, "FILE_BYTES", 4 * LAYERS * UNIT_BYTES)
    monkeypatch.setattr(saved, "FILES", 2)


def files(folder: Path) -> dict[int, str]:
    return {one.stat().st_ino: one.name for one in folder.glob("store-*")}


def make_former(folder: Path, version: int, first: int = 99) -> None:
    """Turn a saved store into one of a version before 4: a file has one layer, and no unit of the window from `first` on."""
    index, names = folder / "store.json", itertools.count()
    told, pieces = json.loads(index.read_text()), []
    for piece in told["pieces"]:
        sides = load_file(folder / piece["file"])
        (folder / piece["file"]).unlink()
        kept = [unit for unit in piece["units"] if unit < first]
        for layer in piece["layers"] if kept else ():
            both = (sides[f"{side}.{layer}"] for side in ("key", "value"))
            rows = (one.unflatten(1, (len(piece["units"]), -1)) for one in both)
            units = torch.stack(tuple(rows)).permute(2, 0, 1, 3, 4)[: len(kept)].contiguous()
            save_file({"units": units}, folder / (name := f"former-{next(names)}.safetensors"))
            about = {
                "layer": layer,
                "units": kept,
                "crc": zlib.crc32(units.view(-1).view(torch.uint8).numpy()),
            }
            pieces.append({**piece, **about, "file": name, **({"groups": [5]} if version == 1 else {})})
    index.write_text(json.dumps({**told, "version": version, "pieces": pieces}))


def loads(folder: Path, units: list[int]) -> None:
    other = open_store()
    other.load(folder)
    check_all(other, units)
    other.close()


def test_what_was_written_is_not_written_again(tmp_path: Path) -> None:
    store = filled(list(range(6)))
    store.save(tmp_path / "one")
    fill(store, list(range(6, 11)))
    store.save(tmp_path / "two")
    first, second = files(tmp_path / "one"), files(tmp_path / "two")
    assert len(first) == 2 and len(second) == 4 and first.keys() < second.keys()
    loads(tmp_path / "one", list(range(6)))
    for one in (tmp_path / "one").iterdir():
        one.unlink()
    loads(tmp_path / "two", list(range(11)))
    store.save(tmp_path / "three")
    assert files(tmp_path / "three").keys() == second.keys()


MERGED = {
    (2, 4): [(1, 0), (2, 1), (1, 0), (2, 1), (3, 2), (2, 1), (3, 2)],
    (3, 9): [(1, 0), (2, 1), (3, 2), (1, 0), (2, 1), (3, 2), (4, 3), (2, 1)],
    (9, 4): [(1, 0), (2, 1), (3, 2), (4, 3), (5, 4)],
}
"""Small files that become one, and units that fill a file -> after each unit, files, and how many were there before."""


@pytest.mark.parametrize("most", MERGED)
def test_many_small_files_become_one_and_no_unit_is_left_out(tmp_path: Path, monkeypatch, most) -> None:
    monkeypatch.setattr(saved, "FILES", most[0])
    monkeypatch.setattr(saved, "FILE_BYTES", most[1] * LAYERS * UNIT_BYTES)
    store, counts, before = open_store(), [], dict[int, str]()
    for unit in range(len(MERGED[most])):
        fill(store, [unit])
        store.save(tmp_path / str(unit))
        now = files(tmp_path / str(unit))
        counts.append((len(now), len(now.keys() & before.keys())))
        before = now
        loads(tmp_path / str(unit), list(range(unit + 1)))
    assert counts == MERGED[most]


@pytest.mark.parametrize("clips", [[1], [1, 3], [3, 1, 1, 1, 1, 1, 1], [1, 12]])
@pytest.mark.parametrize(("room", "most"), [(2**30, 24), (24, 60)])
def test_few_files_hold_many_units_and_each_is_written_few_times(
    tmp_path: Path, monkeypatch, clips: list[int], room: int, most: int
) -> None:
    """Whatever the sizes of clips, so many files at `most`, in which `room` units fit."""
    monkeypatch.setattr(saved, "FILES", 8)
    monkeypatch.setattr(saved, "FILE_BYTES", room * LAYERS * UNIT_BYTES)
    store, written, count = open_store(600), 0, 0
    for number, some in zip(itertools.count(), itertools.cycle(clips)):
        fill(store, list(range(count, count := count + some)))
        store.save(tmp_path / str(number))
        here = [*(tmp_path / str(number)).glob("store-*")]
        written += sum(one.stat().st_size - 1000 for one in here if one.stat().st_nlink == 1)
        assert len(here) <= most, number
        if count > 300:
            break
    assert written < 4 * count * LAYERS * UNIT_BYTES
    loads(tmp_path / str(number), list(range(count)))


def test_a_folder_that_is_made_again_has_no_file_of_another_layer(tmp_path: Path) -> None:
    """Files of the last save are known by their names, which the new ones take."""
    store = filled(list(range(4)))
    store.save(tmp_path / "one")
    fill(store, [4, 5])
    (tmp_path / "one").rename(tmp_path / "old")
    store.save(tmp_path / "one")
    loads(tmp_path / "one", list(range(6)))
    loads(tmp_path / "old", list(range(4)))


DROPS = {
    "a slab": lambda store: store.free_last_slab(),
    "units": lambda store: store.drop_units([0]),
    "the last": lambda store: store.forget_from(7),
    "all": lambda store: store.close(),
}


@crossed(what=DROPS, fails=[False, True])
def test_what_would_drop_units_waits_while_they_are_saved(tmp_path: Path, what: str, fails: bool) -> None:
    store, told = filled(list(range(8)), 4 * LAYERS, spill="drop_oldest"), []
    other = threading.Thread(target=lambda: told.append(DROPS[what](store)))
    with pytest.raises(OSError, match="full") if fails else nullcontext(), checkpoint_io.defer_writes():
        if fails:
            checkpoint_io.write_or_defer(lambda: (_ for _ in ()).throw(OSError("full")))
        store.save(tmp_path)
        other.start()
        other.join(0.1)
        assert not told and not (tmp_path / "store.json").exists()
    other.join()
    assert told == [[0, 1, 2, 3] if what == "a slab" else None]
    if not fails:
        loads(tmp_path, list(range(8)))


def test_large_tensors_are_written_at_once_and_not_held_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_io, "DEFERRED_BYTES", 100)
    few, many = (torch.zeros(n, dtype=torch.uint8) for n in (60, 50))
    with checkpoint_io.defer_writes():
        for name, one in (("a", few), ("b", many)):
            checkpoint_io.write_tensors(tmp_path / name, {"x": one})
        assert (tmp_path / "b").exists() and not (tmp_path / "a").exists()
        few += 1
    assert not load_file(tmp_path / "a")["x"].any()


def test_what_is_cut_is_written_anew(tmp_path: Path) -> None:
    store = filled(list(range(8)))
    store.save(tmp_path / "one")
    store.forget_from(6)
    for layer in range(LAYERS):
        store.put_layer(layer, [6, 7], *contents(layer, [6, 7], salt=1))
    store.save(tmp_path / "two")
    assert len(files(tmp_path / "one").keys() & files(tmp_path / "two").keys()) == 1
    other = open_store()
    other.load(tmp_path / "two")
    check(other, 1, [6, 7], salt=1)


def test_a_file_that_is_gone_or_cut_short_is_written_again(tmp_path: Path) -> None:
    store = filled(list(range(8)))
    store.save(tmp_path / "one")
    gone, short, *_ = sorted((tmp_path / "one").glob("store-*"))
    gone.unlink()
    short.write_bytes(short.read_bytes()[:-9])
    store.save(tmp_path / "two")
    loads(tmp_path / "two", list(range(8)))


def test_what_is_forgotten_leaves_the_other_files(tmp_path: Path) -> None:
    store = filled(list(range(12)), cap=16 * UNIT_BYTES * LAYERS, spill="drop_oldest", slots=16 * LAYERS)
    store.save(tmp_path / "one")
    fill(store, list(range(12, 18)))
    assert store.units(0)[0] > 0
    store.save(tmp_path / "two")
    assert files(tmp_path / "one").keys() & files(tmp_path / "two").keys()
    loads(tmp_path / "two", store.units(0))
    store.drop_units([8, 9, 10, 13])
    store.save(tmp_path / "three")
    kept = files(tmp_path / "two").keys() & files(tmp_path / "three").keys()
    assert len(kept) == 4, "all but that of units 8 to 11"
    loads(tmp_path / "three", store.units(0))


def test_a_disk_that_fills_up_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream goes on answering, and goes on watching when there is room again."""
    store = filled(list(range(5)), 8, cap=8 * UNIT_BYTES, spill="disk", folder=tmp_path)
    held = store.counters()["disk_bytes"]
    broken(monkeypatch, os, "posix_fallocate", OSError(errno.ENOSPC, "No space left on device"))
    with pytest.raises(
        StoreError, match=r"do not fit on the disk under .*No space left.*free room there.*\.$"
    ):
        store.make_room_for(20)
    with pytest.raises(StoreError, match="do not fit"):
        store.put_layer(0, range(10, 40), *contents(0, list(range(10, 40))))
    assert store.counters()["disk_bytes"] == held and len(list(tmp_path.iterdir())) == held / (8 * UNIT_BYTES)
    check_all(store, [0, 1, 2, 3, 4], [4, 0, 2])
    monkeypatch.undo()
    store.make_room_for(20)
    fill(store, list(range(10, 30)))
    check(store, 1, [29, 3, 11])


def test_memory_that_the_host_cannot_spare_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    store = filled([0, 1], 8)
    monkeypatch.setattr(slabs, "free_host_bytes", lambda: 2**20)
    with pytest.raises(StoreError, match="the host has 1048576 bytes left"):
        store.make_room_for(20)
    check(store, 1, [1, 0])
    monkeypatch.setattr(slabs, "free_host_bytes", lambda: buffers.UNKNOWN)

    def pinned(*_: object, dtype: object = None, **__: object) -> bool:
        return dtype == torch.uint8

    broken(monkeypatch, torch, "empty", RuntimeError("cudaHostAlloc failed"), pinned)
    with pytest.raises(StoreError, match="full with 2"):
        store.make_room_for(20)


def test_what_the_host_has_is_read_from_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "meminfo").write_text("MemTotal:  1000 kB\nMemAvailable:  600 kB\n")
    monkeypatch.setattr(buffers, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(buffers, "GROUP", tmp_path)
    assert (buffers.total_host_bytes(), buffers.free_host_bytes()) == (1024000, 614400)
    (tmp_path / "memory.max").write_text("max\n")
    assert buffers.total_host_bytes() == 1024000
    (tmp_path / "memory.max").write_text("500000\n")
    (tmp_path / "memory.current").write_text("450000\n")
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 20000\nactive_file 1000\n")
    assert (buffers.total_host_bytes(), buffers.free_host_bytes()) == (500000, 71000)
    (tmp_path / "memory.current").write_text("600000\n")
    assert buffers.free_host_bytes() == 0
    monkeypatch.setattr(buffers, "MEMINFO", tmp_path / "no")
    monkeypatch.setattr(buffers, "GROUP", tmp_path / "no")
    assert buffers.total_host_bytes() == buffers.free_host_bytes() == buffers.UNKNOWN
    assert 0 < slabs.SPARE < 1


@pytest.mark.parametrize(
    "damage", ["none", "former", "short", "flip", "json", "missing", "shape", "version", "list", "twice"]
)
def test_what_was_saved_comes_back_or_is_refused(tmp_path: Path, damage: str) -> None:
    store = filled([0, 1, 2, 3, 4, 5, 9], 8, cap=16 * UNIT_BYTES, spill="disk", folder=tmp_path / "spilled")
    store.put_layer(0, [7], *contents(0, [7]))
    store.save(tmp_path / "saved")
    first, *_ = sorted((tmp_path / "saved").glob("*.safetensors"))
    index = tmp_path / "saved" / "store.json"
    told = json.loads(index.read_text())
    if damage == "short":
        first.write_bytes(first.read_bytes()[:-7])
    elif damage == "flip":
        raw = bytearray(first.read_bytes())
        raw[-30] ^= 1
        first.write_bytes(raw)
    elif damage == "json":
        index.write_text(index.read_text()[:-20])
    elif damage == "missing":
        first.unlink()
    elif damage == "shape":
        save_file({name: one[..., :1].contiguous() for name, one in load_file(first).items()}, first)
    elif damage == "version":
        index.write_text(json.dumps({**told, "version": 99}))
    elif damage == "list":
        index.write_text(json.dumps({**told, "pieces": [*told["pieces"][:-1], {"file": first.name}]}))
    elif damage == "twice":
        told["pieces"][0]["units"][1] = told["pieces"][0]["units"][0]
        index.write_text(json.dumps(told))
    elif damage == "former":
        make_former(tmp_path / "saved", 1)
    other = filled([2, 30], 8)
    if damage not in ("none", "former"):
        with pytest.raises(StoreError, match=r"(?<!\.\)); save it again\.$"):
            other.load(tmp_path / "saved")
        other.close()
        return
    puts = other.counters()["puts"]
    other.load(tmp_path / "saved")
    assert other.units(0) == [0, 1, 2, 3, 4, 5, 7, 9] and other.units(1) == [0, 1, 2, 3, 4, 5, 9]
    for layer in range(LAYERS):
        check(other, layer, other.units(layer))
    assert other.counters()["puts"] == puts, "loading is not counted as a stream's work"
    unlike = open_store(8, size=8)
    with pytest.raises(StoreError, match="load it with the model and frame size"):
        unlike.load(tmp_path / "saved")


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    store = filled([0], 8)
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError):
        store.save(tmp_path / "file" / "within")
    check(store, 0, [0])


def test_what_has_no_room_here_is_refused(tmp_path: Path) -> None:
    """Whoever saved it would ask for units that the host forgot while it read the others."""
    store = filled(list(range(12)), 8, spill="drop_oldest")
    store.save(tmp_path / "saved")
    small = open_store(8, cap=16 * UNIT_BYTES, spill="drop_oldest")
    with pytest.raises(StoreError, match=r"holds more than this host has room for; .*\.$"):
        small.load(tmp_path / "saved")
    assert small.counters()["dropped"] == 0
