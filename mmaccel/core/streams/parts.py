"""What a session, a stream and a model hand each other."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmaccel.core.layout import TokenLayout

Moment = tuple[int, Sequence[float]]
"""Of a unit of a stream: the number of its first frame, and the seconds at which its frames were shown."""


@dataclass(frozen=True, eq=False)
class Clip:
    """Frames [T, 3, H, W] with the seconds at which each was shown and their rate, where these are known; `part`: of a
    source whose length is not known."""

    frames: Tensor
    times: list[float] | None
    fps: float | None
    part: bool = False


@dataclass(frozen=True, eq=False)
class Question:
    """Tokens [n] after the video and its marks, and their input embeddings [n, E]; ``words[0] .. words[1]`` of them are the
    user's own, and none from `visual` on stands for an image or a video; `layout` [1, n] says which do, None: none does;
    `after` [A, n] as `PositionIds` has it."""

    ids: Tensor
    words: tuple[int, int]
    embeds: Tensor
    visual: int = 0
    layout: TokenLayout | None = None
    after: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Choosing:
    """How the tokens of an answer are chosen: `warp` and `generator` as `Prompt` has them, and whether the answer ends with
    the last of `stop` (ids [1, S])."""

    warp: Callable[[Tensor, Tensor], Tensor] | None = None
    generator: torch.Generator | None = None
    stop: Callable[[Tensor], bool] = lambda ids: False


class RunningStates(ABC):
    """What some layers carry from one row of a stream to the next, instead of keys and values: all rows are in it, and no
    memory chooses among them."""

    @abstractmethod
    def mark(self) -> Any:
        """What `back` needs to come back to this moment."""

    @abstractmethod
    def back(self, mark: Any) -> None:
        """Be as at the moment of `mark`."""

    @abstractmethod
    def crop(self, count: int) -> None:
        """Forget the last `count` rows, of an answer."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """All of it, by name."""

    @abstractmethod
    def put(
        self, read: Callable[[Mapping[str, tuple[tuple[int, ...], torch.dtype]]], dict[str, Tensor]]
    ) -> None:
        """Be as when `tensors` gave what `read` gives for names with shapes and types; raises what that raises."""
