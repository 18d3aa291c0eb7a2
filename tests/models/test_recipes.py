"""Whatever a recipe admits runs on each family, says what it did, and never falls back to dense in silence; a warning
names the user's line; beside the `window` memory a pattern acts within the window. What transformers does under a recipe:
packed sequences, no cache, weights, other loops, bare placeholders, scores."""

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import mmaccel
from mmaccel.core.errors import MmaccelWarning, ModelError
from mmaccel.core.prefill.attention import ForwardPass
from mmaccel.core.registry import registry
from tests.models.streams import FPS, open_session, pair
from tests.models.test_exact import TOLERANCE, logits
from tests.models.tiny_random import BUILD, IMG, PROMPTS, VID, batch, prompt
from tests.spies import crossed

LAYERS = 3
PIECES = [("text", 6), ("video", 36), ("text", 1), ("image",), ("text", 3), ("video", 36), ("text", 9)]
SMALL = {
    "a_shape": {"sink": 16, "window": 32},
    "tri_shape": {"sink": 16, "window": 32, "bottom": 24},
    "sf_fixed": {"summary": 2},
    "sf_strided": {},
    "block_topk": {"budget": 0.5, "sink": 16},
    "vertical_slash": {"vertical": 12, "slash": 4, "last_q": 16},
    "grid": {"stride": "frame", "min_stride": 2, "last_q": 16},
    "boundary_2d": {"default": {"name": "a_shape", "sink": 8, "window": 24}},
    "q_boundary": {
        "text": {"name": "a_shape", "sink": 8, "window": 24},
        "image": {"name": "vertical_slash", "vertical": 12, "slash": 4, "last_q": 16},
        "video": {"name": "grid", "min_stride": 2, "last_q": 16},
    },
    "k_boundary": {
        "text": {"name": "a_shape", "sink": 8, "window": 24},
        "image": {"name": "a_shape", "sink": 2, "window": 4},
        "video": {"name": "vertical_slash", "vertical": 12, "slash": 4, "last_q": 16},
    },
}
WITHIN = {"boundary_2d": "a_shape", "q_boundary": "grid", "k_boundary": "vertical_slash"}
"""What the videos of a boundary follow in it."""
SPARSE = sorted(set(registry("sparse")) - {"dense", "per_head"})


def small(name: str) -> dict:
    """A budget small enough for a prompt of a few hundred tokens."""
    return {"name": name, "block": 16, **SMALL[name]}


def test_every_pattern_has_a_small_budget_here():
    assert sorted(SMALL) == SPARSE


@crossed("family", name=SPARSE, family=sorted(BUILD))
def test_a_pattern_runs_and_kept_is_the_listed_share_of_causal_pairs(family, name, monkeypatch):
    """Counted again by hand from the plans of the run, the tail's rows and a dense layer."""
    kind, model = family
    inputs = prompt(kind, PIECES)
    length, tail = inputs["input_ids"].shape[1], 8
    plans = []
    pattern = registry("sparse")[name]
    plain = pattern.plan
    monkeypatch.setattr(pattern, "plan", lambda self, *a: plans.append(plain(self, *a)) or plans[-1])
    with mmaccel.accelerate(model, sparse=small(name), dense_layers=[1], dense_tail=tail) as fast:
        model.generate(**inputs, max_new_tokens=3, do_sample=False)
        report = fast.report()
    told = f"{name}({WITHIN[name]})" if name in WITHIN else name
    assert report.patterns == ((told,) * 4, ("dense",) * 4, (told,) * 4)
    assert report.heads() == {told: 8, "dense": 4}
    assert 1 / 3 < report.kept < 0.9 and len(plans) == 2
    causal = length * (length + 1) / 2
    shares = [1.0]
    for plan in plans:
        listed = torch.zeros(4, dtype=torch.float64)
        for part in plan.parts:
            own = listed[part.for_heads(4)]
            h = len(own)
            rows = ((part.q_row >= 0) & (part.q_row < length - tail)).expand(1, h, -1)[0]
            for span in part.spans:
                keys = (span.k_row >= 0).expand(1, h, -1)[0]
                table = span.lists.to_dense_table().expand(1, h, -1, -1)[0] >= 0
                nq, nk = (x.unflatten(-1, (-1, 16)).sum(-1).double() for x in (rows, keys))
                own += torch.einsum("hm,hmn,hn->h", nq, table.double(), nk)
        listed += sum(range(length - tail + 1, length + 1))
        shares.append(float((listed / causal).mean()))
    assert report.kept == pytest.approx(sum(shares) / 3, rel=1e-6)


@crossed("family", name=SPARSE, family=sorted(BUILD))
def test_padding_behind_a_prompt_takes_none_of_its_dense_rows(family, name):
    kind, model = family
    prompts = [prompt(kind, [("text", 6), ("video", 36), ("text", n)], seed=n) for n in (110, 30)]
    right = batch(kind, prompts)
    width = right["input_ids"].shape[1]
    for told in right.keys() & {"input_ids", "attention_mask", "mm_token_type_ids"}:
        rows = [torch.nn.functional.pad(p[told], (0, width - p[told].shape[1])) for p in prompts]
        right[told] = torch.cat(rows)
    with mmaccel.accelerate(model, sparse=small(name), dense_tail=40) as fast, torch.no_grad():
        together, kept = model(**right).logits, torch.tensor(fast.report().kept_by_head)
        shares = []
        for row, inputs in enumerate(prompts):
            alone = model(**inputs).logits[0]
            assert (together[row, : len(alone)] - alone).abs().max() <= 1e-4
            shares.append(torch.tensor(fast.report().kept_by_head))
    torch.testing.assert_close(kept, sum(shares) / 2)
    if name == "a_shape":  # others look at each chunk's own last queries
        for chunk in (width - 10, width - 70):
            with mmaccel.accelerate(model, sparse=small(name), dense_tail=40, chunk=chunk), torch.no_grad():
                pieces = model(**right).logits
            assert (pieces - together)[right["attention_mask"].bool()].abs().max() <= 1e-4


SINKS, WINDOW, TAIL = 4, 90, 8
KV = {"name": "window", "sinks": SINKS, "window": WINDOW, "margin": 8}


def written_out(run, layer, query, key, value, scale):
    """`ForwardPass.attend` of a whole prompt: the element masks of the plan that the pattern makes and of the window."""
    n = query.shape[2]
    if n < 64:
        return ATTEND(run, layer, query, key, value, scale)
    view = run.state.view(layer, query)
    distance = torch.arange(n)[:, None] - torch.arange(n)
    window = (distance >= 0) & ((distance < WINDOW) | (torch.arange(n) < SINKS))
    plan = run.config.recipe.sparse.for_layer(layer).plan(query, view.key, run.layout, run.layout)
    tail = (torch.arange(n) >= n - TAIL)[:, None]
    mask = (plan.to_mask() | tail) & window
    return torch.nn.functional.scaled_dot_product_attention(
        query, view.key, view.value, attn_mask=mask, scale=scale, enable_gqa=True
    )


ATTEND = ForwardPass.attend


@crossed("family", name=SPARSE, family=sorted(BUILD))
def test_a_pattern_and_a_window_are_dense_attention_under_both_masks(family, name, monkeypatch):
    kind, model = family
    inputs = prompt(kind, PIECES)
    how = {"max_new_tokens": 6, "do_sample": False}
    with mmaccel.accelerate(model, kv=KV, sparse=small(name), dense_tail=TAIL) as fast:
        ours, text = logits(model, inputs), model.generate(**inputs, **how)
        report = fast.report()
        assert report.kept < 0.8 and "dense" not in report.heads()
        assert report.kv["held"] < report.kv["seen"]
        monkeypatch.setattr(ForwardPass, "attend", written_out)
        exact = logits(model, inputs)
        assert torch.equal(model.generate(**inputs, **how), text)
    assert (ours - exact).abs().max() <= TOLERANCE


@crossed("family", name=SPARSE, family=sorted(BUILD))
def test_a_chunked_prompt_goes_on_over_what_the_window_holds(family, name):
    """Later pieces see a view that lacks columns: the pattern runs there too, in a batch as in one sequence."""
    kind, model = family
    inputs = [prompt(kind, PIECES, seed=seed) for seed in (0, 1)]
    found = []
    for some in (*inputs, batch(kind, inputs)):
        with mmaccel.accelerate(model, kv=KV, sparse=small(name), chunk=100, dense_tail=0) as fast:
            found.append(logits(model, some))
            last = some["input_ids"].shape[1] % 100
            (told, *_) = fast.report().heads()
            assert ("dense" in told) == (last < 64) and fast.report().kept < 0.8
    assert (found[2] - torch.cat(found[:2])).abs().max() <= TOLERANCE


def under(recipe: dict[str, Any], call: Callable[[Any], Any]) -> None:
    model = BUILD["qwen"]()
    with mmaccel.accelerate(model, **recipe), torch.no_grad():
        call(model)


TEXTS = [prompt("qwen", PROMPTS["text"], seed=n) for n in range(2)]
PRUNED = {"prune": {"name": "dycoke", "layer": 1}}
RESTS = {"draft": "prompt_lookup"}
LARGE = torch.zeros(4, 3, 90, 60, dtype=torch.uint8)
WORKS: dict[str, Callable[[], Any]] = {
    "a pruner without a video": lambda: under(PRUNED, lambda one: one.generate(**TEXTS[0], max_new_tokens=2)),
    "the same of a pass": lambda: under(PRUNED, lambda one: one(**TEXTS[0])),
    "a draft that rests": lambda: under(RESTS, lambda one: one.generate(**batch("qwen", TEXTS), max_new_tokens=2)),
    "another size": lambda: open_session("random-qwen", "recent", 2).watch(LARGE, fps=FPS),
    "a bare placeholder": lambda: pair("random-ov")[1](f"what is {pair('random-ov')[1].video_token} ?"),
}  # fmt: skip
"""Each in a line of its own."""


@pytest.mark.parametrize("name", WORKS)
def test_a_warning_names_the_line_that_called(name: str) -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        WORKS[name]()
    ours = [(Path(one.filename).name, one.lineno) for one in told if one.category is MmaccelWarning]
    assert ours == [(Path(__file__).name, WORKS[name].__code__.co_firstlineno)], [
        str(one.message) for one in told
    ]


DRAFT = {"name": "prompt_lookup", "in_batches": "always"}
FULL = {"sparse": {"name": "a_shape", "sink": 512, "window": 512}}
WIDE = {"kv": {"name": "window", "window": 512}}
RECIPES = {"dense": {}, "full budget": FULL, "chunks": {"chunk": 64}, "window": WIDE}
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
    """Of padded sequences, of each step, and of packed sequences."""
    kind = family[0]
    model = BUILD[kind]()
    model.set_attn_implementation("eager")
    single = prompt(kind, PROMPTS["video"])
    padded = batch(kind, [single, prompt(kind, [("text", 9)])])
    call = {**single, **CALL, "output_attentions": True}
    places = torch.cat([torch.arange(8), torch.arange(4)])[None]
    packed = {
        "input_ids": prompt(kind, [("text", 12)])["input_ids"],
        "position_ids": places.expand(4, 1, -1) if kind == "qwen" else places,
    }
    packed |= {"use_cache": False, "output_attentions": True}
    with torch.no_grad():
        plain, alone = model(**padded, output_attentions=True), model.generate(**call)
        apart = model(**packed).attentions
        model.set_attn_implementation(before)
        with mmaccel.accelerate(model, chunk=64):
            got, again = model(**padded, output_attentions=True), model.generate(**call)
            assert close(torch.stack(model(**packed).attentions), torch.stack(apart))
    real = padded["attention_mask"].bool()
    assert len(got.attentions) == len(plain.attentions) == 2
    for one, other in zip(got.attentions, plain.attentions, strict=True):
        assert one.shape == other.shape
        assert close(one.transpose(1, 2)[real], other.transpose(1, 2)[real])
    assert [[x.shape for x in step] for step in again.attentions] == [
        [x.shape for x in step] for step in alone.attentions
    ]
    assert close(again.attentions[-1][1], alone.attentions[-1][1])


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
