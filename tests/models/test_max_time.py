"""`max_time` of `generate`: under drafts, for a batch as a whole, and inside a prompt that is read in pieces."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mmaccel
from mmaccel.core.decoding import generate
from mmaccel.core.errors import MmaccelWarning
from mmaccel.policies.draft import PromptLookup, Sequential

from .tiny_random import BUILD, PROMPTS, batch, prompt

pytestmark = pytest.mark.in_turn("family", 1)


class Clock:
    """Passes a second at each forward pass of a model's text."""

    def __init__(self, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(generate, "monotonic", lambda: self.now)
        monkeypatch.setattr("transformers.generation.stopping_criteria.time.time", lambda: self.now)
        self.hook = model.model.language_model.layers[0].register_forward_hook(self.tick)

    def tick(self, *given: Any) -> None:
        self.now += 1


@pytest.fixture(params=sorted(BUILD))
def family(request: pytest.FixtureRequest) -> tuple[str, Any, Any]:
    model = BUILD[request.param]()
    model.generation_config.eos_token_id = None
    return request.param, model, BUILD[request.param](seed=1)


DRAFTS: dict[str, Any] = {
    "off": lambda model: None,
    "prompt_lookup": lambda model: PromptLookup(),
    "sequential": lambda model: Sequential(model=model, window=3),
}


@pytest.mark.parametrize("draft", DRAFTS)
def test_it_ends_an_answer_as_the_plain_model_s_does(
    family: tuple[str, Any, Any], draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, model, other = family
    inputs = prompt(name, PROMPTS["video"])
    length = inputs["input_ids"].shape[1]
    want = model.generate(**inputs, max_new_tokens=40, do_sample=False)[0, length:].tolist()
    clock = Clock(model, monkeypatch)
    made = DRAFTS[draft](other)
    with mmaccel.accelerate(model, **({} if made is None else {"draft": made})) as fast:
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
        more = torch.cat([first.sequences, ids], 1)
        turn = {"input_ids": more, "attention_mask": torch.ones_like(more), "do_sample": False}
        want = fast.generate(**turn, max_new_tokens=4)
        clock = Clock(model, monkeypatch)
        with pytest.warns(MmaccelWarning, match="max_time: the time ran out before the prompt was read"):
            assert torch.equal(fast.generate(**inputs, max_new_tokens=4, max_time=2.5), ids)
        assert clock.now == 3, "the fourth of five pieces was not run"
        with pytest.warns(MmaccelWarning, match="max_time"):
            told = fast.generate(
                **turn,
                past_key_values=first.past_key_values,
                max_new_tokens=4,
                max_time=2.5,
                return_dict_in_generate=True,
            )
        assert torch.equal(told.sequences, more)
        again = fast.generate(**turn, past_key_values=first.past_key_values, max_new_tokens=4)
        assert torch.equal(again, want), "the cache was given back as it was"
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
