"""The bookkeeping that memories with one store a layer have in common: counts of columns, cutting, choosing."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from mmaccel.core.errors import ModelError
from mmaccel.core.kv import KVState


class LayeredState(KVState):
    """A memory in which each layer counts its columns by itself, so that it is right in the middle of a run too.

    A run appends to layers 0 .. L-1 in order; the length is layer 0's from its append on. Rolling back cuts the layers that
    are longer, and leaves those that a broken run did not reach. Subclasses store (`_put`), cut and choose columns.
    """

    def __init__(self, layers: int) -> None:
        self._counts = [0] * layers
        self._last = 0
        self._batch: int | None = None

    @torch.no_grad()
    def append(self, layer: int, key: Tensor, value: Tensor) -> None:
        batch, _, n, _ = key.shape
        if self._batch is None:
            self._batch = batch
        if batch != self._batch:
            raise ModelError(
                f"kv: the memory is of {self._batch} sequences and {batch} were run; reset or reorder it."
            )
        self._put(layer, key, value)
        self._counts[layer] += n
        if layer == 0:
            self._last = n

    @torch.no_grad()
    def accept(self, keep: int | Tensor) -> None:
        length, last = self.length(), self._last
        count = keep if isinstance(keep, int) else keep.numel()
        if not 0 <= count <= last:
            raise ModelError(f"kv: {count} of the last columns cannot be kept; {last} were appended.")
        start = length - last
        if isinstance(keep, int):
            self.truncate(start + count)
        else:
            for layer, have in enumerate(self._counts):
                if have == length:
                    self._choose(layer, start, keep)
                    self._counts[layer] = start + count
        self._last = count

    def truncate(self, length: int) -> None:
        gone = self.length() - length
        if length < 0 or gone < 0:
            raise ModelError(f"kv: the memory has {self.length()} columns; it cannot be cut to {length}.")
        longer = [layer for layer, count in enumerate(self._counts) if count > length]
        for layer in longer:
            self._check_cut(layer, length)
        for layer in longer:
            self._cut(layer, length)
            self._counts[layer] = length
        self._last = max(0, self._last - gone)

    def length(self) -> int:
        return self._counts[0]

    @abstractmethod
    def _put(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Store new columns; the count of the layer is still the old one."""

    @abstractmethod
    def _choose(self, layer: int, start: int, path: Tensor) -> None:
        """Of the columns from `start` on keep those at `path` [k], counted from there."""

    def _check_cut(self, layer: int, length: int) -> None:
        """Raise `ModelError` when the layer cannot be cut to `length`; nothing has been changed yet."""

    def _cut(self, layer: int, length: int) -> None:
        """Drop the columns from `length` on."""
