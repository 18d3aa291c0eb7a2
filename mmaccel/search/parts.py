"""What a search has done so far, in a folder: a search that was stopped goes on from there."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mmaccel.core.errors import RecipeError


def parts_of(out: Path) -> Path:
    """The folder in which a search for the table `out` keeps what it has done."""
    return out.with_name(out.name + ".parts")


class Parts:
    """What a search has done so far, a file a layer, each written whole or not at all."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep the folder from other searches, of this process or another; `RecipeError` if one is at work in it.

        The lock is the system's and ends with the process, however that ends.
        """
        self.folder.mkdir(exist_ok=True)
        handle = os.open(self.folder, os.O_RDONLY)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise RecipeError(
                    f"another search is at work in {self.folder}; wait for its end, or give another --out."
                ) from error
            try:
                yield
            finally:
                with suppress(OSError):
                    self.folder.rmdir()  # only when nothing was done
        finally:
            os.close(handle)

    def begin(self, about: Mapping[str, Any]) -> None:
        """Start, or go on with what is there if it is about the same; `RecipeError` if it is about something else."""
        told = json.loads(json.dumps(about))
        if (self.folder / "about.json").is_file():
            known = self._read("about.json", dict)
            if known != told:
                raise RecipeError(
                    f"{self.folder} holds a search with another {_listed(differing(known, told))}; give what it was begun "
                    "with, delete the folder, or give another --out."
                )
            return
        self.folder.mkdir(exist_ok=True)
        write_json(self.folder / "about.json", told)

    def measured(self) -> list[dict[str, Any]]:
        """What was measured."""
        path = self.folder / "measured.json"
        return self._read("measured.json", list) if path.is_file() else []

    def note(self, row: dict[str, Any]) -> dict[str, Any]:
        """Keep one measurement."""
        write_json(self.folder / "measured.json", [*self.measured(), row])
        return row

    def spent(self, seconds: float) -> None:
        """Count time that was no layer's."""
        path = self.folder / "spent.json"
        write_json(path, [*(self._read("spent.json", list) if path.is_file() else []), seconds])

    def _path(self, layer: int) -> Path:
        return self.folder / f"layer-{layer:03d}.json"

    def has(self, layer: int) -> bool:
        """Whether a layer is done; one whose file is damaged is not, and is measured again."""
        if not self._path(layer).is_file():
            return False
        try:
            found = self._layer(layer)
        except RecipeError:
            return False
        return found.keys() >= {"heads", "seconds", "peak_bytes"}

    def layer(self, layer: int, heads: list[dict[str, Any]], seconds: float, peak: int) -> None:
        """Keep a layer."""
        write_json(self._path(layer), {"heads": heads, "seconds": seconds, "peak_bytes": peak})

    def heads(self, layer: int) -> list[dict[str, Any]]:
        """What was measured for the heads of a layer."""
        found: list[dict[str, Any]] = self._layer(layer)["heads"]
        return found

    def seconds(self, depth: int) -> float:
        """All time spent, over all the times the search was started."""
        spent = self._read("spent.json", list)
        return float(sum(spent)) + sum(self._layer(n)["seconds"] for n in range(depth))

    def peaks(self, depth: int) -> list[int]:
        """The most memory held at each layer."""
        return [self._layer(n)["peak_bytes"] for n in range(depth)]

    def remove(self) -> None:
        """The table is written: what was kept for it goes, and the folder unless it holds something else."""
        names = ("about.json", "measured.json", "spent.json")
        for path in (
            *(self.folder / name for name in names),
            *self.folder.glob("layer-[0-9][0-9][0-9].json"),
        ):
            path.unlink(missing_ok=True)
        with suppress(OSError):
            self.folder.rmdir()

    def _layer(self, layer: int) -> dict[str, Any]:
        found: dict[str, Any] = self._read(self._path(layer).name, dict)
        return found

    def _read(self, name: str, kind: type) -> Any:
        """What a file holds; `RecipeError` where it was cut off or is not of its `kind`."""
        path = self.folder / name
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            found = None
        if not isinstance(found, kind):
            raise RecipeError(
                f"{path} is damaged; delete the folder {self.folder} and search anew, or give another --out."
            )
        return found


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


def write_json(path: Path, value: Any) -> None:
    """Write a file whole or not at all."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(json.dumps(value, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
