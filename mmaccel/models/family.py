"""`Family`: what describes a model family, and adapter methods for models built like Qwen2; it imports no transformers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mmaccel.backends.ops import layer_ops
from mmaccel.core.adapter import ConfigOnlyModel, Geometry, ModelAdapter, Runner, home_device, rows_of, unwrap
from mmaccel.core.attach import Accelerated, ModelFamily, StreamAdapter
from mmaccel.core.errors import ModelError
from mmaccel.core.layout import IMAGE, MODALITIES, TEXT, VIDEO, TimeScale, TokenLayout
from mmaccel.core.memory.kv import KVState
from mmaccel.core.registry import registry
from mmaccel.models import causal, deepstack, shards, signals
from mmaccel.models.install import Hooks
from mmaccel.models.modules import fused_norm
from mmaccel.models.prompt_layout import (
    LAYERS,
    PIXELS,
    ByFrame,
    Grid,
    Inputs,
    ProcessorSpec,
    has_sliding_window,
    is_nonempty,
    question_token_mask,
    rope_parameters_of,
    token_grid_fields,
)

_ROPE = ("rope_type", "rope_theta", "mrope_section", "factor")
Features = Callable[[Sequence[tuple[Tensor, Inputs]]], Iterable[Any]]
"""Of parts of the pixels, each with the arguments that are others for it, the visual features."""


class Family(ModelFamily):
    """Adapter for a model family with Qwen2's module names: ``model.model.language_model.layers[i].self_attn.q_proj``. A
    family is a subclass in one file that sets these facts and overrides methods whose default does not fit. Sets of class
    names say which modules our fused kernels may replace; all other modules run unchanged.

    mrope                   whether positions have three coordinates (M-RoPE)
    extra_inputs            processor outputs beside ids, mask and pixels, such as `video_grid_thw`
    required_extras         pixel input -> the extra input that must come with it
    processors              model type -> its `ProcessorSpec`
    vision_scorer     `signals.VisionScorer` by which pruners score visual tokens, or model type -> scorer; None: none
    decoder_layers          decoder layers that `layer_step.py` can compute: norms, biases and projections as in Qwen2
    centred_norms           norms of these layers that scale by ``1 + weight``
    rms_norms               RMSNorm classes: ``weight * x / sqrt(mean(x ** 2) + variance_epsilon)``
    gated_mlps              gated MLP classes: ``down_proj(act_fn(gate_proj(x)) * up_proj(x))``
    plain_rotary            rotary embeddings with angles ``position * inv_freq`` where `rope_type` is "default"
    rotate_function         name of the attention modules' RoPE function, if our kernel may replace it; else ""
    partial_rotary          whether RoPE turns only the first dimensions of each head
    adjacent_rotary         whether RoPE pairs adjacent dimensions, not the two halves of those that it turns
    vision_rotate_function  like `rotate_function`, for the vision tower that `window_attention_tower` returns
    replaced_methods        methods of the multimodal model -> what runs instead, `ours(original, *args, **kwargs)`
    tiny                    model type -> configuration of a tiny test model (`tiny.py`)
    mixes_modalities        whether one prompt may hold both images and videos
    has_frame_text          whether prompts have text, such as a timestamp, beside each frame, by `text_around_frame`
    needs_only_pixels       whether the vision tower needs pixels and no host work, so that CUDA graphs can capture it
    split_images            method that splits image inputs by columns, if frames come as images (`generic.py`); else None
    """

    mrope: ClassVar[bool] = False
    extra_inputs: ClassVar[frozenset[str]] = frozenset()
    required_extras: ClassVar[Mapping[str, str]] = {}
    processors: ClassVar[Mapping[str, ProcessorSpec]] = {}
    vision_scorer: ClassVar[Any] = None
    decoder_layers: ClassVar[frozenset[str]] = frozenset()
    centred_norms: ClassVar[frozenset[str]] = frozenset()
    rms_norms: ClassVar[frozenset[str]] = frozenset()
    gated_mlps: ClassVar[frozenset[str]] = frozenset()
    plain_rotary: ClassVar[frozenset[str]] = frozenset()
    rotate_function: ClassVar[str] = "apply_rotary_pos_emb"
    partial_rotary: ClassVar[bool] = False
    adjacent_rotary: ClassVar[bool] = False
    vision_rotate_function: ClassVar[str] = "apply_rotary_pos_emb_vision"
    replaced_methods: ClassVar[Mapping[str, Callable[..., Any]]] = {}
    tiny: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    mixes_modalities: ClassVar[bool] = True
    has_frame_text: ClassVar[bool] = False
    needs_only_pixels: ClassVar[bool] = False
    split_images: ClassVar[Any] = None

    def attach(self, model: nn.Module, owner: Accelerated) -> Callable[[], None]:
        from mmaccel.models.generate import DecodeTimings, generate
        from mmaccel.models.hf import ModelAttachment

        return ModelAttachment(owner, generate, DecodeTimings()).remove

    def runner(self, model: nn.Module, state: KVState | None = None) -> Runner:
        from mmaccel.models.runner import HFRunner

        return HFRunner.open(model, self, state)

    def tiny_model_factory(self, kind: type[nn.Module]) -> Any:
        from mmaccel.models.tiny import TinyModels

        return TinyModels(self, kind)

    def load(self, path: str, like: nn.Module) -> nn.Module:
        from mmaccel.models.loading import config_only_view, load_model

        if isinstance(like, ConfigOnlyModel):
            return config_only_view(path).model
        return load_model(path, dtype=next(like.parameters()).dtype, device=home_device(like))

    def stream_adapter(self, model: nn.Module, processor: Any) -> StreamAdapter:
        from mmaccel.models import stream, units

        kind = units.TimestampedStreamAdapter if self.has_frame_text else stream.HFStreamAdapter
        return kind(unwrap(model), self, processor)

    def causal_lm(self, model: str | nn.Module, like: nn.Module) -> tuple[nn.Module, ModelAdapter] | None:
        from mmaccel.models.loading import load_text_model

        found = load_text_model(model, like) if isinstance(model, str) else model
        return (found, CausalLM()) if found is not None and causal.is_causal_lm(found) else None

    def frames_per_unit(self, model: nn.Module) -> int:
        """Return the number of frames that the vision tower merges into one temporal patch."""
        return int(getattr(getattr(model.config, "vision_config", None), "temporal_patch_size", None) or 1)

    def geometry(self, model: nn.Module) -> Geometry:
        whole = self.global_geometry(model)
        if isinstance(model, ConfigOnlyModel):
            return whole
        attention, size = next(iter(self.attentions(model)), None), whole.head_dim
        heads, groups = rows_of(attention, "q_proj"), rows_of(attention, "k_proj")
        if not heads or not groups or heads % size or groups % size:
            return whole
        return replace(whole, heads=heads // size, kv_heads=groups // size)

    def check_recipe(self, model: nn.Module, recipe: Any) -> None:
        config: Any = model.config.get_text_config(decoder=True)  # type: ignore[operator, union-attr]
        if has_sliding_window(config) and not self.sliding_layers(model):
            raise ModelError(
                f"sliding_window: layers of this model attend only to the last {config.sliding_window} tokens, which family "
                f"{self.name!r} does not support; set sliding_window to None, or use the model without mmaccel."
            )
        if recipe.prune is not None:
            signals.check_vision_tower(self, model, recipe.prune)
        super().check_recipe(model, recipe)

    def global_geometry(self, model: nn.Module) -> Geometry:
        config = model.config.get_text_config(decoder=True)  # type: ignore[operator, union-attr]
        return self.config_geometry(config, config.num_hidden_layers)

    def config_geometry(self, config: Any, layers: int) -> Geometry:
        """Return the `Geometry` (heads, head size, width, vocabulary) of a text config with `layers` attention layers."""
        return Geometry(
            layers=layers,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            hidden=config.hidden_size,
            vocab=config.vocab_size,
        )

    def fingerprint(self, model: nn.Module) -> dict[str, Any]:
        config = model.config.get_text_config(decoder=True)  # type: ignore[operator, union-attr]
        rope = rope_parameters_of(config)
        # Only what turns keys: releases differ in what else they write beside it.
        return {**super().fingerprint(model), "rope": {x: rope[x] for x in _ROPE if rope.get(x) is not None}}

    def qk_checksum(self, model: nn.Module) -> str | None:
        return None if isinstance(model, ConfigOnlyModel) else shards.checksum(model, self.attentions(model))

    def local_heads(self, model: nn.Module) -> range:
        return shards.local_heads(model, len(super().local_heads(model)))

    def model_folder(self, model: nn.Module) -> Path | None:
        source = getattr(model.config, "_name_or_path", "")
        return Path(source) if source and Path(source).is_dir() else None

    def multimodal(self, model: nn.Module) -> nn.Module:
        return model.model  # type: ignore[return-value]

    def text_model(self, model: nn.Module) -> nn.Module:
        return self.multimodal(model).language_model  # type: ignore[return-value]

    def layers(self, model: nn.Module) -> nn.ModuleList:
        return self.text_model(model).layers  # type: ignore[return-value]

    def attended_layers(self, model: nn.Module) -> Sequence[Any]:
        """Return the decoder layers with keys and values, in the order in which memories, pruners and recipes count them."""
        states = self.recurrent_layers(model)
        return [layer for number, layer in enumerate(self.layers(model)) if number not in states]

    def attentions(self, model: nn.Module) -> list[nn.Module]:
        """Return the self-attention modules of the decoder layers that have one."""
        return [layer.self_attn for layer in self.layers(model) if hasattr(layer, "self_attn")]  # type: ignore[misc]

    def recurrent_layers(self, model: nn.Module) -> dict[int, nn.Module]:
        """Return layer index -> module for layers with a recurrent state instead of a KV cache (such as Gated DeltaNet)."""
        return {}

    def attention_layer_indices(self, model: nn.Module) -> dict[str, dict[int, int]]:
        """Return {`LAYERS`: layer -> index among attention layers}, a config field for our attention; {} if all attend."""
        modules: list[Any] = self.attentions(model) if self.recurrent_layers(model) else []
        return {LAYERS: {one.layer_idx: n for n, one in enumerate(modules)}} if modules else {}

    def rotary_module(self, model: nn.Module) -> nn.Module:
        """Return the module that computes RoPE cosines and sines from positions."""
        return self.text_model(model).rotary_emb  # type: ignore[return-value]

    def window_attention_tower(self, model: nn.Module) -> nn.Module | None:
        """Return the vision tower, if it has window attention whose windows `batch_windows` can batch; else None."""
        return None

    def token_embedding(self, model: nn.Module) -> nn.Embedding:
        """Return the input embedding module, from token ids to hidden states."""
        return model.get_input_embeddings()  # type: ignore[operator, no-any-return]

    def logits(self, model: nn.Module, hidden: Tensor) -> Tensor:
        return model.get_output_embeddings()(hidden)  # type: ignore[operator, no-any-return]

    def token_grids(self, model: nn.Module, inputs: Inputs) -> tuple[list[Grid], list[Grid]]:
        """Return the token grids of a prompt's images and of its videos, each list in order of appearance over the batch."""
        raise self._lacks("token_grids")

    def pixel_rows_per_item(self, inputs: Inputs, kind: int) -> dict[str, list[int]]:
        """Return pixel input name -> number of its first-axis rows for each image (`kind` IMAGE) or video (VIDEO)."""
        raise self._lacks("pixel_rows_per_item", ", or give prompts one by one")

    def _lacks(self, method: str, instead: str = "") -> ModelError:
        return ModelError(f"family {self.name!r} does not define {method}; override it{instead}.")

    def given_modalities(self, inputs: Inputs) -> set[int]:
        """Return which of IMAGE and VIDEO a prompt has pixels for; placeholders of a kind without pixels count as text."""
        encoded = inputs.get("mm_encoder_outputs") or {}
        return {
            kind
            for kind, pixels in PIXELS.items()
            if is_nonempty(inputs.get(pixels)) or encoded.get(MODALITIES[kind]) is not None
        }

    def placeholders(self, model: nn.Module) -> tuple[int, ...]:
        config: Any = model.config
        return config.image_token_id, config.video_token_id

    def token_modalities(self, config: Any, ids: Tensor) -> Tensor:
        """Return the modality [B, S] of each token of `ids` [B, S]: IMAGE or VIDEO for placeholders, else TEXT."""
        rest = torch.where(ids == config.image_token_id, IMAGE, TEXT)
        return torch.where(ids == config.video_token_id, VIDEO, rest)

    def tiny_visual_input(
        self, config: Any, kind: int, units: int, generator: torch.Generator
    ) -> tuple[list[int], dict[str, Tensor]]:
        """Make token ids and random pixels of a small image, or video of `units` time steps, for a model of `config`."""
        raise self._lacks("tiny_visual_input")

    def complete_tiny_inputs(self, config: Any, made: dict[str, Tensor]) -> dict[str, Tensor]:
        """Add to the inputs `made` of a small test prompt what else the model needs; by default nothing."""
        return made

    def layout(self, model: nn.Module, inputs: Inputs) -> TokenLayout:
        # A family that names no extra inputs may have those of others.
        known = registry("model").values() if self.extra_inputs else ()
        others: set[str] = set().union(*(getattr(one, "extra_inputs", ()) for one in known))
        given = {name for name, x in inputs.items() if x is not None}
        odd = [f"{name} is of another family" for name in sorted((others - self.extra_inputs) & given)]
        odd += [
            f"{pixels} comes without {fact}"
            for pixels, fact in self.required_extras.items()
            if is_nonempty(inputs.get(pixels)) and inputs.get(fact) is None
        ]
        if odd:
            raise ModelError(f"inputs: {odd[0]}; build them with the model's own processor.")
        ids: Tensor = inputs["input_ids"]
        modality, shown = self.token_modalities(model.config, ids), self.given_modalities(inputs)
        for kind in PIXELS.keys() - shown:
            modality[modality == kind] = TEXT
        mask = inputs.get("attention_mask")
        valid = mask[:, -ids.shape[1] :].bool() if isinstance(mask, Tensor) and mask.ndim == 2 else None
        if not bool((modality != TEXT).any()):
            return TokenLayout.build(modality, valid=valid)
        images, videos = self.token_grids(model, inputs)
        fields = token_grid_fields(modality, {IMAGE: iter(images), VIDEO: iter(videos)})
        asked = question_token_mask(model, ids, modality, fields["segment"])
        return TokenLayout.build(modality, valid=valid, asked=asked, **fields)

    def positions(self, model: nn.Module, inputs: Inputs) -> Tensor:
        ids: Tensor = inputs["input_ids"]
        mask = inputs.get("attention_mask")
        if mask is None:
            return torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        return (mask.long().cumsum(1) - 1).clamp(min=0)

    def time_step_positions(self, model: nn.Module, inputs: Inputs, units: int) -> Tensor:
        """Return the first RoPE coordinate of each time step of a video, relative to time step 0, long [units]."""
        frame = self.layout(model, {**inputs, "attention_mask": None}).frame
        return torch.arange(units, device=frame.device) * int((frame == 0).sum())

    def stream_time_scale(self, model: nn.Module, inputs: Inputs) -> TimeScale | None:
        """If video positions encode time, return positions per second and seconds per unit of `inputs`; else None."""
        return None

    def frame_size(self, model: nn.Module, inputs: Inputs) -> tuple[int, int]:
        """Return (height, width) in pixels of the video frames of `inputs`."""
        return tuple(inputs["pixel_values_videos"].shape[-2:])  # type: ignore[return-value]

    def embed(self, model: nn.Module, inputs: Inputs) -> Tensor:
        return self.forward_inputs(model, inputs)["inputs_embeds"]  # type: ignore[no-any-return]

    def forward_inputs(self, model: nn.Module, inputs: Inputs) -> dict[str, Any]:
        """Return the language model's forward arguments for a prompt: input embeddings, and DeepStack features if any."""
        caught, thread = list[dict[str, Any]](), threading.get_ident()

        class Stop(Exception): ...

        def catch(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            if threading.get_ident() == thread:
                given = ((name, kwargs.get(name)) for name in deepstack.ENTERING)
                caught.append({name: one for name, one in given if one is not None})
                raise Stop

        with Hooks() as hooks, suppress(Stop):
            hooks.add_pre_hook(self.text_model(model), catch)
            self.multimodal(model)(**inputs, use_cache=False)
        return caught[0]

    def encode_frames(self, model: nn.Module, inputs: Inputs) -> Tensor:
        """Return features [n, E] of the n visual tokens of a video; with DeepStack [n, E * (1 + levels)]."""
        # Past the words: putting features in their places counts these on the host.
        given = [inputs[name] for name in ("pixel_values_videos", "video_grid_thw") if name in inputs]
        features = self.multimodal(model).get_video_features(*given, return_dict=True).pooler_output  # type: ignore[operator]
        rows = features.flatten(0, 1) if isinstance(features, Tensor) else torch.cat(features)
        return rows.to(home_device(model), self.token_embedding(model).weight.dtype)

    def split_pixels_by_frame(self, model: nn.Module, inputs: Inputs) -> ByFrame:
        """Return the video pixels of `inputs` as [T, ...], one row a frame, and a function from such rows to inputs."""
        raise self._lacks("split_pixels_by_frame")

    def count_patches(self, model: nn.Module, pixels: Tensor) -> int:
        """Return the number of patches that the vision tower makes of `pixels`."""
        raise self._lacks("count_patches")

    def encode_pixels(
        self, model: nn.Module, kind: int, pixels: Tensor, given: Inputs, most: int, features: Features
    ) -> Any:
        """Encode `pixels`, images (IMAGE) or videos (VIDEO), in parts; return features in the model's output format.

        given     the other arguments of the model's call
        most      largest number of patches in a part; only a part of one image or time step may have more
        features  runs the vision tower on parts (pixels, arguments that replace those of `given`); yields their features
        """
        raise self._lacks("encode_pixels")

    def input_norm(self, model: nn.Module, layer: int, hidden: Tensor) -> Tensor:
        return fused_norm(self.attended_layers(model)[layer].input_layernorm, hidden, self)

    def project_query(self, model: nn.Module, layer: int, rows: Tensor) -> Tensor:
        return self._heads(model, layer, rows, "q")

    def project_key(self, model: nn.Module, layer: int, rows: Tensor) -> Tensor:
        """Return keys [B, G, n, D] of `layer` before RoPE, from normed hidden states `rows` [B, n, E]."""
        return self._heads(model, layer, rows, "k")

    def _heads(self, model: nn.Module, layer: int, rows: Tensor, which: str) -> Tensor:
        own: Any = self.layers(model)[layer].self_attn
        out = getattr(own, f"{which}_proj")(rows)
        out = out.view(*out.shape[:2], -1, self.geometry(model).head_dim)
        norm = getattr(own, f"{which}_norm", None)
        return (out if norm is None else norm(out)).transpose(1, 2)

    def rope_angles(self, model: nn.Module, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        rotary: Any = self.rotary_module(model)
        plain = type(rotary).__name__ in self.plain_rotary and getattr(rotary, "rope_type", None) == "default"
        if plain and positions.ndim == 1:
            inverse = rotary.inv_freq.to(positions.device, torch.float32)
            cos, sin = layer_ops.rope_angles(positions, inverse, rotary.attention_scaling, dtype)
            return cos[None, None], sin[None, None]
        like = torch.empty(0, dtype=dtype, device=positions.device)
        # Past the module's hooks, for a hook of a stream gives no rotation.
        cos, sin = rotary.forward(like, positions[..., None, :])
        return cos[:, None], sin[:, None]

    def apply_rope(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        size = angles[0].shape[-1]
        turned = layer_ops.apply_rope(x[..., :size], *angles, self.adjacent_rotary)
        return turned if size == x.shape[-1] else torch.cat([turned, x[..., size:]], -1)

    def apply_rope_(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> None:
        if layer_ops.can_fuse(x):
            cos, sin = (angle[:, 0] for angle in angles)
            layer_ops.rotate_(x[..., : cos.shape[-1]], cos, sin, self.adjacent_rotary)
        else:
            x.copy_(self.apply_rope(x, angles))


class CausalLM(causal.TextModelMixin, Family):
    """Any ``AutoModelForCausalLM`` whose KV cache can be truncated (text only)."""
