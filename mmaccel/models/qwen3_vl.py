"""Qwen3-VL: interleaved M-RoPE, QK norms, DeepStack; prompts have a timestamp before each frame."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mmaccel.core.adapter import home_device
from mmaccel.core.registry import register
from mmaccel.models import deepstack
from mmaccel.models.prompt_layout import Inputs, ProcessorSpec, Texts, format_time
from mmaccel.models.qwen2_5_vl import Qwen25VL
from mmaccel.models.tiny import ASIDE, BEGIN, END, MROPE, TEXT, TOWER

_TEXT: dict[str, Any] = {**TEXT, "head_dim": 16, "rope_parameters": {**MROPE, "mrope_interleaved": True}}
_VISION: dict[str, Any] = {**TOWER, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}


@register("model", "qwen3_vl")
class Qwen3VL(Qwen25VL):
    """``Qwen3VLForConditionalGeneration``, ``Qwen3VLMoeForConditionalGeneration``: a timestamp before each frame."""

    model_types = ("qwen3_vl", "qwen3_vl_moe")
    extra_inputs = frozenset({"mm_token_type_ids", "image_grid_thw", "video_grid_thw"})
    processors: ClassVar[Mapping[str, ProcessorSpec]] = {}
    has_frame_text = True
    decoder_layers = frozenset({"Qwen3VLTextDecoderLayer", "Qwen3VLMoeTextDecoderLayer"})
    rms_norms = frozenset({"Qwen3VLTextRMSNorm", "Qwen3VLMoeTextRMSNorm"})
    gated_mlps = frozenset({"Qwen3VLTextMLP", "Qwen3VLMoeTextMLP"})
    tiny: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "qwen3_vl": {"text_config": _TEXT, "vision_config": _VISION, **ASIDE},
        "qwen3_vl_moe": {
            "text_config": {**_TEXT, "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2},
            "vision_config": _VISION,
            **ASIDE,
        },
    }

    def video_ids(self, config: Any, tokens: list[int], units: int) -> list[int]:
        frames = ([7, 8 + n % 2, BEGIN, *tokens, END] for n in range(units))
        return list(chain.from_iterable(frames))

    def text_around_frame(self, config: Any, frame: int, seconds: Sequence[float]) -> tuple[Texts, Texts]:
        """Return what a prompt has before, and what after, a unit: two lists of pieces, each a text or a token id. The unit
        begins with frame number `frame`, and its frames are shown at `seconds`."""
        time = format_time((seconds[0] + seconds[-1]) / 2)
        return [f"<{time} seconds>", config.vision_start_token_id], [config.vision_end_token_id]

    def encode_frames(self, model: nn.Module, inputs: Inputs) -> Tensor:
        multimodal: Any = self.multimodal(model)
        out = multimodal.get_video_features(
            inputs["pixel_values_videos"], inputs["video_grid_thw"], return_dict=True
        )
        dtype = self.token_embedding(model).weight.dtype
        return torch.cat(deepstack.join_tower_deepstack(out)).to(home_device(model), dtype)
