"""Qwen2-VL and Qwen2.5-VL: M-RoPE, one token grid per video, no separators between frames.

Most layers of Qwen2.5-VL's tower attend in windows of 64 patches, the others within each time step. Under `sdpa`
transformers splits at `cu_seqlens` in every layer and attends to one window after the other, so that a long video is bound
by kernel launches. Here windows of equal length (a frame size has four lengths) are one batch. This relies on transformers
giving an attention function with "flash" in its name all rows at once with `cu_seq_lens_q` (`is_flash_attention_requested`,
5.17 to 5.23); elsewhere it gets each window alone and equals `sdpa`. A tower with another attention than `sdpa` keeps it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from itertools import groupby, pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mmaccel.backends.ops.layer_ops import apply_rope
from mmaccel.core.errors import ModelError
from mmaccel.core.layout import IMAGE, VIDEO, TimeScale
from mmaccel.core.registry import register
from mmaccel.models import tiny
from mmaccel.models.family import Family, Features
from mmaccel.models.install import Hooks
from mmaccel.models.prompt_layout import PIXELS, ByFrame, Grid, Inputs, Made, ProcessorSpec, VideoBudget
from mmaccel.models.signals import VisionScorer, mean_received_attention

WINDOW_ATTENTION = "mmaccel_flash_windows"
"""The name of `attend_windows` among transformers' attention functions."""

_GRIDS = {IMAGE: "image_grid_thw", VIDEO: "video_grid_thw"}


def _patched(kind: int, pixels: Any, extra: Any, visuals: list[Any], where: Mapping[str, Any]) -> Made:
    """See `ProcessorSpec`: patches of all images (IMAGE) or videos (VIDEO) in a row, and their grids."""
    from mmaccel.media.preprocess import to_patches

    frames = visuals if kind == VIDEO else [image[None] for row in visuals for image in row]
    made = [to_patches(one, pixels, video=kind == VIDEO, **where) for one in frames]
    grids = torch.tensor([shape for _, shape in made], dtype=torch.long)
    merged = (pixels.merge_size or 1) ** 2
    # A single video of gigabytes is not copied.
    whole = made[0][0] if len(made) == 1 else torch.cat([patches for patches, _ in made])
    return {PIXELS[kind]: whole, _GRIDS[kind]: grids}, [math.prod(shape) // merged for _, shape in made]


_PATCHES: dict[str, Any] = {"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2}
_PROCESSOR: dict[str, Any] = {
    "image": "Qwen2VLImageProcessor",
    "video": "Qwen2VLVideoProcessor",
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "images": functools.partial(_patched, IMAGE),
    "videos": functools.partial(_patched, VIDEO),
    "image_settings": {"size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}, **_PATCHES},
    "video_settings": {
        "size": {"shortest_edge": 128 * 28 * 28, "longest_edge": 28 * 28 * 768},
        "max_frames": 768,
        **_PATCHES,
    },
    "type_ids": True,
    # As qwen_vl_utils (0.0.14) has it, which the model's card names.
    "budget": VideoBudget(
        least=4,
        most=768,
        multiple=2,
        factor=28,
        pixels=(128 * 28 * 28, 768 * 28 * 28),
        total=int(0.9 * 128000 * 28 * 28),
    ),
}


class QwenVisionScorer(VisionScorer):
    """Scores Qwen-VL's visual tokens for token pruners, by the attention that patches receive in the vision tower. Patches
    of all frames are packed in the order of attention windows; four patches merge into one visual token."""

    def __init__(self, multimodal: Any) -> None:
        self.visual = multimodal.visual
        self.attention: Any = self.visual.blocks[-1].attn

    def measure_patches(self, hidden: Tensor, kwargs: dict[str, Any]) -> Tensor:
        module, looks = self.attention, []
        query, key = module.qkv(hidden).unflatten(-1, (3, module.num_heads, -1)).permute(1, 2, 0, 3)[:2]
        cos, sin = (angle.float() for angle in kwargs["position_embeddings"])
        query, key = apply_rope(query.float(), cos, sin), apply_rope(key.float(), cos, sin)
        start, ends = 0, kwargs["cu_seqlens"].tolist()
        for size, same in groupby(stop - begin for begin, stop in pairwise(ends)):
            shape = len(list(same)), size
            some = slice(start, start + math.prod(shape))
            q, k = (x[:, some].unflatten(1, shape).transpose(0, 1) for x in (query, key))
            score = mean_received_attention(q, k, q.shape[-1] ** -0.5)
            looks.append(torch.cat([score[..., None], k.mean(1)], -1).flatten(0, 1))
            start = some.stop
        return torch.cat(looks)

    def pool_patches_to_tokens(
        self, kind: int, caught: list[Tensor], pixels: Tensor, given: Inputs
    ) -> Tensor:
        grid = given[_GRIDS[kind]]
        merged = torch.cat(caught).unflatten(0, (-1, self.visual.spatial_merge_size**2)).mean(1)
        return merged[torch.argsort(self._order(grid))]

    def _order(self, grid: Tensor) -> Tensor:
        """Where each merged token, in the order of windows, stands in the order of reading."""
        if not hasattr(self.visual, "window_size"):
            return torch.arange(int(grid.prod(1).sum()) // self.visual.spatial_merge_size**2)
        if hasattr(self.visual, "get_window_index"):
            return self.visual.get_window_index(grid)[0]  # type: ignore[no-any-return]
        from transformers.vision_utils import get_vision_window_index

        names = ("spatial_merge_size", "window_size", "patch_size")
        return get_vision_window_index(grid, **{name: getattr(self.visual, name) for name in names})[0]


@register("model", "qwen2_5_vl")
class Qwen25VL(Family):
    """``Qwen2VLForConditionalGeneration`` and ``Qwen2_5_VLForConditionalGeneration``; positions come from the installed
    model's own `get_rope_index`."""

    model_types: ClassVar[tuple[str, ...]] = ("qwen2_5_vl", "qwen2_vl")
    mrope = True
    extra_inputs = frozenset({"mm_token_type_ids", "image_grid_thw", "video_grid_thw", "second_per_grid_ts"})
    required_extras: ClassVar[Mapping[str, str]] = {
        "pixel_values": "image_grid_thw",
        "pixel_values_videos": "video_grid_thw",
    }
    processors: ClassVar[Mapping[str, ProcessorSpec]] = {
        "qwen2_vl": ProcessorSpec(processor="Qwen2VLProcessor", **_PROCESSOR),
        "qwen2_5_vl": ProcessorSpec(processor="Qwen2_5_VLProcessor", seconds=True, **_PROCESSOR),
    }
    vision_scorer: ClassVar[Any] = QwenVisionScorer
    tiny: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "qwen2_vl": {
            "text_config": {**tiny.TEXT, "rope_parameters": tiny.MROPE},
            "vision_config": {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2},
            **tiny.ASIDE,
        },
        "qwen2_5_vl": {
            "text_config": {**tiny.TEXT, "rope_parameters": tiny.MROPE},
            "vision_config": {**tiny.TOWER, "window_size": 56, "fullatt_block_indexes": [1]},
            **tiny.ASIDE,
        },
    }
    decoder_layers = frozenset({"Qwen2_5_VLDecoderLayer", "Qwen2VLDecoderLayer"})
    rms_norms = frozenset({"Qwen2_5_VLRMSNorm", "Qwen2RMSNorm", "Qwen2VLRMSNorm"})
    gated_mlps = frozenset({"Qwen2MLP", "Qwen2_5_VLMLP"})

    def tiny_visual_input(
        self, config: Any, kind: int, units: int, generator: torch.Generator
    ) -> tuple[list[int], dict[str, Tensor]]:
        vision = config.vision_config
        grid = [units, 4, 6] if kind == VIDEO else [1, 4, 4]
        row = 3 * vision.temporal_patch_size * vision.patch_size**2
        pixels = torch.randn(math.prod(grid), row, generator=generator)
        token = config.video_token_id if kind == VIDEO else config.image_token_id
        tokens = [token] * (grid[1] * grid[2] // vision.spatial_merge_size**2)
        return self.video_ids(config, tokens, grid[0]), {
            PIXELS[kind]: pixels,
            _GRIDS[kind]: torch.tensor([grid]),
        }

    def video_ids(self, config: Any, tokens: list[int], units: int) -> list[int]:
        """Return the token ids of a video in a prompt: start marker, `tokens` for each of `units` time steps, end marker."""
        return [config.vision_start_token_id, *tokens * units, config.vision_end_token_id]

    def given_modalities(self, inputs: Inputs) -> set[int]:
        # Features that come encoded and without their grid have no frames that anyone knows of.
        return {kind for kind in super().given_modalities(inputs) if inputs.get(_GRIDS[kind]) is not None}

    def frame_size(self, model: nn.Module, inputs: Inputs) -> tuple[int, int]:
        patch = int(model.config.vision_config.patch_size)  # type: ignore[union-attr, arg-type]
        height, width = inputs["video_grid_thw"][0, 1:].tolist()
        return height * patch, width * patch

    def token_grids(self, model: nn.Module, inputs: Inputs) -> tuple[list[Grid], list[Grid]]:
        merge = model.config.vision_config.spatial_merge_size  # type: ignore[union-attr]

        def read(kind: int) -> list[Grid]:
            thw, apart = inputs.get(_GRIDS[kind]), kind == VIDEO and self.has_frame_text
            rows = () if thw is None else thw.tolist()
            pixels, patches = inputs.get(PIXELS[kind]), sum(math.prod(row) for row in rows)
            # The tower takes patches under more axes too, as of a loader of data that adds one.
            if isinstance(pixels, Tensor) and rows and (given := math.prod(pixels.shape[:-1])) != patches:
                raise ModelError(
                    f"{PIXELS[kind]}: it has {given} patches, and {_GRIDS[kind]} tells of {patches}; build the inputs with "
                    "the model's processor."
                )
            return [Grid(t, h // merge, w // merge, apart=apart) for t, h, w in rows]

        return read(IMAGE), read(VIDEO)

    def pixel_rows_per_item(self, inputs: Inputs, kind: int) -> dict[str, list[int]]:
        grid = inputs.get(_GRIDS[kind])
        if grid is None:
            return {}
        sizes = {_GRIDS[kind]: [1] * len(grid), PIXELS[kind]: grid.prod(1).tolist()}
        if kind == VIDEO:
            sizes["second_per_grid_ts"] = [1] * len(grid)
        return {name: size for name, size in sizes.items() if inputs.get(name) is not None}

    def split_pixels_by_frame(self, model: nn.Module, inputs: Inputs) -> ByFrame:
        pixels, grids = inputs[PIXELS[VIDEO]], inputs[_GRIDS[VIDEO]]
        steps, height, width = grids[0].tolist()
        seconds, frames_per_unit, each = (
            inputs.get("second_per_grid_ts"),
            self.frames_per_unit(model),
            pixels.shape[1],
        )

        def made(frames: Tensor) -> dict[str, Any]:  # it holds no pixels
            grid = torch.tensor([[len(frames) // frames_per_unit, height, width]], device=grids.device)
            told = {_GRIDS[VIDEO]: grid, PIXELS[VIDEO]: frames.reshape(-1, each)}
            return told if seconds is None else {**told, "second_per_grid_ts": seconds}

        # The patches of a unit hold pixels of all its frames: each row has an equal part of them, and none is a frame.
        return pixels.reshape(steps * frames_per_unit, 1, 1, -1), made

    def count_patches(self, model: nn.Module, pixels: Tensor) -> int:
        return len(pixels)

    def window_attention_tower(self, model: nn.Module) -> nn.Module | None:
        return self.multimodal(model).visual  # type: ignore[return-value]

    @staticmethod
    def batch_windows(hooks: Hooks, tower: Any) -> None:
        """Make a vision `tower` batch attention windows of equal length. One with an attention other than `sdpa`, or already
        set up so, is left unchanged."""
        if getattr(tower.config, "_attn_implementation", None) != "sdpa":
            return
        from transformers import AttentionInterface

        AttentionInterface.register(WINDOW_ATTENTION, attend_windows)
        # A copy, so that whoever builds another model of this config, or sends it away, does not meet the name.
        hooks.set_attention(tower.modules(), tower.config, WINDOW_ATTENTION)

    def encode_pixels(
        self, model: nn.Module, kind: int, pixels: Tensor, given: Inputs, most: int, features: Features
    ) -> Any:
        name = _GRIDS[kind]
        grids: list[list[int]] = given[name].tolist()
        merged = int(model.config.vision_config.spatial_merge_size) ** 2  # type: ignore[union-attr, arg-type]
        cut = list(_parts(grids, most))
        rows_of = pixels.split([sum(map(math.prod, part)) for part in cut])
        parts = [
            (rows, {name: given[name].new_tensor(part)}) for rows, part in zip(rows_of, cut, strict=True)
        ]
        whole: Tensor | None = None
        at = 0
        for made in features(parts):
            for rows in made:
                # Put where they belong as they come: nothing is held twice.
                if whole is None:
                    whole = rows.new_empty(len(pixels) // merged, *rows.shape[1:])
                whole[at : at + len(rows)] = rows
                at += len(rows)
        assert whole is not None
        return whole.split([math.prod(grid) // merged for grid in grids])

    def positions(self, model: nn.Module, inputs: Inputs) -> Tensor:
        ids: Tensor = inputs["input_ids"]
        images, videos = inputs.get("image_grid_thw"), inputs.get("video_grid_thw")
        kinds = inputs.get("mm_token_type_ids")
        if kinds is None or (images is None and videos is None):  # as transformers has it
            return super().positions(model, inputs).expand(3, -1, -1)
        # A placeholder without a grid is a word.
        for kind, grids in ((1, images), (2, videos)):
            kinds = kinds if grids is not None else kinds.masked_fill(kinds == kind, 0)
        mask = inputs.get("attention_mask")
        positions, _ = self.multimodal(model).get_rope_index(  # type: ignore[operator]
            ids,
            image_grid_thw=images,
            video_grid_thw=videos,
            second_per_grid_ts=inputs.get("second_per_grid_ts"),
            attention_mask=mask if mask is None else torch.as_tensor(mask),
            mm_token_type_ids=kinds,
        )
        return positions  # type: ignore[no-any-return]

    def time_step_positions(self, model: nn.Module, inputs: Inputs, units: int) -> Tensor:
        # A video of one token a unit: the time of a unit does not depend on its size.
        config: Any = model.config
        merge = config.vision_config.spatial_merge_size
        ids = torch.full((1, units), config.video_token_id, device=inputs["input_ids"].device)
        skinny = {
            "input_ids": ids,
            "video_grid_thw": torch.tensor([[units, merge, merge]], device=ids.device),
            "mm_token_type_ids": None if inputs.get("mm_token_type_ids") is None else torch.full_like(ids, 2),
            "second_per_grid_ts": inputs.get("second_per_grid_ts"),
        }
        time = self.positions(model, skinny)[0, 0]
        return time - time[0]

    def stream_time_scale(self, model: nn.Module, inputs: Inputs) -> TimeScale | None:
        config: Any = model.config
        steps = inputs.get("second_per_grid_ts")
        seconds = 1.0 if steps is None else float(steps[0])
        rate: Any = getattr(config.vision_config, "tokens_per_second", None)
        return None if rate is None else TimeScale(float(rate), seconds)


def _parts(grids: list[list[int]], most: int) -> Iterator[list[list[int]]]:
    """Grids (steps, rows, columns), in order, as parts of at most `most` patches; a video is cut between two steps."""
    part: list[list[int]] = []
    room = most
    for steps, height, width in grids:
        each = height * width
        while steps:
            if part and room < each:
                yield part
                part, room = [], most
            some = min(steps, max(1, room // each))
            part.append([some, height, width])
            steps, room = steps - some, room - some * each
    yield part


def group_windows_by_length(
    ends: list[int], device: torch.device
) -> tuple[Any, Tensor | None, Tensor | None]:
    """Group attention windows by length, so that each group is one batch; `ends` are the bounds of consecutive windows.
    Returns the shape (windows, rows per window) of each batch; the rows [n] in batch order; and the inverse permutation. The
    last two are None if rows are already in that order. Empty windows are left out."""
    begins: dict[int, list[int]] = {}
    for begin, end in pairwise(ends):
        if end > begin:
            begins.setdefault(end - begin, []).append(begin)
    shapes = tuple((len(some), length) for length, some in begins.items())
    rows = [(torch.tensor(some)[:, None] + torch.arange(n)).flatten() for n, some in begins.items()]
    order = torch.cat(rows)
    if torch.equal(order, torch.arange(len(order))):
        return shapes, None, None
    return shapes, order.to(device), order.argsort().to(device)


def attend_windows(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    cu_seq_lens_q: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute window attention [1, rows, H, D] of query, key, value [1, H, rows, D], with windows of equal length as one
    batch; `cu_seq_lens_q` holds the bounds of the windows."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
    if cu_seq_lens_q is None:
        return sdpa(module, query, key, value, attention_mask, **kwargs)  # type: ignore[no-any-return]
    scale, plain = kwargs.get("scaling"), attention_mask is None and not kwargs.get("dropout")
    if torch.compiler.is_compiling() and plain and scale is not None and not torch.is_grad_enabled():
        return window_attention_op(query, key, value, cu_seq_lens_q, scale), None
    for name in ("cu_seq_lens_k", "max_length_q", "max_length_k"):
        kwargs.pop(name, None)
    # Layers are given one tensor, which keeps its batches until it is written to; an inference tensor's values tell that.
    ends: Any = cu_seq_lens_q
    state = ends.tolist() if ends.is_inference() else (id(ends), ends._version)
    known: Any = getattr(ends, "mmaccel_batches", (None, None))
    if known[0] != state:
        known = ends.mmaccel_batches = state, group_windows_by_length(ends.tolist(), query.device)
    shapes, order, back = known[1]
    rows = [x[0].transpose(0, 1) for x in (query, key, value)]
    if order is not None:
        rows = [x.index_select(0, order.to(x.device)) for x in rows]
    sizes = [count * length for count, length in shapes]
    attended = []
    for shape, *batch in zip(shapes, *(x.split(sizes) for x in rows), strict=True):
        q, k, v = (x.unflatten(0, shape).transpose(1, 2) for x in batch)
        attended.append(sdpa(module, q, k, v, attention_mask, **kwargs)[0].flatten(0, 1))
    out = attended[0] if len(attended) == 1 else torch.cat(attended)
    if back is not None:
        out = out.index_select(0, back.to(out.device))
    return out[None], None


class _Whole:
    """What `sdpa` reads of a module that does not mask."""

    is_causal, training = False, False


@torch.library.custom_op("mmaccel::window_attend", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def window_attention_op(query: Tensor, key: Tensor, value: Tensor, ends: Tensor, scale: float) -> Tensor:
    """`attend_windows` as a custom operator for torch.compile; `ends` holds the windows' bounds."""
    whole: Any = _Whole
    return attend_windows(whole, query, key, value, None, ends, scaling=scale, is_causal=False)[0]


@window_attention_op.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, ends: Tensor, scale: float) -> Tensor:
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])
