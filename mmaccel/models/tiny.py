"""Tiny random models of each family, and prompts for them, as `check_family` and the tests build them; no network.

A family states `tiny`, configuration settings for each of its model types, and `tiny_visual_input`, the tokens and pixels
of one image or video in a prompt.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mmaccel.core.errors import ModelError
from mmaccel.core.layout import IMAGE, VIDEO

IMG, VID, BEGIN, END, VOCAB = 190, 191, 192, 193, 200
"""Tokens in whose places an image and a video are put, those around them, and how many tokens there are."""
WORDS = (3, 180)
"""The tokens of text."""
ASIDE: dict[str, Any] = {
    "image_token_id": IMG,
    "video_token_id": VID,
    "vision_start_token_id": BEGIN,
    "vision_end_token_id": END,
}
MROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
"""A language model of three layers: four query heads of 16, two of keys and values."""
TOWER: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 64,
}
"""A vision tower of Qwen's or GLM's."""

Pieces = Iterable[Sequence[Any]]
"""A prompt: ("text", tokens), ("video", units) or ("image",), in order."""


class TinyModels:
    """Makes tiny models of one transformers class, float32 with random weights, and prompts for them."""

    def __init__(self, family: Any, kind: Any) -> None:
        """`kind`: the class of the model, or its model type."""
        if isinstance(kind, str):
            from transformers import CONFIG_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

            kind = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[CONFIG_MAPPING[kind]]
        self.family, self.kind = family, kind

    def config(self, layers: int | None = None, hidden: int | None = None) -> Any:
        """Return the config of a tiny model, optionally with this number of layers and hidden size."""
        form: Any = self.kind.config_class
        if form.model_type not in self.family.tiny:
            raise ModelError(
                f"family {self.family.name!r} has no tiny[{form.model_type!r}], which check_family needs; register a family "
                "with such settings of a tiny configuration."
            )
        given = copy.deepcopy(dict(self.family.tiny[form.model_type]))
        if layers is not None:
            given["text_config"]["num_hidden_layers"] = layers
            if kinds := given["text_config"].get("layer_types"):
                given["text_config"]["layer_types"] = (kinds * layers)[:layers]
        if hidden is not None:
            given["text_config"]["hidden_size"] = hidden
            if "out_hidden_size" in given["vision_config"]:
                given["vision_config"]["out_hidden_size"] = hidden
        return form(**given)

    def model(self, layers: int | None = None, hidden: int | None = None, seed: int = 0) -> nn.Module:
        """Make a model of `config(layers, hidden)` in float32 and evaluation mode, with random weights from `seed`."""
        torch.manual_seed(seed)
        made = self.kind(self.config(layers, hidden)).float().eval()
        for name, weight in made.named_parameters():
            if name.endswith("patch_embedding.weight") or not (weight.ndim < 2 or weight.any()):
                # A truncated normal, which each version of PyTorch draws in its own way; or zeros, which let nothing by.
                generator = torch.Generator().manual_seed(seed + 3)
                nn.init.normal_(weight, std=weight[0].numel() ** -0.5, generator=generator)
        return made  # type: ignore[no-any-return]

    def prompt(self, config: Any, pieces: Pieces, seed: int = 0) -> dict[str, Tensor]:
        """Make the inputs of one sequence with random token ids, for a model of `config`. `pieces`, in order: ("text",
        tokens), ("video", time steps) or ("image",)."""
        family, generator = self.family, torch.Generator().manual_seed(seed)
        ids: list[int] = []
        found: dict[str, list[Tensor]] = {}
        for kind, *rest in pieces:
            if kind == "text":
                ids += torch.randint(*WORDS, (rest[0],), generator=generator).tolist()
                continue
            tokens, inputs = family.tiny_visual_input(
                config, IMAGE if kind == "image" else VIDEO, *rest or (1,), generator
            )
            ids += tokens
            for name, x in inputs.items():
                found.setdefault(name, []).append(x)
        made = {"input_ids": torch.tensor([ids])}
        made["attention_mask"] = torch.ones_like(made["input_ids"])
        if "mm_token_type_ids" in family.extra_inputs:
            made["mm_token_type_ids"] = family.token_modalities(config, made["input_ids"]).int()
        made |= {name: torch.cat(some) for name, some in found.items()}
        return family.complete_tiny_inputs(config, made)  # type: ignore[no-any-return]

    def processor(self, config: Any) -> Any:
        """Return a test processor for a model of `config`, for tests of video sessions."""
        from mmaccel.models.letters import CharProcessor

        return CharProcessor(self.family, config, WORDS)

    @staticmethod
    def pad_and_stack(prompts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Pad prompts of unequal length on the left and stack them into a batch."""
        width = max(one["input_ids"].shape[1] for one in prompts)
        out: dict[str, Tensor] = {}
        for name in dict.fromkeys(name for one in prompts for name in one):
            some = [one[name] for one in prompts if name in one]
            if some[0].shape == prompts[0]["input_ids"].shape and some[0].ndim == 2:
                some = [nn.functional.pad(one, (width - one.shape[1], 0)) for one in some]
            out[name] = torch.cat(some)
        return out
