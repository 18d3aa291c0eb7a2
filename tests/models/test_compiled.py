"""A model with a recipe may be compiled: what plans and attends stays as it is, what lies around it is traced."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters

import mmaccel
from mmaccel.core.recipe import Recipe
from tests.models.tiny_random import BUILD, prompt

PIECES = [("text", 6), ("video", 36), ("text", 9)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["llava", pytest.param("qwen", marks=pytest.mark.slow)])
def test_compiled_it_says_what_it_said(family: str) -> None:
    model, inputs = BUILD[family](), prompt(family, PIECES)
    recipe = Recipe.load(
        sparse={"name": "a_shape", "block": 16, "sink": 5, "window": 11}, backend="reference", dense_tail=0
    )
    torch._dynamo.reset()
    counters.clear()
    try:
        with torch.no_grad(), mmaccel.accelerate(model, recipe) as fast:
            plain = model(**inputs).logits
            compiled = torch.compile(model, backend="eager")
            for _ in range(2):  # once traced, once more by what was traced
                assert torch.equal(compiled(**inputs).logits, plain)
            assert fast.report().kept < 1
        assert not any("SimpleNamespace" in reason for reason in counters["graph_break"])
    finally:
        torch._dynamo.reset()
