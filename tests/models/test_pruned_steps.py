"""The static step of a pruned target: layers that hold unlike numbers of columns, at their own positions."""

from typing import Any

import pytest
import torch
from torch import Tensor

import mmaccel
from mmaccel.core.errors import ModelError
from mmaccel.models import step
from mmaccel.models.attention import cache_of
from mmaccel.models.runner import HFRunner
from mmaccel.policies.draft import Sequential
from mmaccel.policies.prune import DyCoke, FastV, PyramidDrop, SparseVLM, VisionZip
from tests.models.test_decode import LATER, TREE, counted, graphs_of
from tests.models.tiny_random import BUILD, EVERY, PROMPTS, prompt
from tests.products import crossed

pytestmark = [pytest.mark.numeric(by="torch"), pytest.mark.in_turn("family", 1)]
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

HYBRID = "qwen3_5"
FAMILIES = [*BUILD, HYBRID]


@pytest.fixture(scope="module", params=BUILD)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def model(family: str) -> Any:
    made = EVERY[family](layers=12 if family == HYBRID else 6, seed=5)
    return made


def runners(fast: Any, rows: tuple[int, ...]) -> tuple[HFRunner, HFRunner]:
    """One whose steps go through the model, and one whose steps are captured where there is a device."""
    family = fast.adapter
    plain, static = (cache_of(fast.model, family, fast.open_state()) for _ in range(2))
    return HFRunner(fast.model, family, plain), HFRunner(fast.model, family, static, rows)


@crossed("family", name=PRUNERS, kind=["text", "interleaved", "long"], family=FAMILIES)
@torch.no_grad()
def test_steps_are_the_model_s_own(
    family: str, model: Any, name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
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
def test_a_recipe_decodes_through_it(
    family: str, model: Any, name: str, drafted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
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
