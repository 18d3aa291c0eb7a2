"""A draft on a batch: it pauses where turns do not pay, says so, and changes no token either way."""

import copy

import pytest
import torch

import mmaccel
from mmaccel.core.errors import MmaccelWarning, RecipeError
from mmaccel.core.report import Meter
from mmaccel.models.generate import DraftTimes
from mmaccel.policies.draft import PromptLookup, Sequential
from tests.models.tiny_random import BUILD, PROMPTS, batch, prompt

GREEDY = {"max_new_tokens": 12, "do_sample": False}


@pytest.fixture(scope="module", params=sorted(BUILD))
def family(request):
    model = BUILD[request.param](layers=3)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    prompts = [
        prompt(request.param, PROMPTS[kind], seed=n) for n, kind in enumerate(("video", "text", "image"))
    ]
    together = batch(request.param, prompts)
    return model, prompts[0], together, model.generate(**together, **GREEDY)


def test_it_rests_until_it_is_measured_to_pay(family, monkeypatch):
    model, one, together, plain = family
    with mmaccel.accelerate(model, draft=Sequential(model=copy.deepcopy(model), window=3)) as fast:
        with pytest.warns(
            MmaccelWarning, match=r"does not draft in a batch of 3: .* alone, .* set in_batches to 'always'"
        ):
            assert torch.equal(model.generate(**together, **GREEDY), plain)
        report = fast.report()
        assert report.draft["rounds"] == 0 and report.new_tokens == 12
        assert "draft: it does not draft in a batch of 3" in str(report) and len(report.notes) == 1
        model.generate(**one, **GREEDY)
        assert fast.report().draft["rounds"] > 0 and not fast.report().notes
        assert torch.equal(model.generate(**together, **GREEDY), plain)
        assert "first be timed in 2 calls" in str(fast.report())
        # Now both are known: what is measured decides, and the text is the same.
        assert torch.equal(model.generate(**together, **GREEDY), plain)
        decided = fast.report()
        assert decided.draft["rounds"] > 0 or "with a draft in turns" in str(decided)
        monkeypatch.setattr(DraftTimes, "why_not", lambda self, batch, length: None)
        assert torch.equal(model.generate(**together, **GREEDY), plain)
        assert fast.report().draft["rounds"] > 0 and not fast.report().notes


def test_what_is_sampled_is_not_drafted_for_by_the_clock(family, monkeypatch):
    model, _, together, _ = family
    options = {"max_new_tokens": 12, "do_sample": True, "temperature": 1.5}
    torch.manual_seed(3)
    plain = model.generate(**together, **options)
    monkeypatch.setattr(DraftTimes, "why_not", lambda self, batch, length: None)
    with mmaccel.accelerate(model, draft=PromptLookup()) as fast:
        for _ in range(2):
            torch.manual_seed(3)
            assert torch.equal(model.generate(**together, **options), plain)
            assert "sampled" in str(fast.report())


def test_a_batch_without_a_cache_is_drafted_for(family):
    """Plain decoding would read the prompt anew at each step, so that there is nothing to rest for."""
    model, _, together, plain = family
    with mmaccel.accelerate(model, draft=PromptLookup()) as fast:
        assert torch.equal(model.generate(**together, **GREEDY, use_cache=False), plain)
        assert fast.report().draft["sequences"] and not fast.report().notes


def test_it_can_be_told_always_or_never(family, recwarn):
    model, _, together, plain = family
    for choice in ("always", "never"):
        with mmaccel.accelerate(model, draft=PromptLookup(in_batches=choice)) as fast:
            assert torch.equal(model.generate(**together, **GREEDY), plain)
            report = fast.report()
        assert bool(report.draft["sequences"]) == (choice == "always")
        assert ("in_batches is 'never'" in str(report)) == (choice == "never")
    assert not [one for one in recwarn if issubclass(one.category, MmaccelWarning)]
    with pytest.raises(RecipeError, match="in_batches is 'often'; give 'measured', 'always' or 'never'"):
        mmaccel.Recipe(draft={"name": "sequential", "in_batches": "often"})


def test_a_time_of_another_length_decides_nothing(family):
    """A short prompt given alone says nothing of a batch of long ones."""
    model, _, together, plain = family
    short = {name: together[name][1:2, -6:] for name in ("input_ids", "attention_mask")}
    assert together["input_ids"].shape[1] >= 16
    with mmaccel.accelerate(model, draft=PromptLookup()) as fast:
        model.generate(**short, **GREEDY)
        assert fast.report().draft["rounds"] > 0
        for _ in range(3):
            assert torch.equal(model.generate(**together, **GREEDY), plain)
        told = str(fast.report())
        assert " tokens given alone, and none was given" in told and "with a draft in turns" not in told


def test_what_pays_is_what_was_measured():
    turns, meter = DraftTimes(), Meter(new_tokens=11, first=1.0, last=2.0)
    turns.plain(4, 1024, meter)
    turns.drafted(1500, 0.5, 25)
    assert "of 1024 to 2047 tokens each, must first be timed in 2 calls" in turns.why_not(4, 1024)
    turns.plain(4, 2047, Meter(new_tokens=11, first=1.0, last=6.0))
    assert turns.why_not(4, 2000) is None, (
        "the faster of two calls is what steps take: 100 ms; 4 turns of 20 ms pay"
    )
    assert "2 calls" in turns.why_not(4, 2048) and "none was given" in turns.why_not(4, 4096)
    turns.drafted(1024, 1.0, 25)
    assert "160 ms with a draft in turns, 100 ms in plain steps" in turns.why_not(4, 1024)
    turns.drafted(1024, 9.0, 3)
    turns.plain(2, 1024, Meter(new_tokens=3, first=1.0, last=2.0))
    assert turns.drafted_s == {11: 0.04} and (2, 11) not in turns.plain_s, "so few are no measure"
