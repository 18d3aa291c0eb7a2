"""Scores InternVL's visual tokens in its vision tower, for token pruners."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mmaccel.models.signals import VisionScorer


class InternVisionScorer(VisionScorer):
    """Scores InternVL's visual tokens for token pruners, by the attention that the vision tower's class token pays to their
    patches. Each frame or tile is one batch entry: a class token and P patches; 2 x 2 patches become one visual token."""

    def __init__(self, multimodal: Any) -> None:
        self.multimodal, layer = multimodal, multimodal.config.vision_feature_layer
        # hidden_states[0] is what enters the first layer, so that state n comes out of layer n - 1.
        self.attention: Any = multimodal.vision_tower.encoder.layer[layer - (layer > 0)].attention

    def measure_patches(self, hidden: Tensor, kwargs: dict[str, Any]) -> Tensor:
        own = self.attention
        query, key = (
            norm(made(hidden)).unflatten(-1, (own.num_heads, -1)).transpose(1, 2).float()
            for made, norm in ((own.q_proj, own.q_norm), (own.k_proj, own.k_norm))
        )
        paid = (query[:, :, :1] @ key.mT * own.scale).softmax(-1).mean(1)
        return torch.cat([paid.mT, key.mean(1)], -1)[:, 1:]

    def pool_patches_to_tokens(
        self, kind: int, caught: list[Tensor], pixels: Tensor, given: Mapping[str, Any]
    ) -> Tensor:
        told = torch.cat(caught)
        side, ratio = int(told.shape[1] ** 0.5), self.multimodal.config.downsample_ratio
        joined = self.multimodal.pixel_shuffle(told.unflatten(1, (side, side)), scale_factor=ratio)
        return joined.unflatten(-1, (-1, told.shape[-1])).mean(-2).flatten(0, 2)
