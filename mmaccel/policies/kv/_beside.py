"""A memory that searches an index, as a question sees it while units go on coming: until they do it reads what they change,
and from then on copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mmaccel.core.decoding.replay import Replays
from mmaccel.core.memory.kv import CacheSlot, Stream, StreamPass, StreamState
from mmaccel.policies.kv._index import Index
from mmaccel.policies.kv._prefetch import Prefetcher
from mmaccel.policies.kv._windowed import StreamMemory
from mmaccel.policies.kv.store import HostStore


class BesideQuestion(StreamMemory):
    """What an `ArchivedMemory` does about a snapshot of it."""

    index: Index
    prefetcher: Prefetcher
    store: HostStore
    replays: Replays
    prefetch: str
    _recalled: int
    _questions: int
    _lent: Any = None
    """The snapshot that reads what this memory changes."""
    _apart = False
    """Of a snapshot: it reads copies."""

    @property
    def parts(self) -> bool:  # type: ignore[override]
        # What is forgotten to make room may be what a question is about to fetch.
        return self.store.spill != "drop_oldest"

    def snapshot(self, stream: Stream, pause: Callable[[], None]) -> StreamState | None:
        self.idle()
        taken: Any = super().snapshot(stream, pause)
        self._lent = taken
        return taken  # type: ignore[no-any-return]

    def between(self, first: int, end: int) -> None:
        self._main._part()
        self.index.forget([*range(first), *range(end, self._count)])
        self.local = 0
        self.idle()

    def _part(self) -> None:
        """Something comes that changes what a question reads: from now on that reads copies."""
        taken, self._lent = self._lent, None
        if taken is not None:
            told = self._numbers
            taken.index, taken.prefetcher = self.index.copied(), self.prefetcher.apart(self.window)
            taken.replays, taken.prefetch, taken._apart = Replays(self.device), "off", True
            taken._numbers.copy_(told)

    @property
    def _numbers(self) -> Tensor:
        """[2 + L] on the device: words of the question, units of the stream, summary tokens of each layer."""
        return self.replays.room("told", (2 + self.geometry.layers,), torch.long)

    def _answered(self, taken: Any) -> None:
        super()._answered(taken)
        self._recalled, self._questions, self._lent = taken._recalled, taken._questions, None

    def _slot(self, layer: int, query: Tensor, stream_pass: StreamPass) -> CacheSlot:
        if self._apart and self._first and layer not in self._asked:
            self.prefetcher.begin(self._first)  # the store may have grown
        return super()._slot(layer, query, stream_pass)

    def close(self) -> None:
        self.store.close()
