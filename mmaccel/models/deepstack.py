"""DeepStack: features of intermediate vision-tower layers, added to the visual tokens after the first language-model layers.

They are stored beside the embeddings, for visual tokens only: code that slices, joins or collects embeddings must do the
same to them, by these functions. Source: https://arxiv.org/abs/2406.04334, as implemented in transformers' Qwen3-VL.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

WHERE, FEATURES = "visual_pos_masks", "deepstack_visual_embeds"
"""The arguments of a text model's forward: which columns [B, S] are visual, and their features [n, E] for each layer."""
EACH = "per_layer_inputs"
"""The argument with what each layer of a model such as Gemma 4 adds to each token [B, S, layers, n]."""
ENTERING = ("inputs_embeds", WHERE, FEATURES, EACH)
"""The arguments in which a prompt comes."""


def slice_features(given: Mapping[str, Any], columns: slice | Tensor) -> dict[str, Any]:
    """Return the DeepStack forward arguments in `given` for the tokens at `columns` (a slice or indices [n]) alone."""
    where = given[WHERE]
    inside = torch.zeros_like(where)
    inside[:, columns] = True
    return {WHERE: where[:, columns], FEATURES: [one[inside[where]] for one in given[FEATURES]]}


def split_deepstack_rows(embeds: Tensor, wide: int) -> tuple[Tensor, dict[str, Any]]:
    """Split `embeds` [n, E * (1 + levels)], E = `wide`, into embeddings [n, E] and DeepStack forward arguments."""
    rows, *levels = embeds.split(wide, 1)
    return rows, {WHERE: torch.ones(1, len(rows), dtype=torch.bool, device=rows.device), FEATURES: levels}


def join_prompt_deepstack(given: Mapping[str, Any]) -> Tensor:
    """Concatenate a prompt's embeddings and DeepStack levels to [B, S, E * (1 + levels)]: the inverse of
    `split_deepstack_rows`."""
    embeds, where = given[ENTERING[0]], given.get(WHERE)
    levels = [] if where is None else [torch.zeros_like(embeds) for _ in given[FEATURES]]
    for level, features in zip(levels, given.get(FEATURES, ()), strict=True):
        level[where] = features.to(level)
    return torch.cat([embeds, *levels], -1)


def concatenate_prompt_embeds(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Concatenate embeddings and DeepStack features of two prompts along the sequence; one may have no features."""
    both, embeds = (one, other), ENTERING[0]
    out: dict[str, Any] = {embeds: torch.cat([x[embeds] for x in both], 1)}
    if EACH in one:
        out[EACH] = torch.cat([x[EACH] for x in both], 1)
    if shown := [x[FEATURES] for x in both if FEATURES in x]:
        masks = [x.get(WHERE, x[embeds].new_zeros(x[embeds].shape[:2], dtype=torch.bool)) for x in both]
        out |= {
            WHERE: torch.cat(masks, 1),
            FEATURES: [torch.cat(level) for level in zip(*shown, strict=True)],
        }
    return out


def join_tower_deepstack(out: Any) -> Any:
    """Return the visual features of each image or video from a vision tower's output `out`, concatenated with its DeepStack
    levels: [n, E * (1 + levels)] each, or [n, E] without levels."""
    levels: Any = out.get("deepstack_features")
    if not levels:
        return out.pooler_output
    sizes = [len(rows) for rows in out.pooler_output]
    # Before transformers 5.18 all in one.
    split = [one.split(sizes) if isinstance(one, Tensor) else one for one in levels]
    return [torch.cat(rows, -1) for rows in zip(out.pooler_output, *split, strict=True)]


def split_tower_deepstack(rows: Sequence[Tensor], like: Any) -> dict[str, Any]:
    """Split features joined by `join_tower_deepstack` into output fields of a vision tower; `like` is one of its outputs."""
    levels: Any = like.get("deepstack_features")
    if not levels:
        return {"pooler_output": rows}
    first, *rest = zip(*(one.chunk(1 + len(levels), -1) for one in rows), strict=True)
    flat = isinstance(levels[0], Tensor)
    return {"pooler_output": first, "deepstack_features": [torch.cat(one) if flat else one for one in rest]}
