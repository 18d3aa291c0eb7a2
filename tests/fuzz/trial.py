"""Cases that are tried one by one: each gives an answer or one sentence, in time and memory; here, or in processes.

A case is made from a seed, and named by it in what fails: `cases(random.Random(seed))` gives what is called.
"""

import copy
import json
import os
import random
import resource
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mmaccel.core.errors import MmaccelError

CASES = 200
FEW = 60
"""Cases that are tried in this process; as many as `CASES` in processes of their own."""
SECONDS = 5.0
"""Longest a case may take."""
BYTES = 1 << 30
"""Most memory a case may take."""
SENTENCE = 500
"""Longest sentence."""
DELAY_S = 25.0
"""Seconds after which a process of a case is ended, on a machine that has other work too."""

Case = Callable[[], Any]


class Hang(BaseException):
    """A case took too long."""


@contextmanager
def hurried() -> Iterator[list[str]]:
    """Raise `Hang` in what runs inside too long; where it was is listed, for a library may swallow the error."""
    found: list[str] = []

    def late(number: int, frame: Any) -> None:
        found.append("".join(traceback.format_stack(frame, limit=6)))
        raise Hang

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, 2 * SECONDS)
    try:
        yield found
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def verdict(case: Case) -> tuple[str | None, bool]:
    """What is wrong with how a case ended, None for nothing, and whether it gave an answer."""
    # Processor time: other work on the machine is no hang. What waits is ended by the alarm.
    begin, held = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    answered, wrong, late = False, None, list[str]()
    try:
        with hurried() as late, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            case()
            answered = True
    except MmaccelError as error:
        told = str(error)
        if len(told) > SENTENCE or "\n" in told or not told.endswith((".", "?", "!", ")")):
            wrong = f"no sentence: {told[:300]!r} of {len(told)} characters"
    except Hang:
        pass
    except Exception:
        wrong = traceback.format_exc(limit=-4)
    if late:
        wrong = f"hangs: {late[0]}"
    if time.process_time() - begin > SECONDS:
        wrong = wrong or f"takes {time.process_time() - begin:.0f} s"
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - held) * 1024
    if grown > BYTES:
        wrong = wrong or f"takes {grown >> 20} MiB"
    return wrong, answered


def try_here(cases: Callable[[random.Random], Case], count: int = FEW, first: int = 0) -> float:
    """Try `count` cases in this process; the share that gave an answer."""
    wrong, answers = [], 0
    for seed in range(first, first + count):
        told, answered = verdict(cases(random.Random(seed)))
        answers += answered
        if told is not None:
            wrong.append(f"case {seed}: {told}")
    assert not wrong, f"{len(wrong)} of {count}:\n" + "\n".join(wrong[:8])
    return answers / count


def try_apart(cases: Callable[[random.Random], Case], count: int = CASES, first: int = 10_000) -> None:
    """Try `count` cases, each in a process with a limit on its address space and on its time."""
    wrong = []
    for seed in range(first, first + count):
        child = os.fork()
        if child == 0:
            status = 3
            try:
                size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
                resource.setrlimit(resource.RLIMIT_AS, (size + 2 * BYTES, size + 2 * BYTES))
                told = verdict(cases(random.Random(seed)))[0]
                if told is not None:
                    os.write(2, f"case {seed}: {told}\n".encode("utf-8", "replace"))
                status = 0 if told is None else 1
            finally:
                os._exit(status)
        end = time.monotonic() + DELAY_S
        found, status = os.waitpid(child, os.WNOHANG)
        while not found and time.monotonic() < end:
            time.sleep(0.002)
            found, status = os.waitpid(child, os.WNOHANG)
        if not found:
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
        if status:
            wrong.append(f"case {seed}: {'does not end' if not found else f'status {status}'}")
    assert not wrong, f"{len(wrong)} of {count}: {wrong[:8]}"


def damaged(chance: random.Random, data: bytes) -> bytes:
    """The same bytes, cut, flipped, doubled or with others between."""
    data = bytes(data)
    for _ in range(chance.choice((1, 1, 2, 8))):
        at = chance.randrange(len(data) + 1)
        way = chance.randrange(6)
        if way == 0:
            data = data[:at]
        elif way == 1 and at < len(data):
            data = data[:at] + bytes([data[at] ^ (1 << chance.randrange(8))]) + data[at + 1 :]
        elif way == 2:
            data = data[:at] + chance.randbytes(chance.choice((1, 4, 64))) + data[at:]
        elif way == 3:
            data = data[:at] + data[at + chance.choice((1, 4, 64)) :]
        elif way == 4:
            data = data[:at] + data[max(0, at - 64) : at] * chance.choice((1, 50)) + data[at:]
        else:
            put = chance.choice((b"\0" * 8, b"\xff" * 8, b"\xff\xfe", b"\xef\xbb\xbf"))
            data = data[:at] + put + data[at + 8 :]
    return data


ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 7, 63, 64, 10**6, 2**31, 2**63, -(2**63), 2**64, 10**30, 0.5, -0.0, 1e-300, 1e308,
    float("nan"), float("inf"), "", " ", "a", "\0", "\n", "grid", "off", "null", "../../x", "/dev/zero",
    "/proc/self/mem", ".", "x" * 5000, "\u202e\U0001f600", "video>text", [], {}, [[]], [None], [1, 2, 3], ["grid"],
    {"name": None}, {"name": []}, {"name": "grid"}, {"name": "grid", "stride": -1}, {"": ""}, {"0": {"0": "grid"}},
    {"name": {"name": "a"}}, [0.5] * 400,
)  # fmt: skip


def odd(chance: random.Random) -> Any:
    """One of these, or several within each other."""
    value = copy.deepcopy(chance.choice(ODD))
    for _ in range(chance.choice((0, 0, 0, 1, 3, 80))):
        value = [value] if chance.random() < 0.5 else {chance.choice(("name", "a", "0")): value}
    return value


def places(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where in a tree of lists and mappings there is something."""
    inner = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [path] * bool(path) + [place for name, value in inner for place in places(value, (*path, name))]


def changed(chance: random.Random, tree: Any) -> Any:
    """A copy with something in it replaced, left out, or added."""
    tree = json.loads(json.dumps(tree))
    for _ in range(chance.choice((1, 1, 2, 5))):
        found = places(tree)
        if not found:
            return odd(chance)
        *way, last = chance.choice(found)
        inner = tree
        for name in way:
            inner = inner[name]
        if chance.random() < 0.2:
            del inner[last]
        elif chance.random() < 0.1 and isinstance(inner, dict):
            inner[chance.choice(("", "x" * 300, "name", "a"))] = odd(chance)
        else:
            inner[last] = odd(chance)
    return tree
