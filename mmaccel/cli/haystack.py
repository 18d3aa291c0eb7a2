"""`mmaccel eval haystack`: where in a video a card is still found, method by method, at one share of attention."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmaccel.cli import choices
from mmaccel.cli.ask import Device, Dtype, Json, Model
from mmaccel.cli.console import bars, many, number, out, print_json, steps
from mmaccel.cli.evaluate import Seed, Videos, check_segments, lengths_of
from mmaccel.core.errors import UnknownName, WorldError
from mmaccel.core.recipe import Recipe

if TYPE_CHECKING:
    from mmaccel.eval.cases import Case, Film
    from mmaccel.eval.haystack import Haystack

Recipes = Annotated[list[str] | None, typer.Option("--recipe", help="A name or a YAML file; several.")]
Rivals = Annotated[
    list[str] | None,
    typer.Option("--rival", help="A method brought to the share of --level; several, or all."),
]


def haystack(
    model: Model = "tiny-ov",
    recipe: Recipes = None,
    rival: Rivals = None,
    level: Annotated[
        str | None,
        typer.Option("--level", help="The recipe whose share rivals get (default: the last --recipe)."),
    ] = None,
    frames: Annotated[str, typer.Option("--frames", help="Lengths in frames, with commas.")] = "128,512,2048",
    depths: Annotated[int, typer.Option("--depths", min=1, help="Stretches a video is divided into.")] = 5,
    samples: Annotated[int, typer.Option("--samples", min=1, help="Questions of each cell.")] = 4,
    seed: Seed = 0,
    documents: Annotated[
        bool, typer.Option("--documents", help="Text between video segments (MM-NIAH).")
    ] = False,
    segments: Annotated[int, typer.Option("--segments", min=1, help="Video segments of a document.")] = 4,
    videos: Videos = None,
    output: Annotated[
        Path | None,
        typer.Option("--out", help="Write each answer, as JSON lines, to this file; go on where it stopped."),
    ] = None,
    picture: Annotated[
        Path | None, typer.Option("--picture", help="Draw the maps: .svg, .png or .pdf.")
    ] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    as_json: Json = False,
) -> None:
    """Needle in a haystack by length and depth, for recipes and for rivals at the same share of attention."""
    from mmaccel.eval.cases import Film, checked_seed, tokens_per_frame
    from mmaccel.eval.haystack import Haystack, haystack_cases, shots
    from mmaccel.eval.rivals import RIVALS

    checked_seed(seed)
    lengths = lengths_of(frames)
    check_segments(lengths, segments if documents else 1)
    for path, option in ((output, "--out"), (picture, "--picture")):
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            raise WorldError(f"{option}: {path} is no place for a file; name a file in a folder that exists.")
    fixed = choices.recipes(recipe or ["dense", "searched"], model)
    named = list(RIVALS) if rival == ["all"] else list(rival or [])
    for one in named:
        if one not in RIVALS:
            raise UnknownName("rival", one, RIVALS)
        if one in fixed:
            raise WorldError(
                f"--rival: {one!r} is a --recipe too; rename the recipe's file or leave one of them out."
            )
    yardstick = level or list(fixed)[-1]
    if yardstick not in fixed:
        raise UnknownName("recipe of --level", yardstick, fixed)

    settings = {"model": model, "documents": segments if documents else 0, "depths": depths, "seed": seed}
    log = _Log(output, settings)
    found = Haystack(depths, log.shots)
    place, kept_in = choices.where(device), choices.dtype(dtype)
    processor = choices.processor(model)
    loaded = choices.load(model, place, kept_in)
    stopped, whole = False, False
    try:
        with bars() as progress, Film(videos, steps(progress)) as film:
            per_frame = tokens_per_frame(processor) if documents else 16
            for length in lengths:
                options = {"documents": segments if documents else 0, "tokens_per_frame": per_frame}
                asked = list(haystack_cases(length, depths, samples, seed, **options))
                bar = progress.add_task(f"{length:>5}", total=len(asked), unit="questions")
                if not asked:
                    continue
                told = steps(progress, "methods")
                methods = fixed | _levelled(
                    named, fixed[yardstick], log, loaded, processor, asked[0][1], film, told
                )
                for depth, case in asked:
                    left = {n: r for n, r in methods.items() if not log.has(n, case)}
                    for row in shots(loaded, processor, left, iter([(depth, case)]), film):
                        log.write(row)
                    progress.advance(bar)
        whole = True
    except KeyboardInterrupt:
        stopped = True
    finally:
        # Also when something broke: what was answered is not lost.
        if whole or stopped or found.shots:
            _show(found, settings, yardstick, log.missed(named), whole, as_json)
    if picture is not None and found.shots:
        from mmaccel.eval.picture import haystack_maps
        from mmaccel.figure import save

        save(haystack_maps(found), picture)
    if stopped:
        raise typer.Exit(130)


def _levelled(
    named: list[str],
    yardstick: Recipe,
    log: _Log,
    model: Any,
    processor: Any,
    case: Case,
    film: Film,
    told: Any,
) -> dict[str, Recipe]:
    """The rivals at the share that the yardstick computes on the first prompt of a length."""
    from mmaccel.eval.answer import ask, prompt
    from mmaccel.eval.rivals import RIVALS, computed, level

    length = case.world.frames
    todo = [name for name in named if (name, length) not in log.levels]
    if todo:
        inputs = prompt(processor, case.content(film.watch(case.world)), model)

        def measure(fields: Mapping[str, Any] | Recipe) -> float:
            chosen = fields if isinstance(fields, Recipe) else Recipe.load(fields)
            share = computed(ask(model, processor, inputs, chosen, max_new_tokens=1).report)
            assert share is not None
            return share

        wanted = min(1.0, measure(yardstick))
        for done, name in enumerate(todo):
            told("level", done, len(todo))
            log.level(name, length, *level(RIVALS[name], wanted, measure), wanted)
        told("level", len(todo), len(todo))
    return {name: Recipe.load(log.levels[name, length]) for name in named}


class _Log:
    """The answers so far, and the file they are in: settings, then levels and answers as they come."""

    def __init__(self, path: Path | None, settings: Mapping[str, Any]) -> None:
        from mmaccel.eval.haystack import Shot

        self.path = path
        self.shots: list[Shot] = []
        self.levels: dict[tuple[str, int], dict[str, Any]] = {}
        self.shares: dict[tuple[str, int], tuple[float, float]] = {}
        self._seen: set[tuple[str, int, int, str]] = set()
        rows = list(_lines(path)) if path is not None and path.exists() else []
        if not rows:
            self._put({"settings": dict(settings)})
            return
        try:
            if rows[0]["settings"] != settings:
                raise WorldError(
                    f"--out: {path} holds a run with other settings ({rows[0]['settings']}); give another file."
                )
            for row in rows[1:]:
                if "level" in row:
                    self.levels[row["level"], row["frames"]] = row["fields"]
                    self.shares[row["level"], row["frames"]] = row["share"], row["wanted"]
                else:
                    self.shots.append(Shot(**row))
        except (KeyError, TypeError) as error:
            raise WorldError(f"--out: {path} is there and holds no haystack; give another file.") from error
        self._seen = {self._key(shot.recipe, shot) for shot in self.shots}

    @staticmethod
    def _key(recipe: str, at: Any) -> tuple[str, int, int, str]:
        world = getattr(at, "world", at)
        return recipe, world.frames, world.seed, at.question

    def has(self, recipe: str, case: Case) -> bool:
        return self._key(recipe, case) in self._seen

    def write(self, row: list[Any]) -> None:
        for shot in row:
            self.shots.append(shot)
            self._seen.add(self._key(shot.recipe, shot))
            self._put(shot.to_dict())

    def level(self, name: str, frames: int, fields: dict[str, Any], share: float, wanted: float) -> None:
        self.levels[name, frames] = fields
        self.shares[name, frames] = share, wanted
        self._put({"level": name, "frames": frames, "fields": fields, "share": share, "wanted": wanted})

    def missed(self, named: list[str]) -> list[dict[str, Any]]:
        """The rivals of `named` that are not near the share they should have, at each length."""
        from mmaccel.eval.rivals import NEAR, RIVALS

        return [
            {
                "rival": name,
                "frames": frames,
                "share": share,
                "wanted": wanted,
                "budget": RIVALS[name].budget,
            }
            for (name, frames), (share, wanted) in self.shares.items()
            if name in named and abs(share / wanted - 1) > NEAR
        ]

    def _put(self, row: Mapping[str, Any]) -> None:
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")


def _lines(path: Path) -> Iterator[dict[str, Any]]:
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


def _show(
    found: Haystack,
    settings: Mapping[str, Any],
    yardstick: str,
    missed: list[dict[str, Any]],
    whole: bool,
    as_json: bool,
) -> None:
    from rich.table import Table

    gaps = {name: found.against(name, yardstick) for name in found.recipes if name != yardstick}
    if as_json:
        print_json(
            {
                **settings,
                "rows": found.rows(),
                "mean": {name: found.mean(name) for name in found.recipes},
                "against": {
                    name: {
                        "recipe": yardstick,
                        "difference": mean,
                        "interval": None if n < 2 else half,
                        "asked": n,
                    }
                    for name, (mean, half, n) in gaps.items()
                },
                "missed": missed,
                "complete": whole,
            }
        )
        return
    shown = Table(title="accuracy, and the share of attention computed, by frames")
    shown.add_column("recipe")
    for frames in found.lengths:
        shown.add_column(str(frames), justify="right")
    shown.add_column("mean", justify="right")
    shown.add_column(f"against {yardstick}", justify="right")
    rows = {(row["recipe"], row["frames"]): row for row in found.rows()}
    for name in found.recipes:
        cells = []
        for frames in found.lengths:
            row = rows.get((name, frames), {"accuracy": None, "kept": None})
            cells.append(f"{number(row['accuracy'], '.1%')} ({number(row['kept'], '.0%')})")
        gap = "" if name not in gaps else f"{100 * gaps[name][0]:+.1f} ± {100 * gaps[name][1]:.1f} points"
        shown.add_row(name, *cells, number(found.mean(name), ".1%"), gap)
    out().print(shown)
    for one in missed:
        why = "no budget tried comes nearer" if one["budget"] else "it has no budget"
        out().print(
            f"{one['rival']} computes {one['share']:.1%} at {many(one['frames'], 'frame')}, and {yardstick} "
            f"{one['wanted']:.1%}: {why}.",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
