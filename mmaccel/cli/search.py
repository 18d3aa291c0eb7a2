"""`mmaccel search`: find the best sparse pattern for each attention head of a model, from one sample prompt."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
from rich.progress import Progress
from torch import Tensor, nn
from typer import Argument, Exit, Option

from mmaccel.backends import select
from mmaccel.cli import choices
from mmaccel.cli.answer import prompt_inputs
from mmaccel.cli.choices import Device, Dtype, Fps, Json
from mmaccel.cli.console import bytes_text, echo, plural, print_json, progress_bars, progress_callback
from mmaccel.cli.program import INTERRUPTED
from mmaccel.core.errors import ModelError, RecipeError
from mmaccel.core.report_page import format_attention_share, format_head_counts
from mmaccel.core.rows import read_rows

REQUEST = "Describe the video."
"""What is asked of the sample unless told otherwise."""

Videos = Annotated[list[str] | None, Option("--video", help="A video of the sample; several in order.")]
Texts = Annotated[list[str] | None, Option("--text", help="Text after each video, in order.")]
Most = Annotated[int, Option("--max-tokens", min=256, help="The longest sample; frames are left out.")]


def search(
    model: Annotated[str, Argument(help="A shipped model's name, a folder, or a hub name.")],
    output: Annotated[Path, Option("--out", help="The table to write, JSON.")],
    video: Videos = None,
    text: Texts = None,
    max_tokens: Most = 25_000,
    context: Annotated[
        int | None,
        Option(help="The length the table is for; budgets shrink below 65536 (default: the sample's)."),
    ] = None,
    boundaries: Annotated[
        str, Option(help="Boundary types to consider, with commas; default: all four.")
    ] = "",
    block: Annotated[int, Option(help="Tokens of a block.")] = 64,
    backend: Annotated[str, Option(help="The backend whose costs count.")] = "auto",
    cost: Annotated[str, Option(help="What is equal for all candidates: seconds or pairs.")] = "seconds",
    repeats: Annotated[int, Option(min=1, help="Timed runs of each measurement.")] = 3,
    extended: Annotated[bool, Option("--extended", help="Also try candidates that the paper lacks.")] = False,
    fps: Fps = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    as_json: Json = False,
) -> None:
    """Choose a sparse pattern for each attention head, all at equal measured cost; an interrupted search continues.

    The table is used by `sparse: {name: per_head, table: FILE}`; as heads.json in the model's folder it is preset
    "searched".
    """
    from mmaccel.search import SearchSettings
    from mmaccel.search import search as run
    from mmaccel.search.run import head_pattern_names, main_pattern_name, progress_path
    from mmaccel.search.space import KINDS

    named = tuple(boundaries.replace(",", " ").split()) or KINDS
    settings = SearchSettings(
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
    if backend != "auto":
        select.get_op(backend, device)
    processor = choices.load_supported_processor(model)
    parts = progress_path(output)
    try:
        with progress_bars() as progress:
            loaded = choices.load_cli_model(model, device, dtype)
            inputs, told = build_sample_prompt(
                loaded, processor, video or [], text or [], max_tokens, fps, progress
            )
            table = run(
                loaded, inputs, output, settings, sample=told, progress=progress_callback(progress, "steps")
            )
    except KeyboardInterrupt:
        message = "nothing was measured yet"
        if parts.is_file():
            layers = plural(sum("layer" in row for row in read_rows([parts])), "whole layer")
            goes_on = "the same command goes on with the next layer, from its beginning"
            message = f"the costs and {layers} are kept in {parts}; {goes_on}"
        print(f"stopped: {message}.", file=sys.stderr)
        raise Exit(INTERRUPTED) from None
    every = [head for layer in table["layers"] for head in layer]
    facts = {
        "layers": len(table["layers"]),
        "heads": len(every),
        "tokens": table["sample"]["tokens"],
        "patterns": dict(Counter(main_pattern_name(head["pattern"]) for head in every).most_common()),
        "boundaries": dict(Counter(head["kind"] for head in every).most_common()),
        "kept": sum(head["share"] for head in every) / len(every),
        "error": sum(head["score"] for head in every) / len(every),
        "seconds": table["seconds"],
        "peak_bytes": table["peak_bytes"],
    }
    if as_json:
        print_json({"out": str(output), **facts})
        return
    heads = format_head_counts(Counter(name for layer in head_pattern_names(table) for name in layer))
    layers, count = plural(facts["layers"], "layer"), plural(facts["heads"], "head")
    echo(f"{output}: {layers}, {count} on {facts['tokens']} tokens")
    echo(f"heads: {heads}")
    echo(
        f"pairs computed {format_attention_share(facts['kept'])} without a recipe's dense_tail, mean error of the attention "
        f"output {facts['error']:.3f}, "
        f"{facts['seconds']:.0f} s, peak memory {bytes_text(facts['peak_bytes'])} on {table['device']}"
    )


def check_videos(videos: Sequence[str] | None) -> None:
    """Raise `RecipeError` if no video was named."""
    if not videos:
        raise RecipeError("--video: name at least one video file of the sample.")


def build_sample_prompt(
    model: nn.Module,
    processor: Any,
    videos: Sequence[str],
    texts: Sequence[str],
    most: int,
    fps: float | None,
    progress: Progress,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the inputs of one prompt, each video followed by its text, and facts about it for the table of patterns.

    Frames are dropped evenly until the prompt has at most `most` tokens.
    """
    seen = [choices.read_video(path, processor, progress, fps=fps) for path in videos]
    asked = list(texts) or [REQUEST]
    asked = [""] * (len(seen) - len(asked)) + asked
    for _ in range(4):
        content: list[dict[str, Any]] = []
        for n, one in enumerate(asked):
            content += [{"type": "video", "video": seen[n]}] if n < len(seen) else []
            content += [{"type": "text", "text": one}] if one else []
        inputs = prompt_inputs(processor, content, model)
        tokens = inputs["input_ids"].shape[1]
        if tokens <= most:
            told = {"videos": [Path(path).name for path in videos], "text": [one for one in asked if one]}
            return inputs, told
        for n, film in enumerate(seen):
            # Evenly spaced frames, of which there are fewer each time.
            count = max(1, min(int(len(film) * (most / tokens) * 0.99), len(film) - 1))
            chosen = torch.linspace(0, len(film) - 1, count).round().long()
            seen[n] = replace(film.select_frames(chosen), fps=film.fps * count / len(film))
    raise ModelError(f"--max-tokens: {most} tokens hold no frame of each video; give more, or fewer videos.")
