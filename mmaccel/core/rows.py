"""Files of measurements, one JSON object a line, to which a restarted run appends; the conditions of a measurement."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from mmaccel.backends import select


class JsonlFile:
    """A file of measurements, one JSON object (row) a line, to which rows are appended as they are measured.

    A last line that was cut off, as its run was killed, is skipped, and the next row replaces it. `first` is the key with
    which the first row must begin: any other file raises `ValueError` and is not changed. None accepts any file.
    """

    def __init__(self, path: Path, first: str | None = None) -> None:
        self.path = path
        data = path.read_bytes() if path.exists() else b""
        begin = f'{{"{first}": '.encode()
        if data and first is not None and not (data.startswith(begin) or begin.startswith(data)):
            raise ValueError(f"{path} does not begin with {first}")
        whole = data[: data.rfind(b"\n") + 1]
        self._cut = len(whole) if whole != data else None
        self.rows: list[dict[str, Any]] = list(_parse_json_lines(whole))

    def add(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Append one row to the file at once; return the row as read back from JSON."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self._cut is not None:
            os.truncate(self.path, self._cut)
            self._cut = None
        with self.path.open("a", encoding="utf-8") as file:
            file.write((line := json.dumps(row)) + "\n")
        self.rows.append(json.loads(line))
        return self.rows[-1]


def _parse_json_lines(data: bytes) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects in `data`, one a line; skip lines that are none."""
    for line in data.splitlines():
        with suppress(ValueError):
            if isinstance(row := json.loads(line), dict):
                yield row


def read_rows(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """Return the rows of several files, including the rows that describe environments."""
    return [row for path in paths for row in _parse_json_lines(path.read_bytes())]


def write_atomically(path: Path, text: str) -> None:
    """Write a file atomically: whole or not at all."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def measurement_conditions(device: torch.device | str = "cpu", **more: Any) -> dict[str, Any]:
    """Return the conditions of a measurement: command, commit, device, threads, package versions (None: not installed)."""
    place = torch.device(device)
    found: dict[str, Any] = {
        "command": " ".join(sys.argv),
        "commit": _commit(),
        "device": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "system": platform.system(),
        **more,
    }
    if place.type == "cuda" and (card := torch.cuda.get_device_properties(place)):
        found |= {"device": card.name, "device_bytes": card.total_memory, "cuda": torch.version.cuda}
    packages = ("mmaccel", "torch", "transformers", "triton", "flash-attn-4")
    return found | {package: select.package_version(package) for package in packages}


def _commit() -> str | None:
    """The commit of the checkout that this file is in; None where it is in none."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    with suppress(OSError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
        return done.stdout.strip() or None
    return None
