"""The file of a haystack: where it was measured, the levels and answers as they come, several runs put together."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from mmaccel.core.errors import WorldError
from mmaccel.eval.cases import Case
from mmaccel.eval.haystack import Shot
from mmaccel.eval.rivals import NEAR, RIVALS

Key = tuple[str, int, int, str]


def environment(device: str, dtype: str) -> dict[str, Any]:
    """What a reader has to know to believe the answers."""
    found: dict[str, Any] = {
        "command": " ".join(sys.argv),
        "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else platform.machine(),
        "dtype": dtype,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
    }
    for package in ("mmaccel", "torch", "transformers", "triton"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


class Log:
    """The answers so far, and the file they are in.

    A run begins with one row of its environment and settings; a row of each rival's level, and one of each answer, follow
    as they come. A file may hold several runs, one after the other, that differ in their seed alone.
    """

    def __init__(self, path: Path | None, settings: Mapping[str, Any], about: Mapping[str, Any]) -> None:
        """Go on with the file at `path`, or begin it. Raises `WorldError` for a file of other settings."""
        self.path = path
        self.settings: dict[str, Any] = dict(settings)
        self.shots: list[Shot] = []
        self.levels: dict[tuple[str, int], dict[str, Any]] = {}
        self.shares: dict[tuple[str, int], tuple[float, float]] = {}
        self._seen: set[Key] = set()
        rows = list(_rows(path)) if path is not None and path.exists() else []
        if not rows:
            self._put({"environment": dict(about), "settings": self.settings})
            return
        assert path is not None
        self._take(path, "--out", rows, {})

    @classmethod
    def gathered(cls, paths: Sequence[Path]) -> Log:
        """What several files hold, as one that is written nowhere. Raises `WorldError` where their settings differ in more
        than the seed."""
        held = []
        for path in paths:
            if not path.is_file():
                raise WorldError(f"--rows: there is no file {path}; give one that --out wrote.")
            held.append((path, list(_rows(path))))
        try:
            log = cls(None, held[0][1][0]["settings"], {})
        except (IndexError, KeyError, TypeError) as error:
            raise WorldError(
                f"--rows: {paths[0]} holds no haystack; give a file that --out wrote."
            ) from error
        for path, rows in held:
            log._take(path, "--rows", rows, {"seed": None})
        return log

    def _take(self, path: Path, option: str, rows: list[dict[str, Any]], apart: Mapping[str, Any]) -> None:
        """Take in the rows of a file; settings may differ in what `apart` names, and after the first row in the seed."""
        for number, row in enumerate(rows):
            free = {**apart, **({"seed": None} if number else {})}
            try:
                if number == 0 or "settings" in row:
                    if {**row["settings"], **free} != {**self.settings, **free}:
                        raise WorldError(
                            f"{option}: {path} holds a run with other settings ({row['settings']}); give another file."
                        )
                elif "level" in row:
                    self.levels[row["level"], row["frames"]] = row["fields"]
                    self.shares[row["level"], row["frames"]] = row["share"], row["wanted"]
                elif (shot := Shot(**row)) and self._key(shot.recipe, shot) not in self._seen:
                    self._keep(shot)
            except (KeyError, TypeError) as error:
                raise WorldError(
                    f"{option}: {path} is there and holds no haystack; give another file."
                ) from error

    @staticmethod
    def _key(recipe: str, at: Shot | Case) -> Key:
        world = at.world if isinstance(at, Case) else at
        return recipe, world.frames, world.seed, at.question

    def _keep(self, shot: Shot) -> None:
        self.shots.append(shot)
        self._seen.add(self._key(shot.recipe, shot))

    def has(self, recipe: str, case: Case) -> bool:
        """Whether a recipe was asked this."""
        return self._key(recipe, case) in self._seen

    def write(self, shots: Sequence[Shot]) -> None:
        """Add answers."""
        for shot in shots:
            self._keep(shot)
            self._put(shot.to_dict())

    def level(self, name: str, frames: int, fields: dict[str, Any], share: float, wanted: float) -> None:
        """Add the fields of a rival at a length, and the share it computes where `wanted` was wanted."""
        # As it is read again: in JSON keys are text.
        self.levels[name, frames] = json.loads(json.dumps(fields))
        self.shares[name, frames] = share, wanted
        self._put({"level": name, "frames": frames, "fields": fields, "share": share, "wanted": wanted})

    def missed(self) -> list[dict[str, Any]]:
        """The rivals that are not near the share they should have, at each length; `budget` is whether they have one."""
        return [
            {
                "rival": name,
                "frames": frames,
                "share": share,
                "wanted": wanted,
                "budget": name != "without_tail" and (name not in RIVALS or RIVALS[name].budget),
            }
            for (name, frames), (share, wanted) in self.shares.items()
            if abs(share / wanted - 1) > NEAR
        ]

    def _put(self, row: Mapping[str, Any]) -> None:
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a file; a last line that was cut off while it was written is taken away."""
    text = path.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]
    if whole != text and whole:
        path.write_text(whole, encoding="utf-8")
    try:
        for line in whole.splitlines():
            yield json.loads(line)
    except ValueError as error:
        raise WorldError(f"--out: {path} is there and holds no haystack; give another file.") from error
