"""An accelerated model with the dense recipe is the plain model, also compiled; detached, it is bit for bit what it was."""

import copy
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

import mmaccel
from mmaccel.backends import reference
from mmaccel.core.attach import adapter_for
from mmaccel.core.errors import ModelError
from mmaccel.core.recipe import Recipe
from mmaccel.models import attention, hf, modules, qwen2_5_vl
from mmaccel.models.install import Hooks
from tests.models.tiny_random import BUILD, EVERY, PROMPTS, batch, prompt
from tests.spies import Largest

pytestmark = pytest.mark.numeric(by="torch")


FAMILIES = sorted(EVERY)
TOLERANCE = 1e-5


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return request.param, EVERY[request.param]()


@torch.no_grad()
def logits(model, inputs, **kwargs):
    return model(**inputs, **kwargs).logits


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


def test_a_report_is_of_the_last_pass(family):
    name, model = family
    two = batch(name, [prompt(name, PROMPTS["video"], seed=s) for s in (0, 1)])
    with mmaccel.accelerate(model, "dense") as fast, torch.no_grad():
        assert fast.report().kept is None and "memory: peak" in str(fast.report())
        model(**two)
        model(**prompt(name, PROMPTS["text"]))
        report = fast.report()
        assert (report.prompt_tokens, report.new_tokens, report.kept) == (20, 0, 1.0)


def test_bad_calls_are_told_and_detached_after_an_error(family):
    name, model = family
    inputs = prompt(name, PROMPTS["video"])
    plain = logits(model, inputs)
    with pytest.raises(RuntimeError, match="user"), mmaccel.accelerate(model, "dense"):
        raise RuntimeError("user")
    assert torch.equal(logits(model, inputs), plain)
    with mmaccel.accelerate(model, "dense"):
        with pytest.raises(ModelError, match="already accelerated"):
            mmaccel.accelerate(model, "dense")
        with pytest.raises(ModelError, match="cache_implementation"):
            model.generate(**inputs, cache_implementation="static")
    with pytest.raises(ModelError, match=r"not supported.*llava_onevision"):
        mmaccel.accelerate(torch.nn.Linear(1, 1), "dense")
    with pytest.raises(ModelError, match="language head"):
        mmaccel.accelerate(model.model, "dense")
    short = dict(inputs)
    short["input_ids"] = inputs["input_ids"][:, :-20]
    with (
        mmaccel.accelerate(model, "dense"),
        pytest.raises((ModelError, ValueError, RuntimeError, IndexError)),
    ):
        model(**short)


PIECES = [("text", 6), ("video", 36), ("text", 9)]
LONGER = [("text", 8), ("video", 44), ("text", 11)]
RECIPE = Recipe.load(
    sparse={"name": "a_shape", "block": 16, "sink": 5, "window": 11}, backend="reference", dense_tail=0
)


def traced(model: Any, prompts: list[Any], **how: Any) -> tuple[list[torch.Tensor], dict[str, int]]:
    """The logits of each prompt by the compiled model, and how often each reason broke a graph."""
    torch._dynamo.reset()
    counters.clear()
    try:
        with torch.no_grad(), torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
            compiled = torch.compile(model, backend="eager", **how)
            return [compiled(**inputs).logits for inputs in prompts], dict(counters["graph_break"])
    finally:
        torch._dynamo.reset()


@pytest.mark.always
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "family", ["llava", *(pytest.param(n, marks=pytest.mark.slow) for n in ("qwen", "qwen3_vl", "qwen3_5"))]
)
def test_compiled_it_says_what_it_said(family: str) -> None:
    model, inputs = EVERY[family](), prompt(family, PIECES)
    with torch.no_grad(), mmaccel.accelerate(model, RECIPE) as fast:
        plain = model(**inputs).logits
        said, breaks = traced(model, [inputs, inputs])  # once traced, once more by what was traced
        assert all(torch.equal(one, plain) for one in said)
        assert fast.report().kept < 1
    # Ours are the two wrappers, of the multimodal and of the text model, and the one that cuts pixels: layers are within one
    # graph.
    ours = [reason for reason in breaks if "disable" in reason]
    assert ours and all("AttachmentBase._call" in one or "_encode" in one for one in ours)


@pytest.mark.filterwarnings("ignore")
def test_compiled_before_it_is_attached() -> None:
    """The trace of a film's features does not meet the model a second time, by the arguments of our wrapper."""
    model, inputs = EVERY["qwen3_vl"](), prompt("qwen3_vl", [("text", 6), ("video", 20), ("text", 20)])
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad(), mmaccel.accelerate(compiled):
        assert torch.equal(compiled(**inputs).logits, model(**inputs).logits)
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["llava", "qwen"])
def test_a_recipe_breaks_no_more_graphs(family: str) -> None:
    """Than the plain model has, at a second length too, where no limit of recompilations is met however many the layers."""
    model, prompts = BUILD[family](layers=10), [prompt(family, pieces) for pieces in (PIECES, LONGER)]
    _, plain = traced(model, prompts)
    with torch.no_grad(), mmaccel.accelerate(model, RECIPE):
        want = [model(**inputs).logits for inputs in prompts]
        said, breaks = traced(model, prompts)
    assert all(map(torch.equal, said, want))
    assert sum(breaks.values()) <= sum(plain.values())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_by_inductor_a_prompt_and_a_step_go_to_the_memory(dynamo: None) -> None:
    """What is appended and attended is not left out, nor put in another order."""
    model, inputs = BUILD["llava"](), prompt("llava", PIECES)
    step = torch.tensor([[5]])
    with torch.no_grad(), mmaccel.accelerate(model, RECIPE):
        plain = model(**inputs)
        want = plain.logits, model(input_ids=step, past_key_values=plain.past_key_values).logits
        compiled = torch.compile(model)
        out = compiled(**inputs)
        got = out.logits, compiled(input_ids=step, past_key_values=out.past_key_values).logits
        assert out.past_key_values.get_seq_length() == inputs["input_ids"].shape[1] + 1
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_with_gradients_on_layers_that_break_a_graph_are_found_again(dynamo: None) -> None:
    """What is compiled of a layer's forward is kept by its code, which our copy of it has too, with other names."""
    model, inputs = BUILD["qwen"](), prompt("qwen", PIECES)
    with mmaccel.accelerate(model):
        plain = model(**inputs).logits
        compiled = torch.compile(model, backend="eager")
        assert all(torch.equal(compiled(**inputs).logits, plain) for _ in range(2))


def test_cuda_graphs_leave_out_what_decides_on_the_host() -> None:
    for op in (attention.attend_layer, attention.append_layer_kv, qwen2_5_vl.window_attention_op):
        assert torch.Tag.cudagraph_unsafe in op._opoverload.tags


N = 2048
SPARSE = {
    "a_shape": dict(name="a_shape", sink=16, window=64),
    "vertical_slash": dict(name="vertical_slash", vertical=16, slash=8, last_q=16),
    "grid": dict(name="grid", min_stride=8, max_stride=16, last_q=16),
}


@pytest.fixture(params=list(BUILD))
def model(request: pytest.FixtureRequest) -> torch.nn.Module:
    return BUILD[request.param](layers=1)


@pytest.mark.parametrize("sparse", list(SPARSE))
def test_nothing_is_larger_than_the_hidden_states(model: torch.nn.Module, sparse: str, monkeypatch) -> None:
    """Not the feed-forward's inner rows, not the logits of the prompt, not an entry for every pair of tokens."""
    inputs = prompt("llava", [("text", N)])
    monkeypatch.setattr(reference, "BUDGET", 1 << 14)
    hidden = N * 64
    seen = {}
    for rows in (1 << 15, 256):
        monkeypatch.setattr(modules, "ROWS", rows)
        with torch.no_grad(), mmaccel.accelerate(model, sparse=SPARSE[sparse]) as fast, Largest() as largest:
            out = model(**inputs, logits_to_keep=1)
            assert fast.report().kept < 0.6
        seen[rows] = largest.entries, out.logits
    assert seen[1 << 15][0] >= 2 * hidden
    assert seen[256][0] < 1.3 * hidden
    torch.testing.assert_close(seen[256][1], seen[1 << 15][1], rtol=0, atol=1e-5)


def test_pieces_of_a_batch_and_with_gradients(model: torch.nn.Module, monkeypatch) -> None:
    norm = model.model.language_model.norm
    hidden = torch.randn(3, 100, 64, generator=torch.Generator().manual_seed(0))
    whole = norm(hidden)
    monkeypatch.setattr(modules, "ROWS", 33)
    hooks = Hooks()
    modules.process_in_token_chunks(hooks, [norm], adapter_for(model))  # type: ignore[arg-type]
    with torch.no_grad():
        torch.testing.assert_close(norm(hidden), whole, rtol=0, atol=1e-6)
    norm(hidden.requires_grad_()).sum().backward()
    assert hidden.grad is not None and "forward" in norm.__dict__
    hooks.close()
    assert "forward" not in norm.__dict__


def test_a_prompt_in_chunks_keeps_the_hidden_state_that_is_read(family, monkeypatch):
    """A runner reads the last token's: no more is kept. Other calls get all rows; steps that verify many are one pass."""
    name, model = family
    inputs, told = prompt(name, PROMPTS["long"]), {"max_new_tokens": 80, "do_sample": False}
    plain, whole = model.generate(**inputs, **told), logits(model, inputs)
    made, join = [], hf.join_chunk_outputs
    twin = copy.deepcopy(model)
    monkeypatch.setattr(hf, "join_chunk_outputs", lambda *given: made.append(join(*given)) or made[-1])
    draft = {"name": "sequential", "model": twin, "window": 70}
    with mmaccel.accelerate(model, "dense", chunk=64, draft=draft) as fast:
        assert (logits(fast, inputs) - whole).abs().max() <= TOLERANCE
        assert torch.equal(fast.generate(**inputs, **told), plain)
        assert fast.report().draft["failed"] is None
        assert (logits(fast, inputs) - whole).abs().max() <= TOLERANCE
        rows = [out.last_hidden_state.shape[1] for out in made]
        assert rows == [whole.shape[1], 1, whole.shape[1]]
    with mmaccel.accelerate(model, "dense", chunk=64) as fast:
        shown = {"return_dict_in_generate": True, "output_hidden_states": True}
        states = fast.generate(**inputs, **told, **shown).hidden_states
        assert states[0][-1].shape[1] == whole.shape[1]
