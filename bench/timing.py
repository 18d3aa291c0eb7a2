"""Take times honestly, and write them down with the conditions they were taken under."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mmaccel.core.rows import JsonlFile, measurement_conditions, read_rows, write_atomically

__all__ = [
    "Log",
    "Times",
    "compare",
    "documented_parser",
    "measure",
    "measurement_conditions",
    "read_rows",
    "told",
    "write_rows",
]


@dataclass(frozen=True)
class Times:
    """Seconds of repeated runs."""

    seconds: tuple[float, ...]

    def row(self, prefix: str = "") -> dict[str, float | int]:
        """Median, quartiles and number of runs, for a result row."""
        low, middle, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return {
            f"{prefix}median_s": middle,
            f"{prefix}low_s": low,
            f"{prefix}high_s": high,
            f"{prefix}repeats": len(self.seconds),
        }

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def measure(
    run: Callable[[], Any], *, warmup: int = 2, repeats: int = 7, device: torch.device | str = "cpu"
) -> Times:
    """Times of `run`, after `warmup` runs that do not count; a CUDA device is waited for."""
    return compare({"run": run}, warmup=warmup, repeats=repeats, device=device)["run"]


def compare(
    runs: dict[str, Callable[[], Any]],
    *,
    warmup: int = 2,
    repeats: int = 7,
    device: torch.device | str = "cpu",
) -> dict[str, Times]:
    """Times of several things that take turns, so that what disturbs one disturbs all."""
    if repeats < 2:
        raise ValueError(f"repeats: {repeats}; a spread needs at least 2.")
    place = torch.device(device)
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(warmup + repeats):
        for name, run in runs.items():
            _wait(place)
            began = time.perf_counter()
            run()
            _wait(place)
            if turn >= warmup:
                taken[name].append(time.perf_counter() - began)
    return {name: Times(tuple(times)) for name, times in taken.items()}


class Log:
    """A file of result rows: the environment first, then one JSON object a line, each written at once."""

    def __init__(self, path: str | Path, device: torch.device | str = "cpu") -> None:
        self.path = Path(path)
        self._rows = JsonlFile(self.path)
        self._rows.add({"environment": measurement_conditions(device)})

    def row(self, **fields: Any) -> None:
        """One result."""
        self._rows.add(fields)


def documented_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser whose help is a script's docstring, as it stands."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def told(row: dict[str, Any]) -> str:
    """A row as one line of words: three digits of a number, of a large one all before the point."""

    def text(one: Any) -> str:
        return f"{one:.3g}" if abs(one) < 100 else f"{one:.0f}"

    return "  ".join(f"{name} {text(one) if isinstance(one, float) else one}" for name, one in row.items())


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """A file of these rows and no others; the one that is there stays as it is until the last row is written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, "".join(json.dumps(row) + "\n" for row in rows))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
