"""Jobs by several processes: each takes the next one when it is done, and tells what comes of it as it comes.

A process has a pipe of its own, which ends with either side: no lock is shared that a dead one could hold, nothing waits
for a dead one, and none outlives the parent.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

IDLE_S = 1.0
"""Seconds without a word after which the caller gets to look at the clock."""
END_S = 5.0
"""Seconds that processes which were killed are waited for: one may still be giving memory of a device back."""
ROW, DONE, FAILED = range(3)

Rows = Callable[[Any], Iterable[Any]]
"""What comes of a job."""


def devices(device: str, processes: int) -> list[str]:
    """Where each process computes: with "cuda" on all visible devices in turns, else all on `device`."""
    count = torch.cuda.device_count() if device == "cuda" else 0
    return [f"cuda:{number % count}" if count else device for number in range(processes)]


def rows(
    begin: Callable[[argparse.Namespace], Rows],
    options: argparse.Namespace,
    jobs: Sequence[Any],
    processes: int,
) -> Iterator[Any | None]:
    """What comes of `jobs`, as it comes; None when there was nothing for a while.

    `begin`, a function of a module, makes ready by `options`, whose `device` is the process's own, what does the jobs: here
    for one process, in others with one thread each for more. They are ended with the iterator; close it. Raises `SystemExit`
    in a sentence for one that failed or died.
    """
    if not jobs:
        return
    if processes == 1:
        found = begin(options)
        for job in jobs:
            yield from found(job)
        return
    left = deque(jobs)
    at_work: dict[Connection, Any] = {}
    try:
        for device in devices(options.device, min(processes, len(jobs))):
            end, process = _start(begin, argparse.Namespace(**{**vars(options), "device": device}))
            at_work[end] = process
            _give(end, left)
        while at_work:
            ready = wait(list(at_work), IDLE_S)
            if not ready:
                yield None
            for end in ready:
                assert isinstance(end, Connection)
                kind, told = _heard(end)
                if kind == ROW:
                    yield told
                elif kind == FAILED:
                    raise SystemExit(told)
                elif left:
                    _give(end, left)
                else:
                    at_work.pop(end).kill()
                    end.close()
    finally:
        for end, process in at_work.items():
            process.kill()
            end.close()
        until = time.monotonic() + END_S
        for process in at_work.values():
            process.join(max(0.0, until - time.monotonic()))


def _give(end: Connection, left: deque[Any]) -> None:
    with contextlib.suppress(ConnectionError):  # of one that died the end is read, which tells it
        end.send(left.popleft())


def _heard(end: Connection) -> tuple[int, Any]:
    try:
        kind, told = end.recv()
    except (EOFError, ConnectionError):
        raise SystemExit("a process died; give fewer processes if memory is short.") from None
    return kind, told


def _start(
    begin: Callable[[argparse.Namespace], Rows], options: argparse.Namespace
) -> tuple[Connection, Any]:
    """A process and our end of its pipe. It never sees an interrupt, which goes to all processes of a terminal: that is the
    parent's to handle."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(begin, options, theirs), daemon=True)
    # Where it is begun with the first process it lets interrupts in again.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    theirs.close()
    return ours, process


def _work(begin: Callable[[argparse.Namespace], Rows], options: argparse.Namespace, end: Connection) -> None:
    """In the process: does jobs until there is no one to give them."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    try:
        if torch.device(options.device).type == "cuda" and torch.device(options.device).index is not None:
            torch.cuda.set_device(options.device)
        found = begin(options)
        while True:
            for row in found(end.recv()):
                end.send((ROW, row))
            end.send((DONE, None))
    except (EOFError, ConnectionError):
        return
    except Exception as error:
        end.send((FAILED, f"{type(error).__name__}: {error}"))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


@contextlib.contextmanager
def interruptible(out: Path) -> Iterator[None]:
    """An interrupt ends the command in a sentence, with status 130; also where a shell, for a command in the background, has
    interrupts ignored. `out` has what was measured."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        print(
            f"interrupted; {out} has what was measured, and the same command goes on from there.",
            file=sys.stderr,
        )
        raise SystemExit(130) from None
