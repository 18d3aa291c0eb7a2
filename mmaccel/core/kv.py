"""The contract of a memory: what a sequence or stream keeps of its keys and values, and what a query gets to see."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from mmaccel.core.errors import ModelError

if TYPE_CHECKING:
    from mmaccel.core.adapter import Geometry, ModelView


@dataclass(frozen=True, eq=False)
class KVView:
    """What the queries of one layer see.

    key, value [B, G, N, D]; `column` [N] long, the sequence column of each key, or None when key n is column n.
    `sinks` and `window` (None: no limit) restrict each query further: it sees keys of the first `sinks` columns and those
    less than `window` columns behind it, so that a verified window of rows sees what one row at a time would.
    """

    key: Tensor
    value: Tensor
    column: Tensor | None = None
    sinks: int = 0
    window: int | None = None


class KVState(ABC):
    """The memory of one batch of sequences, all layers."""

    @abstractmethod
    def append(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Take in the keys and values [B, G, n, D] of `n` new columns of one layer."""

    @abstractmethod
    def view(self, layer: int, query: Tensor) -> KVView:
        """What `query` [B, H, n, D], the last `n` appended columns, sees at this layer; it includes those columns."""

    def ahead(self, layer: int, hidden: Tensor) -> None:
        """Told the hidden state [B, n, E] entering `layer`; a memory elsewhere starts to fetch for the next layer."""

    @abstractmethod
    def accept(self, keep: int | Tensor) -> None:
        """Of the columns last appended keep the first `keep`, or those at the given indices (a tree's path)."""

    @abstractmethod
    def length(self) -> int:
        """Columns seen and not rolled back, whether still held or not."""

    @abstractmethod
    def held(self) -> int:
        """Columns whose keys are still held (the largest layer)."""

    @abstractmethod
    def reset(self) -> None:
        """Forget everything."""

    @abstractmethod
    def reorder(self, rows: Tensor) -> None:
        """Take the batch rows `rows` [B'] (beam search, dropping finished sequences)."""

    def nbytes(self) -> int:
        """Bytes held on the device."""
        return 0

    @contextmanager
    def turn(self) -> Iterator[None]:
        """A question on a stream: what is appended inside is dropped at exit."""
        start = self.length()
        try:
            yield
        finally:
            self.truncate(start)

    @abstractmethod
    def truncate(self, length: int) -> None:
        """Roll back to `length` columns; raises `ModelError` when the policy cannot reach back so far."""

    def save(self, path: str | Path) -> None:
        """Write the state (safetensors and JSON); raises `ModelError` for policies that keep nothing worth saving."""
        raise ModelError(f"{type(self).__name__} cannot be saved; use a kv policy made for streams.")

    def load(self, path: str | Path) -> None:
        """Read what `save` wrote."""
        raise ModelError(f"{type(self).__name__} cannot be loaded; use a kv policy made for streams.")

    def counters(self) -> dict[str, float]:
        """Figures for the report."""
        return {"held": float(self.held()), "seen": float(self.length()), "bytes": float(self.nbytes())}


@dataclass(frozen=True, kw_only=True)
class KVPolicy(ABC):
    """A choice of memory; `open` gives a state that lives as long as one sequence or stream.

    exact     answers equal those of a model that keeps everything
    """

    name: ClassVar[str]
    needs: ClassVar[frozenset[str]] = frozenset()
    exact: ClassVar[bool] = False

    @property
    def reach(self) -> int | None:
        """How many of the last columns can be rolled back; None means all."""
        return None

    @property
    def admits_sparse(self) -> bool:
        """Whether a sparse prefill pattern may stand beside this memory."""
        return True

    @abstractmethod
    def open(self, geometry: Geometry, model: ModelView | None, device: torch.device) -> KVState: ...
