"""Other image and video models of transformers: frame positions in the prompt follow from pixels and placeholder tokens.

A run is a sequence of adjacent placeholders of one kind. If there are as many runs as frames in the pixels, each is a frame,
and text may stand between them; if as many as videos, each holds the frames of one; else each run counts as a frame.
Positions come from the model's own `get_rope_index`, if it has one.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, groupby, islice
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mmaccel.core.adapter import ConfigOnlyModel, home_device
from mmaccel.core.errors import ModelError, warn
from mmaccel.core.layout import IMAGE, TEXT, VIDEO, TokenLayout
from mmaccel.core.registry import register
from mmaccel.models import tiny
from mmaccel.models.family import Family
from mmaccel.models.intern_tower import InternVisionScorer
from mmaccel.models.prompt_layout import PIXELS, WIDE, ByFrame, Grid, Inputs, Texts, format_time, is_nonempty

GRIDS = {IMAGE: "image_grid_thw", VIDEO: "video_grid_thw"}
NEAR = 24
"""Of a model without placeholders of video: images with at most so many tokens of text between are the frames of one."""
_TEXTS = "Llama", "Mistral", "Qwen2", "Qwen3"
"""Language models that are built alike, as their classes begin."""
_TOLD_OF = {
    IMAGE: ("image_sizes", "image_merge_sizes", "image_position_ids", "pixel_attention_mask"),
    VIDEO: ("video_merge_sizes", "video_position_ids", "num_frames_per_video"),
}
"""What else tells of the images and of the videos of a prompt, one by one."""

_AROUND_FRAME: dict[str, Callable[[int, float], tuple[Texts, Texts]]] = {
    "internvl": lambda frame, time: (
        ["\n"] * (frame > 0) + [f"Frame{frame % 10**WIDE + 1:0{WIDE}d}: <img>"],
        ["</img>"],
    ),
    "smolvlm": lambda frame, time: (
        [
            f"\nFrame from {int(time // 60 % 100):02d}:{int(time % 60):02d}:<fake_token_around_image><global-img>"
        ],
        ["<fake_token_around_image>"],
    ),
    "video_llama_3": lambda frame, time: (["," * (frame > 0) + f"Time {format_time(time)}s:"], ()),
}
"""What a processor writes beside a frame, of the number of the frame and its time in seconds."""

TOWER: dict[str, Any] = {  # of a tiny model
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 7,
}


@register("model", "generic")
class GenericFamily(Family):
    """Models whose frames mmaccel finds from the pixels and the placeholder tokens of a prompt."""

    model_types: ClassVar[tuple[str, ...]] = (
        "internvl",
        "llava_next_video",
        "perception_lm",
        "smolvlm",
        "video_llama_3",
    )
    has_frame_text = True
    decoder_layers = frozenset({f"{text}DecoderLayer" for text in _TEXTS})
    rms_norms = frozenset({f"{text}RMSNorm" for text in _TEXTS})
    gated_mlps = frozenset({f"{text}MLP" for text in _TEXTS})
    vision_scorer: ClassVar[Any] = {"internvl": InternVisionScorer}
    tiny: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "internvl": {
            "text_config": {**tiny.TEXT, "model_type": "qwen2"},
            "vision_config": {**TOWER, "image_size": [28, 28], "patch_size": [7, 7]},
            "image_token_id": tiny.IMG,
            "image_seq_length": 4,
            "downsample_ratio": 0.5,
        },
        "llava_next_video": {
            "text_config": {**tiny.TEXT, "model_type": "llama"},
            "vision_config": {**TOWER, "model_type": "siglip_vision_model", "vision_use_head": False},
            "image_token_id": tiny.IMG,
            "video_token_id": tiny.VID,
            "image_token_index": tiny.IMG,
            "video_token_index": tiny.VID,
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full",
            "image_grid_pinpoints": [[28, 28], [28, 56], [56, 28]],
            "spatial_pool_stride": 2,
        },
        "perception_lm": {
            "text_config": {**tiny.TEXT, "model_type": "llama"},
            "vision_config": {
                **TOWER,
                "model_type": "siglip_vision_model",
                "vision_use_head": False,
                "model_args": {"embed_dim": 32},
            },
            "vision_use_cls_token": False,
            "projector_pooling_ratio": 2,
            "image_token_id": tiny.IMG,
            "video_token_id": tiny.VID,
        },
        "smolvlm": {
            "text_config": {**tiny.TEXT, "model_type": "llama"},
            "vision_config": TOWER,
            "image_token_id": tiny.IMG,
            "scale_factor": 2,
        },
        "video_llama_3": {
            "text_config": {**tiny.TEXT, "model_type": "qwen2"},
            "vision_config": {**TOWER, "patch_size": 14},
            "image_token_id": tiny.IMG,
            "video_token_id": tiny.VID,
        },
    }

    def tiny_visual_input(
        self, config: Any, kind: int, units: int, generator: torch.Generator
    ) -> tuple[list[int], dict[str, Tensor]]:
        of, name = config.model_type, PIXELS[kind]
        image, video = _token(config, "image"), _token(config, "video")
        token: Any = image if kind == IMAGE or video is None else video
        if of == "video_llama_3":
            pixels = torch.randn(units * 24, 3 * 14 * 14, generator=generator)
            grid, merge = torch.tensor([[units, 4, 6]]), 2 if kind == VIDEO else 1
            words = "image" if kind == IMAGE else "video"
            made = {name: pixels, GRIDS[kind]: grid, f"{words}_merge_sizes": torch.tensor([merge])}
            return [x for n in range(units) for x in (7, 8 + n % 2, *[token] * (24 // merge**2))], made
        tiles = 3 if of == "llava_next_video" and kind == IMAGE else units
        pixels = torch.randn(tiles, 3, 28, 28, generator=generator)
        if of in ("internvl", "smolvlm"):
            return [x for n in range(units) for x in (7, 8 + n % 2, *[token] * 4)], {PIXELS[IMAGE]: pixels}
        if tiles > units:  # a base view, then two tiles with a newline a row
            return [token] * (16 + 36), {name: pixels[None], "image_sizes": torch.tensor([[28, 56]])}
        return [token] * (4 * units), {name: pixels[None]}

    def text_around_frame(self, config: Any, frame: int, seconds: Sequence[float]) -> tuple[Texts, Texts]:
        return _AROUND_FRAME.get(config.model_type, lambda *_: ((), ()))(frame, seconds[0])

    def encode_frames(self, model: nn.Module, inputs: Inputs) -> Tensor:
        multimodal: Any = self.multimodal(model)
        pixels = _shown(inputs)[1]
        if hasattr(multimodal, "get_video_features"):
            apart = PIXELS[VIDEO], "video_compression_mask"
            given = {one: x for one, x in inputs.items() if "video" in one and one not in apart}
            # By position: transformers 5.17 names the pixels of one family otherwise.
            features = multimodal.get_video_features(pixels, **given, return_dict=True).pooler_output
        else:
            # The pixels of InternVL have no axis of videos, those of the others do.
            pixels = pixels.flatten(0, -4) if model.config.model_type == "internvl" else pixels  # type: ignore[union-attr]
            features = multimodal.get_image_features(pixels, return_dict=True).pooler_output
        rows = torch.cat([one.flatten(0, -2) for one in features])
        return rows.to(home_device(model), self.token_embedding(model).weight.dtype)

    def frame_size(self, model: nn.Module, inputs: Inputs) -> tuple[int, int]:
        pixels, grid = _shown(inputs)[1], inputs.get(GRIDS[VIDEO])
        if grid is None:
            return tuple(pixels.shape[-2:])  # type: ignore[return-value]
        patch = int(model.config.vision_config.patch_size)  # type: ignore[union-attr, arg-type]
        return int(grid[0, 1]) * patch, int(grid[0, 2]) * patch

    def split_pixels_by_frame(self, model: nn.Module, inputs: Inputs) -> ByFrame:
        (name, pixels), grid = _shown(inputs), inputs.get(GRIDS[VIDEO])
        if grid is None:
            shape = (1,) * (pixels.ndim == 5)
            return pixels.flatten(0, -4), lambda frames: {name: frames.view(*shape, *frames.shape)}
        steps, kept = int(grid[0, 0]), {one: inputs[one] for one in ("video_merge_sizes",) if one in inputs}

        def made(frames: Tensor) -> dict[str, Any]:
            whole = grid.new_tensor([[len(frames), *grid[0, 1:].tolist()]])
            return {name: frames.flatten(0, 2), GRIDS[VIDEO]: whole, **kept}

        return pixels.reshape(steps, 1, -1, pixels.shape[1]), made

    def pixel_rows_per_item(self, inputs: Inputs, kind: int) -> dict[str, list[int]]:
        names = [PIXELS[kind], GRIDS[kind], *_TOLD_OF[kind]]
        grid = inputs.get(GRIDS[kind])
        sizes = {name: [1] * len(inputs[name]) for name in names if inputs.get(name) is not None}
        counts = inputs.get("num_frames_per_video") if kind == VIDEO else None
        if counts is not None:
            apart = {PIXELS[VIDEO], "video_position_ids"} & sizes.keys()
            return {**sizes, **dict.fromkeys(apart, counts.tolist())}
        return sizes if grid is None else {**sizes, PIXELS[kind]: grid.prod(1).tolist()}

    def split_images(
        self, inputs: Inputs, layout: TokenLayout, columns: slice
    ) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """Split image inputs into those of images with tokens at `columns`, and the rest; None for videos or no images."""
        if PIXELS[VIDEO] in inputs or not is_nonempty(inputs.get(PIXELS[IMAGE])):
            return None
        visual = layout.modality[0] != TEXT
        names = [name for name in (PIXELS[IMAGE], "pixel_attention_mask") if inputs.get(name) is not None]
        whole = inputs[PIXELS[IMAGE]].ndim == 5
        tiles = len(inputs[PIXELS[IMAGE]][0] if whole else inputs[PIXELS[IMAGE]])
        number = (visual.long().cumsum(0) - 1) // (int(visual.sum()) // tiles)
        mine = torch.zeros(tiles, dtype=torch.bool, device=number.device)
        mine[number[columns][visual[columns]]] = True

        def some(rows: Tensor) -> dict[str, Any]:
            return {name: inputs[name][:, rows] if whole else inputs[name][rows] for name in names}

        return some(mine), some(~mine) if bool((~mine).any()) else {}

    def complete_tiny_inputs(self, config: Any, made: dict[str, Tensor]) -> dict[str, Tensor]:
        if config.model_type == "smolvlm" and PIXELS[IMAGE] in made:
            made[PIXELS[IMAGE]] = made[PIXELS[IMAGE]][None]
        return made

    def multimodal(self, model: nn.Module) -> nn.Module:
        return model.base_model  # type: ignore[return-value]

    def text_model(self, model: nn.Module) -> nn.Module:
        return model.get_decoder()  # type: ignore[operator, no-any-return]

    def count_patches(self, model: nn.Module, pixels: Tensor) -> int:
        return 0  # its tower is never run in parts

    def given_modalities(self, inputs: Inputs) -> set[int]:
        shown = super().given_modalities(inputs)
        # Where frames are images, either may be.
        return shown | {VIDEO} if IMAGE in shown else shown

    def token_modalities(self, config: Any, ids: Tensor) -> Tensor:
        image, video = _token(config, "image"), _token(config, "video")
        kinds = torch.where(ids == (-1 if image is None else image), IMAGE, TEXT)
        if video is not None:
            kinds[ids == video] = VIDEO
            return kinds
        for row in kinds:
            for group in _near(_runs(row.tolist())):
                for begin, end in group if len(group) > 1 else ():
                    row[begin:end] = VIDEO
        return kinds

    def placeholders(self, model: nn.Module) -> tuple[int, ...]:
        return tuple(
            token for kind in ("image", "video") if (token := _token(model.config, kind)) is not None
        )

    def token_grids(self, model: nn.Module, inputs: Inputs) -> tuple[list[Grid], list[Grid]]:
        rows = self.token_modalities(model.config, inputs["input_ids"]).tolist()
        images, videos = ([_runs(row, kind) for row in rows] for kind in (IMAGE, VIDEO))
        frames, runs = _frames(inputs), list(chain.from_iterable(videos))
        if len(frames) == len(runs):
            found = [_grid(count, end - begin) for count, (begin, end) in zip(frames, runs, strict=True)]
        else:
            if sum(frames) == len(runs):
                left = iter(runs)
                groups = [list(islice(left, count)) for count in frames]
            else:
                groups = [group for row in videos for group in _near(row)]
            found = [grid for group in groups for grid in _apart(group)]
        return [_grid(1, end - begin) for row in images for begin, end in row], found

    def positions(self, model: nn.Module, inputs: Inputs) -> Tensor:
        index = getattr(self.multimodal(model), "get_rope_index", None)
        known = {} if index is None else inspect.signature(index).parameters
        lacks = "mm_token_type_ids" in known and inputs.get("mm_token_type_ids") is None
        if index is None or lacks or not any(is_nonempty(inputs.get(name)) for name in GRIDS.values()):
            return super().positions(model, inputs)  # of any number of coordinates the model makes its own
        heard, lengths = inputs.get("feature_attention_mask"), inputs.get("audio_feature_lengths")
        told = {
            "attention_mask": torch.ones_like(inputs["input_ids"]),
            "audio_seqlens": lengths if heard is None else heard.sum(1),
            "second_per_grids": inputs.get("video_second_per_grid"),
            **{name: x for name, x in inputs.items() if x is not None},
        }
        return index(**{name: told[name] for name in known if name in told})[0]  # type: ignore[no-any-return]


@register("model", "other")
class UnlistedFamily(GenericFamily):
    """Any other image or video model of transformers, if all its layers have full attention. Tests cover a few of them."""

    model_types = ("*",)
    rotate_function = ""
    tiny: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    unable: ClassVar[Mapping[str, str]] = {
        "streams": "have pixels that mmaccel does not know how to split by frame",
        "pruning": "have decoder layers whose parts mmaccel does not know",
    }

    def supports_model_type(self, kind: str) -> bool:
        from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

        return kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    def check_recipe(self, model: nn.Module, recipe: Any) -> None:
        self.check_layers(model)
        super().check_recipe(model, recipe)
        if (kind := str(model.config.model_type)) not in _TOLD:  # type: ignore[union-attr]
            _TOLD.add(kind)
            warn(
                f"model type {kind!r} has no family of its own: patterns, kv 'window' and drafts work, sessions and pruners "
                "do not; patterns by modality take all tokens for text if its config names no placeholder token."
            )

    def check_layers(self, model: nn.Module) -> None:
        """Raise `ModelError` if a model, or a configuration alone, has layers other than plain causal full attention."""
        if why := self._odd(model):
            raise ModelError(f"model type {model.config.model_type!r} is not supported: {why}.")  # type: ignore[union-attr]

    def _odd(self, model: nn.Module) -> str | None:
        config: Any = model.config.get_text_config(decoder=True)  # type: ignore[operator, union-attr]
        kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
        if kinds:
            return f"it has layers of type {min(kinds)!r}"
        if getattr(config, "cross_attention_layers", None):
            return "it has cross-attention layers"
        own_masks = hasattr(model, "create_masks_for_generate")
        if own_masks or getattr(config, "use_bidirectional_attention", None):
            return "some of its tokens attend to later tokens"
        if getattr(config, "num_key_value_heads", None) is None or getattr(config, "kv_lora_rank", None):
            return "it does not have multi-head or grouped-query attention"
        if isinstance(model, ConfigOnlyModel):
            return None
        attentions = [
            getattr(one, "self_attn", None) for one in getattr(self.text_model(model), "layers", ())
        ]
        names = ("q_proj", "k_proj", "layer_idx")
        if not attentions or not all(hasattr(one, name) for one in attentions for name in names):
            return "not all of its layers have self-attention with q_proj and k_proj"
        windows = any(getattr(one, "sliding_window", None) for one in attentions)
        return "some of its layers have sliding-window attention" if windows else None


_TOLD: set[str] = set()
"""Model types of which it was said what does not act."""


def _token(config: Any, kind: str) -> int | None:
    """The placeholder of images or of videos."""
    found = (getattr(config, f"{kind}_token_{end}", None) for end in ("id", "index"))
    return next((int(one) for one in found if one is not None), None)


def _shown(inputs: Inputs) -> tuple[str, Tensor]:
    """The name and the pixels of the video of `inputs`, which may be images."""
    name = PIXELS[VIDEO] if PIXELS[VIDEO] in inputs else PIXELS[IMAGE]
    return name, inputs[name]


def _runs(kinds: list[int], kind: int | None = None) -> list[tuple[int, int]]:
    """Where the runs of placeholders of `kind` (None: of any) begin and end."""
    found, begin = [], 0
    for value, group in groupby(kinds):
        end = begin + len(list(group))
        if value != TEXT if kind is None else value == kind:
            found.append((begin, end))
        begin = end
    return found


def _frames(inputs: Inputs) -> list[int]:
    """The frames of each video, as far as its inputs tell; [] where they do not."""
    grid, pixels, counts = (inputs.get(x) for x in (GRIDS[VIDEO], PIXELS[VIDEO], "num_frames_per_video"))
    counts = counts if grid is None else grid[:, 0]
    if counts is not None:
        return [int(steps) for steps in counts]
    # Patches of frames have four axes with one for videos, pixels five.
    axes = 4 if "video_position_ids" in inputs else 5
    return [pixels.shape[1]] * len(pixels) if isinstance(pixels, Tensor) and pixels.ndim == axes else []


def _near(runs: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Runs in groups of those that at most `NEAR` tokens separate."""
    groups: list[list[tuple[int, int]]] = []
    for run in runs:
        if groups and run[0] - groups[-1][-1][1] <= NEAR:
            groups[-1].append(run)
        else:
            groups.append([run])
    return groups


def _apart(group: list[tuple[int, int]]) -> list[Grid]:
    """The runs of a video as its frames; where they differ in length each is a video of its own."""
    sizes = [end - begin for begin, end in group]
    if len(set(sizes)) > 1:
        return [_grid(1, size) for size in sizes]
    return [replace(_grid(1, sizes[0]), frames=len(sizes), apart=True)]


def _grid(frames: int, tokens: int) -> Grid:
    """`tokens` as so many frames, square where they can be; what does not divide are marks behind them."""
    each = tokens // max(frames, 1)
    side = math.isqrt(each)
    rows = side if side * side == each else 1
    return Grid(frames, rows, each // rows, marks=tokens - frames * each)
