"""Published configurations of the supported families by name, to build models with random weights and any number of layers.

For benchmarks and memory estimates without a checkpoint. Sizes are those of each checkpoint's config.json. Importing this
file does not import transformers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mmaccel.core.errors import ModelError, UnknownName


@dataclass(frozen=True)
class PublishedModelConfig:
    """A published model configuration: its family and the sizes of its language model and vision tower."""

    family: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int
    tied: bool = False
    vision_intermediate: int = 3420


SHAPES: dict[str, PublishedModelConfig] = {
    "qwen2.5-vl-3b": PublishedModelConfig("qwen2_5_vl", 2048, 36, 16, 2, 11008, 151936, tied=True),
    "qwen2.5-vl-7b": PublishedModelConfig("qwen2_5_vl", 3584, 28, 28, 4, 18944, 152064),
    "qwen2.5-vl-32b": PublishedModelConfig(
        "qwen2_5_vl", 5120, 64, 40, 8, 27648, 152064, vision_intermediate=3456
    ),
    "llava-onevision-0.5b": PublishedModelConfig("llava_onevision", 896, 24, 14, 2, 4864, 152000, tied=True),
    "llava-onevision-7b": PublishedModelConfig("llava_onevision", 3584, 28, 28, 4, 18944, 152128),
    "llava-onevision-72b": PublishedModelConfig("llava_onevision", 8192, 80, 64, 8, 29568, 152128),
    "qwen3-vl-8b": PublishedModelConfig("qwen3_vl", 4096, 36, 32, 8, 12288, 151936),
    "qwen3.5-9b": PublishedModelConfig("qwen3_5", 4096, 32, 16, 4, 12288, 248320),
    "internvl3.5-8b": PublishedModelConfig("internvl", 4096, 36, 32, 8, 12288, 151936),
    "glm-4.1v-9b": PublishedModelConfig("glm4v", 4096, 40, 32, 2, 13696, 151552),
}


def model_config(name: str, layers: int | None = None, vision_layers: int | None = None) -> Any:
    """Make the transformers config of a published shape; `layers` and `vision_layers` reduce the depth.

    Raises `UnknownName` for an unknown shape and `ModelError` for an invalid depth.
    """
    if name not in SHAPES:
        raise UnknownName("shape", name, SHAPES)
    shape = SHAPES[name]
    depth = shape.layers if layers is None else layers
    if not depth >= 1:
        raise ModelError(f"layers: {depth}; give at least 1.")
    from transformers import AutoConfig

    text, vision, others = _PARTS[shape.family](shape, vision_layers)
    heads = dict(num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads)
    sizes = dict(vocab_size=shape.vocab, hidden_size=shape.hidden, intermediate_size=shape.intermediate)
    text |= dict(
        **heads, **sizes, num_hidden_layers=depth, max_position_embeddings=1 << 20, rms_norm_eps=1e-6
    )
    tied = dict(tie_word_embeddings=shape.tied)
    return AutoConfig.for_model(shape.family, text_config=text | tied, vision_config=vision, **others, **tied)


def count_patches_and_tokens(name: str, height: int, width: int) -> tuple[int, int]:
    """Return the numbers of patches and of visual tokens of a time step (one frame, or two for Qwen and GLM) in a model."""
    if (family := SHAPES[name].family) == "llava_onevision":  # resized to 384 x 384, pooled two by two
        return 27 * 27, 14 * 14
    if family == "internvl":  # resized to 448 x 448
        return 32 * 32, 16 * 16
    side = 32 if family in ("qwen3_vl", "qwen3_5") else 28
    tokens = max(1, round(height / side)) * max(1, round(width / side))
    return 4 * tokens, tokens


def build_model(
    name: str,
    layers: int | None = None,
    vision_layers: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    seed: int = 0,
    devices: Sequence[torch.device | str] | None = None,
) -> nn.Module:
    """Build a published shape with random weights, in evaluation mode, directly on `device`.

    With `devices` its layers are spread over these (see `loading.spread_layers_over_devices`), each built on its device.
    """
    conf = model_config(name, layers, vision_layers)
    if devices is None or len(devices) == 1:
        return build_from_config(conf, dtype, device if devices is None else devices[0], seed)
    with _drawn(dtype, seed):
        model = _spread(conf, model_config(name, 1, vision_layers), dtype, [torch.device(d) for d in devices])
    return model.eval()


def build_from_config(conf: Any, dtype: torch.dtype, device: torch.device | str, seed: int = 0) -> nn.Module:
    """Build the model of a transformers config with random weights, in evaluation mode, directly on `device`."""
    from transformers import AutoModelForImageTextToText

    with _drawn(dtype, seed), torch.device(device):
        model: nn.Module = AutoModelForImageTextToText.from_config(conf, dtype=dtype)
    return model.eval()


@contextmanager
def _drawn(dtype: torch.dtype, seed: int) -> Iterator[None]:
    torch.manual_seed(seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _spread(conf: Any, shallow: Any, dtype: torch.dtype, devices: Sequence[torch.device]) -> nn.Module:
    """The model of `conf`, of which `shallow` is one layer, with each layer made on the device that it is to lie on."""
    from transformers import AutoModelForImageTextToText

    from mmaccel.core.attach import adapter_for
    from mmaccel.models.loading import balance_layers_over_devices, install_input_move_hooks

    with torch.device(devices[0]):
        model: Any = AutoModelForImageTextToText.from_config(shallow, dtype=dtype)
    family: Any = adapter_for(model)
    text = family.text_model(model)
    first = text.layers[0]
    depth = conf.text_config.num_hidden_layers
    # What every part holds is this one configuration: it learns of the layers that are to come.
    text.config.num_hidden_layers = model.config.text_config.num_hidden_layers = depth
    text.config.layer_types = model.config.text_config.layer_types = conf.text_config.layer_types
    size = sum(p.nbytes for p in first.parameters())
    ends = sum(p.nbytes for p in model.parameters()) - size
    chosen = [devices[which] for which in balance_layers_over_devices([size] * depth, ends, len(devices))]
    for number, device in enumerate(chosen[1:], 1):
        with torch.device(device):
            layer = type(first)(text.config, number)
        layer.apply(model._init_weights)
        text.layers.append(layer)
    install_input_move_hooks(model, chosen, devices[0])
    return model  # type: ignore[no-any-return]


_Parts = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]


def _qwen(shape: PublishedModelConfig, vision_layers: int | None) -> _Parts:
    tower = 32 if vision_layers is None else vision_layers
    layers = dict(depth=tower, fullatt_block_indexes=[n for n in (7, 15, 23, 31) if n < tower])
    sizes = dict(hidden_size=1280, intermediate_size=shape.vision_intermediate, out_hidden_size=shape.hidden)
    cuts = dict(patch_size=14, spatial_merge_size=2, temporal_patch_size=2, window_size=112)
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
    return {"rope_parameters": rope}, {**layers, **sizes, **cuts, "num_heads": 16, "tokens_per_second": 2}, {}


def _llava(shape: PublishedModelConfig, vision_layers: int | None) -> _Parts:
    layers = dict(num_hidden_layers=26 if vision_layers is None else vision_layers, num_attention_heads=16)
    sizes = dict(hidden_size=1152, intermediate_size=4304, image_size=384, patch_size=14)
    vision = dict(model_type="siglip_vision_model", vision_use_head=False, **layers, **sizes)
    sides = [384 * n for n in range(1, 7)]
    others = {
        "image_token_index": 151646,
        "video_token_index": 151647,
        "vision_feature_layer": -1,
        "image_grid_pinpoints": [[h, w] for h in sides for w in sides],
    }
    rope = {"rope_type": "default", "rope_theta": 1e6}
    return {"model_type": "qwen2", "rope_parameters": rope}, vision, others


def _others(shape: PublishedModelConfig, vision_layers: int | None) -> _Parts:
    """Of families whose published towers are the defaults of their configurations."""
    theta, rest = _ROPES[shape.family]
    text: dict[str, Any] = {"rope_parameters": {"rope_type": "default", "rope_theta": theta, **rest}}
    tower: dict[str, Any] = {"out_hidden_size": shape.hidden}
    depth = "depth"
    if shape.family == "internvl":
        text, tower, depth = {**text, "model_type": "qwen3", "head_dim": 128}, {}, "num_hidden_layers"
    if vision_layers is not None:
        tower[depth] = vision_layers
    if shape.family == "qwen3_vl":
        tower["deepstack_visual_indexes"] = [n for n in (8, 16, 24) if n < tower.get("depth", 27)]
    return text, tower, {}


_ROPES: dict[str, tuple[float, dict[str, Any]]] = {
    "qwen3_vl": (5e6, {"mrope_interleaved": True, "mrope_section": [24, 20, 20]}),
    "qwen3_5": (
        1e7,
        {"mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25},
    ),
    "internvl": (1e6, {}),
    "glm4v": (1e4, {"mrope_section": [8, 12, 12], "partial_rotary_factor": 0.5}),
}
"""Family -> base of the rotary angles, and what else it states of them."""

_PARTS = {"qwen2_5_vl": _qwen, "llava_onevision": _llava, **dict.fromkeys(_ROPES, _others)}
"""Family -> what its text, its vision and its whole configuration have beside the sizes."""
