"""Fetching ahead under lanes that run late, by queries that the last question foretells.

Nothing is read before it is there, or overwritten while it is read.
"""

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mmaccel.core.memory.buffers import QueueMark, on_device
from mmaccel.policies.kv._prefetch import Prefetcher, QueryPrediction
from mmaccel.policies.kv.store import HostStore, host
from tests.policies.kv.store.units import LAYERS, TOKENS, SimLane, SimLanes, contents, fill, open_store

FIRST, COUNT, ROOM = 12, 16, 4
"""Units on the host, units in all, and units that a layer keeps."""


class Replay:
    """Questions through layers that fetch for the next one, each of which reads what it asked for when its turn comes."""

    def __init__(self, store: HostStore, seed: int, hold_up: Callable[[], None] = lambda: None) -> None:
        self.store, self.draw, self.hold_up = store, random.Random(seed), hold_up
        self.prefetcher = Prefetcher(store, LAYERS, COUNT - FIRST, ROOM)
        device = store.device
        self.windows = [
            tuple(t[None].to(device) for t in contents(layer, list(range(FIRST, COUNT))))
            for layer in range(LAYERS)
        ]
        self.seen: list[tuple[int, list[int], Tensor]] = []

    def units(self, end: int, most: int) -> list[int]:
        return sorted(self.draw.sample(range(end), self.draw.randint(1, most)))

    def ask(self) -> None:
        self.prefetcher.begin(FIRST)
        wanted = [self.units(FIRST + 2, 6) for _ in range(LAYERS)]
        for layer, units in enumerate(wanted):
            later = wanted[layer + 1] if layer + 1 < LAYERS else []
            # Some of what will be wanted, and some that will not.
            guess = sorted({*self.draw.sample(later, len(later) // 2), *self.units(FIRST, 3)})

            rest = list(range(max(units) + 1, COUNT))[-2:]
            out = self.store.new_device_buffer(len(units) + len(rest))
            self.hold_up()
            every = self.told([*units, *rest])
            code = self.prefetcher.location_codes(layer, every)
            ready = self.prefetcher.copy_units(layer, every, code, len(units), out, self.windows[layer])
            if later and self.draw.random() < 0.8:
                self.prefetcher.prefetch(
                    layer + 1, self.prefetcher.predict_codes(layer + 1, self.told([*guess, -1]))
                )
            self.store.lanes.compute_queue.wait(ready)
            self.prefetcher.cache_units(layer, every[: len(units)], out[:, :, : len(units) * TOKENS])
            self.read(layer, [*units, *rest], out)
        self.prefetcher.drop_prefetched()
        # As a pass of the stream does, whose cache stays a question's.
        self.prefetcher.begin(FIRST)
        for layer in range(LAYERS):
            units = self.units(FIRST, 4)
            self.hold_up()
            self.read(layer, units, self.prefetcher.retrieve(layer, self.told(units)))
        self.prefetcher.count_copies()

    def told(self, units: list[int]) -> Tensor:
        return torch.tensor(units, dtype=torch.long, device=self.store.device)

    def read(self, layer: int, units: list[int], out: Tensor) -> None:
        kept = torch.full_like(out, -7)

        def work() -> None:
            self.hold_up()
            kept.copy_(out)
            # Its memory is another's by now.
            out.fill_(-9)

        self.store.lanes.compute_queue.run(work)
        self.seen.append((layer, units, kept))

    def right(self) -> bool:
        """Whether every reader saw what it asked for."""
        return all(
            torch.equal(kept.cpu(), torch.stack(contents(layer, units))) for layer, units, kept in self.seen
        )


def holds(seed: int, questions: int = 4) -> bool:
    lanes = SimLanes(seed)
    store = open_store(16, lanes=lanes)
    fill(store, list(range(FIRST)))
    lanes.drain()
    one = Replay(store, seed)
    for _ in range(questions):
        one.ask()
    lanes.drain()
    counted = one.prefetcher.counts()
    assert counted["covered"] > 0 and counted["missing"] > 0 and counted["cached"] > 0
    return one.right()


def test_readers_see_what_they_asked_for() -> None:
    assert all(holds(seed) for seed in range(30))


class Deaf:
    """A lane that waits for nothing."""

    def __init__(self, lane: SimLane) -> None:
        self.run, self.record_mark, self.keep_alive = lane.run, lane.record_mark, lane.keep_alive

    def wait(self, mark: QueueMark) -> None:
        return


def compute_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is missing is read before it is there, and a window written while the last layer's is read."""
    monkeypatch.setattr(SimLanes, "compute_queue", property(lambda self: Deaf(self._compute)))


def the_wire_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gather reads a window, or what a layer keeps, before it is laid there."""
    monkeypatch.setattr(SimLanes, "wire", property(lambda self: Deaf(self._wire)))


@pytest.mark.parametrize("fault", [compute_waits_for_nothing, the_wire_waits_for_nothing])
def test_a_missing_wait_is_caught(fault: Callable[[pytest.MonkeyPatch], None], monkeypatch) -> None:
    fault(monkeypatch)
    assert not all(holds(seed) for seed in range(30))


@pytest.mark.gpu
def test_random_delays_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The streams held up at random, and what the host sends them too: every reader still sees what it asked for."""
    store = open_store(64, device="cuda", slab_bytes=2**20)
    for layer in range(LAYERS):
        key, value = (t.cuda() for t in contents(layer, list(range(FIRST))))
        store.put_layer(layer, range(FIRST), key, value)
        # What was put has been packed.
        key.fill_(7)
        value.fill_(7)
    busy, draw = torch.randn(1024, 1024, device="cuda"), random.Random(1)

    def hold_up() -> None:
        with torch.cuda.stream(
            store.lanes.wire.stream if draw.random() < 0.5 else torch.cuda.current_stream()
        ):  # type: ignore[attr-defined]
            for _ in range(draw.randint(0, 3)):
                torch.mm(busy, busy)

    def sent(numbers: list[int] | Tensor, device: torch.device) -> Tensor:
        for _ in range(20):
            torch.mm(busy, busy)
        return on_device(numbers, device)

    monkeypatch.setattr(host, "on_device", sent)
    one = Replay(store, 0, hold_up)
    for _ in range(100):
        one.ask()
    assert one.right()
    counted, wired = one.prefetcher.counts(), store.counters()
    assert counted["covered"] > 0 and counted["missing"] > 0 and counted["cached"] > 0
    assert wired["bytes_in"] > 0 and wired["seconds_in"] > 0 and wired["gathers"] >= 100 * LAYERS
    store.close()


DEPTH, WORDS = 3, 5
WORD_COUNT = torch.tensor([WORDS])


def drifting() -> QueryPrediction:
    return QueryPrediction(DEPTH, 4, torch.device("cpu"))


def states(seed: int) -> torch.Tensor:
    return torch.randn(1, WORDS, 4, generator=torch.Generator().manual_seed(seed))


def foretold(drift: QueryPrediction, layer: int, words: torch.Tensor) -> torch.Tensor:
    """By rows of which the last ones are no words."""
    drift.note_input(layer)
    rows = torch.cat([words, torch.full((1, 3, 4), torch.nan)], 1)
    return drift.predict_hidden(layer, rows, WORD_COUNT)[:, :WORDS]


def ask(drift: QueryPrediction, start: torch.Tensor, added: list[torch.Tensor]) -> list[torch.Tensor]:
    """What is foretold at each layer, when layers add `added` to all rows."""
    told = []
    for layer in range(len(added) + 1):
        told.append(foretold(drift, layer, start + sum(added[:layer], torch.zeros(4))))
    drift.end_question()
    return told


def test_what_layers_add_alike_is_foretold_from_the_second_question_on() -> None:
    drift, added = drifting(), [torch.arange(4.0), torch.tensor([0.0, -1.0, 2.0, 5.0])]
    first, start = states(1), states(2)
    plain = ask(drift, first, added)
    assert torch.equal(plain[0], first)
    told = ask(drift, start, added)
    for layer in range(2):
        torch.testing.assert_close(told[layer], start + sum(added[: layer + 1], torch.zeros(4)))
    # Nobody saw what comes after the last layer.
    torch.testing.assert_close(told[2], start + sum(added, torch.zeros(4)))
    drift = drifting()
    before, after = states(3), states(4)
    foretold(drift, 0, before)
    foretold(drift, 1, after)
    drift.end_question()
    moved = (after - before).mean(1, keepdim=True)
    torch.testing.assert_close(foretold(drift, 0, before), before + moved)
    drift = drifting()
    foretold(drift, 0, states(5))
    drift.end_question()
    foretold(drift, 1, states(6))
    drift.end_question()
    assert torch.equal(foretold(drift, 0, states(7)), states(7))
    drift = drifting()
    ask(drift, states(8), [states(9)[0, 0]])
    assert not torch.equal(foretold(drift, 0, states(8)), states(8))
    drift.clear()
    assert torch.equal(foretold(drift, 0, states(8)), states(8))
