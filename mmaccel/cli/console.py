"""Console output shared by all commands: results, error messages, progress bars."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, Task, TextColumn, TimeElapsedColumn

from mmaccel.core.errors import MmaccelError, MmaccelWarning
from mmaccel.core.report_page import bytes_text as bytes_text
from mmaccel.core.report_page import plural as plural

EVERY_S = 10.0
"""Seconds between two lines of progress off a terminal."""


class _TolerantFile(io.FileIO):
    """The file below a standard stream; drops what is written after the reader of a pipe, or a terminal, has gone."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO, errno.ECONNRESET):
                raise
            return len(data)


def open_tolerant_stream(given: io.TextIOWrapper | None) -> TextIO:
    """A stream to the file of `given` that ends no command: it drops what nobody reads, also where the shell has closed
    `given` (None), and writes letters that the encoding lacks as escapes."""
    if given is None:
        return open(os.devnull, "w", errors="backslashreplace")
    with suppress(OSError, ValueError):
        given.flush()
    how: Any = {"line_buffering": given.line_buffering, "write_through": given.write_through}
    file: Any = _TolerantFile(given.fileno(), "w", closefd=False)
    file = file if given.write_through else io.BufferedWriter(file)
    return io.TextIOWrapper(file, given.encoding, "backslashreplace", **how)


def out() -> Console:
    """The rich console for results, on standard output."""
    # A pipe has no width; a table in a file should not be cut to a terminal's.
    return Console(width=None if sys.stdout.isatty() else 120)


def echo(text: str) -> None:
    """Print text to standard output as it is, without console markup."""
    out().print(text, markup=False, highlight=False, soft_wrap=True)


def remark(text: str) -> None:
    """Print a line to standard error as it is, without console markup."""
    Console(stderr=True).print(text, markup=False, highlight=False, soft_wrap=True)


def print_json(result: Mapping[str, Any]) -> None:
    """Print one JSON object; lists of numbers stay on one line."""
    text = json.dumps(result, indent=2, allow_nan=False)
    # No string holds a line break: JSON writes it as two characters.
    text = re.sub(
        r"\[\s*\n[-+.\deE,\s]+\]",
        lambda found: f"[{', '.join(found[0][1:-1].replace(',', ' ').split())}]",
        text,
    )
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def silence_libraries() -> None:
    """Silence the libraries we use, and print our own warnings as one line each."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    shown = warnings.showwarning

    def show(message: Any, category: type[Warning], *rest: Any, **more: Any) -> None:
        if issubclass(category, MmaccelWarning):
            print(f"warning: {message}", file=sys.stderr)
        elif os.environ.get("MMACCEL_DEBUG") == "1":
            shown(message, category, *rest, **more)

    warnings.showwarning = show


def error_sentence(error: Exception) -> str | None:
    """Return the one-sentence message of an error that the user can mend; None for an internal error."""
    if isinstance(error, MmaccelError):
        return str(error)
    if getattr(error, "option_name", None) == "--import":
        return "--import stands before the command, as in `mmaccel --import FILE list`."
    if hasattr(error, "format_message"):
        # Wrong usage; the class is typer's own in some versions and click's in others.
        told = str(error.format_message())
        return told if told.endswith((".", "?", "!")) else told + "."
    if type(error).__name__ in ("OutOfMemoryError", "MemoryError"):
        return "there is not enough memory; take fewer frames with --max-frames, or a recipe with chunk set."
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        where = error.filename or "what was to be written"
        return f"{where}: no space is left on the device; make room, or give a path with some."
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {(error.strerror or type(error).__name__).lower()}."
    return None


@contextmanager
def progress_bars() -> Iterator[Progress]:
    """Context with progress bars on standard error, removed when done; without a terminal a line every `EVERY_S` s."""
    columns = (
        TextColumn("{task.description:<8}"),
        BarColumn(bar_width=32),
        MofNCompleteColumn(),
        TextColumn("{task.fields[unit]}"),
        TimeElapsedColumn(),
    )
    console = Console(stderr=True)
    progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    with progress if console.is_terminal else _lines(progress):
        yield progress


@contextmanager
def _lines(progress: Progress) -> Iterator[None]:
    """What the bars would show, as lines."""
    over, begin = threading.Event(), time.monotonic()

    def show() -> None:
        while not over.wait(EVERY_S):
            print(_line(progress.tasks, time.monotonic() - begin), file=sys.stderr, flush=True)

    thread = threading.Thread(target=show, name="mmaccel-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _line(tasks: Sequence[Task], seconds: float) -> str:
    """The tasks that are under way, and the seconds since `progress_bars` opened."""
    shown = []
    for task in tasks:
        if task.visible and not task.finished:
            total = "" if task.total is None else f"/{task.total:.0f}"
            done = f"{task.description.strip()} {task.completed:.0f}{total}"
            shown.append(f"{done} {task.fields['unit']}".rstrip())
    return f"{', '.join(shown) or 'at work'}; {seconds:.0f} s"


def show_bar(
    progress: Progress, name: str, unit: str, total: int | None = None
) -> Callable[[int, int | None], None]:
    """Add a progress bar and return its callback ``(done, total)``, which counts in `unit`."""
    task = progress.add_task(name, total=total, unit=unit)

    def update(done: int, known: int | None) -> None:
        progress.update(task, completed=done, total=known if known is not None else total)

    return update


def progress_callback(progress: Progress, unit: str = "frames") -> Callable[[str, int, int | None], None]:
    """Return a callback ``(name, done, total)`` that shows a progress bar for each name until it is complete."""
    tasks: dict[str, Any] = {}

    def update(what: str, done: int, total: int | None) -> None:
        if what not in tasks:
            tasks[what] = progress.add_task(what, total=total, unit=unit)
        progress.update(tasks[what], completed=done, total=total, visible=done != total)

    return update


def group_table_columns(names: Sequence[str], room: int, wide: int) -> Iterator[Sequence[str]]:
    """Split table columns into even groups, one table each: tables are `room` characters wide, columns `wide`."""
    begin, tables = 0, -(-len(names) // max(1, room // wide))
    for number in range(tables):
        end = begin + (len(names) - begin) // (tables - number)
        yield names[begin:end]
        begin = end


def format_number(value: float | None, form: str, unit: str = "") -> str:
    """Return a figure for a table: `value` in the format `form`, then `unit`; a dash for None."""
    return "-" if value is None else f"{value:{form}}{unit}"


def describe_cut_off(reason: str, tokens: int) -> str:
    """Return in words why an answer of `tokens` tokens was cut off; "" if the model ended it. See `Answer.finish_reason`."""
    return {
        "length": f"cut off at {plural(tokens, 'token')} (--max-new-tokens)",
        "positions": f"cut off at {plural(tokens, 'token')}: the model has no more positions",
        "timeout": f"cut off at {plural(tokens, 'token')} by its timeout",
        "cancelled": f"cancelled at {plural(tokens, 'token')}",
    }.get(reason, "")
