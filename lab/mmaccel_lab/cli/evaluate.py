"""`mmaccel-lab eval needle | caption | table`: measured accuracy, through real video files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmaccel.cli import choices
from mmaccel.cli.choices import Device, Draft, Dtype, Json, Model
from mmaccel.cli.console import echo, format_number, out, print_json, progress_bars, progress_callback, remark
from mmaccel.core.errors import WorldError
from mmaccel_lab.cli import arguments
from mmaccel_lab.cli.arguments import Documents, Seed, Segments, Videos

if TYPE_CHECKING:
    from mmaccel_lab.eval.needle import Tally
    from mmaccel_lab.eval.table import Line

app = typer.Typer(
    no_args_is_help=True, help="Measure accuracy on the synthetic world, through real video files."
)

OneRecipe = Annotated[str, typer.Option("--recipe", help="A name or a YAML file.")]
Frames = Annotated[str, typer.Option("--frames", help="Lengths in frames, with commas.")]
Samples = Annotated[int, typer.Option("--samples", min=1, help="Questions of each kind and length.")]


@app.command()
def needle(
    model: Model = "tiny-ov",
    recipe: OneRecipe = "dense",
    frames: Frames = "8,32,128,512,2048",
    samples: Samples = 20,
    seed: Seed = 0,
    kind: Annotated[str, typer.Option("--kind", help="Kinds with commas, or all.")] = "needle",
    documents: Documents = False,
    segments: Segments = 4,
    videos: Videos = None,
    draft: Draft = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    as_json: Json = False,
) -> None:
    """Questions with one-word answers: the share right at each length. Ctrl-C shows what there is so far."""
    from mmaccel_lab.eval.cases import DOCUMENT_KINDS, Film, cases, checked_seed, seed_at, tokens_per_frame
    from mmaccel_lab.eval.needle import Tally, judge
    from mmaccel_lab.world.document import DOCUMENT_KINDS as ALL_DOCUMENT_KINDS
    from mmaccel_lab.world.questions import KINDS

    checked_seed(seed)
    known = ALL_DOCUMENT_KINDS if documents else KINDS
    asked: tuple[str, ...] = DOCUMENT_KINDS if documents and kind == "needle" else ()
    asked = asked or (known if kind == "all" else arguments.kinds_of(kind, known))
    lengths = arguments.lengths_of(frames)
    arguments.check_segments(lengths, segments if documents else 1)
    chosen = choices.load_recipe(recipe, draft)
    choices.check_recipe_on_model(chosen, model, device)
    processor = choices.load_supported_processor(model)
    loaded = choices.load_cli_model(model, device, dtype)
    tally = Tally(recipe)
    for length in lengths:
        tally.expect(length, asked, samples)

    def result(whole: bool) -> dict[str, Any]:
        rows, missing = tally.rows(), tally.missing()
        return {
            "model": model,
            "recipe": recipe,
            "seed": seed,
            "kinds": list(asked),
            "documents": documents,
            "accuracy": {str(row["frames"]): row["accuracy"] for row in rows},
            "lengths": rows,
            "complete": whole and not missing,
            "missing": missing,
        }

    def answered() -> int:
        return sum(row["asked"] for row in tally.rows())

    with (
        arguments.shown(as_json, answered, result, lambda: out().print(_rows(tally, asked))),
        progress_bars() as progress,
        Film(videos, progress_callback(progress)) as film,
    ):
        more: dict[str, Any] = {}
        if documents:
            more = {"documents": segments, "tokens_per_frame": tokens_per_frame(processor)}
        for length in lengths:
            bar = progress.add_task(f"{length:>5}", total=samples * len(asked), unit="questions")
            todo = cases(length, samples, seed_at(seed, length), asked, **more)
            for judged in judge(loaded, processor, {recipe: chosen}, todo, film):
                tally.add(judged)
                progress.advance(bar)
    for one in tally.missing():
        told = "{asked} of {wanted} {kind} questions at {frames} frames: too few worlds have one."
        remark(told.format(**one))


@app.command()
def caption(
    model: Model = "tiny-ov",
    recipe: OneRecipe = "dense",
    frames: Annotated[int, typer.Option("--frames", min=1, help="Frames of each video.")] = 128,
    samples: Samples = 10,
    seed: Seed = 0,
    words: Annotated[int, typer.Option("--words", help="Longest caption, in words.")] = 480,
    videos: Videos = None,
    draft: Annotated[
        str | None, typer.Option("--draft", help="Folder or name of a draft: how often does it agree?")
    ] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    as_json: Json = False,
) -> None:
    """Long true captions under teacher forcing: the share of tokens right, and on how many a draft agrees."""
    from mmaccel_lab.eval.caption import agreement, caption_cases, caption_scores
    from mmaccel_lab.eval.cases import Film, checked_seed

    checked_seed(seed)
    chosen = choices.load_recipe(recipe)
    choices.check_recipe_on_model(chosen, model, device)
    processor = choices.load_supported_processor(model)
    loaded = choices.load_cli_model(model, device, dtype)
    second = choices.load_cli_model(draft, device, dtype) if draft is not None else None
    rows: list[dict[str, int]] = []
    stopped = False
    with progress_bars() as progress, Film(videos, progress_callback(progress)) as film:
        bar = progress.add_task("captions", total=samples, unit="videos")
        try:
            told = caption_cases(frames, samples, seed, words)
            for row in caption_scores(loaded, processor, told, film, recipe=chosen, draft=second):
                rows.append(row)
                progress.advance(bar)
        except KeyboardInterrupt:
            stopped = True
    shares = agreement(rows)
    result = {"model": model, "recipe": recipe, "frames": frames, **shares, "complete": not stopped}
    if as_json:
        print_json(result)
    elif rows or not stopped:
        right = format_number(shares["accuracy"], ".1%")
        told_line = f"{result['captions']} captions, {result['tokens']} tokens: {right} right"
        if second is not None:
            told_line += f", the draft agrees on {format_number(shares['agreement'], '.1%')}"
        echo(told_line)
    if stopped:
        arguments.tell_stop(len(rows))
        raise typer.Exit(130)


@app.command()
def table(
    model: Model = "tiny-ov",
    recipe: OneRecipe = "dense",
    samples: Samples = 50,
    seed: Seed = 0,
    most_tokens: Annotated[int, typer.Option("--max-tokens", help="Leave longer rows out.")] = 65536,
    videos: Videos = None,
    draft: Draft = None,
    jobs: Annotated[
        int, typer.Option("--jobs", min=1, help="Processes; most of the time is video files, one core each.")
    ] = 1,
    output: Annotated[
        Path | None,
        typer.Option("--out", help="Also write the rows, as JSON, to this file; go on where it stopped."),
    ] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    as_json: Json = False,
) -> None:
    """Every row of the model card's table, as Markdown or JSON; a row that was measured is never lost.

    Ends with status 1 when a row misses its bound.
    """
    import json
    from functools import partial

    from mmaccel.models.shipped import NAMES
    from mmaccel_lab.eval.cases import Film, checked_seed
    from mmaccel_lab.eval.jobs import Job, measure_in
    from mmaccel_lab.eval.table import ENTRIES, markdown, measure, order

    checked_seed(seed)
    arguments.check_place("--out", output)
    chosen = choices.load_recipe(recipe)
    choices.check_recipe_on_model(chosen, model, device)
    partner = draft or (f"{model}-draft" if f"{model}-draft" in NAMES else None)
    load = partial(_load, model, partner, device, dtype)
    entries = [entry for entry in ENTRIES if entry.tokens <= most_tokens]
    facts = {"model": model, "recipe": recipe, "draft": partner, "seed": seed}
    begun = _begun(output, facts)
    lines = list(begun)

    def result(whole: bool) -> dict[str, Any]:
        told = {"lines": [line.to_dict() for line in lines], "markdown": markdown(lines)}
        return {**facts, "samples": samples, **told, "complete": whole}

    def write(whole: bool = False) -> None:
        if output is not None:
            output.write_text(json.dumps(result(whole), indent=2) + "\n", encoding="utf-8")

    how: dict[str, Any] = dict(samples=samples, seed=seed, recipe=chosen, entries=entries, done=begun)
    shows = (lambda: len(lines)), result, (lambda: echo(markdown(lines)))
    with (
        arguments.shown(as_json, *shows, goes_on=output is not None),
        progress_bars() as progress,
        Film(videos, progress_callback(progress)) as film,
    ):
        bar = progress.add_task("table", total=None, unit="")

        def told(task: str, done: int, total: int) -> None:
            progress.update(bar, description=task, completed=done, total=total)

        try:
            if jobs > 1:
                measured = measure_in(jobs, Job(load=load, videos=videos, **how), told)
            else:
                loaded, processor, second = load()
                measured = measure(loaded, processor, film, draft=second, progress=told, **how)
            for line in measured:
                lines.append(line)
                lines.sort(key=order)
                write()
        except KeyboardInterrupt:
            write()
            raise
        write(True)
    if not all(line.met for line in lines):
        raise typer.Exit(1)


def _begun(output: Path | None, settings: dict[str, Any]) -> list[Line]:
    """The lines that an earlier run with the same settings left in a file. Raises `WorldError` for other settings."""
    import json

    from mmaccel_lab.eval.table import Line

    if output is None or not output.exists():
        return []
    try:
        found = json.loads(output.read_text(encoding="utf-8"))
        lines = [Line.from_dict(row) for row in found["lines"]]
    except (ValueError, KeyError, TypeError) as error:
        raise WorldError(f"--out: {output} is there and holds no table; give another file.") from error
    for name, value in settings.items():
        if found.get(name) != value:
            raise WorldError(
                f"--out: {output} holds the table of {name} {found.get(name)!r}, not {value!r}; give another file."
            )
    return lines


def _load(model: str, draft: str | None, device: str, dtype: str) -> tuple[Any, Any, Any]:
    """Model, processor and draft; also what each process of --jobs begins with."""
    second = choices.load_cli_model(draft, device, dtype) if draft is not None else None
    return choices.load_cli_model(model, device, dtype), choices.load_supported_processor(model), second


def _rows(tally: Tally, kinds: tuple[str, ...]) -> Any:
    from rich.table import Column, Table

    heads = ("frames", "tokens", "accuracy", "pairs computed", *(kinds if len(kinds) > 1 else ()))
    shown = Table(*(Column(head, justify="right") for head in heads), title=f"accuracy under {tally.recipe}")
    for row in tally.rows():
        per_kind = [row["kinds"].get(kind) for kind in kinds] if len(kinds) > 1 else []
        cells = ["-" if one is None else f"{one['right']}/{one['asked']}" for one in per_kind]
        shown.add_row(
            str(row["frames"]),
            format_number(row["tokens"], "d"),
            format_number(row["accuracy"], ".1%"),
            format_number(row["kept"], ".1%"),
            *cells,
        )
    return shown
