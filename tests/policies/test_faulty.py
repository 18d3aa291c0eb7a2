"""What is wrong with a policy of a user's own is told in one sentence, where it would run, and not by wrong numbers."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import mmaccel
from mmaccel import check_policy
from mmaccel.core.errors import MmaccelWarning, RecipeError
from mmaccel.core.memory.kv import KVPolicy
from mmaccel.core.prefill.sparse import SparsePattern
from mmaccel.policies.sparse import PerHead
from tests.models.tiny_random import BUILD, PROMPTS, prompt
from tests.policies.faulty import DRAFTS, MEMORIES, PRUNE, SPARSE, Half, Pooled, Sound

DEAR = ("an unsaid reading of queries", "two spans", "the future", "padding", "a low bound")
"""Faults that only `check_policy` finds."""


@pytest.fixture(scope="module")
def model() -> Any:
    return BUILD["llava"](layers=4)


def forward(model: Any, **recipe: Any) -> torch.Tensor:
    with torch.no_grad(), mmaccel.accelerate(model, **recipe) as fast:
        return fast(**prompt("llava", PROMPTS["long"])).logits


def one_sentence(error: Exception) -> str:
    told = str(error)
    assert "\n" not in told and told.endswith((".", "?"))
    return told


@pytest.mark.parametrize("what", [name for name in SPARSE if name not in DEAR])
def test_a_plan_of_other_sizes(model: Any, what: str) -> None:
    pattern, words = SPARSE[what]
    with pytest.raises(RecipeError) as caught:
        forward(model, sparse=pattern(), dense_tail=0)
    assert words in one_sentence(caught.value)


def test_a_sound_pattern_and_pruner_run(model: Any) -> None:
    plain = forward(model, sparse="dense")
    torch.testing.assert_close(forward(model, sparse=Sound(), dense_tail=0), plain, atol=1e-5, rtol=0)
    assert forward(model, prune=Half()).shape == plain.shape
    # Keys of its own, made of keys and values, by themselves and among the patterns of heads.
    pooled = forward(model, sparse=Pooled(block=16), dense_tail=0)
    assert pooled.isfinite().all() and not torch.allclose(pooled, plain, atol=1e-4)
    table = {layer: {head: Pooled(block=16) for head in range(2)} for layer in range(4)}
    some = PerHead(block=16, table=table)
    assert not torch.allclose(forward(model, sparse=some, dense_tail=0), plain, atol=1e-4)
    check_policy(Pooled(block=16))


@pytest.mark.parametrize("what", PRUNE)
def test_a_pruner(model: Any, what: str) -> None:
    pruner, words = PRUNE[what]
    with pytest.raises(RecipeError) as caught:
        forward(model, prune=pruner())
    assert words in one_sentence(caught.value)
    assert mmaccel.attached(model) is None


def plain_class() -> type:
    class Plain(SparsePattern):
        """No dataclass of its own."""

    return Plain


def of_another_kind() -> type:
    @dataclass(frozen=True, kw_only=True)
    class Memory(KVPolicy):
        """No pattern."""

    return Memory


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (
            plain_class,
            "Plain is not a frozen dataclass; write @dataclass(frozen=True, kw_only=True) below @register.",
        ),
        (of_another_kind, "Memory is not a SparsePattern; derive it from that."),
        (lambda: type("Bare", (), {}), "Bare is not a SparsePattern"),
    ],
)
def test_a_class_that_cannot_be_registered(made: Any, words: str) -> None:
    with pytest.raises(RecipeError) as caught:
        mmaccel.register("sparse", "no_such_pattern")(made())
    assert words in one_sentence(caught.value)
    assert "no_such_pattern" not in mmaccel.list_policies("sparse")["sparse"]


@pytest.mark.parametrize(
    ("faults", "what"), [(faults, what) for faults in (SPARSE, PRUNE, MEMORIES) for what in faults]
)
def test_a_fault_is_found_out(faults: dict[str, tuple[Callable[[], Any], str]], what: str) -> None:
    policy, words = faults[what]
    with pytest.raises(RecipeError) as caught:
        check_policy(policy())
    assert words in one_sentence(caught.value)


@pytest.mark.parametrize("what", DRAFTS)
def test_a_draft_is_found_out(what: str) -> None:
    strategy, words = DRAFTS[what]
    with pytest.raises(RecipeError) as caught, warnings.catch_warnings():
        warnings.simplefilter("ignore", MmaccelWarning)
        check_policy(strategy())
    assert words in one_sentence(caught.value)


def test_nothing_else_is_a_policy() -> None:
    for sound in (Sound(), Half()):
        check_policy(sound)
    with pytest.raises(RecipeError, match="give an instance"):
        check_policy(Sound)
