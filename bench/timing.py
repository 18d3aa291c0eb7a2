"""Take times honestly, and write them down with the conditions they were taken under."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch


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


def environment(device: torch.device | str = "cpu") -> dict[str, Any]:
    """What a reader has to know to believe a number."""
    place = torch.device(device)
    found: dict[str, Any] = {
        "command": " ".join(sys.argv),
        "commit": _commit(),
        "device": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "system": platform.system(),
    }
    if place.type == "cuda":
        card = torch.cuda.get_device_properties(place)
        found |= {"device": card.name, "device_bytes": card.total_memory, "cuda": torch.version.cuda}
    for package in ("mmaccel", "torch", "transformers", "triton", "flash-attn-4"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


class Log:
    """A file of result rows: the environment first, then one JSON object a line, each written at once."""

    def __init__(self, path: str | Path, device: torch.device | str = "cpu") -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._end_line()
        self._write({"environment": environment(device)})

    def row(self, **fields: Any) -> None:
        """One result."""
        self._write(fields)

    def _end_line(self) -> None:
        """A line that a run was killed in stays alone: what follows it could not be read either."""
        if self.path.exists() and self.path.read_bytes()[-1:] not in (b"", b"\n"):
            with self.path.open("a", encoding="utf-8") as file:
                file.write("\n")

    def _write(self, fields: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(fields) + "\n")


def read_rows(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """The rows of some files, environments among them; a line that was cut off is left out."""
    found = []
    for path in paths:
        for line in path.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
    return found


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """A file of these rows and no others; the one that is there stays as it is until the last row is written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(path.name + ".new")
    new.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    os.replace(new, path)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _commit() -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except OSError:
        return None
    return done.stdout.strip() or None
