"""LLaVA-OneVision: 1-D RoPE, square frames pooled by two, one newline mark after each video."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import groupby
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mmaccel.core.layout import IMAGE, VIDEO
from mmaccel.core.registry import register
from mmaccel.models.family import Family, Grid


@register("model", "llava_onevision")
class LlavaOnevision(Family):
    """``LlavaOnevisionForConditionalGeneration``. An image's base view is its frame; its finer tiles are marks."""

    model_types = ("llava_onevision",)
    facts = frozenset({"image_sizes", "image_sizes_videos", "batch_num_images"})
    needed: ClassVar[Mapping[str, str]] = {"pixel_values": "image_sizes"}

    def grids(self, model: nn.Module, inputs: Mapping[str, Any]) -> tuple[list[Grid], list[Grid]]:
        config: Any = model.config
        vision = config.vision_config
        side = vision.image_size // vision.patch_size
        pooled = math.ceil(side / 2)
        ids: Tensor = inputs["input_ids"]
        pixels = inputs.get("pixel_values_videos")
        encoded = (inputs.get("mm_encoder_outputs") or {}).get("video")
        videos = []
        if pixels is not None:
            videos = [Grid(pixels.shape[1], pooled, pooled, marks=1)] * pixels.shape[0]
        elif encoded is not None:
            count, tokens = encoded.pooler_output.shape[:2]
            videos = [Grid((tokens - 1) // pooled**2, pooled, pooled, marks=1)] * count
        images = []
        for row in ids.tolist():
            for token, group in groupby(row):
                if token == config.image_token_id:
                    length = len(list(group))
                    images.append(Grid(1, side, side, marks=length - side * side))
        return images, videos

    def frames(self, model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
        rows = super().frames(model, inputs)
        videos, count = inputs["pixel_values_videos"].shape[:2]
        side = model.config.vision_config.image_size // model.config.vision_config.patch_size  # type: ignore[union-attr, operator]
        if len(rows) > videos * count * math.ceil(side / 2) ** 2:
            return rows
        # Earlier releases put the mark behind a video later.
        mark: Any = self.multimodal(model).image_newline
        marks = mark.to(rows).expand(videos, 1, -1)
        return torch.cat([rows.view(videos, -1, rows.shape[1]), marks], 1).flatten(0, 1)

    def shares(self, inputs: Mapping[str, Any], kind: int) -> dict[str, list[int]]:
        names = {
            IMAGE: ("pixel_values", "image_sizes"),
            VIDEO: ("pixel_values_videos", "image_sizes_videos"),
        }[kind]
        found = {name: [1] * len(inputs[name]) for name in names if inputs.get(name) is not None}
        if kind == IMAGE and inputs.get("batch_num_images") is not None:
            # One number for several images of a prompt: the first of them takes it.
            groups = inputs["batch_num_images"].tolist()
            found["batch_num_images"] = [int(n == 0) for group in groups for n in range(group)]
        return found
