"""GLM-4.1V to GLM-4.6V: M-RoPE on a part of each head, in adjacent pairs; each frame is an image inside video markers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mmaccel.core.layout import IMAGE, VIDEO
from mmaccel.core.registry import register
from mmaccel.models.prompt_layout import WIDE, ProcessorSpec, Texts, format_time
from mmaccel.models.qwen2_5_vl import Qwen25VL
from mmaccel.models.tiny import BEGIN, END, IMG, MROPE, TEXT, TOWER, VID

_TEXT: dict[str, Any] = {
    **TEXT,
    "rope_parameters": {**MROPE, "mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5},
}
_VISION: dict[str, Any] = {**TOWER, "image_size": 56, "patch_size": 14}
_ASIDE: dict[str, Any] = {
    "image_token_id": IMG,
    "video_token_id": VID,
    "image_start_token_id": 194,
    "image_end_token_id": 195,
    "video_start_token_id": BEGIN,
    "video_end_token_id": END,
}


@register("model", "glm4v")
class Glm4V(Qwen25VL):
    """``Glm4vForConditionalGeneration``, ``Glm46VForConditionalGeneration``: prompts have a timestamp after each frame."""

    model_types: ClassVar[tuple[str, ...]] = ("glm4v", "glm46v")
    extra_inputs = frozenset({"mm_token_type_ids", "image_grid_thw", "video_grid_thw"})
    processors: ClassVar[Mapping[str, ProcessorSpec]] = {}
    mixes_modalities = False
    decoder_layers = frozenset({"Glm4vTextDecoderLayer"})
    rms_norms = frozenset({"Glm4vRMSNorm", "Glm4vMoeRMSNorm"})
    gated_mlps = frozenset()
    rotate_function, adjacent_rotary = "", True
    has_frame_text = True
    tiny: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "glm4v": {"text_config": _TEXT, "vision_config": _VISION, **_ASIDE},
        "glm46v": {
            "text_config": {**_TEXT, "model_type": "glm4v_text"},
            "vision_config": {**_VISION, "model_type": "glm4v_vision"},
            **_ASIDE,
        },
        "glm4v_moe": {
            "text_config": {
                **_TEXT,
                "head_dim": 16,
                "moe_intermediate_size": 32,
                "n_routed_experts": 4,
                "num_experts_per_tok": 2,
                "first_k_dense_replace": 1,
            },
            "vision_config": _VISION,
            **_ASIDE,
        },
    }

    def video_ids(self, config: Any, tokens: list[int], units: int) -> list[int]:
        if tokens[0] == VID or units > 1:
            frames = ([194, *[IMG] * len(tokens), 195, 8 + n % 2] for n in range(units))
            return [BEGIN, *chain.from_iterable(frames), END]
        return [194, *tokens, 195]

    def text_around_frame(self, config: Any, frame: int, seconds: Sequence[float]) -> tuple[Texts, Texts]:
        """Return what a prompt has before, and what after, a unit: two lists of pieces, each a text or a token id. The unit
        begins with frame number `frame`, and its frames are shown at `seconds`."""
        # GLM-4.6V has seconds as `format_time` writes them from 100 s on, the others whole ones, with fewer figures.
        whole = config.model_type != "glm46v"
        time = f"{int(seconds[0]) % 10**WIDE:0{WIDE}d}" if whole else f"{format_time(seconds[0])} seconds"
        return [config.image_start_token_id], [config.image_end_token_id, time]

    def token_modalities(self, config: Any, ids: Tensor) -> Tensor:
        opened = (ids == config.video_start_token_id).cumsum(1) > (ids == config.video_end_token_id).cumsum(1)
        shown = ids == config.image_token_id
        return torch.where(shown, torch.where(opened, VIDEO, IMAGE), 0)

    def placeholders(self, model: nn.Module) -> tuple[int, ...]:
        config: Any = model.config
        return (config.image_token_id,)


@register("model", "glm4v_moe")
class Glm4VMoe(Glm4V):
    """``Glm4vMoeForConditionalGeneration``: like `Glm4V`, but RoPE pairs the halves of a head, not adjacent dimensions."""

    model_types = ("glm4v_moe",)
    decoder_layers = frozenset({"Glm4vMoeTextDecoderLayer"})
    adjacent_rotary = False
