"""Streams with the memory `mosaic`: long, and broken off in the midst; nothing is lost."""

from types import FunctionType, MethodType, ModuleType
from typing import Any

import pytest
import torch

from tests.models.streams import FPS, QUESTION, film, open_session
from tests.policies.kv.mosaic.driven import LAYERS, TOKENS, Driven
from tests.policies.kv.mosaic.scenes import partition
from tests.policies.kv.mosaic.test_memory import watched

OTHERS = (type, FunctionType, MethodType, ModuleType, torch.nn.Module)


def reached(root: Any, apart: list[Any]) -> dict[int, int]:
    """Bytes of the tensors that can be come to from `root`, by where they lie; what is `apart` is not entered."""
    seen, found, ahead = {id(one) for one in apart}, dict[int, int](), [root]
    while ahead:
        one = ahead.pop()
        if id(one) in seen or isinstance(one, OTHERS):
            continue
        seen.add(id(one))
        if isinstance(one, torch.Tensor):
            storage = one.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
        elif isinstance(one, dict):
            ahead += one.values()
        elif isinstance(one, list | tuple | set):
            ahead += one
        else:
            ahead += getattr(one, "__dict__", {}).values()
    return found


@pytest.mark.usefixtures("small_rooms")
@pytest.mark.parametrize("family", ["random-ov", "random-qwen"])
def test_what_is_not_told_does_not_grow(family: str) -> None:
    index = {"name": "clusters", "init": 8}
    kv = {"name": "mosaic", "window": 4, "frames": 4, "local": 2, "cache": 4, "index": index}
    told, beside = list[float](), list[float]()
    with open_session(family, kv) as session:
        for frames in (50, 250):
            while session.frames < frames:
                session.watch(film(25), fps=FPS)
            for _ in range(2):
                session.ask(QUESTION, 2)
            state: Any = session._live.state  # type: ignore[union-attr]
            index = state.index
            # The host's: clusters, summaries and slabs; counts of the index. Captures have rooms of a question's size.
            host = [index.tree, state.store.slabs, index.absent]
            apart = [*host, *state.store.slabs.__dict__.values(), index._ready]
            apart += [state.replays, state.pass_replays]
            slabs = reached([state.store.slabs], [])
            held = {at: size for at, size in reached(state, apart).items() if at not in slabs}
            told.append(session.counters()["bytes"])
            beside.append(sum(held.values()) - told[-1])
    # Two tables say of each unit of each layer where it lies.
    assert told[1] - told[0] > 2 * state.geometry.layers * 8 * 100 and beside[1] == beside[0]


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
    assert not driven.state.prefetcher.crossing
    alone.watch(3)
    a, b = (torch.cat([*one.watch(1), *one.watch(20)], 2) for one in (driven, alone))
    assert torch.equal(a, b) and partition(driven.index.tree) == partition(alone.index.tree)


def test_a_question_that_breaks_off_leaves_the_wire_nothing_to_write(monkeypatch: pytest.MonkeyPatch) -> None:
    driven, joined = watched(40), []
    monkeypatch.setattr(type(driven.state.store.lanes), "wait_for_copies", lambda lanes: joined.append(lanes))
    with pytest.raises(KeyboardInterrupt), driven.state.question_scope():
        raise KeyboardInterrupt
    assert joined == [driven.state.store.lanes]


def test_what_a_broken_clip_pushed_out_stays_forgotten() -> None:
    """Where the host's memory had to forget older units for it."""
    unit = LAYERS * 2 * 2 * TOKENS * 8 * 8
    driven = Driven(store={"host_bytes": unit * 24, "spill": "drop_oldest"}, frames=20)
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
