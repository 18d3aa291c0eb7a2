"""What holds for every registered memory; registering one is getting it tested."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import mmaccel.policies.kv  # noqa: F401 - fills the registry
from mmaccel import check_policy
from mmaccel.contract.memory import step
from mmaccel.core.errors import ModelError, RecipeError
from mmaccel.core.memory.kv import KVPolicy
from mmaccel.core.registry import registry
from tests.policies.kv.memory import open_state, written

NAMES = [name for name, cls in registry("kv").items() if cls.sequences]


def policy(name: str) -> KVPolicy:
    made = registry("kv").build(name)
    assert isinstance(made, KVPolicy)
    return made


@pytest.mark.parametrize("name", NAMES)
def test_a_policy_is_a_frozen_record_that_declares_itself(name: str) -> None:
    made = policy(name)
    assert made.name == name and type(made).__doc__
    assert isinstance(made.exact, bool) and isinstance(made.needs, frozenset)
    assert isinstance(made.allows_sparse, bool)
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.name = "other"  # type: ignore[misc]
    with pytest.raises(RecipeError):
        registry("kv").build(name, {"no_such_field": 1})


@pytest.mark.parametrize("name", registry("kv"))
def test_what_is_written_is_seen_and_cuts_leave_no_trace(name: str) -> None:
    check_policy(policy(name))


@pytest.mark.parametrize("name", NAMES)
def test_wrong_calls_are_told_in_one_sentence(name: str) -> None:
    state = open_state(policy(name))
    with pytest.raises(ModelError, match=r"layer 1 .*\.$"):
        state.view(1, torch.empty(1, 4, 1, 4))
    step(name, state, 0, 3)
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
