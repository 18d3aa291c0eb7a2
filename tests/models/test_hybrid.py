"""Layers with a running state beside layers of attention: rolled back with the columns, in calls of every kind."""

import copy
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch

import mmaccel
from mmaccel.core.attach import adapter_for
from mmaccel.core.decoding.draft import DraftState, DraftStrategy, Proposal
from mmaccel.core.errors import ModelError
from mmaccel.models import recurrent, step
from mmaccel.models.qwen3_5 import Qwen35
from mmaccel.models.runner import HFRunner
from mmaccel.policies.draft import Sequential, SparseToDense, Tree
from tests.core.toy import Scripted
from tests.models.test_decode import LATER, TREE
from tests.models.tiny_random import EVERY, batch, next_turn, prompt


@dataclass(frozen=True, kw_only=True)
class Echo(DraftStrategy):
    """The last three tokens, once more."""

    name: ClassVar = "echo"
    needs: ClassVar = frozenset({"rollback"})
    max_rollback: ClassVar = 4

    def open(self, target: Any) -> DraftState:
        return Scripted(lambda tokens: Proposal(torch.tensor(tokens[-3:])))


PIECES = [("text", 6), ("video", 12), ("text", 9)]
pytestmark = pytest.mark.numeric(by="torch")


@pytest.fixture(scope="module")
def model() -> Any:
    made = EVERY["qwen3_5"](layers=6)
    return made


@pytest.fixture(scope="module")
def inputs() -> Any:
    return prompt("qwen3_5", PIECES)


def test_geometry_counts_layers_of_attention(model: Any) -> None:
    family = adapter_for(model)
    shape = family.geometry(model)
    assert (shape.layers, shape.heads, shape.kv_heads, shape.head_dim) == (3, 4, 2, 32)
    with mmaccel.accelerate(model, sparse={"name": "a_shape", "block": 16, "sink": 16, "window": 32}) as fast:
        model.generate(**prompt("qwen3_5", [("text", 6), ("video", 40)]), max_new_tokens=2, do_sample=False)
        assert fast.report().heads() == {"a_shape": 12}
    with pytest.raises(mmaccel.MmaccelError, match="there is no layer 3"):
        mmaccel.accelerate(model, dense_layers=[3])


@torch.no_grad()
def test_a_step_taken_back_leaves_no_trace(model: Any, inputs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Back by any number of tokens, over a mark too; and not into the prompt."""
    monkeypatch.setattr(recurrent, "REACH", 12)
    ids = torch.randint(3, 180, (1, 40), generator=torch.Generator().manual_seed(3))
    with mmaccel.accelerate(model):
        one, other = (HFRunner.open(model, adapter_for(model)) for _ in range(2))
        for runner in (one, other):
            runner.prefill(inputs)
        length = one.length()
        want = torch.cat([one.step(part) for part in ids.split([3, 7, 10, 20], 1)], 1)
        done = 0
        for wrong, count in ((4, 3), (1, 7), (9, 1), (5, 9), (11, 4), (12, 8), (2, 8)):
            other.step(torch.full((1, wrong), 7))
            other.truncate(length + done)
            said = other.step(ids[:, done : done + count])
            assert (said - want[:, done : done + count]).abs().max() <= 1e-5
            done += count
        assert done == 40
        with pytest.raises(ModelError, match="not into a prompt"):
            other.truncate(length - 1)
        other.truncate(0)
        assert (other.prefill(inputs) - model(**inputs).logits[:, -1]).abs().max() <= 1e-5


@pytest.mark.parametrize("attached", [False, True])
@torch.no_grad()
def test_a_tree_is_its_paths(
    model: Any, inputs: Any, attached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row of a tree says what a chain of its own would; one path stays, and can be taken back."""
    monkeypatch.setattr(recurrent, "REACH", 12)
    rows, path, after = [4, 5, 6, 7, 8, 9], [0, 2, 4, 5], torch.tensor([[7, 8, 11]])
    with mmaccel.accelerate(model) if attached else nullcontext():
        tree, chain = (HFRunner.open(model, adapter_for(model)) for _ in range(2))
        for runner in (tree, chain):
            runner.prefill(inputs)
            runner.step(torch.tensor([[3, 5]]))
        length = tree.length()

        def by_chain(*ids: int) -> torch.Tensor:
            chain.truncate(length)
            return chain.step(torch.tensor([ids]))[0, -1]

        said = [*tree.step(torch.tensor([rows]), TREE)[0]]
        seen = [*TREE.sees.tolist(), *LATER.sees.tolist()]
        said.append(tree.step(torch.tensor([[3]]), LATER)[0, 0])
        tree.truncate(length + len(rows))
        again = tree.step(torch.tensor([[3]]), LATER)[0, 0]
        assert torch.equal(again, said[-1])
        for sees, got in zip(seen, said, strict=True):
            want = by_chain(*(one for one, is_seen in zip([*rows, 3], sees, strict=False) if is_seen))
            assert (got - want).abs().max() <= 1e-5
        assert (said[0] - said[-1]).abs().max() > 1e-2

        tree.truncate(length)
        tree.step(torch.tensor([rows]), TREE)
        tree.accept(torch.tensor(path))
        by_chain(*(rows[n] for n in path))
        for back in (0, 5):
            for runner in (tree, chain):
                runner.truncate(runner.length() - back)
            assert tree.length() == chain.length()
            assert (tree.step(after) - chain.step(after)).abs().max() <= 1e-5


def test_beams_batches_and_turns(model: Any, inputs: Any) -> None:
    several = batch(
        "qwen3_5", [inputs, prompt("qwen3_5", [("text", 3), ("video", 12), ("text", 20)], seed=4)]
    )
    calls = [
        (inputs, {"num_beams": 3}),
        (several, {}),
        (inputs, {"num_return_sequences": 2, "num_beams": 2}),
        (inputs, {"use_cache": False}),
    ]
    for given, more in calls:
        told = {"max_new_tokens": 6, "do_sample": False, **more}
        plain = model.generate(**given, **told)
        for recipe in ({}, {"chunk": 64}):
            with mmaccel.accelerate(model, **recipe):
                assert torch.equal(model.generate(**given, **told), plain), (more, recipe)


def test_a_later_turn_goes_on_from_the_cache(model: Any, inputs: Any) -> None:
    told = {"max_new_tokens": 5, "do_sample": False}
    more = torch.randint(3, 180, (1, 6), generator=torch.Generator().manual_seed(9))
    said = []
    for recipe in ({}, {"draft": "prompt_lookup"}, None):
        attached = None if recipe is None else mmaccel.accelerate(model, **recipe)
        first = model.generate(**inputs, **told, return_dict_in_generate=True)
        said.append(model.generate(**next_turn(first, more), **told))
        if attached is not None:
            attached.detach()
    assert torch.equal(said[0], said[1]) and torch.equal(said[0], said[2])


@pytest.mark.parametrize("captured", [False, True])
def test_a_draft_by_its_own_weights_goes_on_from_its_states(
    model: Any, inputs: Any, captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all columns it says what the target says: every guess is right. With few it is wrong now and then."""
    told = {"max_new_tokens": 24, "do_sample": False}
    plain = model.generate(**inputs, **told)
    if captured:
        monkeypatch.setattr(step, "DEVICES", ("cpu",))
    for retention in (1.0, 0.1):
        with mmaccel.accelerate(model, draft=SparseToDense(window=3, retention=retention)) as fast:
            assert torch.equal(model.generate(**inputs, **told), plain)
            draft = fast.report().draft
        assert draft["failed"] is None and draft["proposed"] > 0
        assert (draft["accepted"] == draft["proposed"]) == (retention == 1)


def test_what_a_family_lacks_is_refused_before_anything_changes(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, other = dict(model.__dict__), copy.deepcopy(model)
    unable = {"pruning": "have layers that read all tokens", "trees": "have layers that read one chain"}
    monkeypatch.setattr(Qwen35, "unable", unable)
    for recipe, said in (
        ({"prune": "fastv"}, "all tokens"),
        ({"draft": Sequential(model=other, prune="uv")}, "all tokens"),
        ({"draft": "sparse_to_dense"}, "one chain"),
        ({"draft": Tree(model=other)}, "one chain"),
    ):
        with pytest.raises(mmaccel.MmaccelError, match=f"'qwen3_5' have layers that read {said}; leave"):
            mmaccel.accelerate(model, **recipe)
    with pytest.raises(mmaccel.MmaccelError, match="only 128; lower the draft's window"):
        mmaccel.accelerate(model, draft=Sequential(model=other, window=128))
    assert model.__dict__.keys() == before.keys()
