"""A causal language model without vision, as a draft reads with it: no recipe is ever attached to one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from mmaccel.core.adapter import Geometry, Outline
from mmaccel.core.errors import ModelError
from mmaccel.core.layout import TokenLayout
from mmaccel.models.family import Family


class Causal(Family):
    """``AutoModelForCausalLM`` of any kind whose cache can be cut back to an earlier token."""

    name = "text"
    model_types = ()
    decoder_layers = frozenset({"Qwen2DecoderLayer", "Qwen2_5_VLDecoderLayer"})

    def geometry(self, model: nn.Module) -> Geometry:
        return self.whole_geometry(model)

    def multimodal(self, model: nn.Module) -> nn.Module:
        return model.base_model  # type: ignore[return-value]

    def text(self, model: nn.Module) -> nn.Module:
        return model.base_model  # type: ignore[return-value]

    def layout(self, model: nn.Module, inputs: Mapping[str, Any]) -> TokenLayout:
        return TokenLayout.text(*inputs["input_ids"].shape)

    def embed(self, model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
        return self.words(model)(inputs["input_ids"])  # type: ignore[no-any-return]


def causal(model: nn.Module) -> Causal | None:
    """The adapter of a causal language model, or of the outline of one; None for any other model.

    Raises `ModelError` for one that keeps a running state instead of a cache.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig

    config: Any = getattr(model, "config", None)
    if not isinstance(config, PretrainedConfig) or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return None
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if not isinstance(model, Outline | kind):
        return None
    if getattr(kind, "_is_stateful", False):
        raise ModelError(
            f"model type {config.model_type!r} keeps a running state and cannot roll back; give a language model with "
            "attention alone."
        )
    return Causal()
