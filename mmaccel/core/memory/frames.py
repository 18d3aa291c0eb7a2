"""Interface of a memory that stores frames instead of keys and values, and encodes some of them again for each question."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

from torch import Tensor

from mmaccel.core.memory.kv import StreamState


class FrameMemory(StreamState):
    """A stream memory that stores frames instead of keys and values, and runs the model on some of them for each question.
    No forward pass uses it as its KV memory: for each question the frames of `choose_units` are run into a
    `new_kv_memory`, and the question runs on that."""

    @abstractmethod
    def store_frames(self, frames: Tensor) -> None:
        """Store frames [T, 3, H, W]: whole units, in the order of the stream."""

    @abstractmethod
    def choose_units(self, paid: Mapping[int, float]) -> list[tuple[int, Tensor]]:
        """Return the units to run for a question, ascending: of each its number and its frames [F, 3, H, W]. `paid`, for a
        draft's memory: unit number -> attention that the target's question paid to it; empty if unknown."""

    @abstractmethod
    def new_kv_memory(self) -> StreamState:
        """Return an empty KV memory, into which the chosen frames and one question are run."""
