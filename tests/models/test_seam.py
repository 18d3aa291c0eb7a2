"""The seam to transformers under calls that are less usual: each of these once gave a wrong result, or a wrong error."""

import copy
import gc
import pickle
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from transformers import DynamicCache, GenerationConfig, LogitsProcessor

import mmaccel
from mmaccel.core.errors import ModelError
from mmaccel.core.registry import registry
from mmaccel.policies.draft.sequential import Sequential
from mmaccel.policies.kv.full import FullState
from tests.models.test_exact import logits
from tests.models.test_recipes import PIECES, SPARSE, small
from tests.models.tiny_random import EVERY, IMG, PROMPTS, VID, batch, prompt
from tests.spies import crossed

WINDOW = {"name": "window", "sinks": 4, "window": 16}


@pytest.fixture(scope="module", params=sorted(EVERY))
def family(request):
    return request.param, EVERY[request.param]()


@crossed("family", name=SPARSE, family=sorted(EVERY))
def test_a_chunk_that_is_all_padding_for_one_sequence(family, name):
    kind, model = family
    prompts = [prompt(kind, [("text", 20)]), prompt(kind, [("text", 200)])]
    with mmaccel.accelerate(model, sparse=small(name), chunk=64) as fast:
        together = logits(fast, batch(kind, prompts))
    assert together.isfinite().all()
    if name in ("a_shape", "boundary_2d"):  # the others look at each chunk's own last queries
        with mmaccel.accelerate(model, sparse=small(name)) as fast:
            alone = logits(fast, prompts[1])
        assert (together[1] - alone[0]).abs().max() <= 1e-4


@pytest.mark.parametrize("family", ["llava"], indirect=True)
def test_a_long_window_is_verified_densely(family):
    kind, model = family
    inputs = prompt(kind, PIECES)
    choice = {"sparse": small("a_shape"), "dense_tail": 0}
    with mmaccel.accelerate(model, **choice) as fast:
        alone = model.generate(**inputs, max_new_tokens=90, do_sample=False)
        kept = fast.report().kept
    draft = Sequential(model=copy.deepcopy(model), window=80)
    with mmaccel.accelerate(model, draft=draft, **choice) as fast:
        assert torch.equal(model.generate(**inputs, max_new_tokens=90, do_sample=False), alone)
        assert fast.report().kept == pytest.approx(kept) and fast.report().draft["proposed"] >= 80


def test_a_cache_does_not_outlive_its_recipe(family):
    kind, model = family
    inputs = prompt(kind, PROMPTS["video"])
    with mmaccel.accelerate(model, "dense"), torch.no_grad():
        cache = model(**inputs).past_key_values
    with pytest.raises(ModelError, match="detached"):
        logits(model, {"input_ids": torch.tensor([[7]])}, past_key_values=cache)


def test_reordered_rows_take_their_padding_along(family):
    kind, model = family
    prompts = [prompt(kind, [("text", n)], seed=n) for n in (4, 15)]
    step = torch.tensor([[7], [9]])
    with mmaccel.accelerate(model, "dense"), torch.no_grad():
        both = batch(kind, prompts)
        cache = model(**both).past_key_values
        cache.reorder_cache(torch.tensor([1, 0]))
        mask = torch.nn.functional.pad(both["attention_mask"][[1, 0]], (0, 1), value=1)
        swapped = model(input_ids=step, attention_mask=mask, past_key_values=cache).logits
        cache.batch_repeat_interleave(2)
        assert cache.sequence.layout.batch == 4
    for row, (single, token) in enumerate(zip(prompts[::-1], step, strict=True)):
        ids = torch.cat([single["input_ids"], token[None]], 1)
        assert (swapped[row, -1] - logits(model, {"input_ids": ids})[0, -1]).abs().max() <= 1e-5


@pytest.mark.parametrize("family", ["llava", "qwen"], indirect=True)
def test_two_threads_on_one_model(family):
    kind, model = family
    work = [prompt(kind, PROMPTS["video"]), batch(kind, [prompt(kind, [("text", n)]) for n in (3, 21)])]
    want = [logits(model, inputs) for inputs in work]

    def run(inputs, plain):
        valid = inputs["attention_mask"].bool()
        for _ in range(25):
            assert (logits(model, inputs) - plain)[valid].abs().max() <= 1e-5

    with mmaccel.accelerate(model, "dense"), ThreadPoolExecutor(2) as pool:
        list(pool.map(run, work, want))


def test_a_call_inside_generate_has_a_layout_of_its_own(family):
    kind, model = family
    padded = batch(kind, [prompt(kind, [("text", n)], seed=n) for n in (4, 15)])
    other = {"input_ids": torch.randint(3, 180, (2, 15), generator=torch.Generator().manual_seed(3))}
    want, seen = logits(model, other), []

    class Peek(LogitsProcessor):
        def __call__(self, ids, scores):
            seen.append(logits(model, other))
            return scores

    with mmaccel.accelerate(model, "dense"):
        model.generate(**padded, max_new_tokens=2, do_sample=False, logits_processor=[Peek()])
    assert seen and all((one - want).abs().max() <= 1e-5 for one in seen)


def test_a_memory_that_forgets_is_never_passed_by(family):
    kind, model = family
    inputs = prompt(kind, PROMPTS["long"])
    plain = logits(model, inputs)[:, -1]
    with mmaccel.accelerate(model, kv=WINDOW) as fast:
        limited = logits(fast, inputs)[:, -1]
        assert (limited - plain).abs().max() > 1e-3
        assert (logits(fast, inputs, use_cache=False)[:, -1] - limited).abs().max() <= 1e-5
        with pytest.raises(ModelError, match=r"window.*own"):
            logits(fast, inputs, past_key_values=DynamicCache())
        with pytest.raises(ModelError, match="padding"):
            logits(fast, batch(kind, [prompt(kind, [("text", n)]) for n in (4, 15)]))


def test_the_padding_of_a_cache_filled_elsewhere_is_seen(family):
    kind, model = family
    both = batch(kind, [prompt(kind, [("text", n)], seed=n) for n in (4, 15)])
    mask = torch.nn.functional.pad(both["attention_mask"], (0, 1), value=1)
    place = both["attention_mask"].sum(1, keepdim=True)
    step = {"input_ids": torch.tensor([[7], [9]]), "attention_mask": mask, "position_ids": place}
    with torch.no_grad():
        want = logits(model, step, past_key_values=model(**both).past_key_values)
        cache = model(**both).past_key_values
        with mmaccel.accelerate(model, "dense") as fast:
            assert (logits(fast, step, past_key_values=cache) - want).abs().max() <= 1e-5


def test_a_placeholder_that_the_model_wrote_is_a_word(family):
    kind, model = family
    first = prompt(kind, PROMPTS["text"])
    with mmaccel.accelerate(model, "dense"):
        out = model.generate(**first, max_new_tokens=3, do_sample=False, return_dict_in_generate=True)
        more = torch.cat([out.sequences, torch.tensor([[VID, IMG, 5]])], 1)
        again = model.generate(
            input_ids=more, past_key_values=out.past_key_values, max_new_tokens=3, do_sample=False
        )
    assert again.shape[1] == more.shape[1] + 3


def test_arguments_by_position_and_options_that_clash(family):
    kind, model = family
    ids = prompt(kind, PROMPTS["text"])["input_ids"]
    config = GenerationConfig(num_beams=2, max_new_tokens=4, do_sample=False, pad_token_id=0)
    plain = model.generate(ids, config)
    with mmaccel.accelerate(model, "dense"):
        assert torch.equal(model.generate(ids, config), plain)
        with pytest.raises(ModelError, match="cache_implementation"):
            model.generate(ids, GenerationConfig(cache_implementation="static"))
        for call in (model.model.language_model, model.model, model.generate):
            for args, named in ([ids, *[None] * 40], {}), ([ids], {"input_ids": ids, "inputs": ids}):
                with pytest.raises(TypeError, match=r"too many positional|multiple values"):
                    call(*args, **named)


@crossed(
    "family",
    family=sorted(EVERY),
    draft=["off", "prompt_lookup"],
    place=["argument", "config", "the model's own config"],
)
def test_without_a_cache_the_tokens_are_the_same(family, draft, place, monkeypatch):
    """Under a draft the memory is there all the same; it is not given back."""
    kind, model = family
    monkeypatch.setattr(model.generation_config, "eos_token_id", None)
    inputs = prompt(kind, PROMPTS["text"])
    plain = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    told = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True}
    if place == "argument":
        told["use_cache"] = False
    elif place == "config":
        told = {"generation_config": GenerationConfig(**told, use_cache=False)}
    else:
        monkeypatch.setattr(model.generation_config, "use_cache", False)
    with mmaccel.accelerate(model, draft=draft):
        got = model.generate(**inputs, **told)
    assert torch.equal(got.sequences, plain) and got.past_key_values is None


def test_a_model_dropped_without_detaching_is_freed(family):
    kind, _ = family
    model = EVERY[kind]()
    mmaccel.accelerate(model, "dense")
    assert mmaccel.attached(model) is not None
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


@crossed("family", family=sorted(EVERY), name=["dense", "a_shape", "vertical_slash"])
def test_with_gradients_on_it_runs_and_says_that_it_has_none(family, name):
    kind, model = family
    inputs = prompt(kind, PIECES)
    with mmaccel.accelerate(model, sparse=small(name) if name != "dense" else name):
        plain, graph = logits(model, inputs), model(**inputs).logits
        assert torch.equal(graph, plain) and graph.requires_grad
        with pytest.raises(ModelError, match="detach the recipe to train"):
            graph.sum().backward()
    assert all(p.grad is None for p in model.model.language_model.layers[0].parameters())


@pytest.mark.numeric(by="torch")
@crossed("family", family=sorted(EVERY), name=["dense", "a_shape", "vertical_slash", "grid"])
def test_under_autocast(family, name, monkeypatch):
    """With the same plans in bfloat16, the error is that of the plain model: twice it, over other numbers of the same size.

    A pattern may list other blocks in bfloat16, where two scores are close; that is no error, so it is not compared.
    """
    kind, model = family
    inputs = prompt(kind, PIECES)
    plain = logits(model, inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain_mixed = logits(model, inputs)
    largest = float(plain.abs().max()) * torch.finfo(torch.bfloat16).eps
    budget = 2 * float((plain_mixed.float() - plain).abs().max()) + largest
    pattern, plans = registry("sparse")[name], []
    plan = pattern.plan
    with mmaccel.accelerate(model, sparse=small(name) if name != "dense" else name) as fast:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model.generate(**inputs, max_new_tokens=2, do_sample=False)
        assert (fast.report().kept < 0.95) == (name != "dense")
        monkeypatch.setattr(pattern, "plan", lambda self, *a: plans.append(plan(self, *a)) or plans[-1])
        whole = logits(model, inputs)
        monkeypatch.setattr(pattern, "plan", lambda self, *a: plans.pop(0))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            mixed = logits(model, inputs)
    assert mixed.dtype == torch.bfloat16 and plans == []
    assert (mixed.float() - whole).abs().max() <= budget
    if name == "dense":  # Qwen's tower is attached too, and multiplies in other shapes
        assert kind == "qwen" or torch.equal(mixed, plain_mixed)
    else:
        assert (whole - plain).abs().max() > budget, "the dense answer would pass"


@crossed("family", family=sorted(EVERY), choice=["eager", {"vision_config": "eager"}])
def test_another_attention_is_chosen_before_or_after(family, choice):
    kind, inputs = family[0], prompt(family[0], PIECES)
    model = EVERY[kind]()
    with mmaccel.accelerate(model):
        model.set_attn_implementation(choice)
        with pytest.raises(ModelError, match="attn_implementation: it was set while a recipe is attached"):
            model(**inputs)
    assert torch.isfinite(logits(model, inputs)).all()


@crossed("family", family=sorted(EVERY), by=[copy.deepcopy, pickle.dumps])
def test_what_is_accelerated_is_not_copied_and_says_so(family, by):
    model = EVERY[family[0]]()  # one on which transformers has laid no hooks of its own
    with mmaccel.accelerate(model, "a_shape") as fast:
        for held in (model, fast):
            with pytest.raises(ModelError, match="neither be copied nor pickled; detach the recipe"):
                by(held)
    assert isinstance(by(model), bytes | torch.nn.Module)


def test_a_bias_that_keeps_a_pattern_from_planning_is_told(monkeypatch):
    """Once in the report; not under a dense recipe, nor where the memory has no bias."""
    model, inputs = EVERY["qwen"](), prompt("qwen", PIECES)
    plain = FullState.view
    for biased, sparse, told in ((True, "a_shape", 1), (True, "dense", 0), (False, "a_shape", 0)):

        def view(self, layer, query, biased=biased):
            found = plain(self, layer, query)
            return replace(found, bias=torch.zeros(found.key.shape[2])) if biased else found

        monkeypatch.setattr(FullState, "view", view)
        with mmaccel.accelerate(model, sparse=small("a_shape") if sparse == "a_shape" else "dense") as fast:
            model.generate(**inputs, max_new_tokens=2, do_sample=False)
            said = [note for note in fast.report().notes if "bias" in note]
        assert len(said) == told and all(note.startswith("sparse: a_shape planned no pass") for note in said)
