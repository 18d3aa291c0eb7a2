"""A draft's own stream: the frames that its target watches, in a memory of the draft's."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmaccel.core.errors import DraftError, warn
from mmaccel.core.memory.kv import Stream, StreamPolicy, StreamState
from mmaccel.core.prefill.prune import Stage, TokenPruner

SLOW, SLOW_S = 2.0, 20.0
"""How many times what all else takes, and how many seconds, a draft's stream may hold up one that is watched."""


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


class Around:
    """Lays something round a memory while a question lasts; this one nothing."""

    def __call__(
        self, state: StreamState, stream: Stream, before: int, numbers: Sequence[int]
    ) -> StreamState:
        """`state`, or what stands in its place. The first `before` rows of the question are no words. `numbers` has for each
        unit of the memory the number that models of the same pace give it, however either merges units or picks them."""
        return state

    def ears(self, kind: str) -> dict[str, Any]:
        """What `StreamModel.run` is to be told of a pass of this kind."""
        return {}

    def cut(self, tokens: int) -> None:
        """The memory has gone back to so many tokens of units."""


class DraftStream(ABC):
    """A stream of a draft's own. What is raised ends the draft of a session, and not the session."""

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


class CarefulDraftStream:
    """The draft's stream beside that of a session: its failure ends the draft alone.

    `stream` is None where the draft watches nothing, and after a failure, whose reason `failed` has. One that holds up the
    stream for more than `SLOW` times what all else takes cannot keep up, and has failed too.
    """

    def __init__(self, watch: Callable[[], DraftStream] | None = None) -> None:
        self.stream: DraftStream | None = None
        self.failed = ""
        self._born, self._held_up_s = time.monotonic(), 0.0
        if watch is not None:
            with self.dropping():
                self.stream = watch()

    @contextmanager
    def dropping(self) -> Iterator[DraftStream | None]:
        """Run what may fail with the draft's stream; None where there is none."""
        try:
            yield self.stream
        except Exception as error:
            stream, self.stream = self.stream, None
            self.failed = f"{type(error).__name__}: {error}"
            warn(
                f"the draft's own stream failed and was dropped; the session goes on without a draft ({self.failed})."
            )
            if stream is not None:
                # It is broken already; that it cannot tidy up either is no news.
                with suppress(Exception):
                    stream.close()

    def take(self, frames: Tensor, times: Sequence[float], fps: float | None, timed: bool) -> None:
        """Take in frames, if there are any."""
        with self.dropping() as stream:
            if stream is None or not len(frames):
                return
            began = time.monotonic()
            stream.take(frames, times, fps, timed)
            now = time.monotonic()
            self._held_up_s += now - began
            others_s = now - self._born - self._held_up_s
            if self._held_up_s > max(SLOW_S, SLOW * others_s):
                raise DraftError(
                    f"it held up the stream for {self._held_up_s:.0f} s where all else took {others_s:.0f} s; give it "
                    "a cheaper kv, such as no_cache, or leave the draft out"
                )

    def idle(self) -> None:
        """No more frames come for now."""
        with self.dropping() as stream:
            if stream is not None:
                stream.idle()

    def mark(self) -> Any:
        """What `back` needs."""
        with self.dropping() as stream:
            return None if stream is None else stream.mark()

    def back(self, mark: Any) -> None:
        """As it was at `mark`."""
        with self.dropping() as stream:
            if stream is not None:
                stream.back(mark)

    def close(self) -> None:
        """Give back what is held; a second call does nothing."""
        with self.dropping() as stream:
            self.stream = None
            if stream is not None:
                stream.close()
