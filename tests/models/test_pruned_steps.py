"""The static step of a pruned target: layers that hold unlike numbers of columns, at their own positions.
Layers with a running state beside layers of attention: rolled back with the columns, in calls of every kind."""

import copy
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import mmaccel
from mmaccel.core.attach import adapter_for
from mmaccel.core.decoding.draft import DraftState, DraftStrategy, Proposal
from mmaccel.core.errors import ModelError
from mmaccel.models import recurrent, step
from mmaccel.models.attention import wrap_kv_cache
from mmaccel.models.qwen3_5 import Qwen35
from mmaccel.models.runner import HFRunner
from mmaccel.policies.draft import Sequential, SparseToDense, Tree
from mmaccel.policies.prune import DyCoke, FastV, PyramidDrop, SparseVLM, VisionZip
from tests.core.toy import Scripted
from tests.models.test_decode import LATER, TREE, counted, graphs_of
from tests.models.tiny_random import BUILD, EVERY, PROMPTS, batch, next_turn, prompt
from tests.policies.prune.conftest import HYBRID, family, model
from tests.spies import crossed

__all__ = ["family", "model"]
pytestmark = pytest.mark.numeric(by="torch")
PRUNERS: dict[str, Any] = {
    "fastv": FastV(retention=0.4),
    "fastv, numbered anew": FastV(retention=0.4, compact=True),
    "pyramid_drop": PyramidDrop(stages_at=(0.34, 0.5, 0.7)),
    "pyramid_drop, numbered anew": PyramidDrop(stages_at=(0.34, 0.5, 0.7), compact=True),
    "sparsevlm": SparseVLM(retention=(0.6, 0.3), layers=(1, 3)),
    "dycoke": DyCoke(drop=0.5, forget=0.0),
    "dycoke, forgetting": DyCoke(drop=0.5, forget=0.6, layer=3),
    "dycoke, forgetting anew": DyCoke(drop=0.0, forget=0.6, layer=2, refresh=1.0),
    "visionzip": VisionZip(retention=0.5, contextual=0.4),
    "visionzip, numbered anew": VisionZip(retention=0.5, contextual=0.4, compact=True),
}

FAMILIES = [*BUILD, HYBRID]


def runners(fast: Any, rows: tuple[int, ...]) -> tuple[HFRunner, HFRunner]:
    """One whose steps go through the model, and one whose steps are captured where there is a device."""
    family = fast.adapter
    plain, static = (wrap_kv_cache(fast.model, family, fast.open_kv_state()) for _ in range(2))
    return HFRunner(fast.model, family, plain), HFRunner(fast.model, family, static, rows)


@crossed("family", name=PRUNERS, kind=["text", "interleaved", "long"], family=FAMILIES)
@torch.no_grad()
def test_steps_are_the_model_s_own(family: str, model: Any, name: str, kind: str, monkeypatch) -> None:
    seen = counted(monkeypatch)
    inputs = prompt(family, PROMPTS[kind], seed=3)
    with mmaccel.accelerate(model, prune=PRUNERS[name]) as fast:
        plain, static = runners(fast, (1, 4))
        assert torch.equal(plain.prefill(inputs), static.prefill(inputs))

        def both(*ids: int) -> None:
            rows = torch.tensor([ids])
            torch.testing.assert_close(static.step(rows), plain.step(rows), atol=2e-5, rtol=0)
            assert plain.length() == static.length()
            told, own = (one.cache.state.counters() for one in (plain, static))
            assert {**told, "bytes": 0} == {**own, "bytes": 0}

        for ids in ((7,), (9,), (4,), (9, 3, 4), (5,), (5, 5, 5, 5), (11,)):
            both(*ids)
        for one in (plain, static):
            one.truncate(one.length() - 5)
        both(8)
        done = len(seen)
        # More rows than were asked for go through the model, and what follows goes on from there.
        both(1, 2, 3, 4, 5, 6)
        assert len(seen) == done >= 8
        both(7)
        assert len(seen) > done
        # A part of the prompt goes too, and columns that were never held among it.
        for one in (plain, static):
            if family == HYBRID and one.cache.state.count_dropped(5):
                with pytest.raises(ModelError, match="not into a prompt"):
                    one.truncate(inputs["input_ids"].shape[1] - 9)
            elif family != HYBRID:
                one.truncate(inputs["input_ids"].shape[1] - 9)
        both(3)


@crossed("family", name=["fastv, numbered anew", "pyramid_drop", "visionzip"], family=BUILD)
@torch.no_grad()
def test_trees_are_the_model_s_own(family: str, model: Any, name: str) -> None:
    inputs = prompt(family, PROMPTS["interleaved"])
    with mmaccel.accelerate(model, prune=PRUNERS[name]) as fast:
        found: list[list[Tensor]] = []
        for one in runners(fast, (2, 8)):
            one.prefill(inputs)
            said = [one.step(torch.tensor([[4, 5, 6, 7, 8, 9]]), TREE), one.step(torch.tensor([[3]]), LATER)]
            one.truncate(one.length() - 1)
            one.cache.state._last = one._last = 6
            for part in one.cache.state._parts:
                part._last = 6
            one.accept(torch.tensor([0, 2, 4, 5]))
            said.append(one.step(torch.tensor([[7, 8]])))
            found.append(said)
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=0)


@crossed(
    "family",
    name=[name for name in PRUNERS if "anew" not in name],
    drafted=(False, True),
    family=FAMILIES,
    where=lambda name, drafted, _: not (drafted and PRUNERS[name].scoring_layer is not None),
)
def test_a_recipe_decodes_through_it(family: str, model: Any, name: str, drafted: bool, monkeypatch) -> None:
    """The tokens and the figures of a pruned target without it; the cache it leaves can be taken up by plain steps."""
    inputs = prompt(family, PROMPTS["video"])
    choice = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True}
    draft = Sequential(model=EVERY[family](seed=1), window=3) if drafted else "off"
    with mmaccel.accelerate(model, prune=PRUNERS[name], draft=draft) as fast:
        want, before = fast.generate(**inputs, **choice), fast.report()
        monkeypatch.setattr(step, "DEVICES", ("cpu",))
        seen = counted(monkeypatch)
        got, after = fast.generate(**inputs, **choice), fast.report()
        assert torch.equal(got.sequences, want.sequences)
        # Where a token chooses what later layers see, they are a step of their own.
        assert len(seen) == (22 if PRUNERS[name].scoring_layer is not None else 11) if not drafted else seen
        held = [{**report.kv, "bytes": 0} for report in (before, after)]
        assert held[0] == held[1] and after.kv["held_mean"] < after.kv["seen"]
        assert got.past_key_values.sequence.layout.length == got.past_key_values.get_seq_length()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", PRUNERS)
@torch.no_grad()
def test_a_captured_step_is_the_written_one(family: str, name: str) -> None:
    model = BUILD[family](layers=6, seed=5).cuda()
    inputs = {key: one.cuda() for key, one in prompt(family, PROMPTS["long"]).items()}
    with mmaccel.accelerate(model, prune=PRUNERS[name]) as fast:
        plain, static = runners(fast, (1, 4))
        # SparseVLM adds up what it merges in an order that a device does not promise.
        torch.testing.assert_close(static.prefill(inputs), plain.prefill(inputs), atol=1e-4, rtol=0)
        for ids in ([7], [9], [4], [1, 2, 3], [4, 2, 3], [1, 9], [5], [6], [8]):
            rows = torch.tensor([ids], device="cuda")
            torch.testing.assert_close(static.step(rows), plain.step(rows), atol=1e-3, rtol=0)
    parts = 2 if PRUNERS[name].scoring_layer is not None else 1
    assert [len(of) for of in graphs_of(static)] == [parts, parts]


@dataclass(frozen=True, kw_only=True)
class Echo(DraftStrategy):
    """The last three tokens, once more."""

    name: ClassVar = "echo"
    needs: ClassVar = frozenset({"rollback"})
    max_rollback: ClassVar = 4

    def open(self, target: Any) -> DraftState:
        return Scripted(lambda tokens: Proposal(torch.tensor(tokens[-3:])))


PIECES = [("text", 6), ("video", 12), ("text", 9)]


@pytest.fixture(scope="module")
def hybrid() -> Any:
    return EVERY["qwen3_5"](layers=6)


@pytest.fixture(scope="module")
def hybrid_inputs() -> Any:
    return prompt("qwen3_5", PIECES)


def test_geometry_counts_layers_of_attention(hybrid: Any) -> None:
    family = adapter_for(hybrid)
    shape = family.geometry(hybrid)
    assert (shape.layers, shape.heads, shape.kv_heads, shape.head_dim) == (3, 4, 2, 32)
    with mmaccel.accelerate(
        hybrid, sparse={"name": "a_shape", "block": 16, "sink": 16, "window": 32}
    ) as fast:
        hybrid.generate(**prompt("qwen3_5", [("text", 6), ("video", 40)]), max_new_tokens=2, do_sample=False)
        assert fast.report().heads() == {"a_shape": 12}
    with pytest.raises(mmaccel.MmaccelError, match="there is no layer 3"):
        mmaccel.accelerate(hybrid, dense_layers=[3])


@torch.no_grad()
def test_a_step_taken_back_leaves_no_trace(hybrid: Any, hybrid_inputs: Any, monkeypatch) -> None:
    """Back by any number of tokens, over a mark too; and not into the prompt."""
    monkeypatch.setattr(recurrent, "REACH", 12)
    ids = torch.randint(3, 180, (1, 40), generator=torch.Generator().manual_seed(3))
    with mmaccel.accelerate(hybrid):
        one, other = (HFRunner.open(hybrid, adapter_for(hybrid)) for _ in range(2))
        for runner in (one, other):
            runner.prefill(hybrid_inputs)
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
        assert (other.prefill(hybrid_inputs) - hybrid(**hybrid_inputs).logits[:, -1]).abs().max() <= 1e-5


@pytest.mark.parametrize("attached", [False, True])
@torch.no_grad()
def test_a_tree_is_its_paths(hybrid: Any, hybrid_inputs: Any, attached: bool, monkeypatch) -> None:
    """Each row of a tree says what a chain of its own would; one path stays, and can be taken back."""
    monkeypatch.setattr(recurrent, "REACH", 12)
    rows, path, after = [4, 5, 6, 7, 8, 9], [0, 2, 4, 5], torch.tensor([[7, 8, 11]])
    with mmaccel.accelerate(hybrid) if attached else nullcontext():
        tree, chain = (HFRunner.open(hybrid, adapter_for(hybrid)) for _ in range(2))
        for runner in (tree, chain):
            runner.prefill(hybrid_inputs)
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


def test_beams_batches_and_turns(hybrid: Any, hybrid_inputs: Any) -> None:
    several = batch(
        "qwen3_5", [hybrid_inputs, prompt("qwen3_5", [("text", 3), ("video", 12), ("text", 20)], seed=4)]
    )
    calls = [
        (hybrid_inputs, {"num_beams": 3}),
        (several, {}),
        (hybrid_inputs, {"num_return_sequences": 2, "num_beams": 2}),
        (hybrid_inputs, {"use_cache": False}),
    ]
    for given, more in calls:
        told = {"max_new_tokens": 6, "do_sample": False, **more}
        plain = hybrid.generate(**given, **told)
        for recipe in ({}, {"chunk": 64}):
            with mmaccel.accelerate(hybrid, **recipe):
                assert torch.equal(hybrid.generate(**given, **told), plain), (more, recipe)


def test_a_later_turn_goes_on_from_the_cache(hybrid: Any, hybrid_inputs: Any) -> None:
    told = {"max_new_tokens": 5, "do_sample": False}
    more = torch.randint(3, 180, (1, 6), generator=torch.Generator().manual_seed(9))
    said = []
    for recipe in ({}, {"draft": "prompt_lookup"}, None):
        attached = None if recipe is None else mmaccel.accelerate(hybrid, **recipe)
        first = hybrid.generate(**hybrid_inputs, **told, return_dict_in_generate=True)
        said.append(hybrid.generate(**next_turn(first, more), **told))
        if attached is not None:
            attached.detach()
    assert torch.equal(said[0], said[1]) and torch.equal(said[0], said[2])


@pytest.mark.parametrize("captured", [False, True])
def test_a_draft_by_its_own_weights_goes_on_from_its_states(
    hybrid: Any, hybrid_inputs: Any, captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all columns it says what the target says: every guess is right. With few it is wrong now and then."""
    told = {"max_new_tokens": 24, "do_sample": False}
    plain = hybrid.generate(**hybrid_inputs, **told)
    if captured:
        monkeypatch.setattr(step, "DEVICES", ("cpu",))
    for retention in (1.0, 0.1):
        with mmaccel.accelerate(hybrid, draft=SparseToDense(window=3, retention=retention)) as fast:
            assert torch.equal(hybrid.generate(**hybrid_inputs, **told), plain)
            draft = fast.report().draft
        assert draft["failed"] is None and draft["proposed"] > 0
        assert (draft["accepted"] == draft["proposed"]) == (retention == 1)


def test_what_a_family_lacks_is_refused_before_anything_changes(hybrid: Any, monkeypatch) -> None:
    before, other = dict(hybrid.__dict__), copy.deepcopy(hybrid)
    unable = {"pruning": "have layers that read all tokens", "trees": "have layers that read one chain"}
    monkeypatch.setattr(Qwen35, "unable", unable)
    for recipe, said in (
        ({"prune": "fastv"}, "all tokens"),
        ({"draft": Sequential(model=other, prune="uv")}, "all tokens"),
        ({"draft": "sparse_to_dense"}, "one chain"),
        ({"draft": Tree(model=other)}, "one chain"),
    ):
        with pytest.raises(mmaccel.MmaccelError, match=f"'qwen3_5' have layers that read {said}; leave"):
            mmaccel.accelerate(hybrid, **recipe)
    with pytest.raises(mmaccel.MmaccelError, match="only 128; lower the draft's window"):
        mmaccel.accelerate(hybrid, draft=Sequential(model=other, window=128))
    assert hybrid.__dict__.keys() == before.keys()
