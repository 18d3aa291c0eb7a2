"""Drafting changes no token: up to the last position, by a text model, and in batches, where a draft rests until it pays."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as T

import mmaccel
from mmaccel.core.decoding.draft import Drafting
from mmaccel.core.errors import DraftError, MmaccelWarning, ModelError, RecipeError
from mmaccel.core.report import Meter
from mmaccel.models import loading, step
from mmaccel.models.causal import is_causal_lm
from mmaccel.models.family import CausalLM
from mmaccel.models.generate import DecodeTimings
from mmaccel.policies.draft import PromptLookup, Sequential, TextOnly, Tree
from mmaccel.policies.draft.sequential import SequentialDraftState
from tests.models.tiny_random import BUILD, DRAFTS, IMG, PROMPTS, VID, VOCAB, batch, often_right, prompt
from tests.spies import crossed, heard, refusal

PIECES = {**PROMPTS, "long": [("text", 4), ("video", 25), ("text", 6)]}
STRATEGIES = {
    **{name: one for name, one in DRAFTS.items() if name != "off"},
    "dynamic tree": lambda model, window, **more: Tree(
        model=model, shape="dynamic", depth=window, width=2, nodes=2 * window, **more
    ),
    "prompt_lookup": lambda model, window, **more: PromptLookup(window=window, **more),
}


@crossed("family", strategy=STRATEGIES, room=[1, 2, 9], family=sorted(BUILD))
def test_up_to_the_model_s_last_position(family, strategy, room):
    """A prompt that leaves `room` positions: the answer fills them, and no draft asks for one beyond."""
    name, target = family
    draft = often_right(target, 0.02, seed=1)  # rounds end in every way
    inputs = prompt(name, PIECES["long"])
    limit = inputs["input_ids"].shape[1] + room
    alone = target.generate(**inputs, max_length=limit, do_sample=False)
    assert alone.shape[1] == limit
    with mmaccel.accelerate(target, draft=STRATEGIES[strategy](draft, 5)) as fast:
        runner = type(fast.view.runner())
        with pytest.MonkeyPatch.context() as patch:
            lengths = heard(patch, runner, "step", lambda self, ids, *_, **__: self.length() + ids.shape[1])
            assert torch.equal(target.generate(**inputs, max_length=limit, do_sample=False), alone)
        assert fast.report().draft["failed"] is None
    assert lengths or room == 1
    # The rows of a tree are more than its depth, and stand at positions of their depth.
    assert "tree" in strategy or max(lengths, default=0) <= limit


@crossed("family", strategy=STRATEGIES, family=sorted(BUILD))
def test_prompts_may_come_in_pieces_smaller_than_what_is_verified(family, strategy):
    """A tree of more tokens than a piece is verified whole."""
    name, target = family
    inputs, call = prompt(name, PROMPTS["video"]), {"max_new_tokens": 8, "do_sample": False}
    plain = target.generate(**inputs, **call)
    draft = often_right(target, 0.02, seed=1)
    with mmaccel.accelerate(target, draft=STRATEGIES[strategy](draft, 5)) as fast:
        assert torch.equal(target.generate(**inputs, **call, prefill_chunk_size=3), plain)
        assert fast.report().draft["failed"] is None


def words_of(target: torch.nn.Module | None = None, vocab: int = VOCAB) -> T.Qwen2ForCausalLM:
    """A Qwen2 of the tiny models' sizes, with the weights of the language model of `target` if that is given."""
    torch.manual_seed(5)
    like: Any = T.Qwen2Config() if target is None else target.config.get_text_config()
    rope = {"rope_type": "default", "rope_theta": like.rope_parameters["rope_theta"]}
    model = T.Qwen2ForCausalLM(
        T.Qwen2Config(
            vocab_size=vocab, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=8192, bos_token_id=1, eos_token_id=2, pad_token_id=0,
            tie_word_embeddings=False, rms_norm_eps=like.rms_norm_eps, rope_parameters=rope,
        )
    ).eval()  # fmt: skip
    if target is not None:
        model.model.load_state_dict(target.model.language_model.state_dict())
        model.lm_head.load_state_dict(target.lm_head.state_dict())
    return model


@crossed("family", kind=["text", "video", "interleaved"], family=sorted(BUILD))
def test_greedy_tokens_are_the_plain_ones(family, kind: str, tmp_path: Path, monkeypatch) -> None:
    """Its steps are those that are captured, where any are."""
    name, target = family
    inputs = prompt(name, PROMPTS[kind])
    plain = target.generate(**inputs, max_new_tokens=12, do_sample=False)
    words_of(target).save_pretrained(tmp_path)
    for model, devices in ((words_of(target), ()), (str(tmp_path), ()), (words_of(target), ("cpu",))):
        monkeypatch.setattr(step, "DEVICES", devices)
        if devices:
            assert is_causal_lm(model) and CausalLM().runner(model).steps is not None
        draft = TextOnly(model=model, window=3)
        with mmaccel.accelerate(target, draft=draft) as fast:
            assert torch.equal(target.generate(**inputs, max_new_tokens=12, do_sample=False), plain)
            told = fast.report().draft
        assert told["failed"] is None and told["rounds"] > 0 and told["proposed"] > 0
        if kind == "text":
            assert told["accepted"] == told["proposed"], (
                "it has the target's weights, and reads what the target reads"
            )


def test_placeholders_are_never_proposed(family, monkeypatch: pytest.MonkeyPatch) -> None:
    name, target = family
    draft = words_of()
    draft.lm_head.weight.data[[IMG, VID]] = 20 * draft.lm_head.weight.data[[5]].abs().max()
    proposed: list[int] = []
    plain = SequentialDraftState.draft_steps

    def drafting(self: SequentialDraftState, most: int | None = None) -> Drafting:
        found = yield from plain(self, most)
        proposed.extend(found.ids.tolist())
        return found

    monkeypatch.setattr(SequentialDraftState, "draft_steps", drafting)
    for options in ({"do_sample": False}, {"do_sample": True, "temperature": 2.0}):
        with mmaccel.accelerate(target, draft=TextOnly(model=draft, window=4)) as fast:
            target.generate(**prompt(name, PROMPTS["video"]), max_new_tokens=16, **options)
            assert fast.report().draft["failed"] is None
    assert len(proposed) > 20 and not {IMG, VID} & set(proposed)


def test_what_cannot_draft_is_told(family, tmp_path: Path) -> None:
    _, target = family
    state = T.MambaForCausalLM(
        T.MambaConfig(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=1, state_size=4)
    )
    for strategy, model, words in (
        (TextOnly, words_of(vocab=400), "the draft has 400 token embeddings and the target 200"),
        (TextOnly, state, "cannot roll back"),
        (Sequential, torch.nn.Linear(1, 1), "not supported"),
        (TextOnly, torch.nn.Linear(1, 1), "not supported"),
        (Sequential, words_of(), "'qwen2' is not supported"),
    ):
        draft = strategy(model=model)
        assert words in refusal(lambda draft=draft: mmaccel.accelerate(target, draft=draft))
    with pytest.raises(ModelError, match="'qwen2' is not supported"):
        mmaccel.accelerate(words_of())
    assert mmaccel.attached(target) is None


def test_it_is_told_before_anything_is_loaded(
    random_folder: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = random_folder("tiny-ov-draft")
    vocab = loading.config_only_view(folder).geometry.vocab
    for count in (vocab, vocab + 5000):
        words_of(vocab=count).save_pretrained(tmp_path / str(count))
    monkeypatch.setattr(
        T.PreTrainedModel, "from_pretrained", lambda *_, **__: pytest.fail("something is loaded")
    )
    recipe = {"name": "text_only", "model": str(tmp_path / str(vocab))}
    loading.check_recipe({"draft": recipe}, folder)
    with pytest.raises(DraftError, match="token embeddings"):
        loading.check_recipe({"draft": {**recipe, "model": str(tmp_path / str(vocab + 5000))}}, folder)
    with pytest.raises(DraftError, match="'qwen2' is not supported"):
        loading.check_recipe({"draft": {**recipe, "name": "sequential"}}, folder)


GREEDY = {"max_new_tokens": 12, "do_sample": False}


@pytest.fixture(scope="module", params=sorted(BUILD))
def three(request):
    model = BUILD[request.param](layers=3)
    model.generation_config.pad_token_id = 0
    prompts = [
        prompt(request.param, PROMPTS[kind], seed=n) for n, kind in enumerate(("video", "text", "image"))
    ]
    together = batch(request.param, prompts)
    return model, prompts[0], together, model.generate(**together, **GREEDY)


def test_it_rests_until_it_is_measured_to_pay(three, monkeypatch):
    model, one, together, plain = three
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
        monkeypatch.setattr(DecodeTimings, "why_draft_is_slower", lambda self, batch, length: None)
        assert torch.equal(model.generate(**together, **GREEDY), plain)
        assert fast.report().draft["rounds"] > 0 and not fast.report().notes


def test_what_is_sampled_is_not_drafted_for_by_the_clock(three, monkeypatch):
    model, _, together, _ = three
    options = {"max_new_tokens": 12, "do_sample": True, "temperature": 1.5}
    torch.manual_seed(3)
    plain = model.generate(**together, **options)
    monkeypatch.setattr(DecodeTimings, "why_draft_is_slower", lambda self, batch, length: None)
    with mmaccel.accelerate(model, draft=PromptLookup()) as fast:
        for _ in range(2):
            torch.manual_seed(3)
            assert torch.equal(model.generate(**together, **options), plain)
            assert "sampled" in str(fast.report())


def test_a_batch_without_a_cache_is_drafted_for(three):
    """Plain decoding would read the prompt anew at each step, so that there is nothing to rest for."""
    model, _, together, plain = three
    with mmaccel.accelerate(model, draft=PromptLookup()) as fast:
        assert torch.equal(model.generate(**together, **GREEDY, use_cache=False), plain)
        assert fast.report().draft["sequences"] and not fast.report().notes


def test_it_can_be_told_always_or_never(three, recwarn):
    model, _, together, plain = three
    for choice in ("always", "never"):
        with mmaccel.accelerate(model, draft=PromptLookup(in_batches=choice)) as fast:
            assert torch.equal(model.generate(**together, **GREEDY), plain)
            report = fast.report()
        assert bool(report.draft["sequences"]) == (choice == "always")
        assert ("in_batches is 'never'" in str(report)) == (choice == "never")
    assert not [one for one in recwarn if issubclass(one.category, MmaccelWarning)]
    with pytest.raises(RecipeError, match="in_batches is 'often'; give 'measured', 'always' or 'never'"):
        mmaccel.Recipe(draft={"name": "sequential", "in_batches": "often"})


def test_a_time_of_another_length_decides_nothing(three):
    """A short prompt given alone says nothing of a batch of long ones."""
    model, _, together, plain = three
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
    turns, meter = DecodeTimings(), Meter(new_tokens=11, first=1.0, last=2.0)
    turns.record_without_draft(4, 1024, meter)
    turns.record_drafted(1500, 0.5, 25)
    assert "of 1024 to 2047 tokens each, must first be timed in 2 calls" in turns.why_draft_is_slower(4, 1024)
    turns.record_without_draft(4, 2047, Meter(new_tokens=11, first=1.0, last=6.0))
    assert turns.why_draft_is_slower(4, 2000) is None, (
        "the faster of two calls is what steps take: 100 ms; 4 turns of 20 ms pay"
    )
    assert "2 calls" in turns.why_draft_is_slower(4, 2048)
    assert "none was given" in turns.why_draft_is_slower(4, 4096)
    turns.record_drafted(1024, 1.0, 25)
    assert "160 ms with a draft in turns, 100 ms in plain steps" in turns.why_draft_is_slower(4, 1024)
    turns.record_drafted(1024, 9.0, 3)
    turns.record_without_draft(2, 1024, Meter(new_tokens=3, first=1.0, last=2.0))
    assert turns.drafted_s == {11: 0.04} and (2, 11) not in turns.plain_s, "so few are no measure"
