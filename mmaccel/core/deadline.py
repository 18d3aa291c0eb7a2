"""When a call has to end: after so many seconds, or when another thread cancels it."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Literal

from mmaccel.core.errors import ModelError

Over = Literal["timeout", "cancelled"]

WAIT_S = 0.05
"""Seconds for which a lock is waited for before a call is looked at again: it may have been cancelled."""


class Ended(Exception):
    """A call was ended by its deadline inside a pass; `reason` says how. It never reaches the user."""

    def __init__(self, reason: Over) -> None:
        super().__init__(reason)
        self.reason = reason


class Deadline:
    """The end of one call: `seconds` from now (None: none), or the moment at which any thread calls `cancel`, or sets
    `event`, which several calls may share.

    Raises `ModelError` for seconds that are not a positive number.
    """

    def __init__(self, seconds: float | None = None, event: threading.Event | None = None) -> None:
        if seconds is not None and not (
            isinstance(seconds, int | float) and not isinstance(seconds, bool) and 0 < seconds < math.inf
        ):
            raise ModelError(f"timeout: {seconds!r}; give a positive number of seconds, or None.")
        self._end = None if seconds is None else monotonic() + seconds
        self._cancelled, self._event = threading.Event(), event or threading.Event()

    def cancel(self) -> None:
        """End the call as soon as it next looks."""
        self._cancelled.set()

    def over(self) -> Over | None:
        """Why the call has to end now; None: it may go on."""
        if self._cancelled.is_set() or self._event.is_set():
            return "cancelled"
        return "timeout" if self._end is not None and monotonic() >= self._end else None

    def left(self) -> float | None:
        """Seconds until the end; None where there is none."""
        return None if self._end is None else max(0.0, self._end - monotonic())

    def check(self) -> None:
        """Raise `Ended` when the call has to end."""
        if (reason := self.over()) is not None:
            raise Ended(reason)

    @contextmanager
    def holding(self, lock: threading.RLock) -> Iterator[None]:
        """With `lock` held; raises `Ended` when the call has to end before it is free."""
        while True:
            self.check()
            left = self.left()
            if lock.acquire(timeout=WAIT_S if left is None else min(WAIT_S, left)):
                break
        try:
            yield
        finally:
            lock.release()
