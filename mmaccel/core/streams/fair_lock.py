"""`FairLock`: the fair lock of threads that share a model."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from time import monotonic, sleep
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from mmaccel.core.decoding.batch import Batch, BatchedAnswerSteps
from mmaccel.core.decoding.generate import Speculation

WAIT_S = 0.05
"""Seconds between two checks of the deadline while a call waits for its turn."""
PATIENCE_S = 0.02
"""Seconds that a token waits before a pass stands still for it: with a layer and the token's own step, half of 60 ms."""

QUESTION_S = 0.25
"""A question comes before passes of frames that have waited for less: a frame has a second or so until it is asked about."""
SHORT_S = 1.0
"""So does what is done before and after a pass, so that passes wait at once."""
QUERY_S = 0.0005
"""Seconds between two looks at whether the device has done what is queued."""
LAUNCHED = 2
"""Captured passes of frames that the device runs or has queued, at most: behind them a question waits on the device."""


class _Waiter(NamedTuple):
    thread: int
    event: threading.Event
    since: float
    token: bool = False
    ahead: float = 0.0
    over: Callable[[], bool] | None = None


class _Ends(threading.local):
    check: Callable[[], None] | None = None


class FairLock:
    """A lock that threads get in the order in which they asked for it; its holder may take it again.

    A holder with a long task yields in between: waiting threads get their turns, and it continues after them. A forward pass
    of frames yields only to answer tokens, which read snapshots: nothing else may see its half-written memory.

    On a GPU a holder launches a captured pass and leaves, before the device has run it. Answer tokens then come before the
    next passes of frames, which wait while `LAUNCHED` of them are not done.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[_Waiter] = deque()
        self._holder: int | None = None
        self._depth, self._paused, self._jumped = 0, False, False
        self._still: _Waiter | None = None  # the pass that stands still for tokens
        self._answering = set[int]()  # threads that decode an answer
        self._behind: Any = None  # when the device has done what came before the last layer
        self._launched = deque[Any]()  # events, when the device has done the passes of frames
        self.steps: Callable[[], Any] = lambda: None  # what streams share, while one of them holds the model
        self.answers = 0
        """Answers under way that can share steps."""
        self.waiting_passes = list[Any]()
        """Passes of frames that wait (`joint.QueuedUnits`); whoever has the turn may run them."""
        self._ends = _Ends()

    @property
    def is_contended(self) -> bool:
        """Whether another thread holds the lock, or a pass waits for it or for the device."""
        others = self._holder not in (None, threading.get_ident())
        return others or bool(self.waiting_passes) or len(self._launched) >= LAUNCHED

    @contextmanager
    def hold(self, deadline: Any = None, **how: Any) -> Iterator[float]:
        """Context that holds the lock and gives the seconds waited. Raises `CallEnded` if the deadline comes first.

        token  whether the caller runs tokens of an answer
        ahead  seconds (`QUESTION_S`, `SHORT_S`): the caller goes before passes of frames that have waited for less
        over   of a pass of frames: returns whether another holder has run it already; the context then begins without the
               lock. It gets no turn while `LAUNCHED` passes are not done.
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
        """In the middle of a pass, give turns to answer tokens that have waited for `PATIENCE_S` seconds, nothing else. Does
        nothing inside `answering`."""
        late = partial(self._late, self._waiting)
        self._aside(lambda: not self.is_answering and self._still is None and late() is not None, still=True)

    def yield_between_layers(self, device: torch.device, *_: Any) -> None:
        """Give waiting answer tokens their turns, between two layers of a pass on `device`. While one waits, the host runs
        at most one layer ahead of the device. Raises what `ending` says."""
        with self._lock:
            waits = any(one.token for one in self._waiting)
        if waits and device.type == "cuda":
            behind, self._behind = self._behind, torch.cuda.current_stream(device).record_event()
            if behind is not None:
                behind.synchronize()
        self.yield_to_answers()
        if self._ends.check is not None:
            self._ends.check()

    @contextmanager
    def ending(self, check: Callable[[], None] | None) -> Iterator[None]:
        """Context in which passes of this thread break off in the middle with the error that `check` raises; None: they do
        not."""
        before, self._ends.check = self._ends.check, check
        try:
            yield
        finally:
            self._ends.check = before

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

    def wait_for_queue(self, device: torch.device) -> None:
        """Wait until `device` has done what is queued; only answer tokens get turns until then. The holder calls it before
        it reads results: else tokens that wait for the lock wait for these too."""
        self.wait_for_paused_pass()
        if device.type == "cuda":
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(device))
            while not event.query():  # type: ignore[no-untyped-call]
                self._aside(lambda: any(one.token for one in self._waiting), still=True)
                sleep(QUERY_S)

    def add_launched_pass(self, out: Tensor) -> Tensor:
        """Note that the holder launched a pass of frames, and return what it gives, `out`. The holder is to call
        `wait_for_device` after its turn. If a turn has more than `LAUNCHED` passes, wait for the first of them."""
        if out.is_cuda:
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(out.device))
            self._launched.append(event)
            with self._lock:
                self._drop_done_passes()
                late = [self._launched.popleft() for _ in range(len(self._launched) - LAUNCHED)]
            for one in late:
                one.synchronize()
        return out

    def wait_for_device(self) -> None:
        """Wait, without holding the lock, while `LAUNCHED` passes of frames are not done."""
        while len(self._launched) >= LAUNCHED:
            with self._lock:
                oldest = self._launched[0] if self._launched else None
            if oldest is not None:
                oldest.synchronize()
            self._wake()

    def _wake(self) -> None:
        """Give the lock, if it is free, to who is next, now that the device may have done a pass."""
        with self._lock:
            self._drop_done_passes()
            if self._holder is None:
                self._next()

    def _drop_done_passes(self) -> None:
        try:
            while self._launched and self._launched[0].query():
                self._launched.popleft()
        except RuntimeError:  # of the device, which whoever uses it next is told
            self._launched.clear()

    @property
    def is_answering(self) -> bool:
        """Whether the calling thread decodes an answer (`answering`)."""
        return threading.get_ident() in self._answering

    @contextmanager
    def answering(self, when: bool = True) -> Iterator[None]:
        """Context in which the calling thread decodes an answer, if `when`: also between two layers of another thread's
        question. All that it does there, such as a question to a draft that is the model itself, goes on without a pause."""
        me = threading.get_ident()
        new = when and me not in self._answering
        self._answering |= {me} if new else set()
        try:
            yield
        finally:
            self._answering -= {me} if new else set()

    def decode_answer(self, one: Speculation, shares: bool) -> None:
        """Decode an answer, holding the lock; with `shares` its steps may be batched with those of other answers."""
        self.answers += shares
        adapter: Any = one.target.adapter  # type: ignore[attr-defined]
        try:
            with self.answering():
                while not one.ended:
                    if shares and self.answers > 1 and adapter.can_batch_answers:
                        one.target.together = BatchedAnswerSteps(self)
                        with self.release_temporarily():
                            self.batch.run([one])
                    else:
                        one.commit_next_tokens()
        finally:
            self.answers -= shares

    @cached_property
    def batch(self) -> Batch:
        """In which answers that share steps are decoded (see `answers`); each round holds the lock."""
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
        self._launched.clear()
        self._answering &= {threading.get_ident()}
        self.__dict__.pop("batch", None)

    def _queue(self, **how: Any) -> _Waiter:
        mine = _Waiter(threading.get_ident(), threading.Event(), monotonic(), **how)
        self._waiting.append(mine)
        return mine

    def _acquire(self, deadline: Any, over: Callable[[], bool] | None = None, **how: Any) -> bool:
        """Wait for the lock; return whether it is held, which it is not where what it was wanted for is `over`."""
        if deadline is not None:
            deadline.check()
        me = threading.get_ident()
        with self._lock:
            if self._holder == me:
                self._depth += 1
                return True
            mine = self._queue(over=over, **how)
            if self._holder is None:
                self._next()
        try:
            while not mine.event.wait(None if deadline is None and over is None else WAIT_S):
                if deadline is not None:
                    deadline.check()
                if over is not None:
                    self._wake()
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

    def _late(self, some: Iterable[_Waiter]) -> _Waiter | None:
        """Of `some` the token that has waited longest, if that is too long; `_lock` is held."""
        late = monotonic() - PATIENCE_S
        return next((one for one in some if one.token and one.since <= late), None)

    def _next(self) -> None:
        """Give the lock to who has waited longest, every other time to a token that waits for too long; while a pass stands
        still for tokens, to those that it lets go before it, or back to it. `_lock` is held."""
        self._holder, self._depth = None, 0
        for mine in [one for one in self._waiting if one.over is not None and one.over()]:
            self._waiting.remove(mine)
            mine.event.set()
        self._drop_done_passes()
        still = self._still
        able = [one for one in self._waiting if still is None or one is still or one.token]
        if len(self._launched) >= LAUNCHED:
            able = [one for one in able if one.over is None]
        late = None if self._jumped else self._late(able)
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
