"""`mmaccel-lab eval haystack`: where in a video a card is still found, method by method, at one share of attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmaccel.cli import choices
from mmaccel.cli.choices import Device, Dtype, Json, Model
from mmaccel.cli.console import echo, format_number, out, plural, print_json, progress_bars, progress_callback
from mmaccel.core.errors import UnknownName, WorldError
from mmaccel.core.recipe import Recipe
from mmaccel_lab.cli import arguments
from mmaccel_lab.cli.arguments import Documents, Seed, Segments, Videos

if TYPE_CHECKING:
    from mmaccel_lab.eval.cases import Case, Film
    from mmaccel_lab.eval.haystack import Gap, Haystack, Shot
    from mmaccel_lab.eval.haystack_log import Log
    from mmaccel_lab.eval.methods import Methods
    from mmaccel_lab.eval.rivals import Rival

Recipes = Annotated[list[str] | None, typer.Option("--recipe", help="A name or a YAML file; several.")]
Rivals = Annotated[
    list[str] | None,
    typer.Option("--rival", help="A method brought to the share of --level; several, or all."),
]
TITLE = "accuracy, and the mean share of attention computed over the prompts, by frames"


def haystack(
    model: Model = "tiny-ov",
    recipe: Recipes = None,
    rival: Rivals = None,
    level: Annotated[
        str | None,
        typer.Option("--level", help="The recipe whose share rivals get (default: the last --recipe)."),
    ] = None,
    compress: Annotated[
        str | None,
        typer.Option("--compress", help="Drop tokens before every method: visionzip, as its paper has it."),
    ] = None,
    frames: Annotated[str, typer.Option("--frames", help="Lengths in frames, with commas.")] = "128,512,2048",
    depths: Annotated[int, typer.Option("--depths", min=1, help="Stretches a video is divided into.")] = 5,
    samples: Annotated[int, typer.Option("--samples", min=1, help="Questions of each cell.")] = 4,
    seed: Seed = 0,
    documents: Documents = False,
    segments: Segments = 4,
    videos: Videos = None,
    output: Annotated[
        Path | None,
        typer.Option("--out", help="Write each answer, as JSON lines, to this file; go on where it stopped."),
    ] = None,
    rows: Annotated[
        list[Path] | None,
        typer.Option("--rows", help="Ask nothing: show and draw what such files hold together; several."),
    ] = None,
    picture: Annotated[
        Path | None, typer.Option("--picture", help="Draw the maps: .svg, .png or .pdf.")
    ] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    as_json: Json = False,
) -> None:
    """Needle in a haystack by length and depth, for recipes and for rivals at the same share of attention.

    Patterns are followed also where dense attention would be faster. Processes with seeds far apart and files of their own
    share the work, and --rows puts their files together.
    """
    from mmaccel.core.rows import measurement_conditions
    from mmaccel_lab.eval.cases import checked_seed
    from mmaccel_lab.eval.haystack import Haystack
    from mmaccel_lab.eval.haystack_log import Log

    arguments.check_place("--out", output)
    arguments.check_place("--picture", picture)
    if rows:
        log = Log.gathered(rows)
        told = _Told(Haystack(log.settings["depths"], log.shots), log.settings, level or "searched")
        told.missed = log.missed()
        if as_json:
            print_json(told.result(True))
        else:
            told.print(None)
        told.draw(picture)
        return
    lengths = arguments.lengths_of(frames)
    arguments.check_segments(lengths, segments if documents else 1)
    settings = {
        "model": model,
        "documents": segments if documents else 0,
        "depths": depths,
        "compress": compress,
        "seed": checked_seed(seed),
    }
    methods = methods_of(model, device, recipe or ["dense", "searched"], rival or [], level, compress)
    processor = choices.load_supported_processor(model)
    loaded = choices.load_cli_model(model, device, dtype)
    kept = str(next(loaded.parameters()).dtype).removeprefix("torch.")
    log = Log(output, settings, measurement_conditions(device, dtype=kept))
    log.check_yardstick(methods.rivals, methods.yardstick)
    run = _Run(loaded, processor, methods, log)
    told = _Told(Haystack(depths), settings, methods.yardstick)

    def answered() -> int:
        told.found.shots, told.rest = run.answers()
        told.missed = run.missed()
        return len(told.found.shots)

    try:
        with arguments.shown(as_json, answered, told.result, partial(told.print, output), output is not None):
            run.ask(lengths, samples, videos)
    except typer.Exit:  # stopped
        told.draw(picture)
        raise
    told.draw(picture)


@dataclass
class _Run:
    """What is asked of what, and what was."""

    loaded: Any
    processor: Any
    methods: Methods
    log: Log
    asked: dict[int, list[tuple[int, Case]]] = field(default_factory=dict)

    def answers(self) -> tuple[list[Shot], list[Shot]]:
        """What was asked, and what else the file holds."""
        names = {*self.methods.fixed, *self.methods.rivals}
        keys = {
            self.log.key(name, case) for cases in self.asked.values() for _, case in cases for name in names
        }
        mine = [shot for shot in self.log.shots if self.log.key(shot.recipe, shot) in keys]
        return mine, [shot for shot in self.log.shots if self.log.key(shot.recipe, shot) not in keys]

    def missed(self) -> list[dict[str, Any]]:
        """The rivals that were asked and are not near their share."""
        return [
            one
            for one in self.log.missed()
            if one["rival"] in self.methods.rivals and one["frames"] in self.asked
        ]

    def ask(self, lengths: list[int], samples: int, videos: Path | None) -> None:
        """Every question that the file lacks, to every method; length by length."""
        from mmaccel_lab.eval.cases import Film, tokens_per_frame
        from mmaccel_lab.eval.haystack import haystack_cases, shots

        depths, documents, seed = (self.log.settings[name] for name in ("depths", "documents", "seed"))
        with progress_bars() as progress, Film(videos, progress_callback(progress)) as film:
            per_frame = tokens_per_frame(self.processor) if documents else 16
            options = {"documents": documents, "tokens_per_frame": per_frame}
            self.asked |= {
                length: list(haystack_cases(length, depths, samples, seed, **options)) for length in lengths
            }
            for length, asked in self.asked.items():
                bar = progress.add_task(f"{length:>5}", total=len(asked), unit="questions")
                if not asked:
                    continue
                methods = {**self.methods.fixed} | self._levelled(
                    asked[0][1], film, progress_callback(progress, "methods")
                )
                for depth, case in asked:
                    left = {n: r for n, r in methods.items() if not self.log.has(n, case)}
                    for row in shots(self.loaded, self.processor, left, iter([(depth, case)]), film):
                        self.log.write(row)
                    progress.advance(bar)

    def _levelled(self, case: Case, film: Film, told: Any) -> dict[str, Recipe]:
        """The rivals at the share that the yardstick computes on the first prompt of a length."""
        from mmaccel.cli.answer import prompt_inputs
        from mmaccel_lab.eval.encoded import Encoded
        from mmaccel_lab.eval.methods import share
        from mmaccel_lab.eval.rivals import level

        length, methods = case.world.frames, self.methods
        todo = [name for name in methods.rivals if (name, length) not in self.log.levels]
        if todo:
            inputs = prompt_inputs(self.processor, case.content(film.watch(case.world)), self.loaded)
            measure = partial(share, self.loaded, self.processor, inputs, seen=Encoded())
            wanted = min(1.0, measure(methods.fixed[methods.yardstick]))
            for done, name in enumerate(todo):
                told("level", done, len(todo))
                found = level(methods.rivals[name], wanted, lambda fields: measure(methods.recipe(fields)))
                self.log.level(name, length, *found, wanted, methods.yardstick)
            told("level", len(todo), len(todo))
        return {name: methods.recipe(self.log.levels[name, length]) for name in methods.rivals}


def methods_of(
    model: str,
    device: str,
    recipes: Sequence[str],
    rivals: Sequence[str],
    level: str | None = None,
    compress: str | None = None,
) -> Methods:
    """What words name: recipes, rivals ("all", or each by its name), the yardstick (default: the last recipe), and what
    drops tokens before all of them."""
    from mmaccel.backends import select
    from mmaccel_lab.eval.methods import Methods
    from mmaccel_lab.eval.rivals import PRUNERS, RIVALS

    if compress is not None and compress not in PRUNERS:
        raise UnknownName("method of --compress", compress, PRUNERS)
    # A backend by name never takes dense attention where it would be faster.
    more: dict[str, Any] = {"backend": select.default_backend(device)}
    if compress is not None:
        more["prune"] = RIVALS[compress].make(1.0)["prune"]
    fixed = choices.load_recipes(recipes)
    level = level or list(fixed)[-1]
    if level not in fixed:
        raise UnknownName("recipe of --level", level, fixed)
    tail = {"dense_tail": fixed[level].dense_tail}
    known = {name: one for name, one in RIVALS.items() if compress is None or name not in PRUNERS}
    known |= _less(fixed[level], model)
    chosen = known if list(rivals) == ["all"] else {}
    for one in rivals if list(rivals) != ["all"] else []:
        if one not in known:
            raise UnknownName("rival", one, known)
        chosen[one] = known[one]
    for one in chosen:
        if one in fixed:
            raise WorldError(
                f"--rival: {one!r} is a --recipe too; rename the recipe's file or leave one of them out."
            )
    for recipe in fixed.values():
        choices.check_recipe_on_model(recipe, model, device)
    return Methods(
        {name: Recipe.load(one, **more) for name, one in fixed.items()}, chosen, level, {**more, **tail}
    )


def _less(recipe: Recipe, model: str) -> dict[str, Rival]:
    """A searched recipe less its boundaries and its tail; nothing for another recipe."""
    from mmaccel.models.loading import resolve_model_name
    from mmaccel.policies.sparse.per_head import FILE, SHIPPED, PerHead, read_head_table
    from mmaccel.policies.sparse.per_head import patterns_by_layer_and_head as patterns
    from mmaccel.search.run import restrict_boundary_types
    from mmaccel_lab.eval.rivals import ablated

    pattern = recipe.sparse
    if not isinstance(pattern, PerHead) or not isinstance(pattern.table, str):
        return {}
    path = Path(resolve_model_name(model)) / FILE if pattern.table == SHIPPED else Path(pattern.table)
    if not path.is_file():
        return {}
    table = read_head_table(path)
    if "no_boundary" not in table.get("space", {}):
        return {}
    return ablated(
        patterns(table), restrict_boundary_types(table, ["no_boundary"]), table["block"], recipe.dense_tail
    )


@dataclass
class _Told:
    """What is shown of a haystack: the answers asked for, the rivals that missed their share, what else the file holds."""

    found: Haystack
    settings: Mapping[str, Any]
    yardstick: str
    missed: list[dict[str, Any]] = field(default_factory=list)
    rest: Sequence[Shot] = ()

    def gaps(self) -> dict[str, Gap]:
        """Each recipe beside the yardstick, where that was asked."""
        names, own = self.found.recipes, self.yardstick
        return {name: self.found.against(name, own) for name in names if name != own and own in names}

    def draw(self, picture: Path | None) -> None:
        """The maps, where a place for them is given and there are answers."""
        if picture is not None and self.found.shots:
            from mmaccel.figure import save_figure
            from mmaccel_lab.eval.picture import haystack_maps

            save_figure(haystack_maps(self.found), picture)

    def result(self, whole: bool) -> dict[str, Any]:
        """All of it, JSON-ready."""
        from mmaccel_lab.eval.haystack import interval

        found = self.found
        return {
            **self.settings,
            "rows": found.rows(),
            "mean": {name: found.mean(name) for name in found.recipes},
            "interval": {name: list(interval(*found.share(name))) for name in found.recipes},
            "against": {
                name: {
                    "recipe": self.yardstick,
                    "difference": gap.mean,
                    "interval": [gap.low, gap.high],
                    "asked": gap.asked,
                }
                for name, gap in self.gaps().items()
            },
            "missed": self.missed,
            "not_asked": {
                "answers": len(self.rest),
                "recipes": list(dict.fromkeys(shot.recipe for shot in self.rest)),
                "frames": sorted({shot.frames for shot in self.rest}),
            },
            "complete": whole,
        }

    def print(self, path: Path | None) -> None:
        """The table, and remarks; `path` is the file that holds the rest."""
        from rich.table import Column, Table

        found, gaps = self.found, self.gaps()
        heads = (*map(str, found.lengths), "mean", f"against {self.yardstick}")
        shown = Table("recipe", *(Column(head, justify="right") for head in heads), title=TITLE)
        rows = {(row["recipe"], row["frames"]): row for row in found.rows()}
        for name in found.recipes:
            cells = []
            for frames in found.lengths:
                row = rows.get((name, frames), {"accuracy": None, "kept": None})
                cells.append(f"{format_number(row['accuracy'], '.1%')} ({format_number(row['kept'], '.0%')})")
            points = ""
            if (gap := gaps.get(name)) is not None:
                points = f"{100 * gap.mean:+.1f} ({100 * gap.low:+.1f} to {100 * gap.high:+.1f})"
            shown.add_row(name, *cells, format_number(found.mean(name), ".1%"), points)
        out().print(shown)
        several = len({one["seed"] for one in self.missed}) > 1
        for one in self.missed:
            why = "no budget tried comes nearer" if one["budget"] else "it has no budget"
            run = f" (--seed {one['seed']})" if several else ""
            echo(
                f"{one['rival']} computes {one['share']:.1%} of the first prompt of {plural(one['frames'], 'frame')}{run}, "
                f"and {one['yardstick'] or 'what it is levelled with'} {one['wanted']:.1%}: {why}."
            )
        if self.rest:
            names = ", ".join(dict.fromkeys(shot.recipe for shot in self.rest))
            lengths = ", ".join(map(str, sorted({shot.frames for shot in self.rest})))
            echo(
                f"{path} also holds {plural(len(self.rest), 'answer')} not asked for here ({names}; {lengths} frames): "
                f"--rows {path} shows all."
            )
