"""What tells one family's inputs from another's: a row of `STYLES` for each model type."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmaccel.core.errors import ModelError, shown
from mmaccel.media.preprocess import Pixels, anyres_tokens, to_frames, to_patches, to_square, to_tiles

Batch = list[list[Tensor]]
"""The images of each text, each `[3, H, W]`."""
Extra = Mapping[str, Any]
"""The entries of processor_config.json beside the image and video settings."""
Where = Mapping[str, Any]
"""`device` and `dtype` of the pixels."""
Made = tuple[dict[str, Any], list[int]]
"""Model inputs, and how many tokens each image or video takes."""


@dataclass(frozen=True, kw_only=True)
class Style:
    """What tells one family's inputs from another's.

    `processor`, `image`, `video` are the names of the stock classes, for the files; `images` and `videos`
    make the pixels and count the tokens; `defaults` are what the stock classes assume where a file is silent.
    """

    processor: str
    image: str
    video: str
    image_token: str
    video_token: str
    images: Callable[[Pixels, Extra, Batch, Where], Made]
    videos: Callable[[Pixels, Extra, list[Tensor], Where], Made]
    image_defaults: Pixels
    video_defaults: Pixels
    type_ids: bool = False
    seconds: bool = False


def _patch_images(pixels: Pixels, extra: Extra, batch: Batch, where: Where) -> Made:
    images = [image for row in batch for image in row]
    made = [to_patches(image[None], pixels, video=False, **where) for image in images]
    return _patches(made, pixels, "pixel_values", "image_grid_thw")


def _patch_videos(pixels: Pixels, extra: Extra, videos: list[Tensor], where: Where) -> Made:
    made = [to_patches(frames, pixels, **where) for frames in videos]
    return _patches(made, pixels, "pixel_values_videos", "video_grid_thw")


def _patches(made: list[tuple[Tensor, tuple[int, int, int]]], pixels: Pixels, values: str, grid: str) -> Made:
    grids = torch.tensor([shape for _, shape in made], dtype=torch.long)
    merged = (pixels.merge_size or 1) ** 2
    # A single video of gigabytes is not copied.
    whole = made[0][0] if len(made) == 1 else torch.cat([patches for patches, _ in made])
    return {values: whole, grid: grids}, [math.prod(shape) // merged for _, shape in made]


def _tile_images(pixels: Pixels, extra: Extra, batch: Batch, where: Where) -> Made:
    per_tile = _tokens_per_tile(extra)
    less = 1 if extra.get("vision_feature_select_strategy") == "default" else 0
    most = int("".join(filter(str.isdigit, extra.get("vision_aspect_ratio", "anyres_max_9"))))
    tiled, counts = [], []
    for row in batch:
        for image in row:
            alone = len(row) == 1
            tiles = (to_tiles if alone else to_square)(image, pixels, **where)
            size = (int(image.shape[1]), int(image.shape[2]))
            tile = (int(tiles.shape[2]), int(tiles.shape[3]))
            side = math.isqrt(per_tile)
            tokens = (
                anyres_tokens(pixels, side, tile, size, most) + per_tile - side**2 if alone else per_tile + 1
            )
            tiled.append(tiles)
            counts.append(tokens - less)
    longest = max(len(tiles) for tiles in tiled)
    padded = [torch.nn.functional.pad(tiles, (0, 0, 0, 0, 0, 0, 0, longest - len(tiles))) for tiles in tiled]
    sizes = torch.tensor([image.shape[1:] for row in batch for image in row])
    numbers = torch.tensor([len(row) for row in batch])
    return {"pixel_values": torch.stack(padded), "image_sizes": sizes, "batch_num_images": numbers}, counts


def _frame_videos(pixels: Pixels, extra: Extra, videos: list[Tensor], where: Where) -> Made:
    lengths = sorted({len(frames) for frames in videos})
    if len(lengths) > 1:
        told = " and ".join(map(str, lengths))
        raise ModelError(
            f"videos of {told} frames make no batch on this model: give frames={lengths[0]}, so many of each."
        )
    pooled = math.ceil(math.isqrt(_tokens_per_tile(extra)) / 2)
    made = [to_frames(frames, pixels, **where) for frames in videos]
    whole = made[0][None] if len(made) == 1 else torch.stack(made)
    # One newline token ends a video.
    return {"pixel_values_videos": whole}, [len(frames) * pooled * pooled + 1 for frames in videos]


def _tokens_per_tile(extra: Extra) -> int:
    number = extra.get("num_image_tokens")
    if not number:
        raise ModelError("num_image_tokens is missing: set it in processor_config.json, or give config.json.")
    return int(number)


def cuts_of(vision: Mapping[str, Any]) -> dict[str, Any]:
    """What config.json says of the patches, where the vision tower cuts frames into them."""
    if "spatial_merge_size" not in vision:
        return {}
    return {
        "patch_size": vision.get("patch_size"),
        "temporal_patch_size": vision.get("temporal_patch_size"),
        "merge_size": vision["spatial_merge_size"],
    }


def extra_of(config: Mapping[str, Any], vision: Mapping[str, Any]) -> dict[str, Any]:
    """Tokens a tile and how features are chosen, as config.json implies them."""
    if "vision_feature_select_strategy" not in config:
        return {}
    extra: dict[str, Any] = {"vision_feature_select_strategy": config["vision_feature_select_strategy"]}
    if vision.get("image_size") and vision.get("patch_size"):
        extra["num_image_tokens"] = (vision["image_size"] // vision["patch_size"]) ** 2
    if "vision_aspect_ratio" in config:
        extra["vision_aspect_ratio"] = config["vision_aspect_ratio"]
    return extra


_GRID = [[rows * 384, columns * 384] for rows in range(1, 7) for columns in range(1, 7)]
_PATCH = Pixels(
    size={"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280},
    patch_size=14,
    temporal_patch_size=2,
    merge_size=2,
)
_QWEN: dict[str, Any] = {
    "image": "Qwen2VLImageProcessor",
    "video": "Qwen2VLVideoProcessor",
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "images": _patch_images,
    "videos": _patch_videos,
    "image_defaults": _PATCH,
    "video_defaults": _PATCH.updated(
        {"size": {"shortest_edge": 128 * 28 * 28, "longest_edge": 28 * 28 * 768}, "max_frames": 768}
    ),
    "type_ids": True,
}
STYLES: dict[str, Style] = {
    "qwen2_vl": Style(processor="Qwen2VLProcessor", **_QWEN),
    "qwen2_5_vl": Style(processor="Qwen2_5_VLProcessor", seconds=True, **_QWEN),
    "llava_onevision": Style(
        processor="LlavaOnevisionProcessor",
        image="LlavaOnevisionImageProcessor",
        video="LlavaOnevisionVideoProcessor",
        image_token="<image>",
        video_token="<video>",
        images=_tile_images,
        videos=_frame_videos,
        image_defaults=Pixels(size={"height": 384, "width": 384}, image_grid_pinpoints=_GRID),
        video_defaults=Pixels(size={"height": 384, "width": 384}),
    ),
}


def check_type(model_type: str) -> None:
    """Raise `ModelError` for a model type that is not among `STYLES`."""
    if model_type not in STYLES:
        raise ModelError(
            f"model type {shown(model_type)} is not supported: there are {', '.join(sorted(STYLES))}."
        )
