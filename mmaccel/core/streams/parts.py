"""Types that sessions, streams and models exchange, and `FairLock`, the fair lock of threads that share a model."""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from time import monotonic
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from mmaccel.core.decoding.batch import Batch, BatchedAnswerSteps
from mmaccel.core.decoding.generate import Speculation
from mmaccel.core.layout import TokenLayout
from mmaccel.core.memory.kv import Stream, StreamState

Moment = tuple[int, Sequence[float]]
"""Of a unit of a stream: the number of its first frame, and the seconds at which its frames were shown."""


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


WAIT_S = 0.05
"""Seconds between two checks of the deadline while a call waits for its turn."""
PATIENCE_S = 0.02
"""Seconds that a token waits before a pass stands still for it: with a layer and the token's own step, half of 60 ms."""

QUESTION_S = 0.25
"""A question comes before passes of frames that have waited for less: a frame has a second or so until it is asked about."""
SHORT_S = 1.0
"""So does what is done before and after a pass, so that passes wait at once."""


class _Waiter(NamedTuple):
    thread: int
    event: threading.Event
    since: float
    token: bool = False
    ahead: float = 0.0
    over: Callable[[], bool] | None = None


class FairLock:
    """A lock that threads get in the order in which they asked for it; its holder may take it again.

    A holder with a long task yields in between: waiting threads get their turns, and it continues after them. A forward pass
    of frames yields only to answer tokens, which read snapshots: nothing else may see its half-written memory.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[_Waiter] = deque()
        self._holder: int | None = None
        self._depth, self._paused, self._jumped = 0, False, False
        self._still: _Waiter | None = None  # the pass that stands still for tokens
        self._behind: Any = None  # when the device has done what came before the last layer
        self.steps: Callable[[], Any] = lambda: None  # what streams share, while one of them holds the model
        self.answers = 0
        """Answers under way that can share steps."""
        self.waiting_passes = list[Any]()
        """Passes of frames that wait (`joint.WaitingUnits`); whoever has the turn may run them."""

    @property
    def is_contended(self) -> bool:
        """Whether another thread holds the lock, or a pass waits for it."""
        return bool(self.waiting_passes) or self._holder not in (None, threading.get_ident())

    @contextmanager
    def hold(self, deadline: Any = None, **how: Any) -> Iterator[float]:
        """Context that holds the lock and gives the seconds waited. Raises `CallEnded` if the deadline comes first.

        token  whether the caller runs tokens of an answer
        ahead  seconds (`QUESTION_S`, `SHORT_S`): the caller goes before passes of frames that have waited for less
        over   returns whether another holder has done the caller's work already; the context then begins without the lock
        """
        began = monotonic()
        held = self._acquire(deadline, **how)
        try:
            yield monotonic() - began
        finally:
            if held:
                self._release()

    def yield_lock(self, inside: bool = False) -> None:
        """Release the lock to waiting threads, then hold it again to go on: with the next token or, `inside`, in the middle
        of a forward pass. One pass at a time may pause for all waiting threads, others only for answer tokens."""
        if inside and self._paused:
            self.yield_to_answers()
        else:
            self._aside(lambda: bool(self._waiting), token=not inside, inside=inside)

    def yield_to_answers(self) -> None:
        """In the middle of a pass, give turns to answer tokens that have waited for `PATIENCE_S` seconds, nothing else."""
        self._aside(lambda: self._still is None and self._late() is not None, still=True)

    def yield_between_layers(self, device: torch.device, *_: Any) -> None:
        """Give waiting answer tokens their turns, between two layers of a pass on `device`. While one waits, the host runs
        at most one layer ahead of the device."""
        with self._lock:
            waits = any(one.token for one in self._waiting)
        if waits and device.type == "cuda":
            behind, self._behind = self._behind, torch.cuda.current_stream(device).record_event()
            if behind is not None:
                behind.synchronize()
        self.yield_to_answers()

    def wait_for_paused_pass(self) -> None:
        """Wait until no forward pass is paused in the middle."""
        self._aside(lambda: self._still is not None)

    def _aside(
        self, when: Callable[[], bool], token: bool = False, inside: bool = False, still: bool = False
    ) -> None:
        """Queue as the last one, if the lock is held and `when` says so, and wait for it."""
        with self._lock:
            if self._holder != threading.get_ident() or not when():
                return
            depth, self._paused = self._depth, self._paused or inside
            mine = self._queue(token=token)
            self._still = mine if still else self._still
            self._next()
        try:
            while not mine.event.is_set():
                try:
                    mine.event.wait()
                except BaseException:
                    mine.event.wait()  # what is left behind is not to be at work in another's turn
                    raise
        finally:
            self._depth = depth
            self._paused = self._paused and not inside

    def decode_answer(self, one: Speculation, shares: bool) -> None:
        """Decode an answer, holding the lock; with `shares` its steps may be batched with those of other answers."""
        self.answers += shares
        try:
            while not one.ended:
                if shares and self.answers > 1 and one.target.adapter.can_batch_answers:  # type: ignore[attr-defined]
                    one.target.together = BatchedAnswerSteps(self)
                    with self.release_temporarily():
                        self.batch.run([one])
                else:
                    one.commit_next_tokens()
        finally:
            self.answers -= shares

    @cached_property
    def batch(self) -> Batch:
        """The `Batch` in which answers that share steps are decoded; each round holds the lock."""
        return Batch(holding=partial(self.hold, token=True))

    @contextmanager
    def release_temporarily(self) -> Iterator[None]:
        """Context in which the holder releases the lock; at exit it waits to hold it again."""
        with self._lock:
            assert self._holder == threading.get_ident()
            depth = self._depth
            self._next()
        try:
            yield
        finally:
            try:
                self._acquire(None, token=True)
            except BaseException:
                self._acquire(None, token=True)  # what is left behind is not to be at work in another's turn
                self._depth = depth
                raise
            self._depth = depth

    def reset_after_fork(self) -> None:
        """Reset the lock in a forked child process, where no other thread exists that could hold it."""
        mine = self._holder == threading.get_ident()
        self._lock, self._waiting = threading.Lock(), deque()
        self._holder, self._depth = (self._holder, self._depth) if mine else (None, 0)
        self._paused, self._still, self.waiting_passes = False, None, []
        self.__dict__.pop("batch", None)

    def _queue(self, **how: Any) -> _Waiter:
        mine = _Waiter(threading.get_ident(), threading.Event(), monotonic(), **how)
        self._waiting.append(mine)
        return mine

    def _acquire(self, deadline: Any, **how: Any) -> bool:
        """Wait for the lock; return whether it is held, which it is not where what it was wanted for is `over`."""
        if deadline is not None:
            deadline.check()
        me = threading.get_ident()
        with self._lock:
            if self._holder == me:
                self._depth += 1
                return True
            mine = self._queue(**how)
            if self._holder is None:
                self._next()
        try:
            while not mine.event.wait(None if deadline is None else WAIT_S):
                assert deadline is not None
                deadline.check()
        except BaseException:
            with self._lock:
                if mine in self._waiting:
                    self._waiting.remove(mine)
                    raise
            if self._holder == me:
                self._release()
            raise
        return self._holder == me

    def _release(self) -> None:
        with self._lock:
            self._depth -= 1
            if not self._depth:
                self._next()

    def _late(self) -> _Waiter | None:
        """The token that has waited longest, if that is too long; `_lock` is held."""
        late = monotonic() - PATIENCE_S
        return next((one for one in self._waiting if one.token and one.since <= late), None)

    def _next(self) -> None:
        """Give the lock to who has waited longest, every other time to a token that waits for too long; while a pass stands
        still for tokens, to these or back to it. `_lock` is held."""
        self._holder, self._depth = None, 0
        for mine in [one for one in self._waiting if one.over is not None and one.over()]:
            self._waiting.remove(mine)
            mine.event.set()
        able = [one for one in self._waiting if self._still is None or one.token or one is self._still]
        late = None if self._jumped else self._late()
        self._jumped = late is not None
        if able:
            mine = able[0] if late is None else late
            if mine.over is not None:
                waited = monotonic() - mine.since
                mine = next((one for one in able if one.ahead > waited), mine)
            self._waiting.remove(mine)
            self._still = None if mine is self._still else self._still
            self._holder, self._depth = mine.thread, 1
            mine.event.set()


_turns: WeakKeyDictionary[nn.Module, FairLock] = WeakKeyDictionary()


def fair_lock_of(model: nn.Module) -> FairLock:
    """Return the lock that streams on `model` share, one for each text model."""
    return _turns.setdefault(model, FairLock())


def _forked() -> None:
    for turns in _turns.values():
        turns.reset_after_fork()


os.register_at_fork(after_in_child=_forked)
