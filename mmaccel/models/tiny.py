"""Tiny random models of each family, and prompts for them: what `check_family` and our tests build. No network.

A family states `tiny`, the settings of a configuration of each of its model types, and `piece`, the tokens and pixels of one
image or video of a prompt.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

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
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
"""A language model of two layers: four query heads of 16, two of keys and values."""

Pieces = Iterable[Sequence[Any]]
"""A prompt: ("text", tokens), ("video", units) or ("image",), in order."""


def config(family: Any, kind: str, layers: int | None = None, hidden: int | None = None) -> Any:
    """The configuration of a tiny model of type `kind`, with so many layers of so wide rows."""
    from transformers import CONFIG_MAPPING

    given = {name: dict(x) if isinstance(x, Mapping) else x for name, x in family.tiny[kind].items()}
    text = given["text_config"]
    if layers is not None:
        text["num_hidden_layers"] = layers
    if hidden is not None:
        text["hidden_size"] = hidden
        if "out_hidden_size" in given["vision_config"]:
            given["vision_config"]["out_hidden_size"] = hidden
    made: Any = CONFIG_MAPPING[kind]
    return made(**given)


def build(
    family: Any, kind: str, layers: int | None = None, hidden: int | None = None, seed: int = 0
) -> nn.Module:
    """A tiny model of type `kind`, of transformers' own class, with random weights in float32."""
    from transformers import AutoModelForImageTextToText

    torch.manual_seed(seed)
    made = AutoModelForImageTextToText.from_config(
        config(family, kind, layers, hidden), dtype=torch.float32
    ).eval()
    for name, weight in sorted(made.named_parameters()):
        if name.endswith("patch_embedding.weight"):
            # A truncated normal, which each version of PyTorch draws in its own way.
            generator = torch.Generator().manual_seed(seed + 3)
            nn.init.normal_(weight, std=weight[0].numel() ** -0.5, generator=generator)
    return made  # type: ignore[no-any-return]


def prompt(family: Any, config: Any, pieces: Pieces, seed: int = 0) -> dict[str, Tensor]:
    """Inputs of one sequence for a model of `config`."""
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = []
    found: dict[str, list[Tensor]] = {}
    for kind, *rest in pieces:
        if kind == "text":
            ids += torch.randint(*WORDS, (rest[0],), generator=generator).tolist()
            continue
        tokens, inputs = family.piece(config, IMAGE if kind == "image" else VIDEO, *rest or (1,), generator)
        ids += tokens
        for name, x in inputs.items():
            found.setdefault(name, []).append(x)
    made = {"input_ids": torch.tensor([ids])}
    made["attention_mask"] = torch.ones_like(made["input_ids"])
    if "mm_token_type_ids" in family.facts:
        made["mm_token_type_ids"] = family.kinds(config, made["input_ids"]).int()
    return {**made, **{name: torch.cat(some) for name, some in found.items()}}


def batch(prompts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Prompts of unequal length as one left-padded batch."""
    width = max(one["input_ids"].shape[1] for one in prompts)
    out: dict[str, Tensor] = {}
    for name in dict.fromkeys(name for one in prompts for name in one):
        some = [one[name] for one in prompts if name in one]
        if some[0].shape == prompts[0]["input_ids"].shape and some[0].ndim == 2:
            some = [nn.functional.pad(one, (width - one.shape[1], 0)) for one in some]
        out[name] = torch.cat(some)
    return out
