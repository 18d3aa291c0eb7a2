"""A `KVState` in the clothes of a transformers cache."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from mmaccel.core.errors import ModelError
from mmaccel.core.kv import KVState
from mmaccel.core.layout import TokenLayout


@dataclass
class Columns:
    """What is known of the columns a cache holds: their layout, and the step from a column to its rotary position."""

    layout: TokenLayout
    delta: Tensor


@dataclass
class _Door:
    """Whether the layers may be fed. Cache and layers share it: a layer that knew its cache would keep the state's memory
    until Python looks for cycles."""

    open: bool = False


class _Layer(CacheLayerMixin):
    """One layer of a `KVState`, as transformers wants to see it."""

    is_sliding = False
    is_croppable = True
    is_compileable = False

    def __init__(self, state: KVState, door: _Door, index: int) -> None:
        super().__init__()
        self.state, self.door, self.index = state, door, index
        self.is_initialized = True

    # [B, G, n, D], where the memory holds all columns; else None. transformers begins by setting both to None.
    keys = property(lambda self: self._held(0), lambda self, _: None)  # type: ignore[assignment]
    values = property(lambda self: self._held(1), lambda self, _: None)  # type: ignore[assignment]

    def _held(self, which: int) -> Tensor | None:
        if not getattr(self, "is_initialized", False) or not 0 < self.state.length() == self.state.held():
            return None
        view = self.state.view(self.index, torch.empty(0, 0, 2, 0))
        return (view.key, view.value)[which]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        pass

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.door.open:
            raise ModelError(
                "past_key_values: this cache belongs to an accelerated model that is detached, or to another one; "
                "start from a new cache."
            )
        self.state.append(self.index, key_states, value_states)
        return key_states, value_states

    def get_seq_length(self) -> int:
        return self.state.length()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.state.length() + int(query_length), 0

    def get_max_length(self) -> int:
        return -1

    def crop(self, max_length: int) -> None:
        pass

    def reset(self) -> None:
        self.state.reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        pass


class KVCache(Cache):
    """A `KVState` in the clothes of a transformers cache. It serves the accelerated model that opened it, no other."""

    def __init__(self, state: KVState, layers: int) -> None:
        self.state = state
        self.door = _Door()
        self.sequence: Columns | None = None
        super().__init__(layers=[_Layer(state, self.door, index) for index in range(layers)])

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Only inside may the layers be fed: elsewhere nobody would ask the memory what a query sees."""
        self.door.open = True
        try:
            yield
        finally:
            self.door.open = False

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.state.length()

    def crop(self, max_length: int) -> None:
        """Negative: forget that many columns. Positive (older callers): the length to keep."""
        count = int(max_length)
        if count:
            self.state.truncate(count if count > 0 else self.state.length() + count)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take the batch rows `beam_idx` [B']: keys, values and what is known of their columns."""
        self.state.reorder(beam_idx)
        if self.sequence is not None:
            layout, delta = self.sequence.layout, self.sequence.delta
            self.sequence = Columns(layout.pick(beam_idx), delta[beam_idx])

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.sequence is not None:
            rows = torch.arange(self.sequence.layout.batch, device=self.sequence.layout.device)
            self.reorder_cache(rows.repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        self.reorder_cache(indices)

    def reset(self) -> None:
        self.sequence = None
        self.state.reset()
