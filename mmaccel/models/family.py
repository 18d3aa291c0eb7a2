"""What the supported Hugging Face families have in common; a family is this class and a few fields.

Importing this file does not import transformers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mmaccel.backends import pointwise
from mmaccel.core.adapter import Geometry, ModelAdapter, Outline
from mmaccel.core.attach import Accelerated, ModelFamily
from mmaccel.core.errors import ModelError
from mmaccel.core.kv import KVState
from mmaccel.core.layout import IMAGE, VIDEO, TokenLayout
from mmaccel.core.modules import home_of, unwrapped
from mmaccel.core.places import Pace
from mmaccel.core.runner import Runner
from mmaccel.core.stream_adapter import StreamAdapter
from mmaccel.models import weights
from mmaccel.models.install import Hooks
from mmaccel.models.pointwise import normed, rotated
from mmaccel.models.processor_style import ProcessorStyle
from mmaccel.models.prompt_layout import Grid, is_given, read_layout
from mmaccel.models.signals import VisionTower

_ROPE = ("rope_type", "rope_theta", "mrope_section", "factor")
_VISUAL = {IMAGE: ("pixel_values", "image"), VIDEO: ("pixel_values_videos", "video")}
"""The pixels of each kind of visual, and the name of what the tower made of them among `mm_encoder_outputs`."""


class Family(ModelFamily):
    """A family whose modules are called as in Qwen2: ``model.model.language_model.layers[i].self_attn.q_proj``.

    A family is a subclass in one file: these facts, and the methods whose default does not fit. Sets of class names say for
    which classes one of our kernels computes the same; of others the modules run as they are.

    mrope                   whether positions have three coordinates
    facts                   inputs that its processor makes beside ids, mask and pixels
    needed                  pixels -> the one of the facts that comes with them
    processors              model type -> how its processor makes inputs
    vision_tower            how pruners read the vision tower; None: they cannot
    decoder_layers          decoder layers that `step.py` computes: norms, biases and products as in Qwen2
    rms_norms               norms by the root mean square: ``weight * x / sqrt(mean(x ** 2) + variance_epsilon)``
    gated_mlps              ``down_proj(act_fn(gate_proj(x)) * up_proj(x))``
    plain_rotary            rotary modules whose angles are ``position * inv_freq``, where `rope_type` is "default"
    rotate_function         what the attention modules call to rotate queries and keys
    vision_rotate_function  the same of a tower that `windowed` gives
    """

    mrope: ClassVar[bool] = False
    facts: ClassVar[frozenset[str]] = frozenset()
    needed: ClassVar[Mapping[str, str]] = {}
    processors: ClassVar[Mapping[str, ProcessorStyle]] = {}
    vision_tower: ClassVar[type[VisionTower] | None] = None
    decoder_layers: ClassVar[frozenset[str]] = frozenset()
    rms_norms: ClassVar[frozenset[str]] = frozenset()
    gated_mlps: ClassVar[frozenset[str]] = frozenset()
    plain_rotary: ClassVar[frozenset[str]] = frozenset()
    rotate_function: ClassVar[str] = "apply_rotary_pos_emb"
    vision_rotate_function: ClassVar[str] = "apply_rotary_pos_emb_vision"

    def pace(self, model: nn.Module) -> int:
        """Frames that the vision tower takes as one step of time."""
        return 1

    def grids(self, model: nn.Module, inputs: Mapping[str, Any]) -> tuple[list[Grid], list[Grid]]:
        """The images and the videos of a prompt, each in order of appearance over the batch."""
        raise ModelError(f"{self.name}: this family does not say how its visual tokens are laid out.")

    def shown(self, inputs: Mapping[str, Any]) -> set[int]:
        """Which of IMAGE and VIDEO a prompt shows. A placeholder of another kind is a word, as one that the model wrote."""
        encoded = inputs.get("mm_encoder_outputs") or {}
        return {
            kind
            for kind, (pixels, name) in _VISUAL.items()
            if is_given(inputs.get(pixels)) or encoded.get(name) is not None
        }

    def geometry(self, model: nn.Module) -> Geometry:
        whole = self.whole_geometry(model)
        if isinstance(model, Outline):
            return whole
        attention: Any = getattr(self.layers(model)[0], "self_attn", None)
        size = whole.head_dim
        heads, groups = weights.rows_of(attention, "q_proj"), weights.rows_of(attention, "k_proj")
        if not heads or not groups or heads % size or groups % size:
            return whole
        return replace(whole, heads=heads // size, kv_heads=groups // size)

    def whole_geometry(self, model: nn.Module) -> Geometry:
        config = model.config.get_text_config(decoder=True)  # type: ignore[operator, union-attr]
        heads = config.num_attention_heads
        return Geometry(
            layers=config.num_hidden_layers,
            heads=heads,
            kv_heads=config.num_key_value_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            hidden=config.hidden_size,
            vocab=config.vocab_size,
        )

    def fingerprint(self, model: nn.Module) -> dict[str, Any]:
        config = model.config.get_text_config(decoder=True)  # type: ignore[operator, union-attr]
        rope = getattr(config, "rope_parameters", None) or {}
        # Only what turns keys: releases differ in what else they write beside it.
        told = {name: rope[name] for name in _ROPE if rope.get(name) is not None}
        return {**super().fingerprint(model), "rope": told}

    def weights_digest(self, model: nn.Module) -> str | None:
        whole = not isinstance(model, Outline) and weights.shards(model) == 1
        return weights.query_key_digest(self.layers(model)) if whole else None

    def own_heads(self, model: nn.Module) -> range:
        return weights.own_heads(model, len(super().own_heads(model)))

    def folder(self, model: nn.Module) -> Path | None:
        source = getattr(model.config, "_name_or_path", "")
        return Path(source) if source and Path(source).is_dir() else None

    def multimodal(self, model: nn.Module) -> nn.Module:
        return model.model  # type: ignore[return-value]

    def text(self, model: nn.Module) -> nn.Module:
        return self.multimodal(model).language_model  # type: ignore[return-value]

    def layers(self, model: nn.Module) -> nn.ModuleList:
        return self.text(model).layers  # type: ignore[return-value]

    def rotary(self, model: nn.Module) -> nn.Module:
        return self.text(model).rotary_emb  # type: ignore[return-value]

    def pointwise(self, model: nn.Module) -> list[nn.Module]:
        found: list[nn.Module] = [self.text(model).norm]  # type: ignore[list-item]
        for layer in self.layers(model):
            found += [layer.input_layernorm, layer.post_attention_layernorm, layer.mlp]  # type: ignore[list-item]
        return found

    def layout(self, model: nn.Module, inputs: Mapping[str, Any]) -> TokenLayout:
        return read_layout(self, model, inputs)

    def shares(self, inputs: Mapping[str, Any], kind: int) -> dict[str, list[int]]:
        """For each of `inputs` that tells of images (IMAGE) or of videos (VIDEO): how much of its first axis each takes."""
        raise ModelError(
            f"{self.name}: this family does not say which pixels are whose; give prompts one by one."
        )

    def positions(self, model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
        ids: Tensor = inputs["input_ids"]
        mask = inputs.get("attention_mask")
        if mask is None:
            flat = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        else:
            flat = (mask.long().cumsum(1) - 1).clamp(min=0)
        return flat

    def slice(self, kwargs: Mapping[str, Any], begin: int, end: int) -> dict[str, Any]:
        """The text model's keyword arguments for its new columns ``begin .. end``."""
        piece = dict(kwargs)
        for name, axis in (("inputs_embeds", 1), ("input_ids", 1), ("position_ids", -1)):
            if piece.get(name) is not None:
                piece[name] = piece[name].narrow(axis, begin, end - begin)
        return piece

    def embed(self, model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
        caught: list[Tensor] = []
        thread = threading.get_ident()

        class Stop(Exception):
            pass

        def catch(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            if threading.get_ident() == thread:
                caught.append(kwargs["inputs_embeds"])
                raise Stop

        with Hooks() as hooks, suppress(Stop):
            hooks.before(self.text(model), catch)
            self.multimodal(model)(**inputs, use_cache=False)
        return caught[0]

    def frames(self, model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
        # Past the words: putting features in their places counts these on the host.
        told = [inputs[name] for name in ("pixel_values_videos", "video_grid_thw") if name in inputs]
        found = self.multimodal(model).get_video_features(*told, return_dict=True).pooler_output  # type: ignore[operator]
        rows = found.flatten(0, 1) if isinstance(found, Tensor) else torch.cat(found)
        return rows.to(home_of(model), self.words(model).weight.dtype)

    def norm(self, model: nn.Module, layer: int, hidden: Tensor) -> Tensor:
        block: Any = self.layers(model)[layer]
        return normed(block.input_layernorm, hidden, self)

    def query(self, model: nn.Module, layer: int, rows: Tensor) -> Tensor:
        block: Any = self.layers(model)[layer]
        out = block.self_attn.q_proj(rows)
        shape = self.geometry(model)
        return out.view(*out.shape[:2], shape.heads, shape.head_dim).transpose(1, 2)

    def rotate(self, model: nn.Module, x: Tensor, positions: Tensor) -> Tensor:
        cos, sin = self.rotary(model)(x, positions)
        return self.turn(x, (cos[:, None], sin[:, None]))

    def angles(self, model: nn.Module, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        rotary: Any = self.rotary(model)
        plain = type(rotary).__name__ in self.plain_rotary and getattr(rotary, "rope_type", None) == "default"
        if plain and positions.ndim == 1:
            pace = rotary.inv_freq.to(positions.device, torch.float32)
            cos, sin = pointwise.angles(positions, pace, rotary.attention_scaling, dtype)
            return cos[None, None], sin[None, None]
        like = torch.empty(0, dtype=dtype, device=positions.device)
        # Past the module's hooks, for a hook of a stream gives no rotation.
        cos, sin = rotary.forward(like, positions[..., None, :])
        return cos[:, None], sin[:, None]

    def turn(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        return rotated(x, *angles)

    def turn_(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> None:
        if pointwise.fusible(x):
            pointwise.rotate_now_(x, *(angle[:, 0] for angle in angles))
        else:
            x.copy_(self.turn(x, angles))

    def patches(self, model: nn.Module, pixels: Tensor) -> int:
        """How many patches the vision tower makes of `pixels`, as the model's processor gives them."""
        raise ModelError(f"{self.name}: this family does not say how many patches its vision tower sees.")

    def encoded(
        self,
        model: nn.Module,
        kind: int,
        pixels: Tensor,
        told: Mapping[str, Any],
        most: int,
        features: Callable[..., Any],
    ) -> Any:
        """The visual features of `pixels`, images (IMAGE) or videos (VIDEO), as the model's own method gives them.

        features  the tower's of a part of the pixels, given as keywords what of `told` is another for that part. A part has
                  at most `most` patches, unless what cannot be cut has more
        """
        raise ModelError(f"{self.name}: this family does not say how its visual inputs are cut.")

    def windowed(self, model: nn.Module) -> nn.Module | None:
        """The vision tower, where it attends within windows that it calls one by one."""
        return None

    def steps(self, model: nn.Module, inputs: Mapping[str, Any], units: int) -> Tensor:
        """[units] long: what the first rotary coordinate of each unit of the video of `inputs` is beyond that of unit 0,
        were it `units` units long."""
        count = self.layout(model, {**inputs, "attention_mask": None}).frame
        first = int((count == 0).sum())
        return torch.arange(units, device=count.device) * first

    def pace_of(self, model: nn.Module, inputs: Mapping[str, Any]) -> Pace | None:
        """Of a family whose positions are seconds: how many a second has, and the seconds of a unit of `inputs`' video."""
        return None

    def frame_size(self, model: nn.Module, inputs: Mapping[str, Any]) -> tuple[int, int]:
        """(height, width) in pixels of the video frames of `inputs`."""
        height, width = inputs["pixel_values_videos"].shape[-2:]
        return height, width

    def words(self, model: nn.Module) -> nn.Embedding:
        """The embedding of words."""
        return model.get_input_embeddings()  # type: ignore[operator, no-any-return]

    def seam(self, model: nn.Module, processor: Any) -> StreamAdapter:
        from mmaccel.models.stream import Seam

        return Seam(unwrapped(model), self, processor)

    def logits(self, model: nn.Module, hidden: Tensor) -> Tensor:
        return model.get_output_embeddings()(hidden)  # type: ignore[operator, no-any-return]

    def attach(self, model: nn.Module, owner: Accelerated) -> Callable[[], None]:
        from mmaccel.models.hf import Attachment

        return Attachment(model, self, owner).remove

    def runner(self, model: nn.Module, state: KVState | None = None) -> Runner:
        from mmaccel.models.runner import HFRunner

        return HFRunner.open(model, self, state)

    def load(self, path: str, like: nn.Module) -> nn.Module:
        from mmaccel.models.loading import load_model, outline

        if isinstance(like, Outline):
            return outline(path).model
        first = next(like.parameters())
        return load_model(path, dtype=first.dtype, device=first.device)

    def placeholders(self, model: nn.Module) -> tuple[int, ...]:
        config: Any = model.config
        return config.image_token_id, config.video_token_id

    def reader(self, model: str | nn.Module, like: nn.Module) -> tuple[nn.Module, ModelAdapter] | None:
        from mmaccel.models.causal import causal
        from mmaccel.models.loading import load_reader

        found = load_reader(model, like) if isinstance(model, str) else model
        adapter = None if found is None else causal(found)
        return None if adapter is None or found is None else (found, adapter)
