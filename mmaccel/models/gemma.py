"""Gemma 3 and 4: most layers have sliding-window attention, and tokens of one image attend to each other in both directions.

Sliding layers are dense and keep their own window under every recipe; sparse patterns and KV policies apply to layers of
full attention. Images are bidirectional in all layers of Gemma 3, and images and frames in the sliding layers of larger
Gemma 4 models. The smaller Gemma 4 models share keys and values: their last layers read those of an earlier layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import groupby
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mmaccel.core.adapter import Geometry, ModelView
from mmaccel.core.errors import ModelError
from mmaccel.core.layout import IMAGE
from mmaccel.core.registry import register
from mmaccel.models import tiny
from mmaccel.models.generic import TOWER, GenericFamily
from mmaccel.models.prompt_layout import PIXELS

KINDS = ("full_attention", "sliding_attention")
_TEXT: dict[str, Any] = {**tiny.TEXT, "head_dim": 16, "sliding_window": 24}


@register("model", "gemma3")
class Gemma3(GenericFamily):
    """``Gemma3ForConditionalGeneration``: frames are given as images, whose tokens attend to each other in every layer."""

    model_types: ClassVar[tuple[str, ...]] = ("gemma3",)
    extra_inputs = frozenset({"token_type_ids"})
    token_types: ClassVar[str] = "token_type_ids"
    """The argument that says which tokens are of images; without it none sees its image whole, as in the stock model."""
    max_token_type: ClassVar[int] = 1
    """The largest value of `token_types`: 1 for images, 2 for videos where the model tells them apart."""
    rotate_function = ""
    has_frame_text = False
    centred_norms = frozenset({"Gemma3RMSNorm"})
    decoder_layers = rms_norms = gated_mlps = frozenset[str]()
    unable: ClassVar[Mapping[str, str]] = {
        **GenericFamily.unable,
        "streams": "have sliding-window layers, which memories of streams do not support",
        "pruning": "have sliding-window layers, whose windows would move if tokens were dropped",
    }
    tiny: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "gemma3": {
            "text_config": {
                **_TEXT,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
                "query_pre_attn_scalar": 16,
            },
            "vision_config": {**TOWER, "model_type": "siglip_vision_model", "vision_use_head": False},
            "image_token_index": tiny.IMG,
            "boi_token_index": tiny.BEGIN,
            "eoi_token_index": tiny.END,
            "mm_tokens_per_image": 4,
        }
    }

    def tiny_visual_input(
        self, config: Any, kind: int, units: int, generator: torch.Generator
    ) -> tuple[list[int], dict[str, Tensor]]:
        pixels = torch.randn(units, 3, 28, 28, generator=generator)
        frames = [[7, 8 + n % 2, tiny.BEGIN, *[tiny.IMG] * 4, tiny.END] for n in range(units)]
        return [token for frame in frames for token in frame], {PIXELS[IMAGE]: pixels}

    def complete_tiny_inputs(self, config: Any, made: dict[str, Tensor]) -> dict[str, Tensor]:
        types = self.token_modalities(config, made["input_ids"]).clamp(max=self.max_token_type)
        return {**made, self.token_types: types}

    def check_recipe(self, model: nn.Module, recipe: Any) -> None:
        config: Any = model.config.get_text_config(decoder=True)  # type: ignore[operator, union-attr]
        if getattr(config, "use_bidirectional_attention", None) in (True, "all"):
            raise ModelError(
                "use_bidirectional_attention: text attends to later tokens, which no KV cache allows; set it to None."
            )
        if getattr(config, "attn_logit_softcapping", None) is not None:
            raise ModelError(
                "attn_logit_softcapping: mmaccel does not support soft-capped attention scores; set it to None."
            )
        super().check_recipe(model, recipe)

    def config_geometry(self, config: Any, layers: int) -> Geometry:
        # Of a layer of full attention, whose heads may be larger.
        at = list(config.layer_types).index(KINDS[0]) if KINDS[0] in config.layer_types else 0
        own = getattr(config, "per_layer_config", None)
        return super().config_geometry(config if own is None else own[at], layers)

    def geometry(self, model: nn.Module) -> Geometry:
        return self.global_geometry(model)

    def sliding_layers(self, model: nn.Module) -> Mapping[int, int]:
        config: Any = model.config.get_text_config(decoder=True)  # type: ignore[operator, union-attr]
        kinds = enumerate(config.layer_types)
        return {layer: int(config.sliding_window) for layer, kind in kinds if kind == KINDS[1]}

    def rollback_limit(self, model: nn.Module) -> int | None:
        from mmaccel.models import sliding

        return sliding.MARGIN if self.sliding_layers(model) else None

    def kv_owners(self, model: nn.Module) -> list[int]:
        """Return, for each layer, the index of the layer whose keys and values it reads (its own unless they are shared)."""
        return list(range(self.geometry(model).layers))

    def memory(self, view: ModelView, state: Callable[[int], Any]) -> Any:
        from mmaccel.models.sliding import SlidingWindowKVState

        return SlidingWindowKVState(view, self.kv_owners(view.model), self.sliding_layers(view.model), state)

    def bidirectional_image_layers(self, model: nn.Module) -> frozenset[int]:
        return frozenset(range(self.geometry(model).layers))

    def tree_mask_argument(self, model: nn.Module, mask: Tensor, positions: Tensor) -> Any:
        columns = torch.arange(mask.shape[-1], device=mask.device)
        far = positions[0, :, None] - columns >= max(self.sliding_layers(model).values(), default=1 << 62)
        return dict(zip(KINDS, (mask, mask.masked_fill(far, torch.finfo(mask.dtype).min)), strict=True))

    def with_pass_info(self, model: nn.Module, kwargs: dict[str, Any], note: Any) -> Any:
        mask, types = kwargs.get("attention_mask"), kwargs.get(self.token_types)
        if isinstance(mask, dict):
            return note
        keep = kwargs.get("logits_to_keep")
        if kwargs.get("past_key_values") is None or not isinstance(keep, int) or keep != 1:
            # Else layers without keys of their own run for the last row of each pass alone.
            kwargs.pop("logits_to_keep", None)
        # Masks that the model would write out, of as many entries as pairs.
        kwargs["attention_mask"] = dict.fromkeys(KINDS)
        return replace(note, mask=mask, images=self._images(model, types, kwargs))

    def _images(self, model: nn.Module, types: Tensor | None, kwargs: Mapping[str, Any]) -> Any:
        """The runs of tokens of images that `types` [B, S] tells of, of the columns after those in the cache."""
        layers = self.bidirectional_image_layers(model)
        if types is None or not layers:
            return None
        from mmaccel.core.prefill.masked import BidirectionalImages

        cache, spans = kwargs.get("past_key_values"), []
        past = 0 if cache is None else cache.get_seq_length()
        new = types[:, -kwargs["input_ids"].shape[1] :] if kwargs.get("input_ids") is not None else types
        for b, row in enumerate(((new == 1) | (new == 2)).tolist()):
            at = past
            for inside, group in groupby(row):
                begin, at = at, at + len(list(group))
                if inside:
                    spans.append((b, begin, at))
        return BidirectionalImages(tuple(spans), layers) if spans else None


@register("model", "gemma4")
class Gemma4(Gemma3):
    """``Gemma4ForConditionalGeneration``: prompts have a timestamp before each frame; heads of full-attention layers
    are larger than those of sliding-window layers."""

    model_types = ("gemma4",)
    extra_inputs = frozenset({"mm_token_type_ids", "image_position_ids", "video_position_ids"})
    token_types = "mm_token_type_ids"
    max_token_type = 2
    tiny: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "gemma4": {
            "text_config": {
                **_TEXT,
                "num_hidden_layers": 6,
                "layer_types": ["sliding_attention", "full_attention"] * 3,
                "global_head_dim": 32,
                "attention_k_eq_v": True,
                "num_global_key_value_heads": 1,
                "num_kv_shared_layers": 2,
                "hidden_size_per_layer_input": 8,
                "vocab_size_per_layer_input": tiny.VOCAB,
                "use_bidirectional_attention": "vision",
            },
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "head_dim": 16,
                "patch_size": 4,
                "pooling_kernel_size": 2,
                "position_embedding_size": 16,
            },
            "audio_config": None,
            "image_token_id": tiny.IMG,
            "video_token_id": tiny.VID,
            "audio_token_id": 194,
            "boi_token_id": tiny.BEGIN,
            "eoi_token_id": tiny.END,
        }
    }

    def tiny_visual_input(
        self, config: Any, kind: int, units: int, generator: torch.Generator
    ) -> tuple[list[int], dict[str, Tensor]]:
        patches, name = torch.rand(units, 16, 48, generator=generator), PIXELS[kind]
        place = torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), indexing="xy"), -1)
        place = place.reshape(1, 16, 2).expand(units, -1, -1)
        token = tiny.IMG if kind == IMAGE else tiny.VID
        frames = [[7, 8 + n % 2, tiny.BEGIN, *[token] * 4, tiny.END] for n in range(units)]
        tokens = [one for frame in frames for one in frame]
        if kind == IMAGE:
            return tokens, {name: patches, "image_position_ids": place}
        if _old():
            return tokens, {name: patches[None], "video_position_ids": place[None]}
        return tokens, {
            name: patches,
            "video_position_ids": place,
            "num_frames_per_video": torch.tensor([units]),
        }

    def kv_owners(self, model: nn.Module) -> list[int]:
        config: Any = model.config.get_text_config(decoder=True)  # type: ignore[operator, union-attr]
        kinds = list(config.layer_types)
        first = len(kinds) - int(config.num_kv_shared_layers or 0)
        last = {kind: layer for layer, kind in enumerate(kinds[:first])}
        return [layer if layer < first else last[kind] for layer, kind in enumerate(kinds)]

    def bidirectional_image_layers(self, model: nn.Module) -> frozenset[int]:
        config: Any = model.config.get_text_config(decoder=True)  # type: ignore[operator, union-attr]
        sees = config.use_bidirectional_attention == "vision"
        return frozenset(self.sliding_layers(model)) if sees else frozenset()

    def _heads(self, model: nn.Module, layer: int, rows: Tensor, which: str) -> Tensor:
        own: Any = self.layers(model)[layer].self_attn
        out = getattr(own, f"{which}_proj")(rows).unflatten(-1, (-1, own.head_dim))
        return getattr(own, f"{which}_norm")(out).transpose(1, 2)  # type: ignore[no-any-return]


def _old() -> bool:
    """Whether frames come apart by video, as in transformers before `num_frames_per_video`."""
    import inspect

    from transformers import Gemma4Model

    return "num_frames_per_video" not in inspect.signature(Gemma4Model.forward).parameters
