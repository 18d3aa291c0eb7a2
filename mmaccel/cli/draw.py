"""`mmaccel draw`: pictures of head tables, of the attention of heads or a pattern, and of a saved stream's clusters."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from torch import Tensor
from typer import Argument, Option

from mmaccel.cli import choices
from mmaccel.cli.choices import Fps, Model
from mmaccel.cli.console import echo, plural, progress_bars, progress_callback
from mmaccel.cli.search import Most, Texts, Videos, build_sample_prompt, check_videos
from mmaccel.core.decoding.generate import Evidence
from mmaccel.core.errors import ModelError, RecipeError, UnknownName, WorldError, quoted
from mmaccel.core.files import outside
from mmaccel.core.recipe import stream_policy
from mmaccel.core.registry import registry
from mmaccel.core.streams.session import VideoSession
from mmaccel.core.streams.session_io import saved_recipe
from mmaccel.figure import create_figure, save_figure
from mmaccel.models.loading import config_only_view
from mmaccel.policies.sparse.per_head import read_head_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HEADS = "heads"
FORMATS = ("png", "svg", "pdf")
MANY = 16
"""So many heads are drawn unless they are named."""
LANES = 40
"""Clusters of a level that get a lane of their own, the largest; the others share the lowest."""


def draw_pictures(
    what: Annotated[
        str,
        Argument(
            help="A table that `mmaccel search` wrote, what `mmaccel ask --json` printed, the word: heads, the name of a "
            "pattern, or a session that `mmaccel watch` saved."
        ),
    ],
    output: Annotated[
        Path, Option("--out", help="The picture of a table or pattern; a folder for heads and sessions.")
    ],
    model: Model = "tiny-ov",
    video: Videos = None,
    text: Texts = None,
    layer: Annotated[list[int] | None, Option(min=0, help="Layers to draw.")] = None,
    head: Annotated[list[int] | None, Option(min=0, help="Heads to draw, of each layer.")] = None,
    question: Annotated[
        list[str] | None, Option(help="A question to the saved session; draws the frames it retrieves.")
    ] = None,
    truth: Annotated[
        Path | None, Option(help="The truth of the session's video, as `mmaccel-lab world --truth` wrote it.")
    ] = None,
    form: Annotated[str, Option("--format", help="png, svg or pdf, for heads and sessions.")] = "png",
    resolution: Annotated[int, Option(min=16, help="Cells along a side.")] = 256,
    max_tokens: Most = 25_000,
    fps: Fps = None,
    device: Annotated[str, Option(help=choices.DEVICES)] = "auto",
    dtype: Annotated[str, Option(help=choices.TYPES)] = "auto",
) -> None:
    """Draw patterns by layer and head, the attention of heads, the plan of a pattern, or what a saved session retrieves.

    A table of head patterns or the JSON of a run gives a map of layers by heads. The word "heads" gives the attention of a
    model's heads: in the tokens' order, and sorted by position in the frame and by modality. The name of a sparse pattern
    gives the query-key pairs that it computes on a small prompt: in the tokens' order, and in its plan's. A saved session
    gives the cluster of each watched frame (timeline), and the frames that its questions retrieve (retrieved).
    """
    from mmaccel.search.measure import CapturedLayer, visit_attention_inputs
    from mmaccel.search.picture import (
        describe_changed_fields,
        draw_head_attention,
        draw_head_pattern_map,
        draw_pattern_plan,
    )

    if form not in FORMATS:
        raise UnknownName("format", form, FORMATS)
    is_session = Path(what).is_dir()
    if what != HEADS and not is_session:
        is_pattern = not Path(what).exists() and Path(what).name == what and not Path(what).suffix
        if is_pattern and what not in registry("sparse"):
            raise UnknownName("pattern, table or session", what, registry("sparse"))
        layers, title = ([], "") if is_pattern else _named(what)
        if not output.parent.is_dir():
            raise RecipeError(f"--out: the folder {output.parent} does not exist; create it first.")
        save_figure(draw_pattern_plan(what) if is_pattern else draw_head_pattern_map(layers, title), output)
        echo(str(output))
        if is_pattern:
            echo(f"for so short a prompt, in place of the (default): {describe_changed_fields(what)}")
        return
    create_figure(1, 1)  # says at once where matplotlib is missing
    if output.exists() and not output.is_dir():
        raise RecipeError(f"--out: {output} is a file; give a folder for the pictures.")
    if is_session:
        stream_policy(saved_recipe(Path(what)))
        known = None if truth is None else GroundTruth.read_file(truth)
        loaded = choices.load_cli_model(
            model, choices.choose_device(device), choices.check_dtype_name(dtype), Path(what)
        )
        with VideoSession.resume(loaded, choices.load_supported_processor(model), Path(what)) as session:
            for path in _session(session, Path(what), output, form, layer or [0], question or [], known):
                echo(str(path))
        return
    check_videos(video)
    shape = config_only_view(model).geometry
    wanted = _wanted(layer, head, shape.layers, shape.heads)
    processor = choices.load_supported_processor(model)
    with progress_bars() as progress:
        loaded = choices.load_cli_model(model, choices.choose_device(device), choices.check_dtype_name(dtype))
        inputs, _ = build_sample_prompt(loaded, processor, video or [], text or [], max_tokens, fps, progress)
        output.mkdir(parents=True, exist_ok=True)
        tell, done, whole = progress_callback(progress, "heads"), 0, sum(map(len, wanted.values()))

        def visit(inside: CapturedLayer) -> None:
            nonlocal done
            for one in wanted[inside.layer]:
                path = output / f"layer{inside.layer:02d}-head{one:02d}.{form}"
                save_figure(draw_head_attention(inside, one, resolution), path)
                done += 1
                tell("draw", done, whole)

        visit_attention_inputs(loaded, inputs, visit, set(wanted))
    message = f"{output}: {plural(done, 'head')}"
    if not layer and not head and done < shape.layers * shape.heads:
        message += f" of {shape.layers * shape.heads}, evenly spread; --layer and --head name others"
    echo(message)


def _named(path: str) -> tuple[Sequence[Sequence[str]], str]:
    """The names of patterns by layer and head in a file, and what is said over their map."""
    from mmaccel.search.run import head_pattern_names

    try:
        run = outside.read_json(path, f"table {quoted(path, outside.PATH)}", RecipeError)
        if run["patterns"] and all(isinstance(layer, list) for layer in run["patterns"]):
            layers = [[str(name) for name in layer] for layer in run["patterns"]]
            return layers, f"{run['recipe']} on {run['model']}, {run['prompt_tokens']} tokens"
    except (RecipeError, LookupError, TypeError):
        pass
    table = read_head_table(path)
    return head_pattern_names(table), f"{table['model']['type']}, {table['sample']['tokens']} tokens"


def _session(
    session: VideoSession,
    saved: Path,
    output: Path,
    form: str,
    layers: list[int],
    questions: list[str],
    truth: GroundTruth | None,
) -> list[Path]:
    """Draw the clusters of a session, by layer, and what `questions` retrieve; the files that were written."""
    clusters, made = session.clusters(), []
    answers = [(text, session.ask(text)) for text in questions]
    if not clusters and not answers:
        raise RecipeError(f"{saved}: its memory has no clusters to draw; give --question.")
    output.mkdir(parents=True, exist_ok=True)
    for layer in sorted(set(layers)) if clusters else ():
        depth = max(len(rows) for rows in clusters.values())
        if layer >= depth:
            raise ModelError(f"--layer: there is no {layer}; the model has 0 to {depth - 1}.")
        made.append(output / f"timeline-layer{layer:02d}.{form}")
        save_figure(plot_cluster_timeline(clusters, session.shown, layer, truth), made[-1])
    if answers:
        made.append(output / f"retrieved.{form}")
        said = [(text, answer.text, answer.evidence) for text, answer in answers]
        save_figure(plot_retrieved_frames(said, session.seconds, truth), made[-1])
    return made


def _wanted(
    layers: list[int] | None, heads: list[int] | None, depth: int, width: int
) -> dict[int, list[int]]:
    """Layer -> heads to draw: those named, or as many of all as are still looked at, evenly spread."""
    for name, asked, there in (("--layer", layers, depth), ("--head", heads, width)):
        if asked and max(asked) >= there:
            raise ModelError(f"{name}: there is no {max(asked)}; the model has 0 to {there - 1}.")
    if layers or heads:
        return {n: sorted(set(heads or range(width))) for n in sorted(set(layers or range(depth)))}
    step = max(1, -(-depth * width // MANY))
    chosen: dict[int, list[int]] = {}
    for number in range(0, depth * width, step):
        # A step that is a multiple of the heads would draw the same head of each layer.
        layer = number // width
        chosen.setdefault(layer, []).append((number + layer) % width)
    return chosen


class GroundTruth:
    """Ground truth of a synthetic video world (`World.truth`).

    scenes     (begin, end, name) of each scene, in seconds
    questions  words of a question -> the seconds of the frames that it is about
    """

    def __init__(self, facts: Mapping[str, Any]) -> None:
        fps = facts["fps"]
        self.scenes = [(one["start"] / fps, one["stop"] / fps, one["scene"]) for one in facts["scenes"]]
        asked = facts["questions"]
        self.questions = {split_words(one["text"]): tuple(n / fps for n in one["frames"]) for one in asked}

    @classmethod
    def read_file(cls, path: Path) -> GroundTruth:
        """Read a file that `mmaccel-lab world --truth` wrote; raises `WorldError` for any other."""
        try:
            facts: dict[str, Any] = outside.read_json(path, str(path), WorldError)
            if {"fps", "scenes", "questions"} <= facts.keys():
                return cls(facts)
        except (WorldError, AttributeError):
            pass
        raise WorldError(
            f"--truth: {path} holds no truth of a world; give a file that mmaccel-lab world --truth wrote."
        )

    def question_seconds(self, question: str) -> tuple[float, ...]:
        """Return the seconds of the frames that a question is about, ignoring case and punctuation; () if unknown."""
        return self.questions.get(split_words(question), ())


def split_words(text: str) -> str:
    """Return the words of `text` in lower case, without punctuation."""
    return " ".join(re.findall(r"\w+", text.lower()))


def entry_runs_by_cluster(cluster: Sequence[int]) -> dict[int, list[tuple[int, int]]]:
    """Return cluster -> runs (begin, end) of consecutive entries in it, in the order of the clusters' first entries.
    `cluster` names the cluster of each entry of a stream's memory, in order of time."""
    found: dict[int, list[tuple[int, int]]] = {}
    begin = 0
    for name, run in groupby(cluster):
        end = begin + sum(1 for _ in run)
        found.setdefault(name, []).append((begin, end))
        begin = end
    return found


def plot_cluster_timeline(
    clusters: Mapping[str, Tensor], shown: Sequence[float], layer: int, truth: GroundTruth | None = None
) -> Figure:
    """Plot the cluster of each entry of a stream's memory over time: one lane for each cluster, ordered by first entry.

    clusters  level -> cluster of each of N entries (`VideoSession.clusters`): [L, N], of which row `layer` is drawn,
              or [1, N] if all layers have the same
    shown     seconds at which each time step began; each step has an equal number of the N entries
    """
    end = shown[-1] + (shown[-1] - shown[0]) / max(1, len(shown) - 1)
    owners = {name: rows[min(layer, len(rows) - 1)].tolist() for name, rows in clusters.items()}
    lanes = {name: _lanes(entry_runs_by_cluster(owner)) for name, owner in owners.items()}
    heights = [0.5] * (truth is not None) + [0.4 + 0.09 * len(one) for one in lanes.values()]
    drawn = create_figure(9.0, 0.8 + sum(heights))
    plots = drawn.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    if truth is not None:
        names = list(dict.fromkeys(name for _, _, name in truth.scenes))
        for start, stop, name in truth.scenes:
            colour = f"C{names.index(name) % 10}"
            plots[0].broken_barh([(start, stop - start)], (0, 1), facecolors=colour, alpha=0.5)
            plots[0].text((start + stop) / 2, 0.5, name, ha="center", va="center", fontsize=7)
        plots[0].set_ylim(0, 1)
        plots[0].set_yticks([])
        plots[0].set_ylabel("scenes", fontsize=8)
    for axes, (name, told) in zip(plots[len(plots) - len(lanes) :], lanes.items(), strict=True):
        parts = len(owners[name]) // len(shown)
        times = [*shown, end]
        for lane, some in enumerate(told):
            spans = [(times[a // parts], times[-(-b // parts)] - times[a // parts]) for a, b in some]
            axes.broken_barh(spans, (lane - 0.45, 0.9), facecolors=f"C{lane % 10}")
        axes.set_ylim(len(told) - 0.5, -0.5)
        axes.set_yticks([])
        many = len(set(owners[name]))
        of = f" of layer {layer}" if len(clusters[name]) > 1 else ""
        axes.set_ylabel(f"{many} {name}\nclusters{of}", fontsize=8)
    plots[-1].set_xlim(shown[0], end)
    plots[-1].set_xlabel("seconds", fontsize=8)
    return drawn


def plot_retrieved_frames(
    answers: Sequence[tuple[str, str, Sequence[Evidence]]], end: float, truth: GroundTruth | None = None
) -> Figure:
    """Plot for each question its answer's evidence over time: the share of layers that retrieved each frame.

    Frames that the question is about are marked, if `truth` knows them.
    """
    drawn = create_figure(9.0, 0.7 + 0.9 * len(answers))
    plots = drawn.subplots(len(answers), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (question, said, evidence) in zip(plots, answers, strict=True):
        for moment in () if truth is None else truth.question_seconds(question):
            axes.axvline(moment, color="C3", linewidth=0.8)
        axes.vlines([one.seconds for one in evidence], 0, [one.share for one in evidence], linewidth=0.8)
        axes.set_ylim(0, 1.05)
        axes.set_yticks([0, 1])
        axes.set_title(f"{question}  {said}", fontsize=8, loc="left")
    plots[-1].set_xlim(0, end)
    plots[-1].set_xlabel("seconds", fontsize=8)
    drawn.supylabel("share of layers", fontsize=8)
    return drawn


def _lanes(found: dict[int, list[tuple[int, int]]]) -> list[list[tuple[int, int]]]:
    largest = sorted(found, key=lambda one: sum(a - b for a, b in found[one]))
    few = set(largest[: LANES if len(found) <= LANES else LANES - 1])
    lanes = [some for one, some in found.items() if one in few]
    others = [run for one, some in found.items() if one not in few for run in some]
    return [*lanes, others] if others else lanes
