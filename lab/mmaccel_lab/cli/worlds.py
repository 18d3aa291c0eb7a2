"""`mmaccel-lab world` writes a synthetic video; `mmaccel-lab demo` asks about several and shows who was right."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mmaccel.cli import choices
from mmaccel.cli.ask import answer_with_each_recipe, comparison_tables
from mmaccel.cli.choices import Device, Dtype, Json, Model
from mmaccel.cli.console import (
    echo,
    format_number,
    group_table_columns,
    out,
    plural,
    print_json,
    progress_bars,
    progress_callback,
    remark,
    show_bar,
)
from mmaccel.core.errors import WorldError
from mmaccel_lab.cli.arguments import kinds_of, tell_stop

if TYPE_CHECKING:
    from rich.table import Table

    from mmaccel_lab.eval.cases import Case
    from mmaccel_lab.eval.needle import Judged

DEMO_KINDS = ("needle", "order", "combine")
"""What the demonstration asks unless told otherwise."""
ENOUGH = 0.9
"""The share of right answers under which the demonstration ends with status 1."""
ASKED, ANSWER = 56, 14
"""Characters of a table that world, question and truth take, and that a recipe's answers want at least."""


def world(
    output: Annotated[Path, typer.Option("--out", help="The mp4 file to write.")],
    seed: Annotated[int, typer.Option("--seed", help="The world's seed.")] = 0,
    frames: Annotated[int, typer.Option("--frames", help="How many frames.")] = 128,
    truth: Annotated[
        Path | None, typer.Option("--truth", help="Also write what is true of it, as JSON.")
    ] = None,
    style: Annotated[str, typer.Option("--style", help="needle: few cards; caption: many.")] = "needle",
) -> None:
    """Write a synthetic video with ground truth: real H.264, the same for the same seed."""
    from mmaccel_lab.world import World, write_mp4

    made = World.generate(seed, frames, style=style)
    if truth is not None and not truth.parent.is_dir():
        raise WorldError(f"the folder {truth.parent} does not exist; create it first.")
    if truth is not None and truth.is_dir():
        raise WorldError(f"{truth} is a folder; give the name of a file in it.")
    with progress_bars() as progress:
        write_mp4(made, output, progress=show_bar(progress, "world", "frames", frames))
    if truth is not None:
        truth.write_text(json.dumps(made.truth(), indent=2) + "\n", encoding="utf-8")
    told = f"{output}: {plural(frames, 'frame')}, {plural(len(made.cards), 'card')}, {plural(len(made.segments), 'scene')}"
    echo(told)


def demo(
    model: Model = "tiny-ov",
    recipe: Annotated[list[str] | None, typer.Option("--recipe", help="Beside dense.")] = None,
    worlds: Annotated[int, typer.Option("--worlds", min=1, help="How many worlds.")] = 20,
    seed0: Annotated[int, typer.Option("--seed0", min=0, help="Seed of the first; the others follow.")] = 100,
    frames: Annotated[int, typer.Option("--frames", min=4, help="Frames of each world.")] = 128,
    kinds: Annotated[str, typer.Option("--kinds", help="Kinds of question, with commas.")] = ",".join(
        DEMO_KINDS
    ),
    device: Device = "auto",
    dtype: Dtype = "auto",
    as_json: Json = False,
) -> None:
    """The road from an mp4 to a right answer: one world in detail, then several, dense beside sparse.

    Ends with status 1 when fewer than nine in ten answers are right under any recipe. Ctrl-C shows what there is so far.
    """
    from mmaccel_lab.eval.cases import Film, checked_seed
    from mmaccel_lab.eval.needle import Tally, judge
    from mmaccel_lab.world.questions import KINDS

    checked_seed(seed0)
    asked = kinds_of(kinds, KINDS)
    chosen = choices.load_recipes(["dense", *(recipe or ["a_shape-short", "grid"])])
    for one in chosen.values():
        choices.check_recipe_on_model(one, model, device)
    todo = _todo(seed0, worlds, frames, asked)
    processor = choices.load_supported_processor(model)
    loaded = choices.load_cli_model(model, device, dtype)
    seen: list[Judged] = []
    tallies = {name: Tally(name) for name in chosen}
    console = out()
    whole = False
    try:
        with progress_bars() as progress, Film(progress=progress_callback(progress)) as film:
            first = todo[0]
            film.watch(first.world)
            video = choices.read_video(str(film.path(first.world)), processor, progress)
            answers, tokens = answer_with_each_recipe(
                loaded, processor, video, first.question, chosen, progress, 8
            )
            facts = {"model": model, "question": first.question, "frames": len(video), "device": device}
            if not as_json:
                console.print(comparison_tables(answers, facts, tokens))
                console.print(f"the truth: {first.answer} (world {first.world.seed})\n", highlight=False)
            bar = progress.add_task("worlds", total=len(todo), unit="questions")
            for judged in judge(loaded, processor, chosen, todo, film):
                seen.append(judged)
                for tally in tallies.values():
                    tally.add(judged)
                progress.advance(bar)
        whole = True
    except KeyboardInterrupt:
        tell_stop(len(seen))
    shares = {name: tally.share() for name, tally in tallies.items()}
    used = sorted({case.world.seed for case in todo})
    skipped = sorted(set(range(used[0], used[-1] + 1)).union(range(seed0, used[0])).difference(used))
    if as_json:
        print_json(
            {
                "model": model,
                "frames": frames,
                "seeds": used,
                "skipped": skipped,
                "accuracy": shares,
                "cases": [
                    {
                        "seed": one.case.world.seed,
                        "kind": one.case.kind,
                        "question": one.case.question,
                        "truth": one.case.answer,
                        "said": {name: answer.text for name, answer in one.answers.items()},
                    }
                    for one in seen
                ],
                "complete": whole,
            }
        )
    elif seen:
        for names in group_table_columns(list(chosen), room=console.width - ASKED, wide=ANSWER):
            console.print(_table(seen, names))
        told = f"worlds {', '.join(map(str, used))}"
        if skipped:
            told += f"; without a question of every kind, and skipped: {', '.join(map(str, skipped))}"
        console.print(told, highlight=False)
        for name, tally in tallies.items():
            kept = format_number(tally.rows()[0]["kept"], ".1%")
            told = f"{name}: {format_number(shares[name], '.1%')} of {len(seen)} right, kept {kept}"
            console.print(told, highlight=False)
    if not whole:
        raise typer.Exit(130)
    short = {name: share for name, share in shares.items() if share is None or share < ENOUGH}
    if short:
        told = ", ".join(f"{name} ({format_number(share, '.1%')})" for name, share in short.items())
        remark(f"fewer than {ENOUGH:.0%} of the answers are right: {told}.")
        raise typer.Exit(1)


def _todo(seed: int, worlds: int, frames: int, kinds: tuple[str, ...]) -> list[Case]:
    """Questions of every kind about the first `worlds` worlds from `seed` on that have something of each to ask."""
    from mmaccel_lab.eval.cases import cases

    found: list[Case] = []
    for one_seed in range(seed, seed + 50 + 10 * worlds):
        one = list(cases(frames, 1, one_seed, kinds, worlds=1))
        if len(one) == len(kinds):
            found += one
        if len(found) == worlds * len(kinds):
            return found
    raise WorldError(f"too few worlds of {frames} frames ask all of {', '.join(kinds)}; give more frames.")


def _table(seen: list[Judged], recipes: Sequence[str]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table("world", "question", "truth", *recipes, title="every answer; a wrong one in brackets")
    last = None
    for judged in seen:
        case = judged.case
        said = [judged.answers[r].text if judged.right(r) else f"({judged.answers[r].text})" for r in recipes]
        name = "" if case.world.seed == last else str(case.world.seed)
        table.add_row(name, case.question, case.answer, *(Text(one) for one in said))
        last = case.world.seed
    return table
