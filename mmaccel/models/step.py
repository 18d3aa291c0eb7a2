"""Layers of a model over a few new rows, as a function of tensors of fixed shapes that a device can capture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mmaccel.backends import ops
from mmaccel.models import layers as layers_of


@dataclass(frozen=True, eq=False)
class Held:
    """How some layers hold the sequence.

    lacks   columns of the prompt that were pruned before them: a later column lies so many before its number
    angles  cosines and sines [2, B, capacity, D] of the places of the columns that they hold
    bias    [m] float32, added to the scores of the first m columns they hold; None: nothing is
    """

    lacks: int
    angles: Tensor
    bias: Tensor | None = None


class Step(nn.Module):
    """Layers of a Qwen2-like family over new rows, as one function of tensors of fixed shapes, on one device.

    device   where all of it is computed
    layers   the decoder layers that this device computes; a model on one device has all of them in one step
    buffers  keys and values [B, G, capacity, D] of each layer, which the step writes to
    held     how each layer holds the sequence
    words    the embedding; None: what comes in are hidden states
    ends     the last norm and the head; None: what goes out are hidden states
    looks    where the last layer copies the queries [B, H, 1, D] of the first row to; None: nowhere

    The weights are the model's own.
    """

    def __init__(
        self,
        device: torch.device,
        layers: Sequence[Any],
        scale: float,
        buffers: Sequence[tuple[Tensor, Tensor]],
        held: Sequence[Held],
        words: Any = None,
        ends: tuple[Any, Any] | None = None,
        looks: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.scale = scale
        self.device, self.held, self.looks = device, list(held), looks
        self.buffers_of = list(buffers)
        # Held in a tuple: these are the model's own modules, not parts of this one.
        self.parts: tuple[Any, ...] = (words, list(layers), ends)

    def forward(self, given: Tensor, columns: Tensor, places: Tensor, sees: Tensor | None = None) -> Tensor:
        """Logits [B, n, V], or hidden states [B * n, E], of `given`, which are ids [B, n] or hidden states.

        The rows are the columns `columns` [B, n] of the sequence and stand where column `places` [B, n] of it does; `sees`
        [n] is that of `ops.decode_attend`.
        """
        words, layers, ends = self.parts
        B, n = columns.shape
        x: Tensor | layers_of.Weighed = given if words is None else words(given).flatten(0, 1)
        held: Held | None = None
        for number, (layer, (key, value)) in enumerate(zip(layers, self.buffers_of, strict=True)):
            if self.held[number] is not held:
                held = self.held[number]
                own, at = (one - held.lacks if held.lacks else one for one in (columns, places))
                turn = held.angles.take_along_dim(at[None, ..., None], 2)
            assert held is not None
            query = layers_of.entering_turned(layer, x, turn, own, key, value)
            out = ops.decode_attend(query, key, value, own, self.scale, sees, held.bias)
            follows = layers[number + 1].input_layernorm if number + 1 < len(layers) else ends and ends[0]
            x = layers_of.leaving(layer, x, out.transpose(1, 2).reshape(B * n, -1), follows)
        if self.looks is not None:
            self.looks.copy_(query[:, :, :1])
        if ends is None:
            return layers_of.bare(x)
        return layers_of.project(x, [ends[1]], ends[0]).view(B, n, -1)
