"""Language models without vision, as drafts of text."""

from __future__ import annotations

from typing import Any

from torch import nn

from mmaccel.core.adapter import ConfigOnlyModel, Geometry
from mmaccel.core.errors import ModelError
from mmaccel.core.layout import TokenLayout
from mmaccel.models.family import Family
from mmaccel.models.prompt_layout import Inputs


class Causal(Family):
    """``AutoModelForCausalLM`` of any kind whose cache can be cut back to an earlier token."""

    name = "text"
    model_types = ()
    decoder_layers = frozenset({"Qwen2DecoderLayer", "Qwen2_5_VLDecoderLayer"})

    def geometry(self, model: nn.Module) -> Geometry:
        return self.whole_geometry(model)

    def multimodal(self, model: nn.Module) -> nn.Module:
        return model.base_model  # type: ignore[return-value]

    text = multimodal

    def layout(self, model: nn.Module, inputs: Inputs) -> TokenLayout:
        return TokenLayout.text(*inputs["input_ids"].shape)

    def entering(self, model: nn.Module, inputs: Inputs) -> dict[str, Any]:
        return {"inputs_embeds": self.words(model)(inputs["input_ids"])}


def causal(model: nn.Module) -> Causal | None:
    """The adapter of a causal language model, or of the outline of one; None for any other model.

    Raises `ModelError` for one that keeps a running state instead of a cache.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig

    config: Any = getattr(model, "config", None)
    if not isinstance(config, PretrainedConfig) or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return None
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if not isinstance(model, ConfigOnlyModel | kind):
        return None
    if getattr(kind, "_is_stateful", False):
        raise ModelError(
            f"model type {config.model_type!r} keeps a running state and cannot roll back; give a language model with "
            "attention alone."
        )
    return Causal()
