"""Wrong arguments of a processor's call are told where they are given."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import mmaccel
from mmaccel.core.errors import ModelError
from mmaccel.models.processor import Processor
from mmaccel.models.qwen2_5_vl import Qwen25VL
from tests.models.tiny_random import BUILD, prompt


@pytest.mark.parametrize("rate", [0, -1.0, float("nan"), "2"])
@pytest.mark.parametrize("name", ["tiny-ov", "tiny-qwen"])
def test_a_rate_that_is_none(random_folder: Callable[[str], Path], name: str, rate: Any) -> None:
    processor = Processor.from_pretrained(random_folder(name))
    video = torch.zeros(4, 3, 56, 56, dtype=torch.uint8)
    with pytest.raises(ModelError, match=r"fps: .*; give a positive number of frames a second"):
        processor(processor.video_token, videos=video, fps=rate)


@pytest.mark.parametrize("texts", ["", ["a", ""]])
def test_an_empty_text(random_folder: Callable[[str], Path], texts: Any) -> None:
    processor = Processor.from_pretrained(random_folder("tiny-qwen"))
    with pytest.raises(ModelError, match=r"text: number \d of \d is empty"):
        processor(texts)


@pytest.mark.parametrize("own, other", [("tiny-ov-draft", "tiny-qwen"), ("tiny-qwen-draft", "tiny-ov")])
def test_inputs_of_another_family(random_folder: Callable[[str], Path], own: str, other: str) -> None:
    """Told by generate and by the call, whatever drafts; the family's own are served."""
    model = mmaccel.load_model(random_folder(own), dtype=torch.float32)
    frames = torch.zeros(4, 3, 56, 56, dtype=torch.uint8)
    for given in ({"videos": frames}, {"images": frames[0]}):
        wrong = mmaccel.load_processor(random_folder(other)).chat("What ?", **given)
        right = mmaccel.load_processor(random_folder(own)).chat("What ?", **given)
        for recipe in ("dense", "prompt_lookup"):
            with mmaccel.accelerate(model, recipe):
                for call in (model, model.generate):
                    with pytest.raises(
                        ModelError, match=r"inputs: \w+ (is of another family|comes without \w+); build"
                    ):
                        call(**wrong)
                model.generate(**right, max_new_tokens=2)


def test_a_family_that_names_no_facts_has_none_of_others() -> None:
    class Plain(Qwen25VL):
        facts = frozenset()

    inputs = prompt("qwen", [("text", 3), ("video", 12), ("text", 2)])
    assert Plain().layout(BUILD["qwen"](), inputs).length == inputs["input_ids"].shape[1]
