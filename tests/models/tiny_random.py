"""Tiny random models of the families, and prompts of every kind; no checkpoint, no network."""

import copy
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch

from mmaccel.core.attach import family_of
from mmaccel.models import tiny
from mmaccel.policies.draft import Off, Parallel, PromptLookup, Sequential, SparseToDense, TextOnly, Tree

IMG, VID, VS, VE, VOCAB = tiny.IMG, tiny.VID, tiny.BEGIN, tiny.END, tiny.VOCAB
KINDS = {"qwen": "qwen2_5_vl", "llava": "llava_onevision"}
"""Short names of two families, which most tests take; the others go by their model types."""


def sampler(kind: str) -> tiny.TinyModels:
    kind = KINDS.get(kind, kind)
    return family_of(kind).tiny_model_factory(kind)


def model(kind: str, layers: int = 2, hidden: int = 64, seed: int = 0):
    """A model of two layers, 4 heads of 16, 2 key/value heads, whose answers no token ends."""
    made = sampler(kind).model(layers, hidden, seed)
    made.generation_config.eos_token_id = None
    return made


BUILD = {name: partial(model, name) for name in KINDS}
EVERY = {
    **BUILD,
    **{kind: partial(model, kind) for kind in ("qwen2_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5")},
}
qwen = BUILD["qwen"]


def often_right(target, noise: float, seed: int = 0):
    """A draft that says what `target` says unless that is close: with some noise in its last layer."""
    draft = copy.deepcopy(target)
    torch.manual_seed(seed)
    head = draft.get_output_embeddings().weight
    head.data += noise * torch.randn_like(head)
    return draft


DRAFTS: dict[str, Callable[..., Any]] = {
    "off": lambda model, window=3, **own: Off(),
    "sequential": lambda model, window=3, **own: Sequential(model=model, window=window, **own),
    "text_only": lambda model, window=3, **own: TextOnly(model=model, window=window, **own),
    "tree": lambda model, window=3, **own: Tree(model=model, **own),
    "parallel": lambda model, window=3, **own: Parallel(model=model, window=window, process=False, **own),
    "prompt_lookup": lambda model, window=3, **own: PromptLookup(**own),
    "sparse_to_dense": lambda model, window=3, **own: SparseToDense(window=window, retention=0.5, **own),
}
"""Each registered strategy, by a draft model, its window and fields of its own."""


def redraw_patches(model, seed: int) -> None:
    """Draws the one weight of a LLaVA that is a truncated normal: each version of PyTorch draws those in its own way."""
    patches = model.model.vision_tower.embeddings.patch_embedding.weight
    torch.nn.init.normal_(
        patches, std=patches[0].numel() ** -0.5, generator=torch.Generator().manual_seed(seed)
    )


@cache
def _config(kind: str):
    return sampler(kind).config()


def prompt(kind: str, pieces: Sequence, seed: int = 0) -> dict[str, torch.Tensor]:
    """Model inputs of one sequence. `pieces`: ("text", n), ("video", frames) or ("image",), in order. Where a prompt may not
    show both, a short video is in the place of an image beside videos."""
    if not sampler(kind).family.mixes_modalities and any(piece[0] == "video" for piece in pieces):
        pieces = [("video", 2) if piece[0] == "image" else piece for piece in pieces]
    return sampler(kind).prompt(_config(kind), pieces, seed)


def batch(kind: str, prompts: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Prompts of unequal length as one left-padded batch."""
    return sampler(kind).pad_and_stack(prompts)


def next_turn(first: Any, more: torch.Tensor) -> dict[str, Any]:
    """What `generate` is given for `more` [B, n] after what it gave, on the cache that it left."""
    ids = torch.cat([first.sequences, more], 1)
    mask = torch.ones_like(ids)
    return {"input_ids": ids, "attention_mask": mask, "past_key_values": first.past_key_values}


CLOSE = [("image",), ("text", 1), ("image",)]
PROMPTS = {
    "text": [("text", 20)],
    "image": [("text", 5), ("image",), ("text", 7)],
    "video": [("text", 5), ("video", 6), ("text", 9)],
    "two videos": [("text", 3), ("video", 4), ("text", 1), ("video", 4), ("text", 6)],
    "interleaved": [("video", 4), ("text", 2), *CLOSE, ("text", 5), ("video", 4), ("text", 8)],
    "long": [("text", 8), ("video", 40), ("text", 12)],
}
