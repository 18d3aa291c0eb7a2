"""Live sources: a file that grows, and a thread that reads ahead of the caller and reports a stall."""

from __future__ import annotations

import io
import os
import queue
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Generic, TypeVar

from mmaccel.media.pipe import ready

Item = TypeVar("Item")


class Stall(Exception):
    """The source sent nothing for `seconds`."""

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self.seconds = seconds


class Pump(Generic[Item]):
    """Reads `items` in a thread, at most `most` ahead. `next` raises what reading raised, and `Stall` where reading waits.

    make(wait)  opens the source and gives its items; it calls `wait(seconds)` when nothing came for so long, which returns
                True once the caller asks for more, and False when the caller is gone
    """

    def __init__(self, make: Callable[[Callable[[float], bool]], Iterator[Item]], most: int) -> None:
        self._line = _Line[Item](most)
        self._thread = threading.Thread(
            target=_pumped, args=(make, self._line), name="mmaccel-media", daemon=True
        )
        self._begun = False

    def __iter__(self) -> Pump[Item]:
        return self

    def __next__(self) -> Item:
        if not self._begun:
            self._begun = True
            self._thread.start()
        return self._line.get()

    def close(self) -> None:
        """End the reading; what it waits for at an address may keep the thread for as long as the source's timeout."""
        self._line.close()
        if self._begun and threading.current_thread() is not self._thread:
            self._thread.join(1.0)

    def __del__(self) -> None:
        self._line.close()


class _Line(Generic[Item]):
    """The queue from the thread to the caller."""

    def __init__(self, most: int) -> None:
        self._queue: queue.Queue[Item | BaseException] = queue.Queue(most)
        self._asked, self._over = threading.Event(), threading.Event()

    def put(self, item: Item | BaseException) -> bool:
        """Hand over, when there is room; False when the caller is gone."""
        while not self._over.is_set():
            with suppress(queue.Full):
                self._queue.put(item, timeout=0.1)
                return True
        return False

    def get(self) -> Item:
        if self._over.is_set():
            raise StopIteration
        self._asked.set()
        item = self._queue.get()
        if isinstance(item, BaseException):
            if not isinstance(item, Stall):
                self._over.set()
            raise item
        return item

    def wait(self, seconds: float) -> bool:
        """Report a stall, and wait until the caller asks for more."""
        self._asked.clear()
        if not self.put(Stall(seconds)):
            return False
        self._asked.wait()
        return not self._over.is_set()

    def close(self) -> None:
        self._over.set()
        self._asked.set()


def _pumped(make: Callable[[Callable[[float], bool]], Iterator[Item]], line: _Line[Item]) -> None:
    end: BaseException = StopIteration()
    try:
        for item in make(line.wait):
            if not line.put(item):
                return
    except BaseException as error:
        end = error
    line.put(end)


class Growing(io.RawIOBase):
    """A file that is still being written: at its end `read` waits for more.

    When nothing came for `timeout` seconds the file is over if nobody has it open for writing. Else, and where the system
    does not tell, `wait(timeout)` is called, and reading goes on if it returns True.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        timeout: float,
        wait: Callable[[float], bool],
        poll: float = 0.02,
    ) -> None:
        super().__init__()
        # To open a pipe would wait for its writer.
        self._file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb", buffering=0)
        self._timeout, self._wait, self._poll = timeout, wait, poll
        self._over = False

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return False

    def read(self, size: int = -1) -> bytes:
        patience = time.monotonic() + self._timeout
        while not self._over:
            # A file is always ready; a pipe is when there is data or nobody writes any more.
            there = ready(self._file.fileno(), self._poll)
            data = self._file.read(size) if there else None
            if data:
                return bytes(data)
            if time.monotonic() >= patience:
                # FFmpeg asks several times before it believes in an end.
                self._over = (there and is_finished(self._file.fileno())) or not self._wait(self._timeout)
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
