"""Placeholders of images and videos that are written in a text."""

from __future__ import annotations

import warnings

import pytest

from mmaccel.core.errors import MmaccelWarning
from mmaccel.models.processor import Processor
from mmaccel_lab.tiny.tokenizer import PLACEHOLDERS
from tests.models.test_processor import family, folder, noise, processor

__all__ = ["family", "folder", "processor"]


def test_a_placeholder_without_its_visual_is_a_word(processor: Processor, family: str) -> None:
    for kind, mark in PLACEHOLDERS[family].items():
        with pytest.warns(MmaccelWarning, match=f"1 placeholders .* no {kind} is given"):
            got = processor(f"what is {mark}")
        assert got["input_ids"][0].tolist() == processor.tokenizer(f"what is {mark}")["input_ids"]


def test_a_question_may_name_a_placeholder(processor: Processor, family: str) -> None:
    """Beside a video it is text, in as many tokens as text takes; the video keeps its one place."""
    marks = PLACEHOLDERS[family]
    video, image = noise(2, 3, 84, 140), noise(3, 84, 140)
    both = f"what is {marks['video']} and {marks['image']} here"
    plain = processor.chat("what is and here", videos=video, images=image)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        named = processor.chat(both, videos=video, images=image)
    for number in (processor.video_token_id, processor.image_token_id):
        assert (named["input_ids"] == number).sum() == (plain["input_ids"] == number).sum() > 0
    assert named["input_ids"].shape[1] > plain["input_ids"].shape[1]
    assert processor.video_token in processor.decode(named["input_ids"][0]).replace(" ", "")
    batch = processor.chat(["what is here", both], videos=[video, None])
    assert (batch["input_ids"][1] == processor.video_token_id).sum() == 0
