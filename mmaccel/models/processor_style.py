"""How the processor of one family makes inputs, and the ways of doing it that families share."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mmaccel.core.errors import ModelError, shown
from mmaccel.core.registry import registry

if TYPE_CHECKING:
    from mmaccel.media.preprocess import Pixels

Batch = list[list[Tensor]]
"""The images of each text, each `[3, H, W]`."""
Extra = Mapping[str, Any]
"""The entries of processor_config.json beside the image and video settings."""
Where = Mapping[str, Any]
"""`device` and `dtype` of the pixels."""
Made = tuple[dict[str, Any], list[int]]
"""Model inputs, and how many tokens each image or video takes."""


@dataclass(frozen=True, kw_only=True)
class ProcessorStyle:
    """How the processor of one model type makes inputs.

    processor, image, video      names of the stock classes, which the files of a processor name
    image_token, video_token     placeholders of a text
    images, videos               make the pixels, and count the tokens of each image or video
    image_settings               of the stock image class where a file is silent: fields of `media.preprocess.Pixels`
    video_settings               of the stock video class
    type_ids                     whether the model takes `mm_token_type_ids`
    seconds                      whether it takes `second_per_grid_ts`, the seconds of a step of each video
    """

    processor: str
    image: str
    video: str
    image_token: str
    video_token: str
    images: Callable[[Pixels, Extra, Batch, Where], Made]
    videos: Callable[[Pixels, Extra, list[Tensor], Where], Made]
    image_settings: Mapping[str, Any] = field(default_factory=dict)
    video_settings: Mapping[str, Any] = field(default_factory=dict)
    type_ids: bool = False
    seconds: bool = False


def patch_images(pixels: Pixels, extra: Extra, batch: Batch, where: Where) -> Made:
    """Qwen-VL: patches of all images in a row, and their grids."""
    images = [image[None] for row in batch for image in row]
    return _patches(images, pixels, where, ("pixel_values", "image_grid_thw"), video=False)


def patch_videos(pixels: Pixels, extra: Extra, videos: list[Tensor], where: Where) -> Made:
    """Qwen-VL: patches of all videos in a row, and their grids."""
    return _patches(videos, pixels, where, ("pixel_values_videos", "video_grid_thw"), video=True)


def _patches(
    visuals: list[Tensor], pixels: Pixels, where: Where, names: tuple[str, str], video: bool
) -> Made:
    from mmaccel.media.preprocess import to_patches

    made = [to_patches(frames, pixels, video=video, **where) for frames in visuals]
    grids = torch.tensor([shape for _, shape in made], dtype=torch.long)
    merged = (pixels.merge_size or 1) ** 2
    # A single video of gigabytes is not copied.
    whole = made[0][0] if len(made) == 1 else torch.cat([patches for patches, _ in made])
    return {names[0]: whole, names[1]: grids}, [math.prod(shape) // merged for _, shape in made]


def tile_images(pixels: Pixels, extra: Extra, batch: Batch, where: Where) -> Made:
    """LLaVA: a base view of each image, and finer tiles of one that is alone in its text."""
    from mmaccel.media.preprocess import anyres_tokens, to_square, to_tiles

    per_tile = _tokens_per_tile(extra)
    less = 1 if extra.get("vision_feature_select_strategy") == "default" else 0
    most = int("".join(filter(str.isdigit, extra.get("vision_aspect_ratio", "anyres_max_9"))))
    side, tiled, counts = math.isqrt(per_tile), [], []
    for image, alone in [(image, len(row) == 1) for row in batch for image in row]:
        tiles = (to_tiles if alone else to_square)(image, pixels, **where)
        height, width = image.shape[1:]
        tile = (int(tiles.shape[2]), int(tiles.shape[3]))
        finer = anyres_tokens(pixels, side, tile, (height, width), most) - side**2 if alone else 1
        tiled.append(tiles)
        counts.append(per_tile + finer - less)
    longest = max(len(tiles) for tiles in tiled)
    padded = [torch.nn.functional.pad(tiles, (0, 0, 0, 0, 0, 0, 0, longest - len(tiles))) for tiles in tiled]
    sizes = torch.tensor([image.shape[1:] for row in batch for image in row])
    numbers = torch.tensor([len(row) for row in batch])
    return {"pixel_values": torch.stack(padded), "image_sizes": sizes, "batch_num_images": numbers}, counts


def frame_videos(pixels: Pixels, extra: Extra, videos: list[Tensor], where: Where) -> Made:
    """LLaVA: frames of one size, as many of each video."""
    from mmaccel.media.preprocess import to_frames

    lengths = sorted({len(frames) for frames in videos})
    if len(lengths) > 1:
        several = " and ".join(map(str, lengths))
        raise ModelError(
            f"videos of {several} frames make no batch on this model: give frames={lengths[0]}, so many of each."
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


def style_of(model_type: str) -> ProcessorStyle:
    """The style of a model type; raises `ModelError` where no family has one."""
    known: dict[str, ProcessorStyle] = {}
    for family in registry("model").values():
        known.update(getattr(family, "processors", {}))
    if model_type not in known:
        raise ModelError(
            f"model type {shown(model_type)} is not supported: there are {', '.join(sorted(known))}."
        )
    return known[model_type]
