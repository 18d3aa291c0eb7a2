"""Generation ends where the positions of the model do, or the time of `max_time`, whatever drafts."""

import warnings
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import mmaccel
from mmaccel.core.attach import adapter_for
from mmaccel.core.decoding import generate
from mmaccel.core.errors import MmaccelWarning, ModelError
from mmaccel.models.prompt_layout import max_positions
from mmaccel.policies.draft import PromptLookup
from tests.models.tiny_random import BUILD, DRAFTS, PROMPTS, batch, next_turn, prompt
from tests.spies import crossed

ROOM = 13
STRATEGIES: dict[str, Any] = {
    **DRAFTS,
    "pruned": partial(DRAFTS["sequential"], prune={"name": "uv", "retention": 0.3}),
}


@pytest.fixture(scope="module", params=sorted(BUILD))
def family(request: pytest.FixtureRequest) -> tuple[str, Any, Any]:
    model = BUILD[request.param]()
    return request.param, model, BUILD[request.param](seed=1)


def ends_after(model: Any, inputs: dict[str, torch.Tensor], room: int, monkeypatch) -> int:
    """Give the model so many positions that `room` are left after the prompt's last column; how many there are."""
    family = adapter_for(model)
    last = int(family.positions(model, inputs)[..., -1].max())
    monkeypatch.setattr(family.text_model(model).config, "max_position_embeddings", last + 1 + room)
    return last + 1 + room


def said(fast: Any, inputs: dict[str, torch.Tensor], tokens: int) -> list[int]:
    ids = fast.generate(**inputs, max_new_tokens=tokens, do_sample=False)
    new: list[int] = ids[0, inputs["input_ids"].shape[1] :].tolist()
    return new


@crossed("family", strategy=STRATEGIES, kind=["video", "text"], family=sorted(BUILD))
def test_the_answer_ends_with_the_positions(
    family: tuple[str, Any, Any], strategy: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, model, draft = family
    inputs = prompt(name, PROMPTS[kind])
    want = model.generate(**inputs, max_new_tokens=40, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    most = ends_after(model, inputs, ROOM, monkeypatch)
    told = rf"the model has {most} positions \(max_position_embeddings\), and the answer ends with them"
    with mmaccel.accelerate(model, draft=STRATEGIES[strategy](draft)) as fast:
        with pytest.warns(MmaccelWarning, match=told) as warned:
            assert said(fast, inputs, 40) == want[:ROOM].tolist()
        # A draft's pruner that finds no video in a prompt says so, too.
        assert len([one for one in warned if "positions" in str(one.message)]) == 1
        assert fast.report().draft["failed"] is None
        if strategy in ("sequential", "pruned", "text_only", "tree", "parallel", "sparse_to_dense"):
            assert fast.report().draft["rounds"] > 0
        with warnings.catch_warnings():
            # An answer that just fits gives no warning.
            warnings.filterwarnings("error", message=".*positions", category=MmaccelWarning)
            assert said(fast, inputs, ROOM) == want[:ROOM].tolist()


@crossed("family", strategy=STRATEGIES, family=sorted(BUILD))
def test_a_prompt_that_leaves_nothing_is_refused(
    family: tuple[str, Any, Any], strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, model, draft = family
    inputs = prompt(name, PROMPTS["video"])
    most = ends_after(model, inputs, 0, monkeypatch)
    taken = int(adapter_for(model).positions(model, inputs).max()) + 1
    told = rf"input_ids: the prompt takes {taken} positions of the model's {most} .* fewer frames or a shorter text\.$"
    with (
        mmaccel.accelerate(model, draft=STRATEGIES[strategy](draft)) as fast,
        pytest.raises(ModelError, match=told) as refused,
    ):
        said(fast, inputs, 5)
    assert "\n" not in str(refused.value)
    # Under M-RoPE a video may stand further out than the text after it.
    monkeypatch.setattr(adapter_for(model).text_model(model).config, "max_position_embeddings", taken - 1)
    with mmaccel.accelerate(model) as fast, pytest.raises(ModelError, match=f"takes {taken} positions"):
        said(fast, inputs, 2)


@pytest.mark.parametrize("strategy", ["off", "sequential", "parallel"])
def test_each_sequence_of_a_batch_ends_by_itself(
    family: tuple[str, Any, Any], strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The longer prompt, in positions, ends first."""
    name, model, draft = family
    one, two = prompt(name, PROMPTS["video"]), prompt(name, [("text", 9)], seed=1)
    inputs = batch(name, [one, two])
    place = inputs["input_ids"].shape[1]
    inputs["pad_token_id"] = 0  # type: ignore[assignment]
    want = model.generate(**inputs, max_new_tokens=12, do_sample=False)[:, place:]
    ends_after(model, one, 9, monkeypatch)
    with (
        mmaccel.accelerate(model, draft=STRATEGIES[strategy](draft, in_batches="always")) as fast,
        pytest.warns(MmaccelWarning, match="the answer ends"),
    ):
        new = fast.generate(**inputs, max_new_tokens=12, do_sample=False)[:, place:]
    assert new[0, :9].tolist() == want[0, :9].tolist() and not new[0, 9:].any()
    assert new[1].tolist() == want[1].tolist()


def test_a_second_turn_counts_the_first(family: tuple[str, Any, Any], monkeypatch) -> None:
    name, model, _ = family
    inputs = prompt(name, PROMPTS["video"])
    most = ends_after(model, inputs, 20, monkeypatch)
    top = int(adapter_for(model).positions(model, inputs).max())
    with mmaccel.accelerate(model) as fast:
        first = fast.generate(**inputs, max_new_tokens=8, do_sample=False, return_dict_in_generate=True)
        turn = next_turn(first, torch.tensor([[5, 6, 7]]))
        with pytest.warns(MmaccelWarning, match="the answer ends"):
            second = fast.generate(**turn, max_new_tokens=30, do_sample=False)
    # A second turn goes on from the largest position, as transformers has it.
    assert second.shape[1] - turn["input_ids"].shape[1] == most - 1 - (top + 8 + 3)


def test_rotary_scaling_adds_positions(family: tuple[str, Any, Any]) -> None:
    config = family[1].model.language_model.config
    assert max_positions(config) == 8192

    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    given = SimpleNamespace(max_position_embeddings=32768, rope_parameters=rope)
    assert max_positions(given) == 131072
    given.max_position_embeddings = 131072  # some configurations write what the scaling gives
    assert max_positions(given) == 131072
    assert max_positions(SimpleNamespace()) is None


class Clock:
    """Passes a second at each forward pass of a model's text."""

    def __init__(self, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(generate, "monotonic", lambda: self.now)
        monkeypatch.setattr("transformers.generation.stopping_criteria.time.time", lambda: self.now)
        monkeypatch.setitem(model.model.language_model.layers[0]._forward_hooks, -1, self.tick)

    def tick(self, *given: Any) -> None:
        self.now += 1


@pytest.mark.parametrize("draft", ["off", "prompt_lookup", "sequential"])
def test_it_ends_an_answer_as_the_plain_model_s_does(
    family: tuple[str, Any, Any], draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, model, other = family
    inputs = prompt(name, PROMPTS["video"])
    length = inputs["input_ids"].shape[1]
    want = model.generate(**inputs, max_new_tokens=40, do_sample=False)[0, length:].tolist()
    clock = Clock(model, monkeypatch)
    with mmaccel.accelerate(model, draft=DRAFTS[draft](other)) as fast:
        said = fast.generate(**inputs, max_new_tokens=40, do_sample=False, max_time=6.0)[0, length:].tolist()
    assert 0 < len(said) < 40 and said == want[: len(said)] and clock.now <= 8


def test_it_ends_a_prompt_in_pieces(family: tuple[str, Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    name, model, _ = family
    inputs = prompt(name, [("text", 300)])
    ids = inputs["input_ids"]
    with mmaccel.accelerate(model, chunk=64) as fast:
        first = fast.generate(
            **prompt(name, PROMPTS["text"]), max_new_tokens=2, do_sample=False, return_dict_in_generate=True
        )
        turn = {**next_turn(first, ids), "do_sample": False, "max_new_tokens": 4}
        want = fast.generate(**{**turn, "past_key_values": None})
        clock = Clock(model, monkeypatch)
        with pytest.warns(MmaccelWarning, match="max_time: the time ran out before the prompt was read"):
            assert torch.equal(fast.generate(**inputs, max_new_tokens=4, max_time=2.5), ids)
        assert clock.now == 3, "the fourth of five pieces was not run"
        with pytest.warns(MmaccelWarning, match="max_time"):
            told = fast.generate(**turn, max_time=2.5, return_dict_in_generate=True)
        assert torch.equal(told.sequences, turn["input_ids"])
        assert torch.equal(fast.generate(**turn), want), "the cache was given back as it was"
        assert fast.generate(**inputs, max_new_tokens=4, max_time=1e6).shape[1] == ids.shape[1] + 4


def test_it_is_of_a_batch_as_a_whole(family: tuple[str, Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    name, model, _ = family
    inputs = batch(name, [prompt(name, [("text", 20)], seed) for seed in range(4)])
    length = inputs["input_ids"].shape[1]
    clock = Clock(model, monkeypatch)
    told = pytest.warns(MmaccelWarning, match="1 of 4 prompts were not read in time")
    with mmaccel.accelerate(model, draft=PromptLookup(in_batches="always")) as fast, told:
        ids = fast.generate(**inputs, max_new_tokens=40, do_sample=False, max_time=2.5, pad_token_id=0)
    assert clock.now <= 6 and torch.equal(ids[:, :length], inputs["input_ids"])
    assert ids[:3, length].all() and not ids[3, length:].any(), "the last prompt was not read"
