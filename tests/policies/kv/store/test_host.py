"""The host store against a plain dictionary, and its counts, limits and faults."""

import random
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mmaccel.core.errors import RecipeError, StoreError
from mmaccel.core.memory.buffers import CopyQueues
from mmaccel.policies.kv.store import host
from tests.spies import broken

from .units import (
    GROUPS,
    LAYERS,
    SIZE,
    TOKENS,
    UNIT_BYTES,
    SimLanes,
    SimMark,
    check,
    check_all,
    contents,
    fill,
    filled,
    open_store,
    poisoned,
)

KINDS = ("put", "put", "put", "fetch", "fetch", "fetch", "index", "drop", "save", "cut")


@given(seed=st.integers(0, 10**6), files=st.booleans())
def test_any_order_of_calls_gives_what_a_dictionary_gives(
    tmp_path_factory: pytest.TempPathFactory, seed: int, files: bool
) -> None:
    """Late lanes, memory that runs over into files: what comes back is what was put."""
    with mock.patch.object(torch, "empty", poisoned):
        replay(tmp_path_factory.mktemp("saved") / "at", seed, files)


def replay(folder: Path, seed: int, files: bool) -> None:
    lanes, draw = SimLanes(seed, eager=0.1), random.Random(seed)
    limits = dict(cap=12 * UNIT_BYTES, spill="disk") if files else {}
    store = open_store(12, lanes=lanes, **limits)
    plain: dict[tuple[int, int], int] = {}
    waiting: list[tuple[Tensor, Tensor]] = []
    window = torch.full((2, GROUPS, 8 * TOKENS, SIZE), -1.0)

    def expect(found: Tensor, layer: int, units: list[int], side: int) -> None:
        """What the compute lane, as the model does, reads there when it comes to it."""
        kept = torch.full_like(found, -9)
        lanes.compute_queue.run(lambda: kept.copy_(found))
        made = [
            contents(layer, [unit], plain[layer, unit])[side]
            if (layer, unit) in plain
            else torch.zeros(GROUPS, TOKENS, SIZE)
            for unit in units
        ]
        waiting.append((kept, torch.cat(made, 1) if made else kept))

    for number in range(24):
        kind, layer = draw.choice(KINDS), draw.randrange(2)
        units = draw.sample(range(9), draw.randint(0, 6))
        held = [unit for unit in units if (layer, unit) in plain]
        if kind == "put":
            fresh = [unit for unit in units if unit not in held]
            assert store.put_layer(layer, fresh, *contents(layer, fresh, number % 16)) == []
            plain.update({(layer, unit): number % 16 for unit in fresh})
        elif kind == "fetch":
            out = window[:, :, : len(held) * TOKENS] if draw.random() < 0.5 else None
            found = store.fetch(layer, held, out)
            for side in (0, 1):
                expect(found[side], layer, held, side)
        elif kind == "index" and not files and plain:
            index, out = torch.full((len(units),), -5), store.new_device_buffer(len(units))
            rows = torch.from_numpy(store.table.at.rows_of(np.array(units, dtype=np.int64)))
            slots = torch.nn.functional.pad(store.table.slots_on_device()[layer], (0, 10), value=-1)[rows]
            lanes.compute_queue.run(lambda index=index, slots=slots: index.copy_(slots))
            lanes.compute_queue.wait(store.gather(index, out)[1])
            expect(out[1], layer, units, 1)
        elif kind == "drop":
            store.drop_units(units)
            plain = {key: salt for key, salt in plain.items() if key[1] not in units}
        elif kind == "save" and draw.random() < 0.5:
            store.save(folder)
            store.load(folder)
        elif kind == "cut":
            end = draw.randint(0, 12)
            store.forget_from(end)
            plain = {key: salt for key, salt in plain.items() if key[1] < end}
    for layer in range(LAYERS):
        held = sorted(unit for at, unit in plain if at == layer)
        assert store.units(layer) == held
        expect(store.fetch(layer, held)[0], layer, held, 0)
    assert store.counters()["units"] == len(plain)
    lanes.drain()
    for found, expected in waiting:
        assert torch.equal(found, expected)
    store.close()


@pytest.mark.parametrize("files", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_units_come_back_in_the_order_asked_twice_if_asked_twice(
    files: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    spilled = dict(cap=8 * UNIT_BYTES, spill="disk", folder=tmp_path) if files else {}
    store = open_store(4, dtype=dtype, **spilled)
    made = {layer: torch.randn(2, GROUPS, 9 * TOKENS, SIZE).to(dtype) for layer in range(LAYERS)}
    for layer, (key, value) in made.items():
        store.put_layer(layer, range(9), key[None], value[None])
    assert store.can_gather is not files
    order = [8, 0, 1, 2, 8, 5, 4]
    for layer, both in made.items():
        expected = both.unflatten(2, (9, TOKENS))[:, :, order].flatten(2, 3)
        found = store.fetch(layer, order)
        assert torch.equal(torch.stack(found), expected)
        assert found[0].is_contiguous() and found[0].dtype == dtype
        wide = torch.full((2, GROUPS, 50, SIZE), 7, dtype=dtype)
        store.fetch(layer, order, wide[:, :, 3:38])
        assert torch.equal(wide[:, :, 3:38], expected)
        assert (wide[:, :, :3] == 7).all() and (wide[:, :, 38:] == 7).all()


def test_copies_bytes_and_launches_are_counted_exactly(tmp_path: Path) -> None:
    for spilled in (False, True):
        fields = dict(cap=0, spill="disk", folder=tmp_path, slab_bytes=64 * UNIT_BYTES) if spilled else {}
        store = filled([0, 1, 2, 3, 4, 5], 16, **fields)
        counted = store.counters()
        # The units of one call lie side by side; a slab ends behind the 16th.
        assert counted["puts"] == 3 and counted["bytes_out"] == 18 * UNIT_BYTES
        assert counted["copies_out"] == (3 if spilled else 4)
        for units, copies in ([0, 1, 2, 3, 4, 5], 1), ([5, 3, 4], 1), ([0, 2, 5], 3):
            before = store.counters()
            store.fetch(0, units)
            after = store.counters()
            assert after["copies_in"] - before["copies_in"] == (copies if spilled else 1), units
            assert after["gathers"] - before["gathers"] == (not spilled)
            assert after["disk_in"] - before["disk_in"] == len(units) * spilled
            assert after["bytes_in"] - before["bytes_in"] == len(units) * UNIT_BYTES
            assert after["fetches"] - before["fetches"] == 1
        assert after["seconds_in"] > 0 and after["seconds_out"] > 0
        assert (after["host_bytes"], after["disk_bytes"] > 0) == (0 if spilled else 32 * UNIT_BYTES, spilled)
        assert all(isinstance(value, float) for value in after.values())


def test_a_store_at_its_cap_refuses_and_loses_nothing() -> None:
    store = filled([0, 1, 2, 3], 8, cap=16 * UNIT_BYTES)
    with pytest.raises(StoreError, match=r"4 frames.*cap of 5120 bytes is reached; raise cap.*\.$"):
        store.put_layer(0, range(10, 15), *contents(0, list(range(10, 15))))
    with pytest.raises(StoreError, match="cap"):
        store.make_room_for(2)
    assert store.counters()["host_bytes"] <= 16 * UNIT_BYTES
    check_all(store, [0, 1, 2, 3], [3, 0, 2])
    assert store.make_room_for(1) == []
    fill(store, [4])
    store.table.free_slots([0, 1])
    assert store.make_room_for(2) == []
    fill(store, [5, 6])
    check(store, 2, [2, 3, 4, 5, 6])


def test_a_reserved_chunk_always_fits() -> None:
    store = filled([0], 8, cap=24 * UNIT_BYTES)
    assert store.make_room_for(7) == []
    fill(store, [1, 2, 3])
    fill(store, [4, 5, 6, 7])
    check_all(store, list(range(8)))
    with pytest.raises(StoreError):
        store.make_room_for(1)


def test_the_oldest_units_go_where_that_is_asked_for() -> None:
    store = filled(list(range(8)), 8, cap=24 * UNIT_BYTES, spill="drop_oldest")
    assert store.make_room_for(2) == [0, 1]
    fill(store, [8, 9])
    assert store.put_layer(0, [10], *contents(0, [10])) == [2]
    for layer in range(LAYERS):
        assert store.units(layer) == [3, 4, 5, 6, 7, 8, 9] + ([10] if layer == 0 else [])
        check(store, layer, store.units(layer))
    assert store.counters()["dropped"] == 3
    need = 9 * LAYERS * UNIT_BYTES
    with pytest.raises(
        StoreError, match=f"its cap of .* is reached and a pass needs at least {need}; raise cap"
    ) as error:
        store.make_room_for(9)
    assert "drop_oldest" not in str(error.value)
    assert store.units(1) == [3, 4, 5, 6, 7, 8, 9], "what cannot fit at all drops nothing"


def test_a_device_without_memory_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    store = filled(list(range(8)), 8, cap=24 * UNIT_BYTES, spill="drop_oldest")
    with monkeypatch.context() as patch, pytest.raises(RuntimeError):
        broken(patch, torch, "empty", RuntimeError("out of memory"))
        store.put_layer(0, [8], *contents(0, [8]))
    check_all(store, list(range(8)))


def test_files_take_what_memory_does_not_and_go_with_the_store(tmp_path: Path) -> None:
    store = filled(list(range(20)), 8, cap=8 * UNIT_BYTES, spill="disk", folder=tmp_path)
    files = list(tmp_path.iterdir())
    counted = store.counters()
    assert counted["host_bytes"] == 8 * UNIT_BYTES and counted["disk_bytes"] >= 52 * UNIT_BYTES
    assert sum(file.stat().st_size for file in files) == counted["disk_bytes"]
    check_all(store, list(range(20)), [19, 0, 7, 1, 2, 18])
    assert store.counters()["disk_in"] > 0 and not store.can_gather
    store.close()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_its_own_is_removed_even_by_a_store_that_was_not_closed() -> None:
    store = filled([0], 8, cap=0, spill="disk")
    folder = store.slabs.folder
    assert folder is not None and folder.is_dir()
    check(store, 2, [0])
    del store
    assert not folder.exists()


def test_slabs_use_the_cap_and_never_exceed_it() -> None:
    for cap in (0, 1, 100, 2_560, 10_000, 123_456, 10**6):
        store = open_store(4096, cap=cap)
        try:
            for unit in range(200):
                store.put_layer(0, [unit], *contents(0, [unit]))
        except StoreError:
            assert store.counters()["host_bytes"] >= 7 / 8 * cap - 8 * UNIT_BYTES
        assert store.counters()["host_bytes"] <= cap
        store.close()
    files = filled(list(range(20)), 4096, cap=0, spill="disk")
    assert files.counters()["disk_bytes"] == 64 * UNIT_BYTES, "files are few, however small the cap"
    files.close()


def test_wrong_calls_are_told_and_change_nothing() -> None:
    store = filled([0, 1])
    before = store.counters()["units"]
    key, value = contents(0, [2, 3])
    for units, pair, told in (
        ([1, 2], (key, value), "holds unit 1 already; drop it first"),
        ([2, 2], (key, value), "number each once"),
        ([-1, 2], (key, value), "from 0 on"),
        ([2], (key, value), r"\[2, 10, 4\] and should be torch.float32 \[2, 5, 4\]; all units of a stream"),
        ([2, 3], (key.double(), value), "torch.float64"),
        ([2, 3], (key, value[:, :6]), "value of 2 units"),
    ):
        with pytest.raises(StoreError, match=told):
            store.put_layer(0, units, *pair)
    for call in (lambda: store.fetch(0, [0, 9]), lambda: store.unit_views(0, [9])):
        with pytest.raises(StoreError, match="layer 0 does not hold unit 9"):
            call()
    for field, value in (("layers", 0), ("slab_bytes", 0), ("cap", -1), ("spill", "sink")):
        with pytest.raises(RecipeError, match=field):
            open_store(**{field: value})
    assert store.counters()["units"] == before
    check(store, 0, [1, 0])


def test_a_closed_store_holds_and_serves_nothing() -> None:
    store = filled([0])
    store.close()
    store.close()
    counted = store.counters()
    assert counted["units"] == counted["host_bytes"] == counted["index_bytes"] == 0 and counted["puts"] == 3
    calls = lambda: store.fetch(0, [0]), lambda: fill(store, [1]), lambda: store.make_room_for(1)
    for call in (*calls, store.wait_for_copies):
        with pytest.raises(StoreError, match="it is closed; open another"):
            call()


def test_a_store_outlives_inference_mode() -> None:
    store = open_store(4)
    outside = store.new_device_buffer(1)
    with torch.inference_mode():
        fill(store, [0, 1])
        check(store, 0, [0])
        check(store, 0, [1], out=outside)
    fill(store, list(range(2, 9)))
    with torch.inference_mode():
        fill(store, [9])
    check(store, 2, list(range(10)))
    with torch.inference_mode():
        empty = open_store(4)
    assert empty.table.slots_on_device().shape == (LAYERS, 0)


def test_work_is_done_at_once_without_streams() -> None:
    lanes = CopyQueues(torch.device("cpu"))
    done: list[int] = []
    mark = lanes.compute_queue.record_mark()
    lanes.wire.wait(mark)
    lanes.wire.run(lambda: done.append(1))
    later = lanes.wire.record_mark(timed=True)
    lanes.wire.record_mark().wait_on_host()
    assert done == [1] and mark.seconds(later) >= 0


@pytest.mark.usefixtures("small_rooms")
def test_the_table_is_as_wide_as_what_is_held(tmp_path: Path) -> None:
    """A stream without an end; the last units are held and two pinned. Some are taken back and come again; all are saved."""
    store, pinned, last = open_store(12), [3, 40], 20
    for unit in range(600):
        fill(store, [unit])
        store.drop_units([one for one in store.units(0) if one <= unit - last and one not in pinned])
        if unit % 97 == 96:
            store.forget_from(unit - 5)
            fill(store, list(range(unit, unit - 6, -1)))
    held = [*pinned, *range(580, 600)]
    store.save(tmp_path)
    for _ in range(2):
        assert store.table.slots_on_device().shape[1] == store.table.slot.shape[1] <= 4 * len(held)
        check_all(store, held, held[::-1])
        assert all(store.table.find_slots([n], [2, 41, 579]).max() == -1 for n in range(LAYERS))
        with pytest.raises(StoreError, match="does not hold unit 41"):
            store.fetch(0, [40, 41])
        store.load(tmp_path)
    assert store.table.slot.shape[1] <= 4 * len(held)
    store.forget_from(0)
    fill(store, [0, 1])
    check(store, 1, [1, 0])
    assert store.units() == [0, 1] and store.table.at.gap == 0


def test_copies_of_what_leaves_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wire that sends nothing until it is waited for: the bytes on their way stay below the limit and one transfer."""
    monkeypatch.setattr(host, "BEHIND", 8 * UNIT_BYTES)
    lanes, most = SimLanes(0, eager=0.0), 0
    store = open_store(64, lanes=lanes)
    for unit in range(60):
        store.put_layer(0, [unit], *contents(0, [unit]))
        behind = sum(not mark.passed for _, _, mark, _ in store._timed if isinstance(mark, SimMark))
        most = max(most, behind)
    assert 1 < most <= 9
    found = store.fetch(0, list(range(60)))
    lanes.drain()
    assert all(torch.equal(*pair) for pair in zip(found, contents(0, list(range(60))), strict=True))
