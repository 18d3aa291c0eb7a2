"""The KV memory of a model that has sliding-window layers: a window for these, the recipe's KV policy for the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mmaccel.core.adapter import ModelView
from mmaccel.core.errors import ModelError
from mmaccel.core.memory.kv import KVState, KVView
from mmaccel.core.registry import registry

MARGIN = 128
"""Columns beyond its window that a layer holds, so that as many can be rolled back. What is longer is a prompt, of which a
layer lets go as soon as it has been attended to."""


class SlidingWindowKVState(KVState):
    """A `KVState` that combines one for full-attention layers with one for each sliding-window size."""

    def __init__(
        self, view: ModelView, own: Sequence[int], windows: Mapping[int, int], state: Callable[[int], KVState]
    ) -> None:
        """own      of each layer the one whose keys and values it reads, itself for most
        windows  layers that see so many columns alone
        state    opens the memory of so many of the other layers"""
        kinds = [windows.get(layer) for layer in range(len(own))]
        # Windows first: what cannot be rolled back says so before anything was.
        sizes = sorted({size for size in kinds if size is not None})
        self._parts: list[KVState] = []
        places: dict[int, tuple[int, int]] = {}
        for size in [*sizes, None]:
            layers = [layer for layer, one in enumerate(own) if layer == one and kinds[layer] == size]
            places |= {layer: (len(self._parts), at) for at, layer in enumerate(layers)}
            self._parts.append(state(len(layers)) if size is None else _window(view, size, len(layers)))
        self._places = [places[one] for one in own]
        self._once = {layer for layer in windows if own.count(layer) == 1}
        self._read: tuple[int, int, Tensor, Tensor] | None = None

    def append(self, layer: int, key: Tensor, value: Tensor) -> None:
        self._let_go()
        part, at = self._places[layer]
        self._parts[part].append(at, key, value)
        long = layer in self._once and key.shape[2] > MARGIN
        self._read = (part, at, key[:, :, :0].clone(), value[:, :, :0].clone()) if long else None

    def _let_go(self) -> None:
        """Of a prompt, in the layer that was read last."""
        if self._read is not None:
            part, at, *nothing = self._read
            self._parts[part].append(at, *nothing)  # after which it holds no more than it has to
            self._read = None

    def view(self, layer: int, query: Tensor) -> KVView:
        part, at = self._places[layer]
        return self._parts[part].view(at, query)

    def accept(self, keep: int | Tensor) -> None:
        for part in self._parts:
            part.accept(keep)

    def truncate(self, length: int) -> None:
        self._read = None
        for part in self._parts:
            try:
                part.truncate(min(length, part.length()))
            except ModelError as error:
                raise ModelError(
                    f"past_key_values: a sliding-window layer goes back at most {MARGIN} tokens, and not into a prompt; "
                    "start from a new cache."
                ) from error

    def length(self) -> int:
        return self._parts[self._places[0][0]].length()

    def held_columns(self) -> int:
        return max(part.held_columns() for part in self._parts)

    def reset(self) -> None:
        self._read = None
        for part in self._parts:
            part.reset()

    def select_sequences(self, rows: Tensor) -> None:
        self._let_go()
        for part in self._parts:
            part.select_sequences(rows)

    def nbytes(self) -> int:
        return sum(part.nbytes() for part in self._parts)


def _window(view: ModelView, size: int, layers: int) -> KVState:
    kept = registry("kv")["window"](sinks=0, window=size, margin=MARGIN)
    opened: KVState = kept.open(replace(view.geometry, layers=layers), view, torch.device(view.device))
    return opened
