"""The adapter of models with code of their own, on a class that is built as theirs."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Model

import mmaccel
from mmaccel.core.errors import RecipeError
from mmaccel.core.registry import registry
from tests.examples import example

SPARSE = {"sparse": {"name": "a_shape", "block": 16, "window": 16, "sink": 4}, "dense_tail": 0}
TOLD: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}


class StandInConfig(Qwen2Config):
    model_type = "llava_qwen"


class StandInModel(Qwen2Model):
    """The language model holds tower and projector, as in LLaVA-NeXT's code."""

    config_class = StandInConfig

    def __init__(self, config: StandInConfig) -> None:
        super().__init__(config)
        self.vision_tower = nn.Conv2d(3, 16, 7, 7)
        self.mm_projector = nn.Linear(16, config.hidden_size)
        self.image_newline = nn.Parameter(torch.randn(config.hidden_size))


class StandIn(Qwen2ForCausalLM):
    config_class = StandInConfig

    def __init__(self, config: StandInConfig) -> None:
        super().__init__(config)
        self.model = StandInModel(config)
        self.post_init()

    def get_model(self) -> nn.Module:
        return self.model

    def prepare_inputs_labels_for_multimodal(
        self, input_ids: Tensor, position_ids: Any, attention_mask: Any, past: Any, labels: Any, images: Any,
        modalities: Any = ("image",),
    ) -> tuple[Any, ...]:  # fmt: skip
        assert list(modalities) == ["video"]
        tokens = self.model.vision_tower(images[0]).flatten(2).mT
        features = self.model.mm_projector(tokens).flatten(0, 1)
        features = torch.cat([features, self.model.image_newline[None]])
        at = int((input_ids[0] == -200).nonzero())
        words = self.get_input_embeddings()
        before, after = words(input_ids[0, :at]), words(input_ids[0, at + 1 :])
        return None, position_ids, attention_mask, past, torch.cat([before, features, after])[None], labels

    @torch.no_grad()
    def generate(self, inputs: Any = None, images: Any = None, **kwargs: Any) -> Any:
        made = self.prepare_inputs_labels_for_multimodal(inputs, None, None, None, None, images, ["video"])
        return super().generate(inputs_embeds=made[4], **kwargs)


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    module = example("remote_video")
    yield module
    registry("model")._classes.pop(module.KIND)


@pytest.fixture(scope="module")
def remote() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "vocab_size": 200}
    made: Any = StandIn(StandInConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)).float().eval()
    made.generation_config.eos_token_id = None
    return made


def asked(frames: int = 40) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 180, (1, 14), generator=generator)
    ids[0, 5] = -200
    return ids, torch.randn(frames, 3, 14, 14, generator=generator)


def test_streams_are_refused(script: ModuleType, remote: Any) -> None:
    model = script.wrap(remote)
    with pytest.raises(RecipeError, match=r"kv 'rekv': .* by code of their own"):
        mmaccel.accelerate(model, kv="rekv")


def test_it_says_what_their_code_says(script: ModuleType, remote: Any) -> None:
    ids, video = asked()
    want = remote.generate(ids, images=[video], **TOLD)
    model, inputs = script.wrap(remote), script.prompt(remote, ids, video)
    start = inputs["input_ids"].shape[1]
    assert start == 13 + 4 * 40 + 1
    for recipe in (
        None,
        {},
        {"chunk": 64},
        {"draft": "prompt_lookup"},
        {"kv": {"name": "window", "window": 999}},
    ):
        if recipe is None:
            assert torch.equal(model.generate(**inputs, **TOLD)[:, start:], want)
            continue
        with mmaccel.accelerate(model, **recipe):
            assert torch.equal(model.generate(**inputs, **TOLD)[:, start:], want)
    with mmaccel.accelerate(model, **SPARSE) as fast:
        model.generate(**inputs, **TOLD)
        report = fast.report()
    assert 0 < report.kept < 0.6 and report.video_units == 40 and report.video_tokens == 4 * 40 + 1
    assert torch.equal(remote.generate(ids, images=[video], **TOLD), want)


def test_columns_of_frames(script: ModuleType, remote: Any) -> None:
    """Of each frame its own tokens, then the mark; of a tower that joins frames, of each step."""
    ids, video = asked()
    model = script.wrap(remote)
    for units, each in ((None, 4), (20, 8)):
        layout = mmaccel.core.attach.adapter_for(model).layout(
            model, script.prompt(remote, ids, video, units=units)
        )
        frame = layout.frame[0, 5:-8]
        assert frame[:-1].tolist() == [n for n in range(160 // each) for _ in range(each)]
        assert frame[-1] == -1 and bool((layout.modality[0, 5:-8] != 0).all())
