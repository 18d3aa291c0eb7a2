"""`mmaccel search`: which pattern each head of a model should follow, by one sample."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmaccel.cli import choices
from mmaccel.cli.ask import Device, Dtype, Json
from mmaccel.cli.console import bars, many, out, print_json, size, steps
from mmaccel.cli.footage import watch
from mmaccel.core.errors import ModelError, RecipeError

if TYPE_CHECKING:
    from rich.progress import Progress
    from torch import Tensor, nn

    from mmaccel.media import Video

REQUEST = "Describe the video."
"""What is asked of the sample unless told otherwise."""

Videos = Annotated[list[str] | None, typer.Option("--video", help="A video of the sample; several in order.")]
Texts = Annotated[list[str] | None, typer.Option("--text", help="Text after each video, in order.")]
Most = Annotated[int, typer.Option("--max-tokens", min=256, help="The longest sample; frames are left out.")]
Fps = Annotated[float | None, typer.Option("--fps", help="Frames a second to look at.")]


def search(
    model: Annotated[str, typer.Argument(help="A shipped model's name, a folder, or a hub name.")],
    output: Annotated[Path, typer.Option("--out", help="The table to write, JSON.")],
    video: Videos = None,
    text: Texts = None,
    max_tokens: Most = 25_000,
    context: Annotated[
        int | None,
        typer.Option(
            "--context",
            help="The length the table is for; budgets shrink below 65536 (default: the sample's).",
        ),
    ] = None,
    boundaries: Annotated[
        str, typer.Option("--boundaries", help="Boundary types to consider, with commas; default: all four.")
    ] = "",
    block: Annotated[int, typer.Option("--block", help="Tokens of a block.")] = 64,
    backend: Annotated[str, typer.Option("--backend", help="The backend whose costs count.")] = "auto",
    cost: Annotated[
        str, typer.Option("--cost", help="What is levelled: seconds (measured) or pairs (counted).")
    ] = "seconds",
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Timed runs of each measurement.")] = 3,
    extended: Annotated[
        bool, typer.Option("--extended", help="Consider rows of ours beside the paper's.")
    ] = False,
    fps: Fps = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    as_json: Json = False,
) -> None:
    """Choose a pattern for each head, all at one measured cost; a stopped search goes on where it was.

    The table serves `sparse: {name: per_head, table: FILE}`; as heads.json in the model's folder it is the preset
    "searched".
    """
    from mmaccel.backends import select
    from mmaccel.core.report import counted, share
    from mmaccel.core.rows import read_rows
    from mmaccel.search import Settings
    from mmaccel.search import search as run
    from mmaccel.search.algorithm import labels
    from mmaccel.search.run import parts_of
    from mmaccel.search.space import KINDS

    named = tuple(boundaries.replace(",", " ").split()) or KINDS
    settings = Settings(
        context=context,
        boundaries=named,
        cost=cost,  # type: ignore[arg-type]
        repeats=repeats,
        block=block,
        backend=backend,
        extended=extended,
    )
    if not output.parent.is_dir():
        raise RecipeError(f"--out: the folder {output.parent} does not exist; create it first.")
    if output.is_dir():
        raise RecipeError(f"--out: {output} is a folder; give the name of a file in it.")
    check_videos(video)
    place, kind = choices.where(device), choices.dtype(dtype)
    if backend != "auto":
        select.get(backend, place)
    processor = choices.processor(model)
    parts = parts_of(output)
    try:
        with bars() as progress:
            loaded = choices.load(model, place, kind)
            inputs, told = sample(loaded, processor, video or [], text or [], max_tokens, fps, progress)
            table = run(loaded, inputs, output, settings, sample=told, progress=steps(progress, "steps"))
    except KeyboardInterrupt:
        layers = sum("layer" in row for row in read_rows([parts])) if parts.is_file() else 0
        whole = many(layers, "whole layer")
        kept = f"the costs and {whole} are kept in {parts}; the same command goes on with the next layer, from its beginning"
        print(f"stopped: {kept if parts.is_file() else 'nothing was measured yet'}.", file=sys.stderr)
        raise typer.Exit(130) from None
    facts = summary(table)
    if as_json:
        print_json({"out": str(output), **facts})
        return
    heads = counted(Counter(name for layer in labels(table) for name in layer))
    lines = [
        f"{output}: {many(facts['layers'], 'layer')}, {many(facts['heads'], 'head')} on {facts['tokens']} tokens",
        f"heads: {heads}",
        f"kept {share(facts['kept'])}, mean error {facts['error']:.3f}, {facts['seconds']:.0f} s, "
        f"peak memory {size(facts['peak_bytes'])} on {table['device']}",
    ]
    for line in lines:
        out().print(line, markup=False, highlight=False, soft_wrap=True)


def summary(table: dict[str, Any]) -> dict[str, Any]:
    """What there is to say about a table in a few figures."""
    from mmaccel.search.algorithm import main_pattern

    heads = [head for layer in table["layers"] for head in layer]
    return {
        "layers": len(table["layers"]),
        "heads": len(heads),
        "tokens": table["sample"]["tokens"],
        "patterns": dict(Counter(main_pattern(head["pattern"]) for head in heads).most_common()),
        "boundaries": dict(Counter(head["kind"] for head in heads).most_common()),
        "kept": sum(head["share"] for head in heads) / len(heads),
        "error": sum(head["score"] for head in heads) / len(heads),
        "seconds": table["seconds"],
        "peak_bytes": table["peak_bytes"],
    }


def check_videos(videos: Sequence[str] | None) -> None:
    """Raise `RecipeError` where a sample has no video."""
    if not videos:
        raise RecipeError("--video: name at least one video file of the sample.")


def sample(
    model: nn.Module,
    processor: Any,
    videos: Sequence[str],
    texts: Sequence[str],
    most: int,
    fps: float | None,
    progress: Progress,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The inputs of one prompt of the videos, each followed by its text, and what to say of it.

    Frames are left out evenly until the prompt has at most `most` tokens.
    """
    from mmaccel.cli.answer import prompt

    seen = [watch(path, processor, progress, fps=fps) for path in videos]
    asked = list(texts) or [REQUEST]
    if len(asked) < len(seen):
        asked = [*[""] * (len(seen) - len(asked)), *asked]
    for _ in range(4):
        content: list[dict[str, Any]] = []
        for n, one in enumerate(asked):
            content += [{"type": "video", "video": seen[n]}] if n < len(seen) else []
            content += [{"type": "text", "text": one}] if one else []
        inputs = prompt(processor, content, model)
        tokens = inputs["input_ids"].shape[1]
        if tokens <= most:
            told = {"videos": [Path(path).name for path in videos], "text": [one for one in asked if one]}
            return inputs, told
        seen = [_fewer(one, most / tokens) for one in seen]
    raise ModelError(f"--max-tokens: {most} tokens hold no frame of each video; give more, or fewer videos.")


def _fewer(video: Video, share: float) -> Video:
    """Evenly spaced frames of a video, about `share` of them and fewer than there are."""
    from dataclasses import replace

    import torch

    count = max(1, min(int(len(video) * share * 0.99), len(video) - 1))
    chosen = torch.linspace(0, len(video) - 1, count).round().long()
    fps = video.fps * count / len(video)
    return replace(video.at(chosen), fps=fps)
