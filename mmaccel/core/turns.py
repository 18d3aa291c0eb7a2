"""Who runs next on a model: threads take turns, in the order in which they asked."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mmaccel.core.decoding.generate import Deadline

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

    @contextmanager
    def holding(self, deadline: Deadline | None = None) -> Iterator[float]:
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

    def forked(self) -> None:
        """In a forked process only the thread that forked goes on."""
        mine = self._holder == threading.get_ident()
        self._lock, self._waiting = threading.Lock(), deque()
        self._holder, self._depth = (self._holder, self._depth) if mine else (None, 0)

    def _queue(self) -> threading.Event:
        mine = threading.Event()
        self._waiting.append((threading.get_ident(), mine))
        return mine

    def _acquire(self, deadline: Deadline | None) -> None:
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
