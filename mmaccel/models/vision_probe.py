"""Reads for pruners what a vision tower computes: the attention that each token receives, and the keys."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mmaccel.core.errors import ModelError
from mmaccel.core.layout import IMAGE, VIDEO, TokenLayout
from mmaccel.models.install import Hooks
from mmaccel.models.vision import METHODS

if TYPE_CHECKING:
    from mmaccel.models.family import Family

SCORES = 1 << 24
"""Attention scores of a vision tower that are held at a time, unless one frame has more."""


class VisionProbe:
    """While `hooks` are there, computes for each visual token the attention it receives in the vision tower, and its key.

    The tower keeps its own kernels: the one layer's queries and keys are made once more from what enters it, and scores are
    held for a few frames at a time. What was caught stays with the thread until `take`.
    """

    def __init__(self, hooks: Hooks, model: nn.Module, family: Family) -> None:
        towers: dict[str, Any] = {"llava_onevision": _Siglip, "qwen2_5_vl": _Windowed}
        if family.name not in towers:
            raise ModelError(
                f"prune: mmaccel cannot read the vision tower of {family.name}; choose a pruner that does not need it."
            )
        self.multimodal: Any = family.multimodal(model)
        self.tower: Any = towers[family.name](self.multimodal)
        self.local = threading.local()
        for kind, name in METHODS.items():
            hooks.wrap(self.multimodal, name, self._encode, kind)
        hooks.before(self.tower.attention, self._catch)

    def _encode(self, kind: int, encode: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.local.caught = []
        try:
            out = encode(*args, **kwargs)
            caught, self.local.caught = self.local.caught, None
            names = list(inspect.signature(encode).parameters)
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            # Releases of transformers differ in the name of a video's pixels.
            self._told()[kind] = self.tower.tokens(kind, caught, given[names[0]], given)
        finally:
            self.local.caught = None
        return out

    def _told(self) -> dict[int, Tensor]:
        """What this thread found for images and for videos, since it was last taken."""
        if not hasattr(self.local, "told"):
            self.local.told = {}
        told: dict[int, Tensor] = self.local.told
        return told

    def _catch(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        caught = getattr(self.local, "caught", None)
        if caught is not None:
            hidden = args[0] if args else kwargs["hidden_states"]
            caught.append(self.tower.look(hidden, kwargs))

    def take(self, layout: TokenLayout) -> dict[str, Tensor]:
        """`vision_attention` [S] and `vision_key` [S, D] of a prompt of one sequence, from what was encoded last."""
        found, self.local.told = self._told(), {}
        whole: Tensor | None = None
        for kind, name in ((IMAGE, "pixel_values"), (VIDEO, "pixel_values_videos")):
            at = (layout.modality[0] == kind).nonzero()[:, 0]
            if not at.numel():
                continue
            told = found.get(kind)
            if told is None or len(told) != len(at):
                raise ModelError(
                    f"{name}: the pruner reads the vision tower as it runs; give the pixels of all images and videos."
                )
            whole = told.new_zeros(layout.length, told.shape[1]) if whole is None else whole
            whole = whole.index_copy(0, at, told)
        if whole is None:
            return {}
        return {"vision_attention": whole[:, 0], "vision_key": whole[:, 1:]}


def _received(query: Tensor, key: Tensor, scale: float) -> Tensor:
    """[n, P]: the attention each of the P patches of n frames receives, a mean over heads and queries; query and key are
    [n, H, P, D]. The scores of as many frames as `SCORES` admits are held at a time, and of one at least."""
    each = query.shape[1] * query.shape[2] ** 2
    some = max(1, SCORES // max(each, 1))
    return torch.cat(
        [
            ((q.float() @ k.float().transpose(-1, -2)) * scale).softmax(-1).mean((1, 2))
            for q, k in zip(query.split(some), key.split(some), strict=True)
        ]
    )


def _runs(sizes: list[int]) -> Iterator[tuple[int, int, int]]:
    """Runs of equal sizes, as (where the first begins, how many, their size)."""
    start = 0
    for size, same in groupby(sizes):
        count = len(list(same))
        yield start, count, size
        start += count * size


class _Siglip:
    """LLaVA-OneVision: frames of P patches, each a batch entry, pooled by two after the tower; a mark ends each video.

    Of an image the base view and the tiles are a batch entry each, put together as their features are."""

    def __init__(self, multimodal: Any) -> None:
        self.multimodal = multimodal
        layer = multimodal.config.vision_feature_layer
        layer = layer[-1] if isinstance(layer, list | tuple) else layer
        blocks = next(m for m in multimodal.vision_tower.modules() if isinstance(m, nn.ModuleList))
        # hidden_states[0] is what enters the first layer, so that state n comes out of layer n - 1.
        self.attention: Any = blocks[layer if layer < 0 else layer - 1].self_attn

    def look(self, hidden: Tensor, kwargs: dict[str, Any]) -> Tensor:
        module = self.attention
        query, key = (
            made(hidden).unflatten(-1, (module.num_heads, -1)).transpose(1, 2)
            for made in (module.q_proj, module.k_proj)
        )
        score = _received(query, key, query.shape[-1] ** -0.5)
        return torch.cat([score[..., None], key.float().mean(1)], -1)

    def tokens(self, kind: int, caught: list[Tensor], pixels: Tensor, given: Mapping[str, Any]) -> Tensor:
        if kind == IMAGE:
            return self._packed(torch.cat(caught), given)
        pooled = self.multimodal.apply_pooling(torch.cat(caught))
        videos = pooled.reshape(pixels.shape[0], -1, pooled.shape[-1])
        return torch.cat([videos, torch.zeros_like(videos[:, :1])], 1).flatten(0, 1)

    def _packed(self, told: Tensor, given: Mapping[str, Any]) -> Tensor:
        from transformers.models.llava_onevision.modeling_llava_onevision import image_size_to_num_patches

        config, sizes, groups = self.multimodal.config, given["image_sizes"], given.get("batch_num_images")
        alone = [True] * len(sizes) if groups is None else [n == 1 for n in groups for _ in range(n)]
        counts = [
            image_size_to_num_patches(size, config.image_grid_pinpoints, config.vision_config.image_size)
            if one
            else 1
            for size, one in zip(sizes, alone, strict=True)
        ]
        aspect = given.get("vision_aspect_ratio") or config.vision_aspect_ratio
        mark = torch.zeros_like(told[0, 0])
        packed, _ = self.multimodal.pack_image_features(
            told.split(counts), sizes, image_newline=mark, vision_aspect_ratio=aspect
        )
        return torch.cat(packed)


class _Windowed:
    """Qwen2.5-VL: all patches in a row in the order of windows, frames told apart by their lengths, merged four to one."""

    def __init__(self, multimodal: Any) -> None:
        self.visual = multimodal.visual
        self.attention: Any = self.visual.blocks[-1].attn

    def look(self, hidden: Tensor, kwargs: dict[str, Any]) -> Tensor:
        module, found = self.attention, []
        query, key = module.qkv(hidden).unflatten(-1, (3, module.num_heads, -1)).permute(1, 2, 0, 3)[:2]
        cos, sin = (angle.float() for angle in kwargs["position_embeddings"])
        query, key = _turned(query.float(), cos, sin), _turned(key.float(), cos, sin)
        ends = kwargs["cu_seqlens"].tolist()
        for start, count, size in _runs([stop - begin for begin, stop in pairwise(ends)]):
            q, k = (
                x[:, start : start + count * size].unflatten(1, (count, size)).transpose(0, 1)
                for x in (query, key)
            )
            score = _received(q, k, q.shape[-1] ** -0.5)
            found.append(torch.cat([score[..., None], k.mean(1)], -1).flatten(0, 1))
        return torch.cat(found)

    def tokens(self, kind: int, caught: list[Tensor], pixels: Tensor, given: Mapping[str, Any]) -> Tensor:
        grid = given["image_grid_thw" if kind == IMAGE else "video_grid_thw"]
        merged = torch.cat(caught).unflatten(0, (-1, self.visual.spatial_merge_size**2)).mean(1)
        return merged[torch.argsort(self._order(grid))]

    def _order(self, grid: Tensor) -> Tensor:
        """Where each merged token, in the order of windows, stands in the order of reading."""
        if hasattr(self.visual, "get_window_index"):
            order: Tensor = self.visual.get_window_index(grid)[0]
        else:
            from transformers.vision_utils import get_vision_window_index

            order = get_vision_window_index(
                grid,
                spatial_merge_size=self.visual.spatial_merge_size,
                window_size=self.visual.window_size,
                patch_size=self.visual.patch_size,
            )[0]
        return order


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin
