"""What every registered policy promises; what is wrong with one of a user's own is told in a sentence where it would run."""

import dataclasses
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import mmaccel
from mmaccel import check_policy
from mmaccel.contract.memory import append_to_layers, encode_kv
from mmaccel.core.adapter import ModelAdapter
from mmaccel.core.errors import MmaccelWarning, ModelError, RecipeError
from mmaccel.core.memory.kv import KVPolicy
from mmaccel.core.prefill.sparse import SparsePattern
from mmaccel.core.registry import BASES, registry
from mmaccel.policies.sparse import AShape, Dense, PerHead
from tests import sentence
from tests.core.toy import ToyModel, bigram_rule
from tests.models.tiny_random import BUILD, PROMPTS, prompt
from tests.policies.faulty import DRAFTS, MEMORIES, PRUNE, SPARSE, Half, Pooled, Sound, wrong
from tests.policies.kv.token_streams import open_state

EVERY = [(kind, name) for kind in BASES for name in registry(kind)]
SEQUENCES = [name for name, cls in registry("kv").items() if cls.sequences]
FLAGS = {"kv": ("exact", "allows_sparse"), "draft": ("active",)}
TABLE = bigram_rule(torch.randn(6, 6, generator=torch.Generator().manual_seed(1)))


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


@pytest.mark.parametrize("name", SEQUENCES)
def test_wrong_calls_are_told_in_one_sentence(name: str) -> None:
    state = open_state(build("kv", name))
    with pytest.raises(ModelError, match=r"layer 1 .*\.$"):
        state.view(1, torch.empty(1, 4, 1, 4))
    append_to_layers(name, state, 0, 3)
    with pytest.raises(ModelError, match=r"1 sequences and 2 were run.*\.$"):
        state.append(0, *encode_kv([[1], [2]], 0))
    with pytest.raises(ModelError, match="cannot be cut"):
        state.truncate(-1)


@pytest.mark.parametrize("name", SEQUENCES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_first_append_decides_the_dtype(name: str, dtype: torch.dtype) -> None:
    state = open_state(build("kv", name))
    for count in (3, 1, 400):
        key = torch.randn(2, 2, count, 4, dtype=dtype)
        state.append(0, key, key)
        view = state.view(0, key)
        assert view.key.dtype == view.value.dtype == dtype


@pytest.mark.parametrize("name", SEQUENCES)
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
        state.select_sequences(torch.tensor([0]))
    add(2)
    state.select_sequences(torch.tensor([0]))
    add(3)
    state.accept(torch.tensor([0, 2]))
    with torch.inference_mode():
        state.accept(torch.tensor([1]))
    add(2)
    state.truncate(610)
    with torch.no_grad():
        add(1)
    assert state.length() == 611


DEAR = (
    "an unsaid reading of queries",
    "two spans",
    "the future",
    "padding",
    "a low bound",
    "a negative number",
)
"""Faults that only `check_policy` finds."""


@pytest.fixture(scope="module")
def model() -> Any:
    return BUILD["llava"](layers=4)


def forward(model: Any, **recipe: Any) -> torch.Tensor:
    with torch.no_grad(), mmaccel.accelerate(model, **recipe) as fast:
        return fast(**prompt("llava", PROMPTS["long"])).logits


@pytest.mark.parametrize("what", [name for name in SPARSE if name not in DEAR])
def test_a_plan_of_other_sizes(model: Any, what: str) -> None:
    pattern, words = SPARSE[what]
    with sentence(RecipeError, words):
        forward(model, sparse=pattern(), dense_tail=0)


def test_a_pattern_that_plans_nothing_says_so(model: Any) -> None:
    plan_less = wrong(Sound, plan=lambda *_: None)()
    with torch.no_grad(), mmaccel.accelerate(model, sparse=plan_less) as fast:
        fast(**prompt("llava", PROMPTS["long"]))
        assert fast.report().notes == ("sparse: sound planned nothing for some layers; these are dense",)
    with sentence(RecipeError, "plan gives None, which means dense, for each of 12 prompts"):
        check_policy(plan_less)


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
    with pytest.warns(MmaccelWarning, match="it leaves nothing out"):
        check_policy(Pooled(block=16))


@pytest.mark.parametrize("what", PRUNE)
def test_a_pruner(model: Any, what: str) -> None:
    pruner, words = PRUNE[what]
    with sentence(RecipeError, words):
        forward(model, prune=pruner())
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
    with sentence(RecipeError, words):
        mmaccel.register("sparse", "no_such_pattern")(made())
    assert "no_such_pattern" not in mmaccel.list_policies("sparse")["sparse"]


@pytest.mark.parametrize(
    ("base", "members", "words"),
    [
        (object, {"model_types": ("none",)}, "Mine is not a Family; derive it from that."),
        (ModelAdapter, {}, "Mine has no model_types"),
        (
            ModelAdapter,
            {"model_types": ("qwen3_vl",)},
            "family 'qwen3_vl' serves model type 'qwen3_vl' already",
        ),
    ],
)
def test_a_family_that_cannot_be_registered(base: type, members: dict[str, Any], words: str) -> None:
    with sentence(RecipeError, words):
        mmaccel.register("model", "no_such_family")(type("Mine", (base,), members))
    assert "no_such_family" not in registry("model")


def test_a_dataclass_that_is_not_frozen_says_so() -> None:
    for kind in (SparsePattern, KVPolicy):
        with sentence(RecipeError, "Thawed: it is not a frozen dataclass; write @dataclass(frozen=True, kw"):
            dataclass(kw_only=True)(type("Thawed", (kind,), {}))


def test_what_a_check_of_a_pattern_does_not_refuse_it_warns_of() -> None:
    """What leaves nothing out is hardly tested; a row without keys gets zeros, and is rarely meant."""
    with pytest.warns(MmaccelWarning, match="'a_shape': it leaves nothing out of these prompts"):
        check_policy(AShape())
    with pytest.warns(MmaccelWarning, match="row 0 of head 0 .* sees no key, so its attention is zero"):
        check_policy(wrong(Sound, lo=16)())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_policy(AShape(block=16, sink=16, window=16))
        check_policy(Dense())


@pytest.mark.parametrize(
    ("faults", "what"), [(faults, what) for faults in (SPARSE, PRUNE, MEMORIES) for what in faults]
)
def test_a_fault_is_found_out(faults: dict[str, tuple[Callable[[], Any], str]], what: str) -> None:
    policy, words = faults[what]
    with sentence(RecipeError, words):
        check_policy(policy())


@pytest.mark.parametrize("what", DRAFTS)
def test_a_draft_is_found_out(what: str) -> None:
    strategy, words = DRAFTS[what]
    with sentence(RecipeError, words), warnings.catch_warnings():
        warnings.simplefilter("ignore", MmaccelWarning)
        check_policy(strategy())


def test_a_class_that_is_not_registered_is_told_to_be() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Ahead(SparsePattern):
        """Of no name."""

        plan, max_blocks_total = Sound.plan, Sound.max_blocks_total

    for use in (check_policy, lambda one: mmaccel.Recipe.load(sparse=one)):
        with sentence(RecipeError, "sparse: Ahead has no name; write @register('sparse', NAME) above"):
            use(Ahead())


def test_nothing_else_is_a_policy() -> None:
    check_policy(Half())
    with pytest.raises(RecipeError, match="give an instance"):
        check_policy(Sound)
