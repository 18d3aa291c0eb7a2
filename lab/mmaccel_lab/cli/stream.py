"""`mmaccel-lab eval stream`: memories of streams on long worlds, at the same windows and budgets."""

from __future__ import annotations

import json
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmaccel.cli import choices
from mmaccel.cli.choices import Device, Dtype, Json, Model
from mmaccel.cli.console import out, progress_bars
from mmaccel.core.errors import RecipeError, WorldError, quoted
from mmaccel.core.files import outside
from mmaccel.core.recipe import read_recipe_fields
from mmaccel_lab.cli.arguments import Seed, check_place, kinds_of, lengths_of, shown

if TYPE_CHECKING:
    from rich.table import Table

MEMORIES = ("rekv", "mosaic", "recent", "no_cache")
HEADS = (
    "memory",
    "budget\n(frames)",
    "kind",
    "asked",
    "right\n(95%\ninterval)",
    "evidence\nseen",
    "evidence\nnamed",
    "seen\n(frames)",
    "gone or\non the\nhost",
    "device\nand host\n(MiB)",
    "first\ntoken",
)
"""Of the table. Evidence seen is the recall of the rows: the share of layers that looked at the true frames. Named is how
often one of these is among the first moments that a right answer is said to rest on. MiB are the most that
a memory held."""
TOKENS = "streammem and livevlm keep tokens: a frame of which one is left counts as seen."


def stream(
    model: Model = "tiny-ov",
    memory: Annotated[
        list[str] | None,
        typer.Option(
            "--memory",
            help="A kv policy's name, with fields if any ('mosaic local=0 reps=0'), or a YAML file with a kv; several.",
        ),
    ] = None,
    frames: Annotated[int, typer.Option("--frames", min=1, help="Frames of a stream.")] = 500,
    worlds: Annotated[int, typer.Option("--worlds", min=1, help="Streams.")] = 4,
    budgets: Annotated[
        str, typer.Option("--budgets", help="Frames to retrieve, beside local ones; with commas.")
    ] = "32",
    window: Annotated[int, typer.Option("--window", min=1, help="Frames of the encoding window.")] = 32,
    kind: Annotated[str, typer.Option("--kind", help="Kinds with commas, or all.")] = "all",
    still: Annotated[float, typer.Option("--still", help="Share of frames in which nothing moves.")] = 0.3,
    call: Annotated[
        int | None, typer.Option("--call", min=1, help="Frames a memory is given at a time (many).")
    ] = None,
    seed: Seed = 0,
    output: Annotated[
        Path | None, typer.Option("--out", help="Write each answer, as JSON lines, to this file.")
    ] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    as_json: Json = False,
) -> None:
    """Questions on long streams: accuracy, and whether the frames they are based on were seen, by memory and budget."""
    from mmaccel_lab.eval.stream import KINDS, Shot, entries, memories_for, shots, worlds_of
    from mmaccel_lab.eval.stream_tables import paired, rows

    asked = KINDS if kind == "all" else kinds_of(kind, KINDS)
    if not 0 <= still <= 1:
        raise WorldError(f"--still: {still} is no share; give 0 to 1.")
    check_place("--out", output)
    sizes = lengths_of(budgets, "--budgets")
    chosen = [memory_of(name) for name in memory or MEMORIES]
    entries(chosen, sizes, window, tokens=1)  # what is wrong with a memory is told before anything is loaded
    processor = choices.load_supported_processor(model)
    compared = memories_for(processor, chosen, sizes, window)
    loaded = choices.load_cli_model(model, device, dtype)
    films = worlds_of(frames, worlds, seed)
    found: list[Shot] = []

    def result(whole: bool) -> dict[str, Any]:
        names = list(dict.fromkeys(entry.name for entry in compared))
        return {
            "model": model,
            "frames": frames,
            "worlds": worlds,
            "window": window,
            "still": still,
            "call": call,
            "seed": seed,
            "complete": whole,
            "rows": rows(found),
            "paired": [row for other in names[1:] for row in paired(found, names[0], other)],
        }

    with (
        shown(as_json, lambda: len(found), result, lambda: out().print(_table(rows(found)))),
        nullcontext() if output is None else output.open("w", encoding="utf-8") as file,
        progress_bars() as progress,
    ):
        bar = progress.add_task("stream", total=None, unit="frames")
        how: dict[str, Any] = dict(
            kinds=asked, still=still, call=call, progress=partial(progress.advance, bar)
        )
        for shot in shots(loaded, processor, compared, films, **how):
            found.append(shot)
            if file is not None:
                file.write(json.dumps(shot.to_dict()) + "\n")
                file.flush()


def memory_of(text: str) -> str | dict[str, Any]:
    """A policy's name, its name and fields, shown as they are given, or the kv of a YAML file under the file's name."""
    if not text.endswith((".yaml", ".yml")):
        name, *fields = text.split() or [text]
        return {"name": name, "label": text, **dict(_field(one) for one in fields)} if fields else text
    kv = read_recipe_fields(text).get("kv", "full")
    if not isinstance(kv, str | dict):
        raise RecipeError(f"--memory: kv of {text} is {quoted(kv)}; give a name, or a mapping with a name.")
    return {**({"name": kv} if isinstance(kv, str) else kv), "label": Path(text).stem}


def _field(text: str) -> tuple[str, Any]:
    """``name=value``, the value as YAML reads it."""
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise RecipeError(f"--memory: {quoted(text)} is not a field; give name=value.")
    return name, outside.read_yaml(value, f"--memory: {quoted(text)}")


def _table(rows: list[dict[str, Any]]) -> Table:
    from rich.table import Table
    from rich.text import Text

    tokens = any(name in row["memory"] for row in rows for name in ("streammem", "livevlm"))
    table = Table(*HEADS, caption=TOKENS if tokens else None)
    for row in rows:
        cells = (
            row["memory"],
            "all" if row["budget"] is None else str(row["budget"]),
            "mean of\nkinds" if row["kind"] == "all" else row["kind"],
            str(row["questions"]),
            f"{row['accuracy']:.0%}\n({row['low']:.0%}-{row['high']:.0%})",
            f"{row['recall']:.0%}",
            "" if row["named"] is None else f"{row['named']:.0%}",
            f"{row['seen']:.0f}",
            f"{row['off']:.0%}",
            f"{row['device_bytes'] / 2**20:.1f}\n{row['host_bytes'] / 2**20:.1f}",
            f"{row['ttft_s']:.3f} s",
        )
        table.add_row(*(Text(cell) for cell in cells))
    return table
