"""Deadlines: a call ends after its timeout, or when another thread cancels it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Literal

from mmaccel.core.errors import ModelError, shown

Over = Literal["timeout", "cancelled"]

WAIT_S = 0.05
"""Seconds between two checks of the deadline while a call waits for a lock."""


class Ended(Exception):
    """The deadline ended a call; `reason` is "timeout" or "cancelled". Internal: users never see it."""

    def __init__(self, reason: Over) -> None:
        super().__init__(reason)
        self.reason = reason


class Deadline:
    """The end of one call: `seconds` from now (None: none), or when any thread calls `cancel` or sets
    `event`, which several calls may share.

    Raises `ModelError` for seconds that are not a positive number.
    """

    def __init__(self, seconds: float | None = None, event: threading.Event | None = None) -> None:
        if seconds is not None and not (
            isinstance(seconds, int | float)
            and not isinstance(seconds, bool)
            and 0 < seconds <= threading.TIMEOUT_MAX
        ):
            raise ModelError(f"timeout: {shown(seconds)}; give a positive number of seconds, or None.")
        self._end = None if seconds is None else monotonic() + seconds
        self._cancelled, self._event = threading.Event(), event or threading.Event()

    def cancel(self) -> None:
        """Ask the call to end at its next check."""
        self._cancelled.set()

    def over(self) -> Over | None:
        """Why the call must end now; None: it may continue."""
        if self._cancelled.is_set() or self._event.is_set():
            return "cancelled"
        return "timeout" if self._end is not None and monotonic() >= self._end else None

    def left(self) -> float | None:
        """Seconds left; None without a timeout."""
        return None if self._end is None else max(0.0, self._end - monotonic())

    def check(self) -> None:
        """Raise `Ended` when the call must end."""
        if (reason := self.over()) is not None:
            raise Ended(reason)

    @contextmanager
    def holding(self, lock: threading.RLock) -> Iterator[None]:
        """Hold `lock`; raises `Ended` when the deadline passes before the lock is free."""
        while True:
            self.check()
            left = self.left()
            if lock.acquire(timeout=WAIT_S if left is None else min(WAIT_S, left)):
                break
        try:
            yield
        finally:
            lock.release()
