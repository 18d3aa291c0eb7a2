"""What is closed or done gives its memory back at once, not when Python next looks for cycles."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

import mmaccel
from mmaccel.core.memory.kv import KVState
from mmaccel.models.attention import KVCache
from tests.models.streams import FPS, QUESTION, every_stream, film, open_session
from tests.models.tiny_random import BUILD, prompt

pytestmark = pytest.mark.in_turn("name", 4)

TIGHT = every_stream(frames=4, window=6)


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Nothing is collected but what nobody refers to."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("name", sorted(TIGHT))
def test_a_closed_session(name: str, uncollected: None) -> None:
    session = open_session("random-ov", TIGHT[name])
    session.watch(film(12), fps=FPS)
    session.ask(QUESTION, 2)
    state = weakref.ref(session._live.state)  # type: ignore[union-attr]
    session.close()
    assert state() is None


@pytest.mark.parametrize(
    "recipe",
    [
        {},
        {"kv": "window"},
        {"draft": "prompt_lookup"},
        {"prune": {"name": "fastv", "retention": 0.5}},
        {"sparse": {"name": "a_shape", "block": 16}},
    ],
    ids=str,
)
def test_an_answer(recipe: dict[str, Any], uncollected: None, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[weakref.ref[KVState]] = []
    begin = KVCache.__init__

    def told(cache: KVCache, state: KVState, *rest: Any) -> None:
        opened.append(weakref.ref(state))
        begin(cache, state, *rest)

    monkeypatch.setattr(KVCache, "__init__", told)
    model = BUILD["qwen"](layers=3)
    with mmaccel.accelerate(model, **recipe) as fast:
        fast.generate(**prompt("qwen", [("text", 9)]), max_new_tokens=3, do_sample=False)
        assert opened and all(one() is None for one in opened)
        assert fast.last_state is None and fast.report().kv["bytes"] > 0, "what it counted is still told"
