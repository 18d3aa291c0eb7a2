"""Sinks and window: what a query sees, what is held, what can be taken back."""

from __future__ import annotations

import pytest
import torch

from mmaccel.core.errors import ModelError, RecipeError
from mmaccel.core.memory.kv import KVState
from mmaccel.core.registry import registry
from mmaccel.policies.kv import Window
from tests.policies.kv.memory import open_state, read, seen, visible, written

ROW = torch.empty(1, 4, 1, 4)


def feed(state: KVState, first: int, count: int) -> None:
    state.append(0, *written([list(range(first, first + count))], 0))


def test_all_is_seen_and_unlimited_as_long_as_it_fits() -> None:
    state = open_state(Window(sinks=2, window=6), layers=1)
    feed(state, 0, 5)
    feed(state, 5, 3)
    view = state.view(0, ROW)
    assert view.window is None and view.column is None and view.key.shape[2] == 8


def test_a_long_prompt_is_let_go_at_the_next_run() -> None:
    state = open_state(Window(sinks=4, window=16, margin=8), layers=1)
    feed(state, 0, 1000)
    assert state.held_columns() == 1000
    full = state.nbytes()
    feed(state, 1000, 1)
    assert state.held_columns() == 4 + 16 + 8 + 1
    assert state.nbytes() == full * 29 // 1000
    view = state.view(0, ROW)
    assert view.column is not None and view.column.tolist() == [0, 1, 2, 3, *range(976, 1001)]
    assert read(view, 0)[0] == view.column.tolist()
    assert (view.sinks, view.window) == (4, 16)


def test_a_question_longer_than_the_window_leaves_no_trace() -> None:
    state = open_state(Window(sinks=1, window=4, margin=2), layers=1)
    for serial in range(40):
        feed(state, serial, 1)
    with state.question_scope():
        for serial in range(100, 150):
            feed(state, serial, 1)
            with state.question_scope():
                feed(state, serial, 1)
        sequence = [*range(40), *range(100, 150)]
        feed(state, 150, 1)
        assert seen(state.view(0, ROW), 0, 1, 91) == [visible([*sequence, 150], 1, 1, 4)]
    assert state.length() == 40 and state.held_columns() <= 1 + 4 + 2 + 1
    feed(state, 40, 1)
    assert seen(state.view(0, ROW), 0, 1, 41) == [visible(list(range(41)), 1, 1, 4)]


@pytest.mark.parametrize("back", range(8))
def test_the_limit_of_taking_back_is_sharp(back: int) -> None:
    """Of one sink and columns 12 .. 19 the query of column c sees those from c - 3 on: c = 15 is the first it can be."""
    state = open_state(Window(sinks=1, window=4, margin=3), layers=1)
    for serial in range(20):
        feed(state, serial, 1)
    if back <= 5:
        state.truncate(20 - back)
        feed(state, 20 - back, 2)
        expected = visible(list(range(22 - back)), 2, 1, 4)
        assert seen(state.view(0, ROW), 0, 2, 22 - back) == [expected]
    else:
        with pytest.raises(ModelError, match="margin"):
            state.truncate(20 - back)


def test_it_holds_nothing_but_its_own_columns() -> None:
    state = open_state(Window(), layers=1)
    large = torch.zeros(1, 2, 1000, 4)
    state.append(0, large[:, :, :3], large[:, :, 3:6])
    large.fill_(1.0)
    assert state.nbytes() == 2 * 2 * 3 * 4 * 4
    assert state.view(0, ROW).key.sum() == 0


def test_it_declares_what_it_is() -> None:
    policy = Window(margin=9)
    assert policy.rollback_limit == 9 and not policy.exact and policy.allows_sparse


@pytest.mark.parametrize(("field", "value"), [("sinks", -1), ("window", 0), ("margin", -1)])
def test_a_field_out_of_range_is_told(field: str, value: int) -> None:
    with pytest.raises(RecipeError, match=rf"^window: {field} is {value}; give at least \d\.$"):
        registry("kv").build("window", {field: value})
