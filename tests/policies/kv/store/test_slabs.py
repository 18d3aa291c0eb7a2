"""Slabs: made one ahead of need, and where they lie, as the wire tells it to the device."""

import sys
import threading
import weakref
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from mmaccel.core.errors import StoreError
from mmaccel.policies.kv import _archived
from mmaccel.policies.kv.store import HostStore, UnitShape, host, slabs
from tests.spies import heard

from .units import LAYERS, UNIT_BYTES, SimLanes, check, check_all, contents, fill, open_store


def ahead(monkeypatch, fails: Collection[int] = (), **fields: Any) -> tuple[HostStore, list[str]]:
    """A store of 4 slots a slab, as if pinned; and the threads that made its slabs: those in `fails`, from 1, fail."""
    store = open_store(4, **fields)
    own, made = store.slabs, list[str]()

    def memory() -> Tensor | None:
        made.append(threading.current_thread().name)
        raw = torch.empty(own.slab_bytes, dtype=torch.uint8)
        return None if len(made) in fails else own._cut(raw)

    own._pinned = True
    monkeypatch.setattr(own, "_memory", memory)
    monkeypatch.setattr(torch.accelerator, "empty_host_cache", lambda: None, raising=False)
    return store, made


def test_the_next_slab_is_there_before_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    store, made = ahead(monkeypatch)
    for unit in range(12):
        fill(store, [unit])
    assert len(store.slabs.slabs) == 9 and len(made) == 10
    assert made[0] == "MainThread" and set(made[1:]) == {"mmaccel-slab"}
    check_all(store, list(range(12)))
    assert store.counters()["host_bytes"] == 9 * 4 * UNIT_BYTES, "one that is ahead holds nothing yet"
    store.close()
    assert not store.slabs.slabs and store.slabs._ahead is None


def test_a_slab_is_pinned_before_a_token_waits_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A MiB takes some 0.8 ms. A host of any size is held in pieces that a system can map, and a unit has room."""

    def per(host: int, unit: int = 196, **fields: Any) -> tuple[int, int]:
        monkeypatch.setattr("mmaccel.policies.kv.store.slabs.total_host_bytes", lambda: host)
        store = HostStore(UnitShape(2, 4, unit, 128, torch.bfloat16), "cpu", **fields)
        return store.slabs.slab_bytes >> 20, store.slabs.per

    assert per(256 << 30) == (16, 41) and per(2**62) == (256, 668)
    assert all((gib << 10) // per(gib << 30)[0] <= 2**14 for gib in (1, 128, 1024, 4096))
    assert per(64 << 30, spill="disk")[0] == 256, "files are few"
    assert per(64 << 30, 1 << 14)[1] >= 4 and per(64 << 30, cap=64 << 20)[0] * 4 == 64


def test_nobody_holds_the_slabs_that_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """When PyTorch is told to keep none of the pinned memory, a gather's list of slabs would keep it."""
    store, _ = ahead(monkeypatch)
    fill(store, [0, 1, 2, 3, 4])
    check(store, 0, [0, 4])
    given, held = [weakref.ref(one) for one in store.slabs.slabs], list[bool]()
    monkeypatch.setattr(
        torch.accelerator,
        "empty_host_cache",
        lambda: held.append(any(one() is not None for one in given)),
        raising=False,
    )
    store.close()
    assert held == [False]


def test_none_is_made_beyond_the_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    store, made = ahead(monkeypatch, cap=3 * 4 * UNIT_BYTES)
    fill(store, [0, 1, 2, 3])
    with pytest.raises(StoreError, match="its cap of"):
        store.put_layer(0, [4], *contents(0, [4]))
    assert len(made) == 3


def test_one_that_cannot_be_made_is_told_when_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    store, made = ahead(monkeypatch, fails={4, 5})
    fill(store, [0, 1, 2, 3])
    with pytest.raises(StoreError, match="full with 4"):
        store.put_layer(0, [4], *contents(0, [4]))
    check(store, 0, [3, 0])
    assert made[3:] == ["mmaccel-slab", "MainThread"], "it is tried once more when it is needed"
    # Nor is that the end: the next may be had.
    store.put_layer(0, [4], *contents(0, [4]))
    check(store, 0, [4])
    store.close()


def test_one_that_could_not_be_made_ahead_is_made_when_it_is_needed(monkeypatch, tmp_path: Path) -> None:
    store, made = ahead(monkeypatch, fails={4}, spill="disk", folder=tmp_path)
    for unit in range(5):
        fill(store, [unit])
    assert made[3:5] == ["mmaccel-slab", "MainThread"]
    assert store.counters()["disk_bytes"] == 0 and not list(tmp_path.iterdir())
    check(store, 0, [4, 0])
    store.close()


def test_the_device_is_told_where_every_slab_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that came after it was told before, and after all were replaced."""

    def note(out: Tensor, slab: list[Tensor], base: Tensor, slot: Tensor, grain: int) -> Any:
        assert not any(one.data_ptr() % grain for one in slab)
        return base[: len(slab)].tolist(), [one.data_ptr() - slab[0].data_ptr() for one in slab]

    told = heard(monkeypatch, slabs, "copy_units", note)
    store = open_store(8)
    for units in ([0, 1], [2, 3, 4, 5], [6, 7, 8, 9]):
        fill(store, units)
        check(store, 2, units)
    assert len({len(base) for base, _ in told}) == 3
    assert all(base == apart for base, apart in told)


def test_where_slabs_lie_is_sent_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """However far behind the compute lane is: what it sends after the mark that the wire waits for may come too late."""
    lanes, issued, told = SimLanes(0, eager=0), False, list[list[int]]()
    store = open_store(8, lanes=lanes)
    for units in ([0, 1], [2, 3, 4, 5]):
        fill(store, units)
    lanes.drain()

    def send(numbers: list[int], device: torch.device) -> Tensor:
        """What the host sends goes with the lane that is at work, and with the compute lane when none is."""
        made = torch.full((len(numbers),), 77)
        copy = partial(made.copy_, torch.tensor(numbers))
        copy() if issued else lanes.compute_queue.run(copy)  # type: ignore[arg-type]
        return made

    def note(out: Tensor, slab: list[Tensor], base: Tensor, slot: Tensor, grain: int) -> None:
        told.append(base[: len(slab)].tolist())
        assert told[-1] == [one.data_ptr() - slab[0].data_ptr() for one in slab]

    for module in (host, slabs):
        monkeypatch.setattr(module, "on_device", send)
    monkeypatch.setattr(slabs, "copy_units", note)
    store.gather(torch.tensor([5, 0]), store.new_device_buffer(2))
    store.fetch(1, [3, 1])
    issued = True
    lanes.rush()
    assert len(told) == 2 and len(told[0]) > 1


def test_where_slabs_lie_stays_until_what_computes_has_read_it() -> None:
    """On a device the current stream is the wire's while that is given something to send."""
    store, own, wire = open_store(8), mock.Mock(), mock.Mock()
    fill(store, [0])
    lanes = SimpleNamespace(wire=wire, compute_queue=own)

    def run(work: Callable[[], object]) -> None:
        lanes.compute_queue = wire
        work()

    wire.run = run
    slabs.GatherTable(()).fill_from_slabs(store.slabs, lanes, store.device)  # type: ignore[arg-type]
    assert own.keep_alive.call_count == 1 and not wire.keep_alive.called


def test_captured_copies_stay_valid_while_hundreds_of_slabs_are_added() -> None:
    store, keys = open_store(1), set[Any]()
    for unit in range(400 // LAYERS):
        fill(store, [unit])
        keys.add(store.gather_tables.find().capture_key)
    assert len(store.slabs.slabs) >= 390 and len(keys) == 1


@pytest.mark.parametrize("seed", range(8))
def test_what_computes_after_a_join_runs_after_the_wire(seed: int) -> None:
    lanes, order = SimLanes(seed), list[str]()
    for _ in range(3):
        lanes.wire.run(lambda: order.append("wire"))
    lanes.wait_for_copies()
    lanes.compute_queue.run(lambda: order.append("compute"))
    lanes.rush()
    assert order == ["wire"] * 3 + ["compute"]


class Other:
    """A memory of somebody else's on another model."""

    def __init__(self) -> None:
        self._model = SimpleNamespace(model=object())


@pytest.mark.parametrize("module, opens", [(slabs, lambda: open_store().slabs), (_archived, Other)])
def test_others_open_and_close_while_all_are_listed(
    module: Any, opens: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In threads of theirs, between any two steps of the listing."""
    for listed in (slabs, _archived):  # memories that other tests keep count too
        monkeypatch.setattr(listed, "_open", weakref.WeakKeyDictionary())
    own: Any = SimpleNamespace(store=open_store(together=1 << 40), _model=SimpleNamespace(model=object()))
    there, new, over = [opens() for _ in range(200)], [opens() for _ in range(50)], threading.Event()
    for one in there:
        module._open[one] = None

    def come_and_go() -> None:
        while not over.is_set():
            for one in new:
                module._open[one] = None
            for one in new:
                module._open.pop(one, None)

    thread, interval = threading.Thread(target=come_and_go), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        thread.start()
        for _ in range(400):
            assert not own.store.slabs.next_slab_exceeds_process_limit
            assert not _archived.SharedArchive._relieved(own)
    finally:
        sys.setswitchinterval(interval)
        over.set()
        thread.join()
