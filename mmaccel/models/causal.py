"""Text-only causal language models, used as drafts: how their `Family` differs from that of a vision-language model."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn

from mmaccel.core.adapter import ConfigOnlyModel, Geometry
from mmaccel.core.errors import ModelError
from mmaccel.core.layout import TokenLayout
from mmaccel.models.prompt_layout import Inputs


class TextModelMixin:
    """Mixin of a `Family` for text-only models: the whole model is the language model, and prompts are text alone. Its
    methods replace those of `Family`."""

    name = "text"
    model_types: ClassVar[tuple[str, ...]] = ()
    decoder_layers = frozenset({"Qwen2DecoderLayer", "Qwen2_5_VLDecoderLayer"})

    def geometry(self: Any, model: nn.Module) -> Geometry:
        return self.global_geometry(model)  # type: ignore[no-any-return]

    def multimodal(self, model: nn.Module) -> nn.Module:
        return model.base_model  # type: ignore[return-value]

    text_model = multimodal

    def layout(self, model: nn.Module, inputs: Inputs) -> TokenLayout:
        return TokenLayout.text(*inputs["input_ids"].shape)

    def forward_inputs(self: Any, model: nn.Module, inputs: Inputs) -> dict[str, Any]:
        return {"inputs_embeds": self.token_embedding(model)(inputs["input_ids"])}


def is_causal_lm(model: nn.Module) -> bool:
    """Whether `model` (or a `ConfigOnlyModel`) is a causal language model; raises `ModelError` if it is stateful (such as
    Mamba), since a recurrent state cannot be rolled back."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig

    config: Any = getattr(model, "config", None)
    if not isinstance(config, PretrainedConfig) or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return False
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if not isinstance(model, ConfigOnlyModel | kind):
        return False
    if getattr(kind, "_is_stateful", False):
        raise ModelError(
            f"model type {config.model_type!r} has a recurrent state and cannot roll back; give a language model "
            "with attention alone."
        )
    return True
