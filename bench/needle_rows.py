"""The rows of `needles.py`: settings, answers and levels in a file, and the figures and maps that follow from them alone."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from mmaccel.core.report import Rows as Written
from mmaccel.figure import save
from mmaccel_lab.eval.cases import Case
from mmaccel_lab.eval.haystack import Gap, Haystack, Shot, interval, spread_by
from mmaccel_lab.eval.picture import haystack_maps

OURS = ("dense", "searched")


@dataclass(frozen=True)
class Setting:
    """What a row says of itself beside its answer."""

    model: str
    documents: int
    compress: str | None
    dtype: str

    @property
    def task(self) -> str:
        return "MM-NIAH" if self.documents else "V-NIAH"


KEY = ("recipe", "frames", "seed", "question")
"""What tells an answer of a setting from others."""
DENSE_ROWS = {"searched": "without_tail", "without_boundaries": "without_both", "tri_shape": "a_shape"}
"""Methods in which the rows of the question are dense, and each without these rows: Tri-shape then is A-shape."""
Level = tuple[Setting, int, str]
"""A setting without its dtype, frames, rival."""


class Rows:
    """A file of rows: what is in it, and more as it comes."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.depths: int | None = None
        self.shots: dict[Setting, list[Shot]] = defaultdict(list)
        self.levels: dict[Level, dict[str, Any]] = {}
        self.seen: set[tuple[Any, ...]] = set()
        self._file = None if path is None else Written(path)
        for row in [] if self._file is None else self._file.rows:
            self.take(row)

    def take(self, row: Mapping[str, Any]) -> None:
        """A row of a file, or a new one."""
        if "model" not in row:
            depths = row["settings"]["depths"]
            if self.depths not in (None, depths):
                raise SystemExit(f"maps of {self.depths} and of {depths} depths cannot be put together.")
            self.depths = depths
            return
        told = dict(row)
        setting = Setting(*(told.pop(name) for name in Setting.__dataclass_fields__))
        if "level" in told:
            name, frames = told.pop("level"), told.pop("frames")
            self.levels.setdefault((replace(setting, dtype=""), frames, name), told)
        elif (key := (setting, *(told[name] for name in KEY))) not in self.seen:
            self.seen.add(key)
            self.shots[setting].append(Shot(**told))

    def add(self, row: Mapping[str, Any]) -> None:
        """Write a row, and take it."""
        self.write(row)
        self.take(row)

    def add_new(self, row: Mapping[str, Any]) -> None:
        """As `add`, unless the answer is there: of a video's questions some may be asked again."""
        setting = Setting(*(row[name] for name in Setting.__dataclass_fields__))
        if "level" in row or (setting, *(row[name] for name in KEY)) not in self.seen:
            self.add(row)

    def write(self, row: Mapping[str, Any]) -> None:
        assert self._file is not None
        self._file.add(row)

    def has(self, setting: Setting, recipe: str, case: Case) -> bool:
        """Whether a method answered."""
        return (setting, recipe, case.world.frames, case.world.seed, case.question) in self.seen

    def gather(self, other: Rows) -> None:
        """Take what another file holds."""
        self.take({"settings": {"depths": other.depths}})
        for setting, found in other.shots.items():
            for shot in found:
                self.take({**asdict(setting), **shot.to_dict()})
        self.levels = {**other.levels, **self.levels}


def summary(rows: Rows) -> Iterator[str]:
    """The figures of rows, line by line: each setting by length, then models and tasks together."""
    together: dict[tuple[str, str | None, str], list[Setting]] = defaultdict(list)
    for setting in sorted(rows.shots, key=str):
        found = Haystack(rows.depths or 1, rows.shots[setting])
        yield f"{setting.model} {setting.task} {setting.dtype}" + _after(setting.compress)
        for name in sorted(found.recipes, key=_place):
            held = {row["frames"]: row for row in found.rows() if row["recipe"] == name}
            cells = [
                f"{n}: {sum(row['right'])}/{sum(row['asked'])} ({row['kept']:.1%})" for n, row in held.items()
            ]
            mine = {((s.frames, s.seed), s.question): s.right for s in found.shots if s.recipe == name}
            yield f"  {name:20}" + "  ".join(f"{cell:22}" for cell in (*cells, _share(mine)))
        for tasks in (setting.task, "both tasks"):
            together[tasks, setting.compress, setting.dtype].append(setting)
    for (tasks, compress, dtype), settings in together.items():
        yield f"all models, {tasks}, {dtype}" + _after(compress)
        right: dict[str, dict[Any, bool]] = defaultdict(dict)
        for setting in settings:
            for shot in rows.shots[setting]:
                at = (setting.documents, shot.frames, shot.seed), setting, shot.question
                right[shot.recipe][at] = shot.right
        for name, mine in sorted(right.items(), key=lambda item: _place(item[0])):
            line = f"  {name:20}{_share(mine)}"
            yield line + f"; against searched {_gap(mine, right['searched'])}" if name != "searched" else line
        if right.keys() >= {*DENSE_ROWS, *DENSE_ROWS.values()}:
            yield f"  {'rows of the question dense':40}{'on':36}{'off':36}on - off"
            for name, less in DENSE_ROWS.items():
                told = f"{_share(right[name]):36}{_share(right[less]):36}{_gap(right[name], right[less])}"
                yield f"    {f'{name}, {less}':38}{told}"
            on = _gap(right["searched"], right["without_boundaries"])
            off = _gap(right["without_tail"], right["without_both"])
            yield f"    {'ours, less ours without boundaries':38}{on:36}{off}"
    for setting in rows.shots:
        other = replace(setting, dtype="float32")
        if setting != other and other in rows.shots:
            its = {(s.recipe, s.frames, s.seed, s.question): s.right for s in rows.shots[other]}
            mine = {(s.recipe, s.frames, s.seed, s.question): s.right for s in rows.shots[setting]}
            both = mine.keys() & its.keys()
            unlike = sum(mine[at] != its[at] for at in both)
            yield f"{setting.model} {setting.task}: {unlike} of {len(both)} answers in {setting.dtype} and float32 differ"
    for setting in sorted(rows.shots, key=str):
        for frames, name, mine, ours in departures(rows.shots[setting]):
            told = f"{name} computes {mine:.1%} where ours computes {ours:.1%} ({mine / ours - 1:+.0%})"
            about = f"{setting.model} {setting.task} {setting.dtype}" + _after(setting.compress)
            yield f"{about}, {frames} frames: {told}"


def departures(shots: Sequence[Shot]) -> Iterator[tuple[int, str, float, float]]:
    """(frames, method, its share, ours) by length where a method's share of attention is more than a tenth off ours: means
    over the questions that both were asked. A level is of one prompt, and what a method computes may hang on the video."""
    kept: dict[tuple[int, str], dict[tuple[int, str], float]] = defaultdict(dict)
    for shot in shots:
        if shot.kept is not None:
            kept[shot.frames, shot.recipe][shot.seed, shot.question] = shot.kept
    for frames, name in sorted(kept):
        its, ours = kept[frames, name], kept[frames, "searched"]
        both = its.keys() & ours.keys()
        if name not in OURS and both:
            mine, our = (math.fsum(one[at] for at in both) / len(both) for one in (its, ours))
            if abs(mine / our - 1) > 0.1:
                yield frames, name, mine, our


def _place(name: str) -> tuple[bool, str]:
    """Where a method is told: ours first, the others by name."""
    return name not in OURS, name


def _share(answers: Mapping[Any, bool]) -> str:
    """Right of asked, and its interval; answers by (video, ..., question)."""
    right, asked = sum(answers.values()), len(answers)
    low, high = interval(right, asked, spread_by([at[0] for at in answers], list(answers.values())))
    return f"{right}/{asked} = {right / asked:.1%} ({low:.1%} to {high:.1%})"


def _gap(mine: Mapping[Any, bool], its: Mapping[Any, bool]) -> str:
    """How much more often one is right than the other, in points, over what both were asked."""
    both = [at for at in mine if at in its]
    effect = spread_by([at[0] for at in both], [mine[at] - its[at] for at in both])
    gap = Gap.of([(mine[at], its[at]) for at in both], effect)
    return f"{100 * gap.mean:+.1f} ({100 * gap.low:+.1f} to {100 * gap.high:+.1f}), {gap.asked} questions"


def _after(compress: str | None) -> str:
    return f", {compress} first" if compress else ""


def draw(rows: Rows, folder: Path) -> None:
    """The maps of every setting in which rivals were asked, as pictures in a folder."""
    import matplotlib

    for setting, found in rows.shots.items():
        if {shot.recipe for shot in found} - set(OURS):
            words = ["needles", setting.model, setting.task.lower(), setting.compress, setting.dtype]
            place = folder / ("_".join(Path(word).name for word in words if word) + ".svg")
            drawn = haystack_maps(
                Haystack(rows.depths or 1, sorted(found, key=lambda shot: _place(shot.recipe)))
            )
            # Letters stay letters of one font: shapes, or a list of fonts at every word, are most of a file.
            letters = {"svg.fonttype": "none", "svg.hashsalt": "needles", "font.sans-serif": ["DejaVu Sans"]}
            with matplotlib.rc_context(letters):
                save(drawn, place)
