"""What a search has done so far, in a file: a search that was stopped goes on from there."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from mmaccel.core.errors import RecipeError
from mmaccel.core.rows import Rows


def parts_of(out: Path) -> Path:
    """The file in which a search for the table `out` keeps what it has done."""
    return out.with_name(out.name + ".parts")


class Parts:
    """What a search has done so far: a row of what it is about, then one of each cost, of time spent, and of each layer."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._rows: Rows

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep the file from other searches, of this process or another, and read it; `RecipeError` if one is at work on it,
        or if it holds no search.

        The lock is the system's and ends with the process, however that ends.
        """
        with ExitStack() as stack:
            try:
                handle = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
                stack.callback(os.close, handle)
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._rows = Rows(self.path, "about")
            except BlockingIOError as error:
                raise RecipeError(
                    f"another search is at work in {self.path}; wait for its end, or give another --out."
                ) from error
            except (IsADirectoryError, ValueError) as error:
                raise RecipeError(
                    f"{self.path} is there and holds no search that can go on; delete it, or give another --out."
                ) from error
            try:
                yield
            finally:
                if not self._rows.rows:  # nothing was done
                    self.path.unlink(missing_ok=True)

    def begin(self, about: Mapping[str, Any]) -> None:
        """Start, or go on with what is there if it is about the same; `RecipeError` if it is about something else."""
        told = json.loads(json.dumps(about))
        known = self._all("about")
        if known and known[0] != told:
            other = _listed(differing(known[0], told)) if isinstance(known[0], dict) else "beginning"
            raise RecipeError(
                f"{self.path} holds a search with another {other}; give what it was begun with, delete the file, or give "
                "another --out."
            )
        if not known:
            self._rows.add({"about": about})

    def _all(self, key: str) -> list[Any]:
        return [row[key] for row in self._rows.rows if key in row]

    def measured(self) -> list[dict[str, Any]]:
        """What was measured."""
        return self._all("measured")

    def note(self, row: dict[str, Any]) -> dict[str, Any]:
        """Keep one measurement."""
        self._rows.add({"measured": row})
        return row

    def spent(self, seconds: float) -> None:
        """Count time that was no layer's."""
        self._rows.add({"spent": seconds})

    def layer(self, layer: int, heads: list[dict[str, Any]], seconds: float, peak: int) -> None:
        """Keep a layer: what was measured for its heads, the time it took, the most memory held."""
        self._rows.add({"layer": layer, "heads": heads, "seconds": seconds, "peak_bytes": peak})

    def layers(self) -> dict[int, dict[str, Any]]:
        """The layers that are done, by number."""
        return {row["layer"]: row for row in self._rows.rows if "layer" in row}

    def seconds(self) -> float:
        """All time spent, over all the times the search was started."""
        return float(sum(self._all("spent"))) + sum(row["seconds"] for row in self.layers().values())

    def remove(self) -> None:
        """The table is written: what was kept for it goes."""
        self.path.unlink(missing_ok=True)
        self._rows.rows.clear()


OPTIONS = {
    "cost": "--cost",
    "model": "model",
    "block": "--block",
    "context": "--context",
    "boundaries": "--boundaries",
    "extended": "--extended",
    "backend": "--backend",
    "device": "--device",
    "dtype": "--dtype",
    "tolerance": "tolerance",
    "versions": "version of a package",
}
"""What a user gives, by its name in what a search is about; all else there follows from these and from the sample."""


def differing(known: Mapping[str, Any], told: Mapping[str, Any]) -> list[str]:
    """What differs between two searches, as a user gives it: the videos first, then the cost, in brackets what was known."""
    was, now = known.get("sample") or {}, told.get("sample") or {}
    found = []
    for name, option in (("videos", "--video"), ("text", "--text")):
        if was.get(name) != now.get(name):
            found.append(f"{option} ({', '.join(was.get(name, ()))})")
    if was != now and not found:
        found.append("sample (what is in --video, --fps or --max-tokens)")
    # What is not given follows the sample.
    follows = (
        {"context"}
        if all(a.get("context") == b.get("tokens") for a, b in ((known, was), (told, now)))
        else set()
    )
    follows |= {"boundaries"} if known.get("modalities") != told.get("modalities") else set()
    for name, option in OPTIONS.items():
        if known.get(name) != told.get(name) and name not in follows:
            held = known.get(name)
            found.append(f"{option} ({held})" if isinstance(held, str | int | float) else option)
    return found or [next(n for n in {**told, **known} if told.get(n) != known.get(n))]


def _listed(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
