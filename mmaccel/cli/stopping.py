"""SIGTERM stops a command as Ctrl-C does, and keeps the same; the exit status is 143."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED, TERMINATED = 130, 143
AGAIN_S = 1.0
"""Seconds after which another SIGTERM acts: a supervisor may signal a process and its whole group, and means one stop."""


class _Signal:
    """Whether SIGTERM came, and whether a shield delays it."""

    def __init__(self) -> None:
        self.came = self.waits = False
        self.shields = 0
        self._acted = 0.0

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Raise KeyboardInterrupt, or have the shield raise it when it ends; do nothing soon after the last time.

        Python swallows what is raised in a `__del__` or in some callbacks: the next SIGTERM has to act too.
        """
        now = time.monotonic()
        if self.came and now - self._acted < AGAIN_S:
            return
        self.came, self._acted = True, now
        self.waits = self.shields > 0
        if not self.waits:
            raise KeyboardInterrupt


_signal = _Signal()


@contextmanager
def terminable() -> Iterator[None]:
    """Inside, SIGTERM raises KeyboardInterrupt in the main thread, one that comes `AGAIN_S` after it too.

    Where SIGTERM is ignored or has a handler of the caller's own, that stays.
    """
    global _signal
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    _signal = _Signal()
    signal.signal(signal.SIGTERM, _signal.handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def shielded() -> Iterator[None]:
    """SIGTERM waits until the code inside, such as a save, has ended."""
    _signal.shields += 1
    try:
        yield
    finally:
        _signal.shields -= 1
    if _signal.waits and not _signal.shields:
        _signal.waits = False
        raise KeyboardInterrupt


def status_of(status: object) -> int:
    """The exit status of a command that ended with `status`; 143 where SIGTERM stopped it."""
    code = status if isinstance(status, int) else 0
    return TERMINATED if code == INTERRUPTED and _signal.came else code
