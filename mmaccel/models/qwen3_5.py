"""Qwen3.5: Gated DeltaNet layers between layers of gated attention; recipes act on the attention layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor, nn

from mmaccel.core.adapter import Geometry
from mmaccel.core.registry import register
from mmaccel.models.qwen3_vl import Qwen3VL
from mmaccel.models.tiny import ASIDE, MROPE, TEXT, TOWER

_KINDS = ["linear_attention", "full_attention"] * 3
_TEXT: dict[str, Any] = {
    **TEXT,
    "num_hidden_layers": len(_KINDS),
    "layer_types": _KINDS,
    "head_dim": 32,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "rope_parameters": {
        **MROPE,
        "mrope_interleaved": True,
        "mrope_section": [2, 1, 1],
        "partial_rotary_factor": 0.25,
    },
}
_VISION: dict[str, Any] = {**TOWER, "num_position_embeddings": 16}


@register("model", "qwen3_5")
class Qwen35(Qwen3VL):
    """``Qwen3_5ForConditionalGeneration``, ``Qwen3_5MoeForConditionalGeneration``. Recipes and memories count attention
    layers only: their layer n is the n-th attention layer."""

    model_types = ("qwen3_5", "qwen3_5_moe")
    decoder_layers = frozenset({"Qwen3_5DecoderLayer", "Qwen3_5MoeDecoderLayer"})
    centred_norms = frozenset({"Qwen3_5RMSNorm", "Qwen3_5MoeRMSNorm"})
    rms_norms = frozenset()
    gated_mlps = frozenset({"Qwen3_5MLP"})
    rotate_function, partial_rotary = Qwen3VL.rotate_function, True
    tiny: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "qwen3_5": {"text_config": _TEXT, "vision_config": _VISION, **ASIDE},
        "qwen3_5_moe": {
            "text_config": {
                **_TEXT,
                "moe_intermediate_size": 32,
                "shared_expert_intermediate_size": 32,
                "num_experts": 4,
                "num_experts_per_tok": 2,
            },
            "vision_config": _VISION,
            **ASIDE,
        },
    }

    def global_geometry(self, model: nn.Module) -> Geometry:
        config: Any = model.config.get_text_config(decoder=True)  # type: ignore[operator, union-attr]
        kinds = list(config.layer_types)
        return self.config_geometry(config, kinds.count("full_attention"))

    def geometry(self, model: nn.Module) -> Geometry:
        whole, found = self.global_geometry(model), super().geometry(model)
        # The rows of q_proj are queries and their gates.
        return whole if found.kv_heads == whole.kv_heads else replace(found, heads=found.heads // 2)

    def rollback_limit(self, model: nn.Module) -> int:
        from mmaccel.models import recurrent

        return recurrent.REACH

    def recurrent_layers(self, model: nn.Module) -> dict[int, nn.Module]:
        layers: Any = self.layers(model)
        return {n: layer.linear_attn for n, layer in enumerate(layers) if hasattr(layer, "linear_attn")}

    def _heads(self, model: nn.Module, layer: int, rows: Tensor, which: str) -> Tensor:
        own: Any = self.attentions(model)[layer]
        out = getattr(own, f"{which}_proj")(rows).unflatten(
            -1, (-1, own.head_dim * (2 if which == "q" else 1))
        )
        return getattr(own, f"{which}_norm")(out[..., : own.head_dim]).transpose(1, 2)  # type: ignore[no-any-return]
