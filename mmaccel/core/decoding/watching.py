"""A draft's own stream: the frames that its target watches, in a memory of the draft's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmaccel.core.memory.kv import StreamPolicy
from mmaccel.core.prefill.prune import Stage, TokenPruner


@dataclass(frozen=True, eq=False)
class Watching:
    """What a draft is told of the session whose frames it is to watch: its processor, memory and `chunk`; and, in another
    process, the `prune` of its own."""

    processor: Any
    kv: StreamPolicy
    chunk: int | None
    prune: TokenPruner | None = None


@dataclass(frozen=True, eq=False)
class Heard:
    """What a target's question paid to the tokens of units, for a draft's pruner, of whose `stage` it is.

    unit    P, tokens of a unit of the target
    tokens  [n] long, ascending: what a layer saw; the unit's number, as all models of a pace count them, times P, plus the
            place in it
    paid    [k, n] float32: the attention that the question paid to each, a mean over its rows, heads and the layers of the
            group `Stage.attention[k]`; a layer that did not see it paid nothing. Of a pruner that reads states it is its
            score [1, n], moved to be positive
    """

    stage: Stage
    unit: int
    tokens: Tensor
    paid: Tensor

    def to(self, numbers: Tensor, places: Tensor, unit: int) -> Tensor:
        """[k, m] what was paid to the tokens at `places` [m] of units `numbers` [m], where units have `unit` tokens."""
        wanted, tokens = numbers * self.unit + places * self.unit // unit, self.tokens.to(numbers.device)
        paid = self.paid.to(numbers.device)
        if not tokens.numel():
            return paid.new_zeros(len(paid), len(wanted))
        at = torch.searchsorted(tokens, wanted).clamp(max=len(tokens) - 1)
        return torch.where(tokens[at] == wanted, paid[:, at], 0.0)


class DraftStream(ABC):
    """A stream of a draft's own. What is raised ends the draft of a session, and not the session."""

    pace: Any = None
    """What a strategy has measured of the answers so far, for the next one."""

    @abstractmethod
    def take(self, frames: Tensor, times: Sequence[float], fps: float | None, timed: bool) -> None:
        """Take in frames [T, 3, H, W] uint8, shown at `times`, after the target did. `fps` is the rate of their clip, if
        known; `timed`: the times are known, and not made up."""

    @abstractmethod
    def mark(self) -> Any:
        """What `back` needs; one is in use at a time."""

    @abstractmethod
    def back(self, mark: Any) -> None:
        """Be as at the moment of `mark`."""

    @abstractmethod
    def ask(self, question: str, room: int, heard: Heard | None = None) -> None:
        """A question comes, of whose answer the target may say `room` tokens; what reads it is the draft's state. `heard`,
        where the draft has a pruner: what the target's question attended to."""

    @abstractmethod
    def done(self) -> None:
        """The question is over: be as before it."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write the stream into `folder`, which exists, as .safetensors and .json files."""

    @abstractmethod
    def load(self, folder: Path) -> None:
        """Read what `save` wrote, into a stream just opened; raises `ModelError` where it does not fit."""

    def idle(self) -> None:
        """No more frames come for now."""

    def close(self) -> None:
        """Give back what is held."""
