"""What enters the attention of each layer of a model as it reads one sample: rotated queries, keys, values."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mmaccel.core.attach import accelerate, adapter_for
from mmaccel.core.attention import NOTE, Note
from mmaccel.core.draft import PrefillPass, Probe
from mmaccel.core.errors import ModelError
from mmaccel.core.layout import MODALITIES, TokenLayout


@dataclass(frozen=True, eq=False)
class Inside:
    """The attention of one layer: query [1, H, S, D] and key, value [1, G, S, D] after rotation, and what the tokens are."""

    layer: int
    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    layout: TokenLayout


class _Enough(Exception):
    """No layer further down is wanted."""


def watch(
    model: nn.Module,
    inputs: Mapping[str, Any],
    visit: Callable[[Inside], None],
    layers: set[int] | None = None,
) -> None:
    """Run the prompt through `model` densely and call `visit` at each layer, or at those of `layers`, on the way.

    One layer is held at a time, and its tensors only while `visit` runs; nothing is cached and no logits are made. Raises
    `ModelError` for a batch of several prompts.
    """
    if inputs["input_ids"].shape[0] != 1:
        raise ModelError("input_ids: the search looks at one prompt; give a batch of one.")
    if layers is not None and not layers:
        return
    last = max(layers) if layers is not None else None

    class Visit(Probe):
        def attending(
            self, run: PrefillPass, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float
        ) -> None:
            if layers is None or layer in layers:
                visit(Inside(layer, query, key, value, scale, run.layout))
            if layer == last:
                raise _Enough

    with accelerate(model, "dense"):
        note = {NOTE: Note(probes=(Visit(),))}
        try:
            with torch.no_grad():
                adapter_for(model).multimodal(model)(**inputs, **note, use_cache=False)
        except _Enough:
            pass


def frame_tokens(layout: TokenLayout) -> int:
    """Tokens of the largest frame of a prompt; 0 where there is none."""
    return int((layout.cell.amax() + 1).item())


def present(layout: TokenLayout) -> list[int]:
    """The modalities that a prompt has."""
    return [m for m in MODALITIES if layout.census[m]]


def described(inputs: Mapping[str, Any], layout: TokenLayout) -> dict[str, Any]:
    """What a table says of its sample: tokens of each modality, frames, and a digest of all that the model is given."""
    digest = hashlib.sha256()
    for name in sorted(inputs):
        value = inputs[name]
        digest.update(name.encode())
        if isinstance(value, Tensor):
            digest.update(value.detach().float().cpu().contiguous().numpy().tobytes())
        else:
            digest.update(repr(value).encode())
    return {
        "tokens": layout.length,
        **{f"{MODALITIES[m]}_tokens": layout.census[m] for m in MODALITIES},
        "frames": int(layout.frame.amax()) + 1,
        "tokens_a_frame": frame_tokens(layout),
        "digest": digest.hexdigest()[:16],
    }
