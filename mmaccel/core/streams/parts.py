"""Types that sessions, streams and models exchange, and the turns that threads take on a model."""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from time import monotonic
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from mmaccel.core.decoding.batch import AnswersTogether, Batch
from mmaccel.core.decoding.generate import Speculation
from mmaccel.core.decoding.watching import DraftStream
from mmaccel.core.errors import DraftError, warn
from mmaccel.core.layout import TokenLayout
from mmaccel.core.memory.kv import Stream, StreamState

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
    """Recurrent states of layers that have no keys and values (linear attention). A state has seen all rows of the stream;
    no memory chooses among them."""

    @abstractmethod
    def mark(self) -> Any:
        """The states as they are now, for `back` to return to."""

    @abstractmethod
    def back(self, mark: Any) -> None:
        """Return to the states that `mark` gave."""

    @abstractmethod
    def crop(self, count: int) -> None:
        """Go back by the last `count` rows, which belong to an answer."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """All states by name, to be saved."""

    @abstractmethod
    def put(
        self, read: Callable[[Mapping[str, tuple[tuple[int, ...], torch.dtype]]], dict[str, Tensor]]
    ) -> None:
        """Be as when `tensors` gave what `read` gives for names with shapes and types; raises what that raises."""


def joined(parts: Sequence[Tensor]) -> Tensor:
    """[n, E] parts [., E] of what enters the layers, one after the other; those without what others have beside them
    (`StreamModel.unit_embeds`) have zeros."""
    wide = max(part.shape[1] for part in parts)
    return torch.cat([torch.nn.functional.pad(part, (0, wide - part.shape[1])) for part in parts])


@contextmanager
def kept(running: RunningStates | None) -> Iterator[None]:
    """Context in which recurrent states may change; they are restored at exit."""
    mark = None if running is None else running.mark()
    try:
        yield
    finally:
        if running is not None:
            running.back(mark)


@dataclass(eq=False)
class StreamInfo:
    """Facts of a stream other than its memory.

    size     (height, width) of the frames of the first clip; `unit` the tokens of a unit of them
    fps      the rate of the first clip, for which positions are made
    marks    [m, E] features of what ends any video
    timed    whether the times of frames are known, and not made up: positions in seconds then follow them
    spans    (first frame, frames) of each unit; `times` the seconds at which each frame was shown
    pending  frames of a unit not yet complete; `raw` their (height, width)
    pins     stretches of seconds whose frames the memory is not to let go of
    """

    size: tuple[int, int]
    fps: float | None
    unit: int
    marks: Tensor
    timed: bool = False
    raw: tuple[int, int] | None = None
    spans: list[tuple[int, int]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    pending: Tensor | None = None
    pins: list[tuple[float, float]] = field(default_factory=list)

    def shown(self, first: int, count: int | None = None) -> list[float]:
        """Times in seconds of `count` units from unit `first` on; of all that follow if `count` is None."""
        end = None if count is None else first + count
        return [self.times[frame] for frame, _ in self.spans[first:end]]

    def moments(self, pace: int, frames: Sequence[int]) -> list[Moment]:
        """What is written beside units of `pace` frames that begin with `frames`."""
        return [(frame, self.times[frame : frame + pace]) for frame in frames]


class Around:
    """Wraps the memory of a stream while a question lasts, for example to prune what it shows. This class wraps nothing:
    subclasses do."""

    def __call__(
        self, state: StreamState, stream: Stream, before: int, numbers: Sequence[int]
    ) -> StreamState:
        """`state`, or what wraps it, for one question on `stream`. The first `before` rows of the question are not its words
        but units that wait, and the end of the video. `numbers`: for each unit of the memory its number in the stream as
        shown, the same for every model of this pace, however their memories merge or choose units."""
        return state

    def run_options(self, kind: str) -> dict[str, Any]:
        """Arguments of `StreamModel.run` for a pass of this kind."""
        return {}

    def cut(self, tokens: int) -> None:
        """The memory has gone back to so many tokens of units."""


SLOW, SLOW_S = 2.0, 20.0
"""How many times what all else takes, and how many seconds, a draft's stream may hold up one that is watched."""


class CarefulDraftStream:
    """The draft's stream beside that of a session: its failure ends the draft alone.

    `stream` is None where the draft watches nothing, and after a failure, whose reason `failed` has. One that holds up the
    stream for more than `SLOW` times what all else takes cannot keep up, and has failed too.
    """

    def __init__(self, watch: Callable[[], DraftStream] | None = None) -> None:
        self.stream: DraftStream | None = None
        self.failed = ""
        self._born, self._held_up_s = monotonic(), 0.0
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
            began = monotonic()
            stream.take(frames, times, fps, timed)
            now = monotonic()
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
        """The draft's stream as it is now, for `back` to return to; None where there is no draft any more."""
        with self.dropping() as stream:
            return None if stream is None else stream.mark()

    def back(self, mark: Any) -> None:
        """Return the draft's stream to where it was when `mark` was made."""
        with self.dropping() as stream:
            if stream is not None:
                stream.back(mark)

    def close(self) -> None:
        """Give back what is held; a second call does nothing."""
        with self.dropping() as stream:
            self.stream = None
            if stream is not None:
                stream.close()


WAIT_S = 0.05
"""Seconds between two checks of the deadline while a call waits for its turn."""


class Turns:
    """A lock that is given to threads in the order in which they asked for it; its holder may take it again.

    Who works for long gives way in between: those that wait then have their turns, and it goes on after them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[tuple[int, threading.Event]] = deque()
        self._holder: int | None = None
        self._depth, self._paused = 0, False
        self.steps: Callable[[], Any] = lambda: (
            None
        )  # what streams of the model share, while one of them holds it
        self.answers = 0
        """Answers under way that can share steps."""

    @contextmanager
    def holding(self, deadline: Any = None) -> Iterator[float]:
        """Hold the lock; gives the seconds that this took. Raises `Ended` when the deadline comes first."""
        began = monotonic()
        self._acquire(deadline)
        try:
            yield monotonic() - began
        finally:
            self._release()

    def give_way(self, inside: bool = False) -> None:
        """Let those that wait have their turns, and go on after them. `inside`: a pass of the model is under way; only one
        may stand still at a time, for what passes put on a model is taken back in order."""
        with self._lock:
            if self._holder != threading.get_ident() or not self._waiting or (inside and self._paused):
                return
            depth, self._paused = self._depth, self._paused or inside
            mine = self._queue()
            self._next()
        try:
            while not mine.is_set():
                try:
                    mine.wait()
                except BaseException:
                    mine.wait()  # what is left behind is not to be at work in another's turn
                    raise
        finally:
            self._depth = depth
            self._paused = self._paused and not inside

    def decode(self, one: Speculation, shares: bool) -> None:
        """Decode an answer, while the lock is held; if it `shares` steps, then with others as soon as there are any."""
        self.answers += shares
        try:
            while not one.ended:
                if shares and self.answers > 1 and one.target.adapter.shares:  # type: ignore[attr-defined]
                    one.target.together = AnswersTogether(self)
                    with self.released():
                        self.batch.run([one])
                else:
                    one.advance()
        finally:
            self.answers -= shares

    @cached_property
    def batch(self) -> Batch:
        """Where answers that share steps are decoded; each round is a turn."""
        return Batch(holding=self.holding)

    @contextmanager
    def released(self) -> Iterator[None]:
        """Within, the holder leaves the lock to others; then it is the next to wait for it."""
        with self._lock:
            assert self._holder == threading.get_ident()
            depth = self._depth
            self._next()
        try:
            yield
        finally:
            try:
                self._acquire(None)
            except BaseException:
                self._acquire(None)  # what is left behind is not to be at work in another's turn
                self._depth = depth
                raise
            self._depth = depth

    def forked(self) -> None:
        """In a forked process only the thread that forked goes on."""
        mine = self._holder == threading.get_ident()
        self._lock, self._waiting = threading.Lock(), deque()
        self._holder, self._depth = (self._holder, self._depth) if mine else (None, 0)
        self.__dict__.pop("batch", None)

    def _queue(self) -> threading.Event:
        mine = threading.Event()
        self._waiting.append((threading.get_ident(), mine))
        return mine

    def _acquire(self, deadline: Any) -> None:
        if deadline is not None:
            deadline.check()
        with self._lock:
            if self._holder == threading.get_ident():
                self._depth += 1
                return
            mine = self._queue()
            if self._holder is None:
                self._next()
        try:
            while not mine.wait(None if deadline is None else WAIT_S):
                assert deadline is not None
                deadline.check()
        except BaseException:
            with self._lock:
                if (waits := (threading.get_ident(), mine)) in self._waiting:
                    self._waiting.remove(waits)
                    raise
            self._release()
            raise

    def _release(self) -> None:
        with self._lock:
            self._depth -= 1
            if not self._depth:
                self._next()

    def _next(self) -> None:
        """Give the lock to who has waited longest; `_lock` is held."""
        self._holder, self._depth = None, 0
        if self._waiting:
            self._holder, event = self._waiting.popleft()
            self._depth = 1
            event.set()


_turns: WeakKeyDictionary[nn.Module, Turns] = WeakKeyDictionary()


def turns_of(model: nn.Module) -> Turns:
    """The turns under which passes of streams run on a text model."""
    return _turns.setdefault(model, Turns())


def _forked() -> None:
    for turns in _turns.values():
        turns.forked()


os.register_at_fork(after_in_child=_forked)
