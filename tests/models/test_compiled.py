"""A model with a recipe may be compiled: what plans and attends stays as it is, what lies around it is traced."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

import mmaccel
from mmaccel.core.recipe import Recipe
from mmaccel.models import attention, modules
from tests.models.tiny_random import BUILD, EVERY, prompt

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
    # Ours are the two wrappers, of the multimodal and of the text model: their layers are within one graph.
    ours = [reason for reason in breaks if "disable" in reason]
    assert len(ours) == 1 and "Attaching._call" in ours[0]


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
def test_by_inductor_a_prompt_and_a_step_go_to_the_memory() -> None:
    """What is appended and attended is not left out, nor put in another order."""
    model, inputs = BUILD["llava"](), prompt("llava", PIECES)
    step = torch.tensor([[5]])
    with torch.no_grad(), mmaccel.accelerate(model, RECIPE):
        plain = model(**inputs)
        want = plain.logits, model(input_ids=step, past_key_values=plain.past_key_values).logits
        torch._dynamo.reset()
        try:
            compiled = torch.compile(model)
            out = compiled(**inputs)
            got = out.logits, compiled(input_ids=step, past_key_values=out.past_key_values).logits
            assert out.past_key_values.get_seq_length() == inputs["input_ids"].shape[1] + 1
        finally:
            torch._dynamo.reset()
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_with_gradients_on_layers_that_break_a_graph_are_found_again() -> None:
    """What is compiled of a layer's forward is kept by its code, which our copy of it has too, with other names."""
    model, inputs = BUILD["qwen"](), prompt("qwen", PIECES)
    with mmaccel.accelerate(model):
        plain = model(**inputs).logits
        torch._dynamo.reset()
        try:
            compiled = torch.compile(model, backend="eager")
            assert all(torch.equal(compiled(**inputs).logits, plain) for _ in range(2))
        finally:
            torch._dynamo.reset()


def test_cuda_graphs_leave_out_what_decides_on_the_host() -> None:
    for op in (attention.layer_attend, attention.layer_append, modules.window_attend):
        assert torch.Tag.cudagraph_unsafe in op._opoverload.tags
