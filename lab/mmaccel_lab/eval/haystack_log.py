"""The file of a haystack: where it was measured, the levels and answers as they come, several runs put together."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mmaccel.core.errors import WorldError
from mmaccel.core.rows import JsonlFile
from mmaccel_lab.eval.cases import Case
from mmaccel_lab.eval.haystack import Shot
from mmaccel_lab.eval.rivals import NEAR, RIVALS

Key = tuple[str, int, int, str]


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
        self.shares: dict[tuple[str, int], list[dict[str, Any]]] = {}
        self._seen: set[Key] = set()
        self._file = None if path is None else _opened(path, "--out")
        if path is not None and self._file is not None and self._file.rows:
            self._take(path, "--out", self._file.rows, {})
        else:
            self._put({"environment": dict(about), "settings": self.settings})

    @classmethod
    def gathered(cls, paths: Sequence[Path]) -> Log:
        """What several files hold, as one that is written nowhere. Raises `WorldError` where their settings differ in more
        than the seed."""
        held = []
        for path in paths:
            if not path.is_file():
                raise WorldError(f"--rows: there is no file {path}; give one that --out wrote.")
            held.append((path, _opened(path, "--rows").rows))
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
        seed = None
        for number, row in enumerate(rows):
            free = {**apart, **({"seed": None} if number else {})}
            try:
                if number == 0 or "settings" in row:
                    seed = row["settings"]["seed"]
                    if {**row["settings"], **free} != {**self.settings, **free}:
                        raise WorldError(
                            f"{option}: {path} holds a run with other settings ({row['settings']}); give another file."
                        )
                elif "level" in row:
                    self.levels[row["level"], row["frames"]] = row["fields"]
                    told = {"share": row["share"], "wanted": row["wanted"], "yardstick": row.get("yardstick")}
                    self._levelled(row["level"], row["frames"], {**told, "seed": seed})
                elif (shot := Shot(**row)) and self.key(shot.recipe, shot) not in self._seen:
                    self._keep(shot)
            except (KeyError, TypeError) as error:
                raise WorldError(
                    f"{option}: {path} is there and holds no haystack; give another file."
                ) from error

    @staticmethod
    def key(recipe: str, at: Shot | Case) -> Key:
        """What tells an answer from all others: the recipe, the length, the world's seed and the question."""
        world = at.world if isinstance(at, Case) else at
        return recipe, world.frames, world.seed, at.question

    def _keep(self, shot: Shot) -> None:
        self.shots.append(shot)
        self._seen.add(self.key(shot.recipe, shot))

    def has(self, recipe: str, case: Case) -> bool:
        """Whether a recipe was asked this."""
        return self.key(recipe, case) in self._seen

    def write(self, shots: Sequence[Shot]) -> None:
        """Add answers."""
        for shot in shots:
            self._keep(shot)
            self._put(asdict(shot))

    def level(
        self, name: str, frames: int, fields: dict[str, Any], share: float, wanted: float, yardstick: str
    ) -> None:
        """Add the fields of a rival at a length, and the share it computes where the `yardstick` computes `wanted`."""
        # As it is read again: in JSON keys are text.
        self.levels[name, frames] = json.loads(json.dumps(fields))
        told = {"share": share, "wanted": wanted, "yardstick": yardstick}
        self._levelled(name, frames, {**told, "seed": self.settings["seed"]})
        self._put({"level": name, "frames": frames, "fields": fields, **told})

    def _levelled(self, name: str, frames: int, told: dict[str, Any]) -> None:
        """Keep the share of a rival at a length; runs of several seeds set their own."""
        held = self.shares.setdefault((name, frames), [])
        if told not in held:
            held.append(told)

    def check_yardstick(self, rivals: Collection[str], yardstick: str) -> None:
        """Raise `WorldError` where the file holds one of `rivals` at the share of another recipe."""
        for (name, _), held in self.shares.items():
            for told in held:
                if name in rivals and told["yardstick"] not in (None, yardstick):
                    raise WorldError(
                        f"--level: {self.path} holds {name} at the share of {told['yardstick']}, and not of {yardstick}; "
                        "name that recipe, or give another file."
                    )

    def missed(self) -> list[dict[str, Any]]:
        """The rivals that are not near the share they should have on the first prompt of a length, of each run that set one.

        `budget` is whether they have one, `yardstick` the recipe whose share it is (None in files that do not tell), `seed`
        that of the run.
        """
        return [
            {
                "rival": name,
                "frames": frames,
                **told,
                "budget": name != "without_tail" and (name not in RIVALS or RIVALS[name].budget),
            }
            for (name, frames), held in self.shares.items()
            for told in held
            if abs(told["share"] / told["wanted"] - 1) > NEAR
        ]

    def _put(self, row: Mapping[str, Any]) -> None:
        if self._file is not None:
            self._file.add(row)


def _opened(path: Path, option: str) -> JsonlFile:
    """The rows of a haystack's file."""
    try:
        return JsonlFile(path, "environment")
    except ValueError as error:
        raise WorldError(f"{option}: {path} is there and holds no haystack; give another file.") from error
