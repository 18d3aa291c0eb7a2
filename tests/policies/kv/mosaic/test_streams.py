"""Sessions with the memory `mosaic` far longer than its window: all that it says happens, and it holds what it says."""

from __future__ import annotations

from types import FunctionType, MethodType, ModuleType
from typing import Any

import pytest
import torch

import mmaccel
from mmaccel.core.streams.session import VideoSession
from mmaccel_lab.world import World, render
from tests.models.streams import FPS, QUESTION, film, open_session

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


@pytest.mark.parametrize("family", ["random-ov", "random-qwen"])
def test_what_is_not_told_does_not_grow(family: str) -> None:
    kv = {
        "name": "mosaic",
        "window": 4,
        "frames": 4,
        "local": 2,
        "cache": 4,
        "index": {"name": "clusters", "init": 8},
    }
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
            apart = [*host, *state.store.slabs.__dict__.values(), state.replays, index._ready]
            slabs = reached([state.store.slabs], [])
            held = {at: size for at, size in reached(state, apart).items() if at not in slabs}
            told.append(session.counters()["bytes"])
            beside.append(sum(held.values()) - told[-1])
    # Two tables say of each unit of each layer where it lies.
    assert told[1] - told[0] > 2 * state.geometry.layers * 8 * 100 and beside[1] == beside[0]


FRAMES, WINDOW = 500, 24


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny-ov", "tiny-qwen"])
def test_hundreds_of_frames(name: str) -> None:
    model, processor = mmaccel.load_model(name).float(), mmaccel.load_processor(name)
    world = World.generate(113, FRAMES)
    kv = {"name": "mosaic", "window": WINDOW, "local": 4, "frames": 16, "cache": 16}
    right = asked = 0
    with VideoSession(model, processor, {"kv": kv}) as session:
        table = world.table()
        for first in range(0, FRAMES, 50):
            rows = {column: values[first : first + 50] for column, values in table.items()}
            session.watch(render(rows, 112, 112), fps=1.0)
        before = session.counters()
        units = before["units"]
        assert before["window"] <= 0.1 * units, "nine frames in ten are off the device"
        assert before["host_units"] == model.config.text_config.num_hidden_layers * (units - before["window"])
        for question in world.questions(["needle", "combine"]):
            answer = session.ask(question.text, max_new_tokens=8)
            asked += 1
            right += answer.text.strip(" .") == question.answer.strip(" .")
        after = session.counters()
    named = ("visual_splits", "deferred", "singletons", "eager_splits", "deferred_splits", "fetch_cached")
    assert min(after[each] for each in ("recalled", "resolved", "fetch_covered", "host_copies_in")) > 0
    assert sum(after[each] > 0 for each in named) >= 5, {each: after[each] for each in named}
    assert asked >= 4 and right >= 0.7 * asked, f"{right} of {asked}"
