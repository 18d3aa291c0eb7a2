"""Double buffering under lanes that run late: nothing is read before it is there, or overwritten while it is read."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mmaccel.core.errors import RecipeError, StoreError
from mmaccel.policies.kv.store import slots as module
from mmaccel.policies.kv.store.cost import Cost
from mmaccel.policies.kv.store.lanes import Mark

from .lanes_sim import SimLane, SimLanes
from .units import LAYERS, contents, fill, open_store


def replay(seed: int, count: int = 2, layers: int = 40) -> bool:
    """Layers that fetch for the next one before they read their own units; whether every reader saw what it asked for."""
    lanes = SimLanes(seed)
    store = open_store(16, lanes=lanes)
    fill(store, list(range(12)))
    draw = random.Random(seed)
    buffers = store.slots(count, units=1)
    asked = [draw.sample(range(12), draw.randint(1, 4)) for _ in range(layers)]
    seen: list[tuple[Tensor, Tensor]] = []
    ticket = buffers.fetch_async(0, asked[0], way="copies")
    for layer, units in enumerate(asked):
        mine = ticket
        if layer + 1 < layers:
            if count == 1:
                key, _ = mine.wait()
                read(lanes, key, layer, units, seen)
                mine.release()
            way = draw.choice(["copies", "gather", "pieces"])
            ticket = buffers.fetch_async((layer + 1) % LAYERS, asked[layer + 1], way=way)  # type: ignore[arg-type]
        if count > 1 or layer + 1 == layers:
            key, _ = mine.wait()
            read(lanes, key, layer, units, seen)
            mine.release()
    lanes.drain()
    return all(torch.equal(found, expected) for found, expected in seen)


def read(
    lanes: SimLanes, key: Tensor, layer: int, units: list[int], seen: list[tuple[Tensor, Tensor]]
) -> None:
    kept = torch.full_like(key, -7)
    lanes.compute.run(lambda: kept.copy_(key))
    seen.append((kept, contents(layer % LAYERS, units)[0]))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_readers_see_what_they_asked_for(count: int) -> None:
    assert all(replay(seed, count) for seed in range(30))


def without_waiting_for_free(monkeypatch: pytest.MonkeyPatch) -> None:
    real = module.Ticket.release

    def release(self: module.Ticket) -> None:
        real(self)
        self._slot.free = None

    monkeypatch.setattr(module.Ticket, "release", release)


def without_waiting_for_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimLanes, "compute", property(lambda self: Deaf(self._compute)))


class Deaf:
    """A lane that waits for nothing."""

    def __init__(self, lane: SimLane) -> None:
        self.run, self.mark = lane.run, lane.mark

    def wait(self, mark: Mark) -> None:
        return


@pytest.mark.parametrize("fault", [without_waiting_for_free, without_waiting_for_ready])
def test_a_missing_wait_is_caught(
    fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    assert not all(replay(seed) for seed in range(30))


def test_a_fresh_buffer_is_written_only_after_what_the_model_had_issued() -> None:
    """Its memory may have been given up by work that has yet to run."""
    lanes = SimLanes(0, eager=0)
    store = open_store(lanes=lanes)
    fill(store, [0, 1, 2])
    lanes.drain()
    buffers, done = store.slots(2), list[str]()
    lanes.compute.run(lambda: done.append("model"))
    ticket = buffers.fetch_async(0, [0, 2])
    lanes.wire.run(lambda: done.append("wire"))
    lanes.wire.go_on()
    assert done == [], "the wire waits, however fast it is"
    lanes.drain()
    assert done == ["model", "wire"] and torch.equal(ticket.wait()[0], contents(0, [0, 2])[0])


def test_a_buffer_is_not_handed_out_while_a_ticket_holds_it() -> None:
    store = open_store()
    fill(store, [0, 1, 2])
    buffers = store.slots(2)
    one, two = buffers.fetch_async(0, [0]), buffers.fetch_async(0, [1, 2])
    with pytest.raises(StoreError, match=r"all 2 buffers are held by tickets; release one"):
        buffers.fetch_async(0, [2])
    with pytest.raises(StoreError, match="does not hold unit 9"):
        one.release()
        buffers.fetch_async(0, [9])
    with buffers.fetch_async(0, [2, 0]) as (key, value):
        for found, expected in zip((key, value), contents(0, [2, 0]), strict=True):
            assert torch.equal(found, expected)
    assert torch.equal(two.wait()[0], contents(0, [1, 2])[0])
    two.release()
    two.release()
    with pytest.raises(StoreError, match="released"):
        two.wait()
    assert buffers.nbytes() == 2 * sum(t.nbytes for t in contents(0, [0, 1]))
    with pytest.raises(RecipeError, match="count is 0"):
        store.slots(0)


def test_a_ticket_tells_how_long_its_units_were_waited_for() -> None:
    lanes = SimLanes(0, eager=0)
    store = open_store(lanes=lanes)
    fill(store, [0, 1])
    buffers = store.slots(2, units=1)
    never, early = buffers.fetch_async(0, [1]), buffers.fetch_async(0, [0])
    lanes.drain()
    lanes.steps += 5
    early.wait()
    lanes.drain()
    ahead, none = early.slack(), never.slack()
    assert ahead is not None and ahead >= 5 and none is None
    early.release()
    late = buffers.fetch_async(0, [1])
    late.wait()
    # The compute lane comes to its wait before the wire has begun.
    lanes.compute.go_on()
    lanes.steps += 5
    lanes.drain()
    waited = late.slack()
    assert waited is not None and waited <= -5


@pytest.mark.parametrize(
    ("runs", "nbytes", "expected"),
    [(1, 2**30, "copies"), (64, 2**24, "gather"), (1, 1000, "copies"), (20, 1000, "gather")],
)
def test_the_cheaper_way_is_taken(runs: int, nbytes: int, expected: str) -> None:
    """At 55 GB/s and 8 us a copy, 51 GB/s and 40 us a launch."""
    cost = Cost(copy=8e-6, copy_byte=1 / 55e9, launch=40e-6, launch_byte=1 / 51e9)
    assert cost.way(runs, nbytes) == expected


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["copies", "gather", "pieces", "auto"])
def test_random_delays_on_a_device(way: Any) -> None:
    """The streams held up at random: every reader still sees what it asked for."""
    store = open_store(64, device="cuda", slab_bytes=2**20)
    draw = random.Random(0)
    busy = torch.randn(1024, 1024, device="cuda")
    for layer in range(LAYERS):
        key, value = (t.cuda() for t in contents(layer, list(range(100))))
        store.put(layer, range(100), key, value)
        key.fill_(7)
        value.fill_(7)
    buffers = store.slots(2, units=1)
    results = []
    for turn in range(300):
        layer, units = turn % LAYERS, draw.sample(range(100), draw.randint(1, 30))
        with torch.cuda.stream(store.lanes.wire.stream):  # type: ignore[attr-defined]
            for _ in range(draw.randint(0, 3)):
                torch.mm(busy, busy)
        index = torch.tensor(units, device="cuda") if way in ("gather", "auto") and turn % 2 else units
        with buffers.fetch_async(layer, index, way=way) as (key, value):
            for _ in range(draw.randint(0, 3)):
                torch.mm(busy, busy)
            results.append((layer, units, key.clone(), value.clone()))
    for layer, units, *found in results:
        for ours, theirs in zip(found, contents(layer, units), strict=True):
            assert torch.equal(ours.cpu(), theirs)
    counted = store.counters()
    assert counted["bytes_in"] > 0 and counted["seconds_in"] > 0
    assert way != "gather" or counted["gathers"] == counted["fetches"] == 300
    store.close()
