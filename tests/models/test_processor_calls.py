"""Wrong arguments of a processor's call are told where they are given."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mmaccel.core.errors import ModelError
from mmaccel.models.processor import Processor


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
