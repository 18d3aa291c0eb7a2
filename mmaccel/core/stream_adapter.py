"""The contract of a model that reads streams: pixels to features, features through the layers, text both ways."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmaccel.core.adapter import ModelView
from mmaccel.core.kv import StreamState
from mmaccel.core.positions import PositionIds


@dataclass(frozen=True, eq=False)
class Clip:
    """Frames [T, 3, H, W] with the seconds at which each was shown and their rate, where these are known; `part`: of a
    source whose length is not known."""

    frames: Tensor
    times: list[float] | None
    fps: float | None
    part: bool = False


class StreamAdapter(ABC):
    """One model and its processor as streams use them: pixels to features, features through the layers, text both ways.

    Nothing stays on the model between two calls. Several streams may share a model: a call waits until those of other
    threads are done. P tokens a unit, E hidden size, V vocabulary.
    """

    view: ModelView
    pace: int
    """Frames of a unit."""
    dtype: torch.dtype
    """Of embeddings, keys and values."""
    device: torch.device

    @abstractmethod
    def clips(
        self, video: Any, fps: float | None, check: Callable[[], None] | None = None
    ) -> Generator[Clip, None, None]:
        """`video` (frames, a `Video`, a clip, a path) as frames a session takes in; a path is read at `fps`, in pieces.

        `check` is called while frames of a path are awaited, and ends the wait by what it raises. Raises `VideoError` in one
        sentence.
        """

    @abstractmethod
    def fits(self, frames: Tensor, size: tuple[int, int]) -> bool:
        """Whether frames [T, 3, H, W] come to the vision tower in the size in which frames of `size` (height, width) do."""

    @abstractmethod
    def features(self, frames: Tensor, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Of frames [n * pace, 3, H, W]: features [n, P, E] of the units, and [m, E] of the marks that end any video.

        Frames that do not fit with those of `size` are resized to it.
        """

    @abstractmethod
    def resized(self, frames: Tensor, size: tuple[int, int]) -> Tensor:
        """`frames` [T, 3, H, W] at (height, width)."""

    @abstractmethod
    def head(self) -> Tensor:
        """[h] ids of the prompt before the video."""

    @abstractmethod
    def tail(self, question: str) -> tuple[Tensor, tuple[int, int]]:
        """Tokens [n] that follow the video and its marks when `question` is asked; ``words[0] .. words[1]`` of them are the
        user's own. Raises `ModelError` for an empty question."""

    @abstractmethod
    def places(self, size: tuple[int, int], fps: float | None) -> PositionIds:
        """The positions of a stream of frames of `size`, `fps` of them a second (None: not known)."""

    @abstractmethod
    def words(self, ids: Tensor) -> Tensor:
        """[n, E] input embeddings of text `ids` [n]."""

    @abstractmethod
    def run(
        self,
        state: StreamState,
        embeds: Tensor,
        hidden: bool = False,
        few: bool = False,
        check: Callable[[], None] | None = None,
    ) -> Tensor:
        """[n, E] final hidden states of new columns `embeds` [n, E], through all layers, with `state` as memory.

        Keys and queries reach the memory before rotation; with `hidden` it is told what enters each layer. `few`: the
        columns are a question's or an answer's, which few kernels may compute where they round otherwise than the modules.
        `check` is called at each layer where columns are many; what it raises breaks the pass off.
        """

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """[n, V] logits of final hidden states [n, E]."""

    @abstractmethod
    def ends(self) -> frozenset[int]:
        """Tokens that end an answer."""

    @abstractmethod
    def decode(self, ids: Tensor) -> str:
        """The text of ids [n], special tokens left out."""

    @abstractmethod
    def signature(self) -> str:
        """A short mark of the weights: another model, or another training of this one, has another."""
