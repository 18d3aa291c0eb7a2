"""LLaVA-OneVision: 1-D RoPE, square frames pooled 2 x 2, one newline token after each video."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, groupby, zip_longest
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate
from torch.nn.utils.rnn import pad_sequence

from mmaccel.core.errors import ModelError
from mmaccel.core.layout import IMAGE, VIDEO
from mmaccel.core.registry import register
from mmaccel.models.family import Family, Features
from mmaccel.models.prompt_layout import PIXELS, ByFrame, Grid, Inputs, Made, ProcessorSpec, VideoBudget
from mmaccel.models.signals import VisionScorer, mean_received_attention
from mmaccel.models.tiny import IMG, TEXT, VID


def _tiled(pixels: Any, extra: Mapping[str, Any], visuals: list[Any], where: Mapping[str, Any]) -> Made:
    """See `ProcessorSpec`: a base view of each image, and finer tiles of one that is alone in its text."""
    from mmaccel.media.preprocess import best_tiling_resolution, pad_and_resize_square, to_tiles

    per_tile = _tokens_per_tile(extra)
    less = 1 if extra.get("vision_feature_select_strategy") == "default" else 0
    most = int("".join(filter(str.isdigit, extra.get("vision_aspect_ratio", "anyres_max_9"))))
    side, tiled, counts = math.isqrt(per_tile), [], []
    for image, alone in [(image, len(row) == 1) for row in visuals for image in row]:
        tiles = (to_tiles if alone else pad_and_resize_square)(image, pixels, **where)
        finer = 1
        if alone:
            best = best_tiling_resolution(pixels, *image.shape[1:])
            grid = best[0] // int(tiles.shape[2]), best[1] // int(tiles.shape[3])
            rows, columns = tiled_token_grid(grid, side, image.shape[1:], most)
            finer = rows * (columns + 1)
        tiled.append(tiles)
        counts.append(per_tile + finer - less)
    made = {
        PIXELS[IMAGE]: pad_sequence(tiled, batch_first=True),
        "image_sizes": torch.tensor([image.shape[1:] for row in visuals for image in row]),
        "batch_num_images": torch.tensor([len(row) for row in visuals]),
    }
    return made, counts


def tiled_token_grid(grid: Sequence[int], side: int, image: Sequence[int], most: int) -> tuple[int, int]:
    """Return (rows, columns) of tokens of `image` (height, width), cut into `grid` (down, across) tiles of `side` x `side`
    tokens: without padding; scaled down if far more than `most` tiles have. A newline token follows each row, uncounted."""
    height, width = image
    rows, columns = side * grid[0], side * grid[1]
    if width / height > columns / rows:
        rows -= (rows - int(round(height * (columns / width), 7))) // 2 * 2
    else:
        columns -= (columns - int(round(width * (rows / height), 7))) // 2 * 2
    ratio = math.sqrt(rows * columns / (most * side**2))
    return (int(rows // ratio), int(columns // ratio)) if ratio > 1.1 else (rows, columns)


def _framed(pixels: Any, extra: Mapping[str, Any], visuals: list[Any], where: Mapping[str, Any]) -> Made:
    """See `ProcessorSpec`: frames of one size, as many of each video."""
    from mmaccel.media.preprocess import to_frames

    lengths = sorted({len(frames) for frames in visuals})
    if len(lengths) > 1:
        several = " and ".join(map(str, lengths))
        raise ModelError(
            f"videos of {several} frames make no batch on this model: give frames={lengths[0]}, so many of each."
        )
    pooled = math.ceil(math.isqrt(_tokens_per_tile(extra)) / 2)
    made = [to_frames(frames, pixels, **where) for frames in visuals]
    whole = made[0][None] if len(made) == 1 else torch.stack(made)
    # One newline token ends a video.
    return {PIXELS[VIDEO]: whole}, [len(frames) * pooled * pooled + 1 for frames in visuals]


def _tokens_per_tile(extra: Mapping[str, Any]) -> int:
    number = extra.get("num_image_tokens")
    if not number:
        raise ModelError("num_image_tokens is missing: set it in processor_config.json, or give config.json.")
    return int(number)


def pool_frames(plain: Callable[[Tensor], Tensor], features: Tensor) -> Tensor:
    """Pool features of frames [N, side * side, E] to [N, pooled * pooled, E], as `plain`, the model's `apply_pooling`, does.

    On CUDA, except in float32, channels stay last. Interpolation then runs one thread for each element, not one for each
    position of a frame, and gives the same bits (16 frames of 729 features of width 3584 in bfloat16 on an H100: 0.14 ms
    instead of 22.8 ms).
    """
    if not _pools_by_element(features):
        return plain(features)
    side = math.isqrt(features.shape[1])
    frames = features.unflatten(1, (side, side)).permute(0, 3, 1, 2)
    small = interpolate(frames, size=2 * (math.ceil(side / 2),), mode="bilinear")
    return small.permute(0, 2, 3, 1).flatten(1, 2)


def _pools_by_element(features: Tensor) -> bool:
    """Whether pooling with the channels last is faster and gives the same bits (in float32 the last bit may differ)."""
    return features.is_cuda and features.dtype != torch.float32


class LlavaVisionScorer(VisionScorer):
    """Scores LLaVA-OneVision's visual tokens for token pruners, by the attention that patches receive in the vision tower.
    Each frame is one batch entry of P patches, which are pooled 2 x 2; one token of score 0 ends each video.

    The base view and each tile of an image are batch entries too; their scores are joined as the model joins their features.
    """

    def __init__(self, multimodal: Any) -> None:
        self.multimodal = multimodal
        layer = multimodal.config.vision_feature_layer
        layer = layer[-1] if isinstance(layer, list | tuple) else layer
        blocks = next(m for m in multimodal.vision_tower.modules() if isinstance(m, nn.ModuleList))
        # hidden_states[0] is what enters the first layer, so that state n comes out of layer n - 1.
        self.attention: Any = blocks[layer if layer < 0 else layer - 1].self_attn

    def measure_patches(self, hidden: Tensor, kwargs: dict[str, Any]) -> Tensor:
        module = self.attention
        query, key = (
            made(hidden).unflatten(-1, (module.num_heads, -1)).transpose(1, 2)
            for made in (module.q_proj, module.k_proj)
        )
        score = mean_received_attention(query, key, query.shape[-1] ** -0.5)
        return torch.cat([score[..., None], key.float().mean(1)], -1)

    def pool_patches_to_tokens(
        self, kind: int, caught: list[Tensor], pixels: Tensor, given: Inputs
    ) -> Tensor:
        if kind == IMAGE:
            return self._packed(torch.cat(caught), given)
        pooled = self.multimodal.apply_pooling(torch.cat(caught))
        videos = pooled.reshape(pixels.shape[0], -1, pooled.shape[-1])
        return torch.cat([videos, torch.zeros_like(videos[:, :1])], 1).flatten(0, 1)

    def _packed(self, told: Tensor, given: Inputs) -> Tensor:
        from transformers.models.llava_onevision.modeling_llava_onevision import image_size_to_num_patches

        config, sizes, groups = self.multimodal.config, given["image_sizes"], given.get("batch_num_images")
        alone = [True] * len(sizes) if groups is None else [n == 1 for n in groups for _ in range(n)]
        pinpoints, tile = config.image_grid_pinpoints, config.vision_config.image_size
        counts = [
            image_size_to_num_patches(size, pinpoints, tile) if one else 1
            for size, one in zip(sizes, alone, strict=True)
        ]
        aspect = given.get("vision_aspect_ratio") or config.vision_aspect_ratio
        mark = torch.zeros_like(told[0, 0])
        packed, _ = self.multimodal.pack_image_features(
            told.split(counts), sizes, image_newline=mark, vision_aspect_ratio=aspect
        )
        return torch.cat(packed)


@register("model", "llava_onevision")
class LlavaOnevision(Family):
    """``LlavaOnevisionForConditionalGeneration``. In the token layout an image is one frame, its base view,
    followed by the tokens of its high-resolution tiles."""

    model_types = ("llava_onevision",)
    extra_inputs = frozenset({"image_sizes", "image_sizes_videos", "batch_num_images"})
    required_extras: ClassVar[Mapping[str, str]] = {"pixel_values": "image_sizes"}
    replaced_methods: ClassVar[Mapping[str, Callable[..., Any]]] = {"apply_pooling": pool_frames}
    processors: ClassVar[Mapping[str, ProcessorSpec]] = {
        "llava_onevision": ProcessorSpec(
            budget=VideoBudget(fps=None, most=32),  # as in LLaVA-OneVision (arXiv 2408.03326), section 3.2
            processor="LlavaOnevisionProcessor",
            image="LlavaOnevisionImageProcessor",
            video="LlavaOnevisionVideoProcessor",
            image_token="<image>",
            video_token="<video>",
            images=_tiled,
            videos=_framed,
            image_settings={
                "size": {"height": 384, "width": 384},
                "image_grid_pinpoints": [[384 * n, 384 * m] for n in range(1, 7) for m in range(1, 7)],
            },
            video_settings={"size": {"height": 384, "width": 384}},
        )
    }
    vision_scorer = LlavaVisionScorer
    needs_only_pixels = True
    decoder_layers = frozenset({"Qwen2DecoderLayer"})
    rms_norms = frozenset({"Qwen2RMSNorm"})
    gated_mlps = frozenset({"Qwen2MLP"})
    plain_rotary = frozenset({"Qwen2RotaryEmbedding"})

    tiny: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "llava_onevision": {
            "text_config": {**TEXT, "model_type": "qwen2"},
            "vision_config": {
                "model_type": "siglip_vision_model",
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "image_size": 28,
                "patch_size": 7,
                "vision_use_head": False,
            },
            "image_token_id": IMG,
            "video_token_id": VID,
            "vision_feature_layer": -1,
            "image_grid_pinpoints": [[28, 28], [28, 56], [56, 28]],
        }
    }

    def tiny_visual_input(
        self, config: Any, kind: int, units: int, generator: torch.Generator
    ) -> tuple[list[int], dict[str, Tensor]]:
        vision = config.vision_config
        size, side = vision.image_size, vision.image_size // vision.patch_size
        if kind == VIDEO:
            pixels = torch.randn(units, 3, size, size, generator=generator)
            each = math.ceil(side / 2) ** 2
            return [config.video_token_id] * (units * each + 1), {PIXELS[VIDEO]: pixels[None]}
        # Twice as wide as high: a base view, then two tiles with a newline a row.
        pixels = torch.randn(3, 3, size, size, generator=generator)
        made = {
            PIXELS[IMAGE]: pixels[None],
            "image_sizes": torch.tensor([[size, 2 * size]]),
            "batch_num_images": torch.tensor([1]),
        }
        return [config.image_token_id] * (side * side + side * (2 * side + 1)), made

    def token_grids(self, model: nn.Module, inputs: Inputs) -> tuple[list[Grid], list[Grid]]:
        config: Any = model.config
        side = _side(model)
        pooled = math.ceil(side / 2)
        pixels, size = inputs.get(PIXELS[VIDEO]), config.vision_config.image_size
        for kind, name in PIXELS.items():
            if not isinstance(given := inputs.get(name), Tensor):
                continue
            if given.ndim != 5 and (kind == VIDEO or given.ndim != 4):
                axes = "videos, frames" if kind == VIDEO else "images, tiles"
                raise ModelError(
                    f"{name}: its shape is {list(given.shape)}, and the model's tower takes [{axes}, 3, {size}, {size}]; "
                    "build the inputs with the model's processor."
                )
            if given.shape[-2:] != (size, size):
                high, wide = given.shape[-2:]
                raise ModelError(
                    f"{name}: it has pictures of {high} x {wide} pixels, and the model's tower takes {size} x {size}; build "
                    "the inputs with the model's processor."
                )
        encoded = (inputs.get("mm_encoder_outputs") or {}).get("video")
        count = frames = 0
        if pixels is not None:
            count, frames = pixels.shape[:2]
        elif encoded is not None:
            count, tokens = encoded.pooler_output.shape[:2]
            frames = (tokens - 1) // pooled**2
        videos = [Grid(frames, pooled, pooled, marks=1)] * count
        ids = inputs["input_ids"].tolist() if IMAGE in self.given_modalities(inputs) else []
        runs = [
            len(list(some)) for row in ids for token, some in groupby(row) if token == config.image_token_id
        ]
        return self._image_grids(config, inputs, side, runs), videos

    def _image_grids(self, config: Any, inputs: Inputs, side: int, runs: list[int]) -> list[Grid]:
        """Grids of the images whose tokens make up `runs`, in order. Images may stand side by side: where each ends is told
        by its size, if it has tiles, and by its one mark. If that does not fit the runs, each is one image."""
        sizes, groups = inputs.get("image_sizes"), inputs.get("batch_num_images")
        count = 0 if sizes is None or max(runs, default=0) <= side * side + 1 else len(sizes)
        # One number stands for all images of a prompt; several of them have no tiles.
        alone = [True] * count if groups is None else [n == 1 for n in groups.tolist() for _ in range(n)]
        tiles = [
            self._tiles(config, inputs, at) if one and at < count else None for at, one in enumerate(alone)
        ]
        grids = [Grid(1, side, side, 1 if size is None else size[0] * (size[1] + 1), size) for size in tiles]
        ends = [*accumulate(side * side + one.marks for one in grids)]
        if {*accumulate(runs)} <= {*ends} and sum(runs) == (ends[-1] if ends else 0):
            return grids
        marks = [run - side * side for run in runs]
        found = zip_longest(marks, tiles[: len(runs)])
        return [
            Grid(1, side, side, n, size if size and size[0] * (size[1] + 1) == n else None)
            for n, size in found
        ]

    def _tiles(self, config: Any, inputs: Inputs, number: int) -> tuple[int, int]:
        """Rows and columns of what the finer tiles of image `number` make together; each row ends with a token more."""
        from transformers.models.llava_onevision.modeling_llava_onevision import get_anyres_image_grid_shape

        size, tile = [int(x) for x in inputs["image_sizes"][number]], config.vision_config.image_size
        grid = get_anyres_image_grid_shape(size, config.image_grid_pinpoints, tile)
        aspect = inputs.get("vision_aspect_ratio") or config.vision_aspect_ratio
        side, most = tile // config.vision_config.patch_size, int(aspect.removeprefix("anyres_max_"))
        return tiled_token_grid(grid, side, size, most)

    def encode_frames(self, model: nn.Module, inputs: Inputs) -> Tensor:
        rows = super().encode_frames(model, inputs)
        videos, count = inputs["pixel_values_videos"].shape[:2]
        if len(rows) > videos * count * math.ceil(_side(model) / 2) ** 2:
            return rows
        # Earlier releases put the mark behind a video later.
        mark: Any = self.multimodal(model).image_newline
        marks = mark.to(rows).expand(videos, 1, -1)
        return torch.cat([rows.view(videos, -1, rows.shape[1]), marks], 1).flatten(0, 1)

    def split_pixels_by_frame(self, model: nn.Module, inputs: Inputs) -> ByFrame:
        return inputs[PIXELS[VIDEO]][0], lambda frames: {PIXELS[VIDEO]: frames[None]}

    def count_patches(self, model: nn.Module, pixels: Tensor) -> int:
        patch = int(model.config.vision_config.patch_size)  # type: ignore[union-attr, arg-type]
        height, width = pixels.shape[-2:]
        return math.prod(pixels.shape[:-3]) * (height // patch) * (width // patch)

    def encode_pixels(
        self, model: nn.Module, kind: int, pixels: Tensor, given: Inputs, most: int, features: Features
    ) -> Any:
        if pixels.ndim != 5:  # all tiles of all images in a row: their own method knows whose each is
            return next(iter(features([(pixels, {})])))
        count, each = pixels.shape[:2]
        frames = max(1, most // self.count_patches(model, pixels[0, :1]))
        several, inside = max(1, frames // each), min(frames, each)
        if kind == IMAGE:
            parts = _images(given, count, several)
            made = features([(pixels[part.pop("at")], part) for part in parts])
            return [one for images in made for one in images]
        unit = math.ceil(_side(model) / 2) ** 2
        whole: Tensor | None = None
        cuts = [(first, begin) for first in range(0, count, several) for begin in range(0, each, inside)]
        frames_of = [pixels[first : first + several, begin : begin + inside] for first, begin in cuts]
        for (first, begin), part, rows in zip(
            cuts, frames_of, features([(part, {}) for part in frames_of]), strict=True
        ):
            # Behind each part stands the mark of a video, in releases that put it there.
            length = part.shape[1] * unit
            if whole is None:
                whole = rows.new_empty(count, each * unit + rows.shape[1] - length, rows.shape[2])
            some = whole[first : first + several]
            some[:, begin * unit : begin * unit + length] = rows[:, :length]
            some[:, each * unit :] = rows[:, length:]
        return whole

    def pixel_rows_per_item(self, inputs: Inputs, kind: int) -> dict[str, list[int]]:
        names = PIXELS[kind], "image_sizes" if kind == IMAGE else "image_sizes_videos"
        found = {name: [1] * len(inputs[name]) for name in names if inputs.get(name) is not None}
        if kind == IMAGE and inputs.get("batch_num_images") is not None:
            # One number for several images of a prompt: the first of them takes it.
            groups = inputs["batch_num_images"].tolist()
            found["batch_num_images"] = [int(n == 0) for group in groups for n in range(group)]
        return found


def _side(model: nn.Module) -> int:
    """Patches along each side of a frame."""
    vision: Any = model.config.vision_config  # type: ignore[union-attr]
    return int(vision.image_size // vision.patch_size)


def _images(given: Inputs, count: int, most: int) -> Iterator[dict[str, Any]]:
    """`count` images, in order, as parts of at most `most`: `at` where they stand, and what tells of these alone. An image
    of a prompt with several comes without tiles, and not in a part with one that has some."""
    numbers = given.get("batch_num_images")
    tiled = [True] * count if numbers is None else [n == 1 for n in numbers.tolist() for _ in range(n)]
    begin = 0
    for kind, group in groupby(tiled):
        stop = begin + len(list(group))
        for first in range(begin, stop, most):
            last = min(first + most, stop)
            part: dict[str, Any] = {"at": slice(first, last), "image_sizes": given["image_sizes"][first:last]}
            if numbers is not None:
                # One number stands for all images of a prompt, and none of these is alone in its own.
                part["batch_num_images"] = numbers.new_tensor(
                    [1] * (last - first) if kind else [max(2, last - first)]
                )
            yield part
        begin = stop
