"""Paths and URLs of videos: checks before they are opened, error reasons, and pipes with a timeout."""

from __future__ import annotations

import io
import os
import select
import signal
import stat
import sys

import av.error

from mmaccel.core.errors import VideoError, quoted

CONCAT = b"ffconcat version 1.0"
LIST = "is a list of other files, not a video: name the files one by one."
LONGEST_MS = 2**31 - 1
"""The longest the system waits, 24 days."""


def is_url(path: str | os.PathLike[str]) -> bool:
    """Whether `path` has a scheme (``://``)."""
    return "://" in os.fspath(path)


def local_path(path: str) -> str:
    """The path of a `file://` URL; any other path or URL unchanged."""
    return "/" + path[7:].lstrip("/") if path[:7].lower() == "file://" else path


def format_path_for_error(path: str) -> str:
    """Format a path for an error message: one line, at most about 240 characters."""
    return path if 0 < len(path) <= 240 and path.isprintable() else quoted(path, 240)[1:-1] or '""'


def is_file(name: str, may_be_empty: bool = False) -> bool:
    """Whether `name` is a regular file that can be opened; raises `VideoError` for a path that can never be read."""
    path, name = name, format_path_for_error(name)
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISDIR(mode):
            raise VideoError(f"{name} is a folder, not a video: name a file in it.")
        if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
            raise VideoError(f"{name} is a device: name its format, such as v4l2, or name a video file.")
        if not stat.S_ISREG(mode):
            return False
        with open(path, "rb") as file:
            begin = file.read(len(CONCAT))
            if not may_be_empty and not begin:
                raise VideoError(f"{name} is empty: it has 0 bytes.")
            if begin == CONCAT:
                raise VideoError(f"{name} {LIST}")
    except FileNotFoundError as error:
        raise VideoError(f"there is no file {name}: check the path.") from error
    except PermissionError as error:
        raise VideoError(f"{name} may not be read: permission denied.") from error
    except (OSError, ValueError) as error:
        raise VideoError(f"{name} cannot be read: {os_reason(error)}.") from error
    return True


def os_reason(error: Exception) -> str:
    """The reason of an operating-system error, in lower case."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return str(text).rstrip(".").lower()


def is_read_timeout(error: Exception) -> bool:
    """Whether an error means that a source sent no data within its timeout."""
    return isinstance(error, (av.error.ExitError, TimeoutError))


def is_pipe(name: str) -> bool:
    """Whether `name` is a named pipe."""
    try:
        return stat.S_ISFIFO(os.stat(name).st_mode)
    except (OSError, ValueError):
        return False


def wait_for_data(number: int, seconds: float) -> bool:
    """Wait, at most `seconds`, until the file descriptor `number` has data or is at its end; return whether it has or is."""
    asked = select.poll()  # `select` refuses the files of a program that has many open
    asked.register(number, select.POLLIN)
    return bool(asked.poll(min(1e3 * seconds, LONGEST_MS)))


def has_no_writer(file: int) -> bool:
    """Whether no process has the file open for writing; False if the system cannot tell. Always True for a pipe."""
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


class Pipe(io.RawIOBase):
    """A named pipe opened for reading; raises `TimeoutError` if no data comes for `timeout` seconds.

    Without a timeout, opening and reading would wait forever for a missing writer.
    """

    def __init__(self, path: str | os.PathLike[str], timeout: float) -> None:
        super().__init__()
        self._number, self._timeout = os.open(path, os.O_RDONLY | os.O_NONBLOCK), timeout

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        """Read up to `size` bytes (-1: a default number); b"" at the end. Raises `TimeoutError` if none come."""
        # Not ready before the first writer; ready, with nothing to read, once the last has gone.
        if not wait_for_data(self._number, self._timeout):
            raise TimeoutError(f"nothing came for {self._timeout:g} s")
        return self._data(size)

    def _data(self, size: int) -> bytes:
        return os.read(self._number, size if size >= 0 else io.DEFAULT_BUFFER_SIZE)

    def close(self) -> None:
        if not self.closed:
            os.close(self._number)
        super().close()
