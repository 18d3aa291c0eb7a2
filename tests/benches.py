"""Scripts of bench/ run in this process, as the command line runs them, and jobs for several processes."""

import argparse
import importlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


def ran(script: str, out: Path, *words: str) -> list[dict[str, Any]]:
    """The rows in `out` after `bench/<script>.py --device cpu --out <out> <words>`."""
    importlib.import_module(script).main(["--device", "cpu", "--out", str(out), *words])
    return [json.loads(line) for line in out.read_text().splitlines()]


def begin(options: argparse.Namespace) -> Callable[[int], Iterator[tuple[int, int, str]]]:
    """What comes of a job: who does it; -1 is raised, -2 ends the process, and -3 is at work for ever.

    It stands here for the sake of processes that start with it: they import nothing else.
    """

    def found(job: int) -> Iterator[tuple[int, int, str]]:
        yield job, os.getpid(), f"{options.device} {options.more}"
        if job == -1:
            raise ValueError("minus one")
        if job == -2:
            os._exit(1)
        while job == -3:
            pass

    return found
