"""A file of results, a JSON object a line: a run that was stopped goes on behind the lines that it wrote."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch


class Rows:
    """The rows of a file, which are written as they come.

    A line that a run was killed in is left out; where it is the last, the next row takes its place. `first` is the key with
    which every such file begins; `ValueError` for a file that begins otherwise, which stays as it is. None admits any file.
    """

    def __init__(self, path: Path, first: str | None = None) -> None:
        self.path = path
        data = path.read_bytes() if path.exists() else b""
        begin = f'{{"{first}": '.encode()
        if data and first is not None and not (data.startswith(begin) or begin.startswith(data)):
            raise ValueError(f"{path} does not begin with {first}")
        whole = data[: data.rfind(b"\n") + 1]
        self._cut = len(whole) if whole != data else None
        self.rows: list[dict[str, Any]] = list(parsed(whole))

    def add(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Write one row at once; gives it as it will be read."""
        line = json.dumps(row)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self._cut is not None:
            os.truncate(self.path, self._cut)
            self._cut = None
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        self.rows.append(json.loads(line))
        return self.rows[-1]


def parsed(data: bytes) -> Iterator[dict[str, Any]]:
    """The objects of the lines of `data`; a line that is none is left out."""
    for line in data.splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            yield row


def read_rows(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """The rows of some files, those of environments among them."""
    return [row for path in paths for row in parsed(path.read_bytes())]


def write_whole(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def environment(device: torch.device | str = "cpu", **more: Any) -> dict[str, Any]:
    """What a reader has to know to believe a number: command, commit, device, threads, versions (None: not installed)."""
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
    if place.type == "cuda":
        card = torch.cuda.get_device_properties(place)
        found |= {"device": card.name, "device_bytes": card.total_memory, "cuda": torch.version.cuda}
    for package in ("mmaccel", "torch", "transformers", "triton", "flash-attn-4"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def _commit() -> str | None:
    """The commit of the checkout that this file is in; None where it is in none."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except OSError:
        return None
    return done.stdout.strip() or None
