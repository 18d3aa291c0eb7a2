"""What a memory tells of the device is all that grows there: beside it no tensor does."""

from __future__ import annotations

from types import FunctionType, MethodType, ModuleType
from typing import Any

import pytest
import torch

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
