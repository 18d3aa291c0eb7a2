"""Types that sessions, streams and models exchange."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from mmaccel.core.layout import TokenLayout
from mmaccel.core.memory.kv import Stream, StreamState

Moment = tuple[int, Sequence[float]]
"""Of a unit of a stream: the number of its first frame, and the seconds at which its frames were shown."""
Messages = Sequence[Mapping[str, Any]]
Between = tuple[float, float] | Callable[[float], tuple[float, float] | None] | None
"""The seconds that a question is about; or what gives them, called with the stream's last second when its turn has come."""


def as_messages(question: str | Messages) -> Messages:
    """Return `question` as messages: a text or content pieces become one user message; messages are returned unchanged."""
    if isinstance(question, str) or not question or "role" not in question[0]:
        return [{"role": "user", "content": question}]
    return question


@dataclass(frozen=True, eq=False)
class Question:
    """A question on a stream, tokenized: all that follows the video and the tokens that end it.

    ids      [n], with `embeds`, their input embeddings [n, E]
    words    (begin, end) of the user's own words in `ids`
    suffix_length  number of tokens at the end that the chat template puts behind the user's message
    visual   index from which on no token is of an image or a video
    layout   [1, n], the modality of each token; None: all are text
    after    [A, n] rotary positions relative to the first token's (A is 1, or 3 for M-RoPE); None: 0, 1, 2, ...
    """

    ids: Tensor
    words: tuple[int, int]
    embeds: Tensor
    visual: int = 0
    layout: TokenLayout | None = None
    after: Tensor | None = None
    suffix_length: int = 0

    def split(self) -> tuple[Question, Tensor]:
        """Return the question without the chat template's suffix, and the ids [n] of the suffix."""
        end = len(self.ids) - self.suffix_length
        layout = None if self.layout is None else self.layout.select_tokens(slice(end))
        return replace(self, ids=self.ids[:end], embeds=self.embeds[:end], layout=layout), self.ids[end:]


@dataclass(frozen=True, eq=False)
class TokenChoice:
    """How the tokens of an answer are chosen: `warp` turns a token's logits into the distribution from which `generator`
    draws it (None: greedy); ``stop(ids)`` returns whether the answer ends with the last token of ids [1, S]."""

    warp: Callable[[Tensor, Tensor], Tensor] | None = None
    generator: torch.Generator | None = None
    stop: Callable[[Tensor], bool] = lambda ids: False


class RunningStates(ABC):
    """The recurrent states that layers without keys and values (linear attention) carry along a stream. They have read all
    rows of the stream; a memory policy cannot leave any out."""

    @abstractmethod
    def fork(self) -> RunningStates:
        """Return a copy of the present recurrent states: to go on by itself, or for `restore`."""

    @abstractmethod
    def restore(self, fork: Any) -> None:
        """Restore the recurrent states to a copy that `fork` returned and that was not run further."""

    @abstractmethod
    def undo_rows(self, count: int) -> None:
        """Roll the recurrent states back by the last `count` rows, which belong to an answer."""

    @abstractmethod
    def accept(self, path: Tensor) -> None:
        """Keep of the tree that ran last only the rows at `path` [k], ascending."""

    @abstractmethod
    def named_tensors(self) -> dict[str, Tensor]:
        """Return all recurrent states by name, to be saved."""

    @abstractmethod
    def load(self, read: Callable[..., dict[str, Tensor]]) -> None:
        """Load saved recurrent states. `read` gets name -> (shape, dtype), and returns tensors that fit, or raises."""


def concat_padded(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate the rows of `parts`, pieces [m, E] of the layers' input, to [n, E]. Pieces that also hold features for
    later layers (`StreamModel.embed_units`) are wider; the others are padded with zeros to their width."""
    wide = max(part.shape[1] for part in parts)
    return torch.cat([torch.nn.functional.pad(part, (0, wide - part.shape[1])) for part in parts])


@contextmanager
def restore_states_at_exit(running: RunningStates | None) -> Iterator[None]:
    """Context that at its exit restores the recurrent states as they were at its start; does nothing for None."""
    mark = None if running is None else running.fork()
    try:
        yield
    finally:
        if running is not None:
            running.restore(mark)


@dataclass(eq=False)
class StreamInfo:
    """Facts of a stream other than its memory. A unit is one step of time: a frame, or a temporal patch of frames.

    size     (height, width) of the frames of the first clip; `tokens_per_unit`: tokens of one unit of that size
    fps      the rate of the first clip, from which positions are made; `rate`: that of the last clip
    marks    [m, E] features of the tokens that end any video
    timed    whether the frames' times are known, not made up: positions in seconds then follow them
    spans    (first frame, frames) of each unit; `times`: the seconds at which each frame was shown
    pending  frames of an incomplete unit; `raw`: their (height, width)
    pins     (begin, end) in seconds, whose frames the memory must not forget
    timed_texts  `TimedText`s (subtitles and the like) in order of time; the tuple is replaced, not changed
    """

    size: tuple[int, int]
    fps: float | None
    tokens_per_unit: int
    marks: Tensor
    timed: bool = False
    raw: tuple[int, int] | None = None
    spans: list[tuple[int, int]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    pending: Tensor | None = None
    pins: list[tuple[float, float]] = field(default_factory=list)
    timed_texts: tuple[Any, ...] = ()
    rate: float | None = None

    def unit_times(self, first: int, count: int | None = None) -> list[float]:
        """Return the times in seconds of `count` units (frames) from unit `first` on; all later ones if None."""
        end = None if count is None else first + count
        return [self.times[frame] for frame, _ in self.spans[first:end]]

    def unit_moments(self, frames_per_unit: int, frames: Sequence[int]) -> list[Moment]:
        """Return the `Moment`s (frame number, seconds) of the units whose first frames are `frames`."""
        return [(frame, self.times[frame : frame + frames_per_unit]) for frame in frames]


class MemoryWrapper:
    """Wraps the memory of a stream during a question, for example to prune what it shows. This base class wraps nothing."""

    def __call__(
        self, state: StreamState, stream: Stream, before: int, numbers: Sequence[int]
    ) -> StreamState:
        """`state`, or what wraps it, for one question on `stream`. The first `before` rows of the question are not its words
        but pending units and the end of the video. `numbers`: for each unit of the memory its number in the stream as shown,
        the same for every model of as many frames a unit, however their memories merge or choose units."""
        return state

    def run_options(self, kind: str) -> dict[str, Any]:
        """Return extra arguments of `StreamModel.run_layers` for a pass of this `kind` (see `StreamPass`)."""
        return {}

    def forget_after(self, tokens: int) -> None:
        """Forget what was recorded after the first `tokens` video tokens: the memory was rolled back to them."""
