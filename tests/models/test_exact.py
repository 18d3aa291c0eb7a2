"""An accelerated model with the dense recipe is the plain model; detached, it is bit for bit what it was."""

import copy

import pytest
import torch

import mmaccel
from mmaccel.core.errors import ModelError
from tests.models.tiny_random import EVERY, PROMPTS, batch, prompt
from tests.products import product

FAMILIES = sorted(EVERY)
TOLERANCE = 1e-5
pytestmark = [pytest.mark.numeric(by="torch"), pytest.mark.in_turn("family", 2)]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return request.param, EVERY[request.param]()


@torch.no_grad()
def logits(model, inputs, **kwargs):
    return model(**inputs, **kwargs).logits


@pytest.mark.parametrize(
    ("family", "kind", "chunk"), product(FAMILIES, PROMPTS, [None, 64], together=2), indirect=["family"]
)
def test_dense_logits_and_tokens_are_the_plain_ones(family, kind, chunk):
    name, model = family
    inputs = prompt(name, PROMPTS[kind])
    plain = logits(model, inputs)
    with mmaccel.accelerate(model, "dense", chunk=chunk) as fast:
        ours = logits(fast, inputs)
        uncached = logits(fast, inputs, use_cache=False)
    assert (ours - plain).abs().max() <= TOLERANCE
    assert (uncached - plain).abs().max() <= TOLERANCE
    assert torch.equal(logits(model, inputs), plain)
    with mmaccel.accelerate(model, "dense", chunk=chunk) as fast:
        said = model.generate(**inputs, max_new_tokens=8, do_sample=False)
        report = fast.report()
    assert torch.equal(said, model.generate(**inputs, max_new_tokens=8, do_sample=False))
    length = inputs["input_ids"].shape[1]
    assert (report.prompt_tokens, report.new_tokens) == (length, said.shape[1] - length)
    assert report.kept == pytest.approx(1.0) and report.ttft_s > 0


def test_detached_after_an_error(family):
    name, model = family
    inputs = prompt(name, PROMPTS["video"])
    plain = logits(model, inputs)
    with pytest.raises(RuntimeError, match="user"), mmaccel.accelerate(model, "dense"):
        raise RuntimeError("user")
    assert torch.equal(logits(model, inputs), plain)


def test_two_models_from_one_config_do_not_disturb_each_other(family):
    name, model = family
    twin = type(model)(model.config).eval()
    twin.load_state_dict(model.state_dict())
    inputs = prompt(name, PROMPTS["long"])
    plain = logits(twin, inputs)
    with mmaccel.accelerate(model, kv={"name": "window", "sinks": 4, "window": 16}) as fast:
        assert torch.equal(logits(twin, inputs), plain)
        with mmaccel.accelerate(twin, "dense") as other:
            assert (logits(other, inputs) - plain).abs().max() <= TOLERANCE
            assert (logits(fast, inputs)[:, -1] - plain[:, -1]).abs().max() > 100 * TOLERANCE


def test_interleaved_sequences_keep_their_own_positions(family):
    """The hand loop on two sequences at once: positions are the sequence's own, not state of the module."""
    name, model = family
    first, second = prompt(name, PROMPTS["video"]), prompt(name, PROMPTS["two videos"], seed=5)
    token = torch.tensor([[7]])
    alone = []
    for inputs in (first, second):
        cache = model(**inputs).past_key_values
        alone.append(model(input_ids=token, past_key_values=cache).logits)
    with mmaccel.accelerate(model, "dense"), torch.no_grad():
        caches = [model(**inputs).past_key_values for inputs in (first, second)]
        for want, cache in zip(alone, caches, strict=True):
            assert (model(input_ids=token, past_key_values=cache).logits - want).abs().max() <= TOLERANCE


@torch.no_grad()
def test_a_pattern_of_the_text_leaves_the_frames_as_they_are(family):
    """Qwen's tower is attached too, and multiplies in other shapes: twice its own error is allowed, by float64."""
    name, model = family
    inputs = prompt(name, PROMPTS["video"])
    adapter = mmaccel.core.attach.adapter_for(model)
    plain = adapter.frames(model, inputs)
    exact = adapter.frames(copy.deepcopy(model).double(), double(inputs))
    error = float((plain - exact).abs().max()) + torch.finfo(torch.float32).eps * float(exact.abs().max())
    with mmaccel.accelerate(model, "a_shape"):
        ours = adapter.frames(model, inputs)
    assert exact.dtype == torch.float64 and ours.dtype == torch.float32
    assert (ours - exact).abs().max() <= 2 * error
    assert name != "llava" or torch.equal(ours, plain)


def double(inputs):
    return {key: x.double() if x.is_floating_point() else x for key, x in inputs.items()}


def test_a_report_is_of_the_last_pass(family):
    name, model = family
    two = batch(name, [prompt(name, PROMPTS["video"], seed=s) for s in (0, 1)])
    with mmaccel.accelerate(model, "dense") as fast, torch.no_grad():
        assert fast.report().kept is None and "memory: peak" in str(fast.report())
        model(**two)
        model(**prompt(name, PROMPTS["text"]))
        report = fast.report()
        assert (report.prompt_tokens, report.new_tokens, report.kept) == (20, 0, 1.0)


def test_a_second_turn_on_the_same_cache_is_the_whole_conversation(family):
    name, model = family
    first = prompt(name, PROMPTS["video"])
    ids = first["input_ids"]
    with mmaccel.accelerate(model, "dense") as fast:
        out = model.generate(**first, max_new_tokens=5, do_sample=False, return_dict_in_generate=True)
        more = torch.cat([out.sequences, torch.tensor([[11, 12, 13, 14]])], 1)
        turn = {"input_ids": more, "attention_mask": torch.ones_like(more)}
        again = model.generate(**turn, past_key_values=out.past_key_values, max_new_tokens=5, do_sample=False)
        assert fast.report().prompt_tokens == more.shape[1] - (out.sequences.shape[1] - 1)
    whole = {**first, **turn}
    if "mm_token_type_ids" in whole:
        kinds = first["mm_token_type_ids"]
        whole["mm_token_type_ids"] = torch.nn.functional.pad(kinds, (0, more.shape[1] - ids.shape[1]))
    assert torch.equal(again, model.generate(**whole, max_new_tokens=5, do_sample=False))


def test_bad_calls_are_told(family):
    name, model = family
    inputs = prompt(name, PROMPTS["video"])
    with mmaccel.accelerate(model, "dense"):
        with pytest.raises(ModelError, match="already accelerated"):
            mmaccel.accelerate(model, "dense")
        with pytest.raises(ModelError, match="cache_implementation"):
            model.generate(**inputs, cache_implementation="static")
    with pytest.raises(ModelError, match=r"not supported.*llava_onevision"):
        mmaccel.accelerate(torch.nn.Linear(1, 1), "dense")
    with pytest.raises(ModelError, match="language head"):
        mmaccel.accelerate(model.model, "dense")
    with pytest.raises(mmaccel.MmaccelError, match=r"window is the text 'big'; give a whole number"):
        mmaccel.accelerate(model, sparse={"name": "a_shape", "window": "big"})
    short = dict(inputs)
    short["input_ids"] = inputs["input_ids"][:, :-20]
    with (
        mmaccel.accelerate(model, "dense"),
        pytest.raises((ModelError, ValueError, RuntimeError, IndexError)),
    ):
        model(**short)
