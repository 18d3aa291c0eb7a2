"""What holds for every registered memory; registering one is getting it tested."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import mmaccel.policies.kv  # noqa: F401 - fills the registry
from mmaccel.core.errors import ModelError, RecipeError
from mmaccel.core.kv import KVPolicy, KVState, KVView
from mmaccel.core.registry import registry
from tests.policies.kv.memory import LAYERS, open_state, written

NAMES = [name for name, cls in registry("kv").items() if cls.sequences]


def policy(name: str) -> KVPolicy:
    made = registry("kv").build(name)
    assert isinstance(made, KVPolicy)
    return made


def step(state: KVState, first: int, count: int) -> KVView:
    """One run of columns with serials from `first` on; the view of the last layer."""
    for layer in range(LAYERS):
        state.append(layer, *written([list(range(first, first + count))], layer))
        view = state.view(layer, torch.empty(1, 4, count, 4))
        newest, _ = written([list(range(first, first + count))], layer)
        assert torch.equal(view.key[:, :, -count:], newest), "a view includes the columns of its queries"
        assert view.key.shape == view.value.shape
        assert view.column is None or view.column.shape == view.key.shape[2:3]
    return view


@pytest.mark.parametrize("name", NAMES)
def test_a_policy_is_a_frozen_record_that_declares_itself(name: str) -> None:
    made = policy(name)
    assert made.name == name and type(made).__doc__
    assert isinstance(made.exact, bool) and isinstance(made.needs, frozenset)
    assert isinstance(made.admits_sparse, bool)
    assert made.reach is None or made.reach >= 0
    assert not made.exact or made.reach is None
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.name = "other"  # type: ignore[misc]
    with pytest.raises(RecipeError):
        registry("kv").build(name, {"no_such_field": 1})


@pytest.mark.parametrize("name", NAMES)
def test_lengths_cuts_and_reset(name: str) -> None:
    made = policy(name)
    state = open_state(made)
    assert state.length() == state.held() == 0
    step(state, 0, 50)
    assert state.length() == 50
    for serial in range(50, 90):
        step(state, serial, 1)
    back = 30 if made.reach is None else min(made.reach, 30)
    state.truncate(90 - back)
    assert state.length() == 90 - back
    step(state, 200, 7)
    state.accept(3)
    assert state.length() == 90 - back + 3
    step(state, 300, 5)
    state.accept(torch.tensor([0, 2, 4]))
    assert state.length() == 90 - back + 6
    assert state.held() <= state.length() and state.nbytes() > 0
    assert all(isinstance(value, float) for value in state.counters().values())
    with pytest.raises(ModelError):
        state.truncate(1000)
    with pytest.raises(ModelError):
        state.accept(1000)
    state.reset()
    assert state.length() == state.held() == 0
    step(state, 0, 4)


@pytest.mark.parametrize("name", NAMES)
def test_what_comes_after_a_cut_is_as_if_it_had_never_been(name: str) -> None:
    plain, cut = open_state(policy(name)), open_state(policy(name))
    for state in (plain, cut):
        step(state, 0, 40)
    step(cut, 500, 6)
    cut.accept(0)
    with cut.turn():
        step(cut, 600, 100)
        step(cut, 700, 1)
    ours, theirs = step(cut, 40, 3), step(plain, 40, 3)
    assert torch.equal(ours.key, theirs.key) and torch.equal(ours.value, theirs.value)
    assert cut.length() == plain.length() == 43


@pytest.mark.parametrize("name", NAMES)
def test_a_question_is_dropped_when_it_fails_in_the_middle_of_a_run(name: str) -> None:
    state = open_state(policy(name))
    step(state, 0, 10)
    with pytest.raises(ZeroDivisionError), state.turn():
        state.append(0, *written([[10, 11]], 0))
        raise ZeroDivisionError
    assert state.length() == 10
    step(state, 10, 2)


@pytest.mark.parametrize("name", NAMES)
def test_rows_can_be_reordered_multiplied_and_dropped(name: str) -> None:
    state = open_state(policy(name))
    for layer in range(LAYERS):
        state.append(layer, *written([[1, 2], [3, 4]], layer))
    state.reorder(torch.tensor([1, 1, 0]))
    for layer in range(LAYERS):
        state.append(layer, *written([[5], [6], [7]], layer))
        view = state.view(layer, torch.empty(3, 4, 1, 4))
        assert torch.equal(view.key, written([[3, 4, 5], [3, 4, 6], [1, 2, 7]], layer)[0])
    state.reorder(torch.tensor([2]))
    step(state, 8, 1)


@pytest.mark.parametrize("name", NAMES)
def test_wrong_calls_are_told_in_one_sentence(name: str) -> None:
    state = open_state(policy(name))
    with pytest.raises(ModelError, match=r"layer 1 .*\.$"):
        state.view(1, torch.empty(1, 4, 1, 4))
    step(state, 0, 3)
    with pytest.raises(ModelError, match=r"1 sequences and 2 were run.*\.$"):
        state.append(0, *written([[1], [2]], 0))
    with pytest.raises(ModelError, match="cannot be cut"):
        state.truncate(-1)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_first_append_decides_the_dtype(name: str, dtype: torch.dtype) -> None:
    state = open_state(policy(name))
    for count in (3, 1, 400):
        key = torch.randn(2, 2, count, 4, dtype=dtype)
        state.append(0, key, key)
        view = state.view(0, key)
        assert view.key.dtype == view.value.dtype == dtype


@pytest.mark.parametrize("name", NAMES)
def test_a_memory_outlives_inference_mode_and_keeps_no_gradients(name: str) -> None:
    """A stream may be watched in one mode and asked in another."""
    state = open_state(policy(name), layers=1)

    def add(count: int) -> None:
        key = torch.randn(1, 2, count, 4, requires_grad=True) * 2
        state.append(0, key, key)
        view = state.view(0, key)
        assert not view.key.requires_grad and view.key.shape[2] == state.length()

    with torch.inference_mode():
        add(5)
        add(600)
    add(1)
    with torch.inference_mode():
        state.reorder(torch.tensor([0]))
    add(2)
    state.reorder(torch.tensor([0]))
    add(3)
    state.accept(torch.tensor([0, 2]))
    with torch.inference_mode():
        state.accept(torch.tensor([1]))
    add(2)
    state.truncate(610)
    with torch.no_grad():
        add(1)
    assert state.length() == 611
