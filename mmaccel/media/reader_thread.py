"""Sources read in a thread: a queue that reports a stall and can be left, and a file that grows."""

from __future__ import annotations

import atexit
import io
import os
import signal
import stat
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from mmaccel.media.address import ready

Item = TypeVar("Item")

CHECK_S = 0.05
"""Seconds between two calls of `check` while an item is awaited."""

LEAVE_S = 0.5
"""Seconds that `Pump.close` waits for its thread."""


class Stall(Exception):
    """The source sent nothing for `seconds`."""

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self.seconds = seconds


class Forked(Exception):
    """The process forked: the thread that reads is in its parent."""


class Line(Generic[Item]):
    """The queue from the thread that reads to the caller: at most `most` items, and whether the source stalls."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._items: deque[Item | BaseException] = deque()
        self._changed = threading.Condition()
        self._awaited = self._over = False
        self._stall: Stall | None = None

    @property
    def left(self) -> bool:
        """Whether the caller wants no more."""
        return self._over

    @property
    def starved(self) -> bool:
        """Whether the caller awaits an item, or wants no more. A slow caller has items to take: it awaits none."""
        with self._changed:
            return self._over or (self._awaited and not self._items)

    def put(self, item: Item | BaseException) -> bool:
        """Hand over, when there is room; False when the caller wants no more."""
        with self._changed:
            self._changed.wait_for(lambda: self._over or len(self._items) < self._most)
            if not self._over:
                self._items.append(item)
                self._changed.notify_all()
            return not self._over

    def get(self, check: Callable[[float], None]) -> Item:
        """The next item; `check(seconds)` is called with how long it was awaited so far. Raises what `put` was given to
        raise, `Stall`, `StopIteration` once the line is closed, and what `check` raises."""
        began = time.monotonic()
        try:
            while not self._there():
                check(time.monotonic() - began)  # without the lock: it may run anything
        finally:
            self._awaited = False
        with self._changed:
            if self._over:
                raise StopIteration
            if not self._items and self._stall is not None:
                stall, self._stall = self._stall, None
                raise stall
            item = self._items.popleft()
            self._changed.notify_all()
            if isinstance(item, BaseException):
                self._over = True
                raise item
            return item

    def _there(self) -> bool:
        """Whether `get` has something to give or to raise; waits a little where it has not."""
        with self._changed:
            if not self._awaited:
                self._awaited = True
                self._changed.notify_all()
            if not (self._over or self._items or self._stall):
                self._changed.wait(CHECK_S)
            return bool(self._over or self._items or self._stall)

    def wait(self, seconds: float) -> bool:
        """Report a stall once the caller has taken all items, and wait until it asks for more; False when it does not."""
        with self._changed:
            self._stall = Stall(seconds)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._over or (self._stall is None and self._awaited))
            return not self._over

    def close(self) -> None:
        """Whoever waits at either end goes on."""
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def forked(self) -> None:
        """In a forked process nobody reads, and nobody gives back a lock: what was read is given, and then `Forked`."""
        self._changed = threading.Condition()
        self._items.append(Forked())


class Pump(Generic[Item]):
    """Reads items in a thread, at most `most` ahead. `get` raises what reading raised, and `Stall` where reading waits.

    make(line)  opens the source and gives its items; it calls `line.wait(seconds)` when nothing came for so long, which
                returns True once the caller asks for more, and ends when `line.left`
    """

    def __init__(self, make: Callable[[Line[Item]], Iterator[Item]], most: int) -> None:
        self._line = Line[Item](most)
        self._thread = threading.Thread(
            target=_pumped, args=(make, self._line), name="mmaccel-media", daemon=True
        )
        self._begun = False

    def get(self, check: Callable[[float], None]) -> Item:
        """The next item, as `Line.get` gives it."""
        if not self._begun:
            _running[self._thread] = self._line
            try:
                self._thread.start()
            except RuntimeError:  # no more threads: the next call tries again
                del _running[self._thread]
                raise
            self._begun = True
        return self._line.get(check)

    def close(self) -> None:
        """End the reading. A thread that waits for an address ends when that sends something or its timeout is over."""
        self._line.close()
        if self._begun and threading.current_thread() is not self._thread:
            self._thread.join(LEAVE_S)

    def __del__(self) -> None:
        self._line.close()


_running: dict[threading.Thread, Line[Any]] = {}


@atexit.register
def _leave() -> None:
    """End all reading before the interpreter goes: it ends the process where a thread comes back into torch later."""
    running, late = list(_running.items()), time.monotonic() + LEAVE_S
    for _, line in running:
        line.close()
    for thread, _ in running:
        thread.join(max(0.0, late - time.monotonic()))


def _forked() -> None:
    for line in list(_running.values()):
        line.forked()
    _running.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def _pumped(make: Callable[[Line[Item]], Iterator[Item]], line: Line[Item]) -> None:
    end: BaseException = StopIteration()
    try:
        try:
            for item in make(line):
                if not line.put(item):
                    return
        except BaseException as error:
            end = error
        line.put(end)
    finally:
        _running.pop(threading.current_thread(), None)


class Growing(io.RawIOBase):
    """A file that is still being written: at its end `read` waits for more.

    When nothing came for `timeout` seconds the file is over if nobody has it open for writing. Else, and where the system
    does not tell, `line.wait(timeout)` is called, and reading goes on if it returns True. A caller that still has items to
    take does not wait: reading then goes on at once. When the caller has left, the file is over.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        timeout: float,
        line: Line[Any],
        poll: float = 0.02,
    ) -> None:
        super().__init__()
        # To open a pipe would wait for its writer.
        self._file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb", buffering=0)
        self._timeout, self._line, self._poll = timeout, line, poll
        self._over = False

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return False

    def read(self, size: int = -1) -> bytes:
        patience = time.monotonic() + self._timeout
        while not (self._over or self._line.left):
            # A file is always ready; a pipe is when there is data or nobody writes any more.
            there = ready(self._file.fileno(), self._poll)
            data = self._file.read(size) if there else None
            if data:
                return bytes(data)
            if time.monotonic() >= patience:
                # FFmpeg asks several times before it believes in an end.
                self._over = (there and is_finished(self._file.fileno())) or (
                    self._line.starved and not self._line.wait(self._timeout)
                )
                patience = time.monotonic() + self._timeout
            elif there:
                time.sleep(self._poll)
        return b""

    def close(self) -> None:
        self._file.close()
        super().close()


def is_finished(file: int) -> bool:
    """Whether no process has the file, or the pipe at its end, open for writing; False where the system cannot say."""
    if stat.S_ISFIFO(os.fstat(file).st_mode):
        return True
    if sys.platform != "linux":
        return False
    import fcntl

    try:
        # The kernel grants a read lease on what nobody writes to. One that opens it meanwhile is told of by this signal,
        # which is ignored where nobody listens; the default would end the process.
        fcntl.fcntl(file, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError:
        return False
    return True
