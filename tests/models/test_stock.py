"""What transformers does, under a recipe: packed sequences, no cache, weights, other loops, bare placeholders, scores."""

import copy

import pytest
import torch

import mmaccel
from mmaccel.core.errors import ModelError
from tests.models.tiny_random import BUILD, IMG, PROMPTS, VID, batch, prompt
from tests.spies import crossed

pytestmark = pytest.mark.in_turn("family", 1)

DRAFT = {"name": "prompt_lookup", "in_batches": "always"}
FULL = {"sparse": {"name": "a_shape", "sink": 512, "window": 512}}
RECIPES = {
    "dense": {},
    "full budget": FULL,
    "chunks": {"chunk": 64},
    "window": {"kv": {"name": "window", "window": 512}},
}
CALL = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True}


def close(a, b):
    return (a - b).abs().max() <= 1e-4


@crossed("family", recipe=["dense", "full budget", "chunks"], family=sorted(BUILD))
@torch.no_grad()
def test_packed_sequences_do_not_see_each_other(family, recipe):
    kind, model = family
    ids = prompt(kind, [("text", 90)])["input_ids"]
    sizes = (70, 13, 7)
    places = torch.cat([torch.arange(n) for n in sizes])[None]
    places = places.expand(4, 1, -1) if kind == "qwen" else places
    call = {"input_ids": ids, "position_ids": places, "use_cache": False}
    plain = model(**call).logits
    with mmaccel.accelerate(model, **RECIPES[recipe]):
        got = model(**call).logits
        for one, alone in zip(got.split(sizes, 1), ids.split(sizes, 1), strict=True):
            assert close(one, model(input_ids=alone).logits)
    assert close(got, plain)


@torch.no_grad()
def test_rows_are_packed_each_in_its_own_way(family):
    kind, model = family
    ids = torch.cat([prompt(kind, [("text", 20)], seed=n)["input_ids"] for n in range(2)])
    places = torch.stack([torch.arange(20), torch.arange(20) % 8])
    places = places.expand(4, -1, -1) if kind == "qwen" else places
    call = {"input_ids": ids, "position_ids": places, "use_cache": False}
    plain = model(**call).logits
    with mmaccel.accelerate(model):
        assert close(model(**call).logits, plain)
    with (
        mmaccel.accelerate(model, kv="window"),
        pytest.raises(ModelError, match=r"position_ids: .* one by one"),
    ):
        model(**call)


@pytest.mark.parametrize("prune", [{"name": "fastv", "layer": 1}, "visionzip"], ids=str)
def test_a_pruned_prompt_without_a_cache_is_pruned_once(family, prune):
    kind, model = family
    inputs = {**prompt(kind, PROMPTS["video"]), "max_new_tokens": 16, "do_sample": False}
    with mmaccel.accelerate(model, prune=prune):
        want = model.generate(**inputs)
        assert torch.equal(model.generate(**inputs, use_cache=False), want)
        got = model.generate(**inputs, use_cache=False, return_dict_in_generate=True)
    assert torch.equal(got.sequences, want) and got.past_key_values is None


def test_a_model_that_keeps_no_cache_by_its_config(family):
    model = BUILD[family[0]]()
    model.config.text_config.use_cache = False
    inputs = prompt(family[0], PROMPTS["video"])
    with mmaccel.accelerate(model), torch.no_grad():
        assert model(**inputs).past_key_values is None


@pytest.mark.parametrize("before", ["eager", "sdpa"])
def test_attention_weights_are_given(family, before):
    kind = family[0]
    model = BUILD[kind]()
    model.set_attn_implementation("eager")
    single = prompt(kind, PROMPTS["video"])
    padded = batch(kind, [single, prompt(kind, [("text", 9)])])
    call = {**single, **CALL, "output_attentions": True}
    with torch.no_grad():
        plain, alone = model(**padded, output_attentions=True), model.generate(**call)
        model.set_attn_implementation(before)
        with mmaccel.accelerate(model, chunk=64):
            got, again = model(**padded, output_attentions=True), model.generate(**call)
    real = padded["attention_mask"].bool()
    assert len(got.attentions) == len(plain.attentions) == 2
    for one, other in zip(got.attentions, plain.attentions, strict=True):
        assert one.shape == other.shape
        assert close(one.transpose(1, 2)[real], other.transpose(1, 2)[real])
    assert [[x.shape for x in step] for step in again.attentions] == [
        [x.shape for x in step] for step in alone.attentions
    ]
    assert close(again.attentions[-1][1], alone.attentions[-1][1])


@torch.no_grad()
def test_attention_weights_of_packed_sequences(family):
    kind = family[0]
    model = BUILD[kind]()
    model.set_attn_implementation("eager")
    places = torch.cat([torch.arange(8), torch.arange(4)])[None]
    call = {
        "input_ids": prompt(kind, [("text", 12)])["input_ids"],
        "position_ids": places.expand(4, 1, -1) if kind == "qwen" else places,
        "use_cache": False,
        "output_attentions": True,
    }
    plain = model(**call).attentions
    with mmaccel.accelerate(model):
        assert close(torch.stack(model(**call).attentions), torch.stack(plain))


def test_a_prompt_in_pieces_and_weights_that_nobody_holds_are_refused_under_a_pruner(family):
    """Weights as they are under a pattern and a window, by test_arguments."""
    kind, model = family
    inputs = prompt(kind, PROMPTS["video"])
    with mmaccel.accelerate(model, prune={"name": "fastv", "layer": 1}):
        with pytest.raises(ModelError, match=r"output_attentions: .*'dense'"):
            model(**inputs, output_attentions=True)
        with pytest.raises(ModelError, match="prefill_chunk_size: prune 'fastv' runs the prompt whole"):
            model.generate(**inputs, **CALL, prefill_chunk_size=16)
        assert model.generate(**inputs, **CALL).sequences.shape[1] == inputs["input_ids"].shape[1] + 6
    with mmaccel.accelerate(model), pytest.raises(ModelError, match="prefill_chunk_size: it is a number"):
        model.generate(**inputs, **CALL, prefill_chunk_size=0)


@crossed("family", recipe=RECIPES, own=[False, True], family=sorted(BUILD))
def test_an_assistant_model(family, recipe, own):
    kind, model = family
    inputs = prompt(kind, PROMPTS["interleaved"])
    helper = model if own else BUILD[kind]()
    call = {**inputs, **CALL, "assistant_model": helper, "suppress_tokens": [0, VID, IMG]}
    plain = model.generate(**call)
    with mmaccel.accelerate(model, **RECIPES[recipe]):
        got = model.generate(**call)
    assert torch.equal(got.sequences, plain.sequences)


@crossed("family", recipe=[*RECIPES, "draft"], family=sorted(BUILD))
@torch.no_grad()
def test_a_placeholder_of_what_is_not_given_is_a_word(family, recipe):
    kind, model = family
    choice = {"draft": DRAFT} if recipe == "draft" else RECIPES[recipe]
    for shown, other in (("image", VID), ("video", IMG)):
        inputs = prompt(kind, PROMPTS[shown])
        inputs["input_ids"][0, -2] = other
        plain = model.generate(**inputs, **CALL)
        with mmaccel.accelerate(model, **choice):
            assert torch.equal(model.generate(**inputs, **CALL).sequences, plain.sequences)


SCORED = {**CALL, "output_scores": True, "output_logits": True, "repetition_penalty": 1.3}


@pytest.mark.parametrize("draft", [DRAFT, "sequential", "tree"])
def test_scores_and_logits_under_a_draft(family, draft):
    kind, model = family
    inputs = prompt(kind, PROMPTS["video"])
    plain = model.generate(**inputs, **SCORED)
    recipe = draft if draft == DRAFT else {"name": draft, "model": copy.deepcopy(model)}
    with mmaccel.accelerate(model, draft=recipe) as fast:
        got = model.generate(**inputs, **SCORED)
        assert draft == DRAFT or fast.report().draft["accepted"] > 0
    assert torch.equal(got.sequences, plain.sequences)
    for name in ("scores", "logits"):
        one, other = torch.stack(getattr(got, name)), torch.stack(getattr(plain, name))
        assert one.shape == other.shape and close(one, other)


def test_scores_of_a_batch_and_its_missing_cache(family):
    kind, model = family
    prompts = [prompt(kind, PROMPTS["video"]), prompt(kind, [("text", 9)])]
    each = [model.generate(**one, **SCORED) for one in prompts]
    end = int(each[1].sequences[0, -3])
    with mmaccel.accelerate(model, draft=DRAFT) as fast:
        with pytest.warns(mmaccel.MmaccelWarning, match="past_key_values is None"):
            got = model.generate(**batch(kind, prompts), **SCORED, eos_token_id=end)
        assert "past_key_values is None" in str(fast.report())
    assert got.past_key_values is None
    assert len(got.logits) == got.sequences.shape[1] - prompts[0]["input_ids"].shape[1]
    for row, alone in enumerate(each):
        for step, want in zip(got.logits, alone.logits, strict=False):
            assert close(step[row], want[0]) or not step[row].any()
        assert close(got.scores[0][row], alone.scores[0][0])


def test_several_answers_of_one_prompt_under_a_draft(family):
    kind, model = family
    inputs = batch(kind, [prompt(kind, PROMPTS["video"]), prompt(kind, [("text", 9)])])
    call = {**inputs, "max_new_tokens": 6, "do_sample": True, "num_return_sequences": 3}
    with mmaccel.accelerate(model, draft=DRAFT):
        torch.manual_seed(0)
        got = model.generate(**call)
        torch.manual_seed(0)
        assert torch.equal(model.generate(**call), got)
        assert got.shape == (6, inputs["input_ids"].shape[1] + 6)
        assert torch.equal(got[:, :-6], inputs["input_ids"].repeat_interleave(3, 0))
        assert len({tuple(row) for row in got[:3].tolist()}) == 3
        with pytest.raises(ValueError, match="num_return_sequences"):
            model.generate(**{**call, "do_sample": False})
        # As good as certain, each answer is the greedy one.
        sure = model.generate(**call, temperature=1e-6)
        want = model.generate(**inputs, max_new_tokens=6, do_sample=False)
    assert torch.equal(sure, want.repeat_interleave(3, 0))
