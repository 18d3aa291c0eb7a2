"""Checks that a call of `generate` continues the conversation in its `past_key_values`, by comparing token ids."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mmaccel.core.errors import ModelError
from mmaccel.models.hf import ModelAttachment
from mmaccel.models.prompt_layout import PIXELS, is_nonempty


def check_prompt_extends_cache(attachment: ModelAttachment, kwargs: Mapping[str, Any], ids: Tensor) -> None:
    """Raise `ModelError` if the prompt `ids` [B, S] does not begin with the tokens in the caller's cache, has another number
    of sequences, or repeats pixels that the cache has read. A call with new tokens alone, whose attention mask is longer
    than `ids`, is not checked. The cache's ids are unknown from such a call on, or from one with `inputs_embeds`: later
    calls compare only the ids before it."""
    cache, mask = kwargs["past_key_values"], kwargs.get("attention_mask")
    held, count, known = cache.get_seq_length(), ids.shape[1], attachment.cached_columns(cache)
    names = "num_beams", "num_return_sequences"
    beams, more = (attachment.get_generate_option(name, kwargs) or 1 for name in names)
    if held and known is not None and known.layout.batch != (rows := len(ids) * max(beams, more)):
        raise ModelError(
            f"past_key_values: it holds {known.layout.batch} sequences and this call has {rows}, beams included; give a "
            "cache of as many (batch_repeat_interleave), or leave it out."
        )
    if not (held and cache.layers) or (isinstance(mask, Tensor) and mask.shape[-1] > count):
        return  # a `StreamCache` has no layers, and says itself whom it serves
    read = None if known is None else known.ids
    read = ids if read is None or len(read) != len(ids) else read.to(ids.device)
    both = min(held, count, read.shape[1])
    unlike = ids[:, :both] != read[:, :both]
    if isinstance(mask, Tensor) and mask.ndim == 2:
        unlike &= mask[:, :both].to(ids.device).bool()
    same = int((unlike.any(0).cumsum(0) == 0).sum())
    if count <= held or same < both:
        most = min(same, count - 1)
        share = f", or keep of past_key_values what both share (its crop({most}))" if most else ""
        raise ModelError(
            f"input_ids: these {count} tokens do not begin with the {held} that past_key_values holds; give those and the "
            f"new turn behind them{share}, or leave it out."
        )
    marks = torch.tensor(attachment.family.placeholders(attachment.model), device=ids.device)
    for name in PIXELS.values():
        if is_nonempty(kwargs.get(name)) and not bool(torch.isin(ids[:, held:], marks).any()):
            raise ModelError(
                f"{name}: past_key_values has read the images and videos, and the new turn shows none; leave it out."
            )
