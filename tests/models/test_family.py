"""A model family is one class of facts: one that a user writes in a file of his own lacks nothing."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import pytest
import torch
from transformers import LlavaOnevisionConfig, LlavaOnevisionForConditionalGeneration
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RMSNorm

import mmaccel
from mmaccel.core.errors import ModelError
from mmaccel.core.registry import registry
from mmaccel.models.llava_onevision import LlavaOnevision
from mmaccel.models.processor import Processor
from mmaccel.models.prompt_layout import ProcessorStyle
from tests.models.streams import FPS, QUESTION, film, pair


class TheirConfig(LlavaOnevisionConfig):
    model_type = "theirs_onevision"


class TheirModel(LlavaOnevisionForConditionalGeneration):
    config_class = TheirConfig


class TheirNorm(Qwen2RMSNorm):
    pass


class TheirLayer(Qwen2DecoderLayer):
    pass


class Theirs(LlavaOnevision):
    """LLaVA-OneVision under another model type, with decoder layers and norms of other classes."""

    name = "theirs"
    model_types = ("theirs_onevision",)
    processors: ClassVar[Mapping[str, ProcessorStyle]] = {
        "theirs_onevision": LlavaOnevision.processors["llava_onevision"]
    }
    decoder_layers = frozenset({"TheirLayer"})
    rms_norms = frozenset({"TheirNorm"})


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Processor]]:
    """A model and a processor of their family, made of those of LLaVA-OneVision."""
    monkeypatch.setitem(registry("model")._classes, "theirs", Theirs)
    like, processor = pair("random-ov")
    config = TheirConfig.from_dict({**like.config.to_dict(), "model_type": "theirs_onevision"})
    model = TheirModel(config).float().eval()
    model.load_state_dict(like.state_dict())
    model.generation_config = copy.deepcopy(like.generation_config)
    for layer in model.model.language_model.layers:
        layer.__class__ = TheirLayer
        layer.input_layernorm.__class__ = layer.post_attention_layernorm.__class__ = TheirNorm
    video = processor.video.to_dict()
    yield (
        model,
        Processor(
            "theirs_onevision",
            processor.tokenizer,
            image=processor.image.to_dict(),
            video=video,
            extra=processor.extra,
            config=config.to_dict(),
            chat_template=processor.chat_template,
        ),
    )


RECIPES: dict[str, dict[str, Any]] = {
    "dense": {},
    "a_shape": {"sparse": {"name": "a_shape", "block": 16, "sink": 16, "window": 32}},
    "fastv": {"prune": {"name": "fastv", "layer": 1}},
    "visionzip": {"prune": "visionzip"},
    "prompt_lookup": {"draft": "prompt_lookup"},
}


def content() -> list[dict[str, Any]]:
    return [{"type": "video", "video": film(12)}, {"type": "text", "text": QUESTION}]


@pytest.mark.parametrize("name", RECIPES)
@torch.no_grad()
def test_it_gives_what_the_family_it_copies_gives(theirs: tuple[Any, Processor], name: str) -> None:
    found = []
    for model, processor in (theirs, pair("random-ov")):
        inputs = processor.chat(content(), fps=FPS)
        with mmaccel.accelerate(model, **RECIPES[name]) as fast:
            ids = model.generate(**inputs, max_new_tokens=5, do_sample=False)
            # Two rows: the prompt's end, and what a pattern or pruner has made of it.
            found.append((ids, model(**inputs).logits[:, -2:]))
            kept = fast.report().kept
        assert name != "a_shape" or kept < 1
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize("kv", ["recent", "rekv", "mosaic"])
def test_its_streams_answer_the_same(theirs: tuple[Any, Processor], kv: str) -> None:
    said = []
    for model, processor in (theirs, pair("random-ov")):
        with mmaccel.VideoSession(model, processor, None, kv=kv) as session:
            session.watch(film(10), fps=FPS)
            said.append(session.ask(QUESTION, 5).text)
    assert said[0] == said[1]


def test_its_facts_are_those_of_its_class(theirs: tuple[Any, Processor], tmp_path: Any) -> None:
    from mmaccel.models.modules import is_norm
    from mmaccel.models.step import known

    model, processor = theirs
    layers, family = list(model.model.language_model.layers), Theirs()
    assert known(layers, "silu", family) and not known(layers, "silu", LlavaOnevision())
    norm = layers[0].input_layernorm
    assert is_norm(norm, family) and not is_norm(norm, LlavaOnevision())
    processor.save_pretrained(tmp_path)
    model.config.save_pretrained(tmp_path)
    assert Processor.from_pretrained(tmp_path).model_type == "theirs_onevision"


def test_a_family_without_a_fact_does_without(
    theirs: tuple[Any, Processor], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, processor = theirs
    monkeypatch.setattr(Theirs, "vision_tower", None)
    with pytest.raises(ModelError, match="cannot read the vision tower of theirs"):
        mmaccel.accelerate(model, prune="visionzip")
    monkeypatch.setattr(Theirs, "processors", {})
    with pytest.raises(ModelError, match="'theirs_onevision' is not one of llava_onevision, qwen2"):
        Processor("theirs_onevision", processor.tokenizer)
