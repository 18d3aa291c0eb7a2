"""Benchmarks in steps: each runs once, none is begun that would not end in time, what fails leaves the others alone."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from timing import Log, documented_parser, measurement_conditions, read_rows


@dataclass(frozen=True)
class Step:
    """A step by name: the seconds it takes on an H200, about, and what runs it."""

    name: str
    seconds: float
    run: Callable[[argparse.Namespace, Log], None]


def done_before(path: Path) -> set[str]:
    """Names of the steps whose rows are in the file already."""
    return {row["done"] for row in read_rows([path] if path.exists() else []) if "done" in row}


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """The options that `run_steps` reads, but for `shrink`, for a script to add its own to."""
    parser = documented_parser(description)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", required=True, help="file of result rows; rows are added to it")
    parser.add_argument("--only", nargs="+", help="steps, or the beginnings of their names")
    parser.add_argument("--limit", type=float, default=520.0, help="seconds in all")
    return parser


def run_steps(steps: Sequence[Step], options: argparse.Namespace) -> None:
    """Run what `options` asks for: `out`, `device`, `only` (beginnings of names), `limit` in seconds, `shrink`."""
    began = time.monotonic()
    log = Log(options.out, options.device)
    print(measurement_conditions(options.device), flush=True)
    done = done_before(log.path)
    for step in steps:
        if step.name in done or (options.only and not any(step.name.startswith(o) for o in options.only)):
            continue
        if time.monotonic() - began + step.seconds / options.shrink > options.limit:
            print(f"{step.name:24} left for another run", flush=True)
            continue
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        start = time.monotonic()
        try:
            step.run(options, log)
        except Exception as error:  # what one step meets must not take the others along
            text = str(error).splitlines()[0] if str(error) else ""
            log.row(case=step.name, failed=f"{type(error).__name__}: {text}")
            print(f"{step.name:24} {type(error).__name__}: {text[:120]}", flush=True)
            continue
        log.row(done=step.name, seconds=time.monotonic() - start)
