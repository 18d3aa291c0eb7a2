"""Qwen2-VL in a session: the stock processor's style is ours already, and its places are evenly spaced."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers

import mmaccel
from mmaccel.core.attach import adapter_for
from mmaccel.core.streams.asking import asked as asked_of
from mmaccel.models import step
from mmaccel.models.processor import Processor
from mmaccel.models.runner import HFRunner
from tests.models.streams import FPS, QUESTION, film, pair
from tests.models.tiny_random import EVERY, PROMPTS, prompt


@pytest.fixture(scope="module")
def model_and_processor() -> tuple[Any, Processor]:
    like, stock = pair("random-qwen")
    text, vision = like.config.text_config.to_dict(), like.config.vision_config
    given = {
        "text_config": {**text, "model_type": "qwen2_vl_text"},
        "vision_config": {
            "depth": 1,
            "embed_dim": 32,
            "num_heads": 2,
            "hidden_size": text["hidden_size"],
            "patch_size": vision.patch_size,
            "spatial_merge_size": vision.spatial_merge_size,
            "temporal_patch_size": vision.temporal_patch_size,
        },
    }
    ids = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    config = transformers.Qwen2VLConfig(**given, **{name: getattr(like.config, name) for name in ids})
    torch.manual_seed(5)
    model = transformers.Qwen2VLForConditionalGeneration(config).float().eval()
    model.generation_config = copy.deepcopy(like.generation_config)
    settings = {name: getattr(stock, name).to_dict() for name in ("image", "video")}
    made = Processor(
        "qwen2_vl",
        stock.tokenizer,
        **settings,
        extra=stock.extra,
        config=config.to_dict(),
        chat_template=stock.chat_template,
    )
    return model, made


@pytest.mark.parametrize("kv", ["full", "offload", "mosaic"])
def test_a_session_says_what_the_plain_model_says(
    model_and_processor: tuple[Any, Processor], kv: str
) -> None:
    model, processor = model_and_processor
    content = [{"type": "video", "video": film(12)}, {"type": "text", "text": QUESTION}]
    inputs = processor.chat(content, fps=FPS)
    with torch.no_grad():
        plain = model(**inputs).logits[0, -1]
    with mmaccel.VideoSession(model, processor, None, kv=kv) as session:
        session.ingest(film(12), fps=FPS) if kv in ("full", "offload") else session.watch(film(12), fps=FPS)
        assert session._live is not None
        with asked_of(session._live, QUESTION, 4) as asked:
            said = asked.logits[0].clone()
    assert (said - plain).abs().max() <= 1e-4


def test_its_steps_are_those_that_are_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    made = EVERY["qwen2_vl"]()
    made.generation_config.eos_token_id = None
    inputs = prompt("qwen2_vl", PROMPTS["interleaved"])
    plain = made.generate(**inputs, max_new_tokens=10, do_sample=False)
    monkeypatch.setattr(step, "DEVICES", ("cpu",))
    with mmaccel.accelerate(made, draft="prompt_lookup") as fast:
        runner = HFRunner.open(made, adapter_for(made))
        assert runner.steps is not None
        assert torch.equal(made.generate(**inputs, max_new_tokens=10, do_sample=False), plain)
        assert fast.report().new_tokens == 10
