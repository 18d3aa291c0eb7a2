"""What holds for every registered policy, and for every memory and draft of them; registering one is getting it tested."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import mmaccel.policies  # noqa: F401 - fills the registries
from mmaccel import check_policy
from mmaccel.contract.memory import step
from mmaccel.core.errors import ModelError, RecipeError
from mmaccel.core.registry import BASES, registry
from tests.core.toy import ToyModel, bigram
from tests.policies.kv.memory import open_state, written

EVERY = [(kind, name) for kind in BASES for name in registry(kind)]
MEMORIES = [name for name, cls in registry("kv").items() if cls.sequences]
FLAGS = {"kv": ("exact", "allows_sparse"), "draft": ("active",)}
TABLE = bigram(torch.randn(6, 6, generator=torch.Generator().manual_seed(1)))


def build(kind: str, name: str) -> Any:
    """The policy with its defaults, and a toy model for a draft that asks for one."""
    own = {field.name for field in dataclasses.fields(registry(kind)[name])}
    toy = {"model": ToyModel(TABLE, 6), "process": False} if kind == "draft" else {}
    return registry(kind).build(name, {field: value for field, value in toy.items() if field in own})


@pytest.mark.parametrize(("kind", "name"), EVERY)
def test_a_policy_is_a_frozen_record_that_declares_itself(kind: str, name: str) -> None:
    made = build(kind, name)
    assert isinstance(made, BASES[kind]) and made.name == name and type(made).__doc__
    assert all(isinstance(getattr(made, flag), bool) for flag in FLAGS.get(kind, ()))
    assert isinstance(getattr(made, "needs", frozenset()), frozenset)
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.name = "other"
    with pytest.raises(RecipeError):
        registry(kind).build(name, {"no_such_field": 1})


# Patterns and pruners are tried on more prompts in rooms of their own. Drafts that read an accelerated model's memory need
# one; tests/models holds them to the same.
@pytest.mark.parametrize(("kind", "name"), [one for one in EVERY if one[0] in FLAGS])
def test_a_policy_keeps_its_contract(kind: str, name: str) -> None:
    """What is written is seen and cuts leave no trace; greedy output is the target's."""
    check_policy(build(kind, name))


@pytest.mark.parametrize("name", MEMORIES)
def test_wrong_calls_are_told_in_one_sentence(name: str) -> None:
    state = open_state(build("kv", name))
    with pytest.raises(ModelError, match=r"layer 1 .*\.$"):
        state.view(1, torch.empty(1, 4, 1, 4))
    step(name, state, 0, 3)
    with pytest.raises(ModelError, match=r"1 sequences and 2 were run.*\.$"):
        state.append(0, *written([[1], [2]], 0))
    with pytest.raises(ModelError, match="cannot be cut"):
        state.truncate(-1)


@pytest.mark.parametrize("name", MEMORIES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_first_append_decides_the_dtype(name: str, dtype: torch.dtype) -> None:
    state = open_state(build("kv", name))
    for count in (3, 1, 400):
        key = torch.randn(2, 2, count, 4, dtype=dtype)
        state.append(0, key, key)
        view = state.view(0, key)
        assert view.key.dtype == view.value.dtype == dtype


@pytest.mark.parametrize("name", MEMORIES)
def test_a_memory_outlives_inference_mode_and_keeps_no_gradients(name: str) -> None:
    """A stream may be watched in one mode and asked in another."""
    state = open_state(build("kv", name), layers=1)

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
