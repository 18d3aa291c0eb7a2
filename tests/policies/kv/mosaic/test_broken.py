"""What breaks off in the midst of the memory `mosaic`: nothing is lost, and nothing is left that another would meet."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.policies.kv.mosaic.driven import LAYERS, TOKENS, Driven
from tests.policies.kv.mosaic.scenes import audit, partition
from tests.policies.kv.mosaic.test_memory import watched


def test_a_broken_question_loses_nothing() -> None:
    driven = watched(40)

    def breaks(layer: int) -> list[torch.Tensor]:
        if layer == 1:
            raise KeyboardInterrupt
        return driven.question(2)(layer)

    with pytest.raises(KeyboardInterrupt), driven.state.question_scope():
        driven.run(driven.stream_pass(), breaks, driven.hidden(2))
    for _ in range(4):
        driven.ask(2)
    assert torch.equal(driven.ask(2), driven.ask(2))
    audit(driven.index.tree)


def test_questions_that_break_while_units_come_leave_every_buffer_free() -> None:
    """More of them than there are buffers; broken when the next layer's guess is made, with transfers under way."""
    driven, twin = watched(40, cache=0), watched(40, cache=0)
    state = driven.state
    prefetch, calls = state.prefetcher.prefetch, [0]

    def breaks(*args: Any) -> Any:
        calls[0] += 1
        if calls[0] == 2:
            raise KeyboardInterrupt
        return prefetch(*args)

    state.prefetcher.prefetch = breaks  # type: ignore[method-assign]
    for _ in range(5):
        calls[0] = 0
        with pytest.raises(KeyboardInterrupt):
            driven.ask(2)
    state.prefetcher.prefetch = prefetch  # type: ignore[method-assign]
    assert torch.equal(driven.ask(2), twin.ask(2))


def test_what_a_broken_pass_retrieved_is_forgotten() -> None:
    driven, alone = Driven(), Driven()
    driven.watch(3)
    mark = driven.state.checkpoint()
    driven.watch(60)
    search = driven.state.index.search

    def breaks(layer: int, *rest: Any) -> Any:
        if layer == 1:
            raise KeyboardInterrupt
        return search(layer, *rest)

    driven.state.index.search = breaks  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        driven.watch(1)
    driven.state.index.search = search  # type: ignore[method-assign]
    driven.state.restore(mark)
    # Counted while its codes mean the places that they did.
    assert not driven.state.prefetcher._crossing
    alone.watch(3)
    a, b = (torch.cat([*one.watch(1), *one.watch(20)], 2) for one in (driven, alone))
    assert torch.equal(a, b) and partition(driven.index.tree) == partition(alone.index.tree)


@pytest.mark.parametrize("units", [6, 30])
def test_a_broken_clip_is_taken_back(units: int) -> None:
    broken, alone = Driven(), Driven()
    broken.watch(units)
    mark = broken.state.checkpoint()
    broken.watch(45)
    broken.state.begin_pass(broken.stream_pass())
    broken.state.restore(mark)
    assert broken.state.units() == units
    alone.watch(units)
    for more in (14, 10, 16):
        for one in (broken, alone):
            one.watch(more)
        assert torch.equal(broken.ask(1), alone.ask(1))
    assert partition(broken.index.tree) == partition(alone.index.tree)
    assert broken.index.tree.counters == alone.index.tree.counters
    broken.state.reset()
    assert broken.state.units() == 0 and broken.state.length() == 0


def test_a_question_that_breaks_off_leaves_the_wire_nothing_to_write(monkeypatch: pytest.MonkeyPatch) -> None:
    driven, joined = watched(40), []
    monkeypatch.setattr(type(driven.state.store.lanes), "join", lambda lanes: joined.append(lanes))
    with pytest.raises(KeyboardInterrupt), driven.state.question_scope():
        raise KeyboardInterrupt
    assert joined == [driven.state.store.lanes]


def test_what_a_broken_clip_pushed_out_stays_forgotten() -> None:
    """Where the host's memory had to forget older units for it."""
    unit = LAYERS * 2 * 2 * TOKENS * 8 * 8
    driven = Driven(host_bytes=unit * 24, spill="drop_oldest", frames=20)
    state = driven.state
    driven.watch(31)
    mark, before = state.checkpoint(), int(state.index.absent.sum())
    driven.watch(12)
    state.restore(mark)
    here = set(range(state._first)) - set(state.index.absent.nonzero()[:, 0].tolist())
    assert 0 < before < int(state.index.absent.sum())
    assert all(here == set(state.store.units(layer)) for layer in range(LAYERS))
    driven.ask(driven.scenes[0])
    # What the clip itself pushed out comes anew.
    driven.watch(12)
    here = set(range(state._first)) - set(state.index.absent.nonzero()[:, 0].tolist())
    assert all(here == set(state.store.units(layer)) for layer in range(LAYERS))
