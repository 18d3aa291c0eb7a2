"""Reads a named pipe with a deadline: without one, opening and reading wait forever for a missing writer."""

from __future__ import annotations

import io
import os
import select
import stat

LONGEST_MS = 2**31 - 1
"""The longest the system waits, 24 days."""


def is_pipe(name: str) -> bool:
    """Whether `name` is a named pipe."""
    try:
        return stat.S_ISFIFO(os.stat(name).st_mode)
    except (OSError, ValueError):
        return False


def ready(number: int, seconds: float) -> bool:
    """Whether a file has something to read, or is at its end, within `seconds`."""
    asked = select.poll()  # `select` refuses the files of a program that has many open
    asked.register(number, select.POLLIN)
    return bool(asked.poll(min(1e3 * seconds, LONGEST_MS)))


class Pipe(io.RawIOBase):
    """A named pipe opened for reading; raises `TimeoutError` where nothing comes for `timeout` seconds."""

    def __init__(self, path: str | os.PathLike[str], timeout: float) -> None:
        super().__init__()
        self._number, self._timeout = os.open(path, os.O_RDONLY | os.O_NONBLOCK), timeout

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return False

    def read(self, size: int = -1) -> bytes:
        # Not ready before the first writer; ready, with nothing to read, once the last has gone.
        if not ready(self._number, self._timeout):
            raise TimeoutError(f"nothing came for {self._timeout:g} s")
        return os.read(self._number, size if size >= 0 else io.DEFAULT_BUFFER_SIZE)

    def close(self) -> None:
        if not self.closed:
            os.close(self._number)
        super().close()
