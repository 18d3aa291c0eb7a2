"""A warning names the user's line, however deep in the package it is given."""

from __future__ import annotations

import inspect
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import mmaccel
from mmaccel.core.errors import MmaccelWarning
from tests.models.streams import FPS, film, open_session, pair
from tests.models.tiny_random import BUILD, PROMPTS, batch, prompt


def idle_pruner() -> Any:
    model = BUILD["qwen"]()
    fast = mmaccel.accelerate(model, prune={"name": "dycoke", "layer": 1})
    with fast:
        return inspect.currentframe().f_lineno, model.generate(
            **prompt("qwen", PROMPTS["text"]), max_new_tokens=2
        )


def idle_pruner_of_a_pass() -> Any:
    model = BUILD["qwen"]()
    with mmaccel.accelerate(model, prune={"name": "dycoke", "layer": 1}), torch.no_grad():
        return inspect.currentframe().f_lineno, model(**prompt("qwen", PROMPTS["text"]))


def resting_draft() -> Any:
    model = BUILD["qwen"]()
    inputs = batch("qwen", [prompt("qwen", PROMPTS["text"], seed=n) for n in range(2)])
    with mmaccel.accelerate(model, draft="prompt_lookup"):
        return inspect.currentframe().f_lineno, model.generate(**inputs, max_new_tokens=2, do_sample=False)


def other_size() -> Any:
    with open_session("random-qwen", "recent") as session:
        session.watch(film(2), fps=FPS)
        frames = torch.nn.functional.interpolate(film(4), (90, 60))
        return inspect.currentframe().f_lineno, session.watch(frames, fps=FPS)


def bare_placeholder() -> Any:
    processor = pair("random-ov")[1]
    return inspect.currentframe().f_lineno, processor(f"what is {processor.video_token} ?")


@pytest.mark.parametrize(
    "work", [idle_pruner, idle_pruner_of_a_pass, resting_draft, other_size, bare_placeholder]
)
def test_a_warning_names_the_line_that_called(work: Any) -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        line, _ = work()
    ours = [(Path(one.filename).name, one.lineno) for one in told if one.category is MmaccelWarning]
    assert ours == [(Path(__file__).name, line)], [str(one.message) for one in told]
