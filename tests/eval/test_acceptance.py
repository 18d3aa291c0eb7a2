"""Figures of drafting, and the certificate: rounding passes, a wrong token does not."""

import copy

import pytest

from mmaccel.cli import answer
from mmaccel.core.recipe import Recipe
from mmaccel.policies.draft import Parallel, Sequential
from tests.models.tiny_random import BUILD, PROMPTS, prompt


@pytest.fixture(scope="module", params=sorted(BUILD))
def family(request):
    model = BUILD[request.param](layers=3)
    model.generation_config.eos_token_id = None
    return request.param, model


def test_both_conventions_of_a_perfect_draft(family):
    name, model = family
    inputs = prompt(name, PROMPTS["video"])
    twin = copy.deepcopy(model)
    recipes = {
        "in turns": Recipe(draft=Sequential(model=twin, window=4)),
        "at once": Recipe(draft=Parallel(model=twin, window=4, process=False)),
    }
    plain = answer.generate(model, inputs, max_new_tokens=21)
    rows = {
        name: answer.draft_metrics(answer.generate(model, inputs, recipe, max_new_tokens=21), plain)
        for name, recipe in recipes.items()
    }
    turns, once = rows["in turns"], rows["at once"]
    assert turns["same"] and once["same"]
    assert (turns["kept"], turns["a_step"], turns["steps"], turns["share"]) == (4.0, 5.0, 4, 1.0)
    assert once["steps"] == 5 and once["a_step"] == 4.0 and once["streak"] >= 16 and once["share"] == 1.0
    assert turns["speedup"] > 0


def test_a_draft_that_fails_is_told(family):
    name, model = family
    inputs = prompt(name, PROMPTS["video"])
    plain = answer.generate(model, inputs, max_new_tokens=6)
    broken = copy.deepcopy(model)
    broken.model.forward = None
    with pytest.warns(UserWarning, match="dropped"):
        run = answer.generate(model, inputs, Recipe(draft=Sequential(model=broken)), max_new_tokens=6)
    told = answer.draft_metrics(run, plain)
    assert told["failed"] and told["same"] and told["kept"] == 0 and told["a_step"] <= 1.25


@pytest.fixture(scope="module")
def low(family):
    """The model in bfloat16, its inputs, and what it says."""
    name, model = family
    model = copy.deepcopy(model).bfloat16()
    inputs = prompt(name, PROMPTS["video"])
    inputs = {k: x.bfloat16() if x.is_floating_point() else x for k, x in inputs.items()}
    return model, inputs, answer.generate(model, inputs, max_new_tokens=24)[0][0]


def test_equal_texts_need_no_proof(low):
    model, inputs, ids = low
    assert answer.check_rounding(model, inputs, ids, ids, 4) == answer.RoundingCheck(None)


def test_a_wrong_token_is_not_certified(low):
    """The least likely token stands in the place of the likeliest."""
    model, inputs, ids = low
    logits = answer._logits(model, inputs, ids[:9], [1])
    wrong = ids.clone()
    wrong[9] = logits.argmin()
    told = answer.check_rounding(model, inputs, wrong, ids, 4)
    assert told.first == 9 and told.gap > told.slack and not told.holds


def test_a_text_that_ends_early_is_not_certified(low):
    """Both say the same tokens, so that the same token ended one of them and not the other."""
    model, inputs, ids = low
    for ours, plain in ((ids[:9], ids), (ids, ids[:9])):
        told = answer.check_rounding(model, inputs, ours, plain, 4)
        assert told.first == 9 and not told.holds


def test_a_near_tie_is_certified(low):
    """Two candidates whose logits are made equal in every precision: the output row of one is copied to the other."""
    model, inputs, ids = low
    tied = copy.deepcopy(model)
    head = tied.get_output_embeddings().weight.data
    other = int((ids[9] + 1) % 150)
    head[other] = head[ids[9]]
    ours = ids.clone()
    ours[9] = other
    told = answer.check_rounding(tied, inputs, ours, ids, 4)
    assert told.first == 9 and told.gap < 1e-5 and told.holds


def test_the_slack_is_what_a_wide_pass_changes(low, monkeypatch):
    model, inputs, ids = low
    other = ids.clone()
    other[20] = (ids[20] + 1) % 150
    honest, asked = answer._logits, []

    def rounding(model, inputs, before, sizes):
        asked.append(sizes)
        out = honest(model, inputs, before, sizes)
        out[7] += 0.25 * (len(sizes) == 1)
        return out

    before = answer.check_rounding(model, inputs, other, ids, 8)
    monkeypatch.setattr(answer, "_logits", rounding)
    after = answer.check_rounding(model, inputs, other, ids, 8)
    assert asked == [[1] * 8, [8], [1] * 8]
    assert after.gap == before.gap and 0.2 < after.slack <= before.slack + 0.25


def test_fp32_leaves_no_room(family):
    name, model = family
    inputs = prompt(name, PROMPTS["video"])
    ids = answer.generate(model, inputs, max_new_tokens=12)[0][0]
    other = ids.clone()
    other[10] = (ids[10] + 1) % 150
    told = answer.check_rounding(model, inputs, other, ids, 8, exact=model)
    assert told.slack < 1e-5 and not told.holds


def test_the_floor_is_weights_and_cache_over_the_rate(family):
    _, model = family
    text = sum(p.numel() for p in model.model.language_model.parameters())
    embedding = model.get_input_embeddings().weight.numel()
    head = model.get_output_embeddings().weight.numel()
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    want = 4 * (text if tied else text - embedding + head) + 1000
    assert answer.min_decode_step_s(model, 1000, 1e6) == pytest.approx(want / 1e6)
    assert answer.memory_bandwidth(size=1 << 22) > 1e8
