"""The contract of a memory that keeps frames instead of keys and values."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

from torch import Tensor

from mmaccel.core.memory.kv import StreamState


class FrameMemory(StreamState):
    """A memory that keeps frames instead of keys and runs the model on some of them at a question. It goes through no pass
    itself: what a question sees is made by `fresh`, filled with the units of `pick`."""

    @abstractmethod
    def keep(self, frames: Tensor) -> None:
        """Take in frames [n * pace, 3, H, W], whole units, in the order of the stream."""

    @abstractmethod
    def pick(self, paid: Mapping[int, float]) -> list[tuple[int, Tensor]]:
        """The units to run for a question: number and frames [pace, 3, H, W], ascending. `paid` are what a target's question
        paid to units by number, where this is the memory of a draft that was told; empty: not known."""

    @abstractmethod
    def fresh(self) -> StreamState:
        """An empty memory for one question."""
