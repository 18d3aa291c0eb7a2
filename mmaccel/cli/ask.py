"""`mmaccel ask`: ask a question about a video file; prints the answer, its times and its memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Group
from rich.progress import Progress
from rich.table import Column, Table
from rich.text import Text
from torch import nn
from typer import Argument, Option

from mmaccel.cli import choices
from mmaccel.cli.answer import Answer, prompt_inputs
from mmaccel.cli.answer import ask as answer
from mmaccel.cli.choices import MAX_FRAMES, Device, Draft, Dtype, Fps, Frames, Json, Longest, Model, Timeout
from mmaccel.cli.console import (
    bytes_text,
    describe_cut_off,
    format_number,
    group_table_columns,
    out,
    plural,
    print_json,
    progress_bars,
)
from mmaccel.cli.questions import describe_kept_tokens
from mmaccel.cli.report import Page, check_report_path, write_html_page
from mmaccel.core.attach import adapter_for
from mmaccel.core.decoding.generate import MAX_NEW_TOKENS
from mmaccel.core.errors import RecipeError, VideoError, check_question
from mmaccel.core.prefill.prune import candidate_columns, share_token_count
from mmaccel.core.recipe import Recipe
from mmaccel.core.report_page import (
    describe_draft,
    describe_kv_memory,
    format_answer_speed,
    format_attention_share,
    format_head_counts,
)

if TYPE_CHECKING:
    from mmaccel.media import Video

ATTENTION = ("self_attn", "attn")
"""What the attention of a layer is called in language models and vision towers."""

FIGURES = (
    "ttft_s",
    "tokens_per_s",
    "kept",
    "peak_bytes",
    "prompt_tokens",
    "video_units",
    "new_tokens",
    "backend",
    "backend_why",
)
"""What --json tells as the `Report` has it."""

LABELS, COLUMN = 32, 24
"""Characters of a table that its labels take, and that a recipe wants at least."""

BY_HEAD = "layer by layer: the same with --json > FILE, then mmaccel draw FILE --out heads.svg"


def ask(
    video: Annotated[str, Argument(help="A video file or URL.")],
    question: Annotated[str, Argument(help="What to ask about it.")],
    model: Model = "tiny-ov",
    recipe: Annotated[
        list[str] | None, Option(help="A recipe, policy, YAML file or heads.json; repeat it to compare.")
    ] = None,
    draft: Draft = None,
    compare: Annotated[bool, Option("--compare", help="Also run dense attention, first.")] = False,
    as_json: Json = False,
    fps: Fps = None,
    frames: Frames = None,
    max_frames: Annotated[
        int | None,
        Option(help=f"At most so many frames (as is usual for the model; {MAX_FRAMES} with --fps)."),
    ] = None,
    max_new_tokens: Longest = MAX_NEW_TOKENS,
    timeout: Timeout = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    report: Page = None,
) -> None:
    """Ask a question about a video; prints the answer, seconds, tokens per second, query-key pairs computed, memory."""
    if not question.strip():
        raise VideoError("the question is empty; ask something.")
    check_question(question)
    check_report_path(report)
    chosen = choices.load_recipes(recipe or ["dense" if draft is None else "sequential"], draft)
    if compare:
        dense = choices.load_recipe("dense")
        if chosen.get("dense", dense) != dense:
            raise RecipeError(
                "--compare shows the dense run as 'dense', and the recipe of that name is another; rename its file, "
                "or name a preset beside --draft."
            )
        chosen = {"dense": dense, **chosen}
    for one in chosen.values():
        choices.check_recipe_on_model(one, model, device)
    processor = choices.load_supported_processor(model)
    with progress_bars() as progress:
        load, first = partial(choices.load_cli_model, model, device, dtype), next(iter(chosen.values()))
        how = {"fps": fps, "frames": frames, "max_frames": max_frames, "timeout": timeout}
        loaded, seen = choices.load_model_and_video(load, first, video, processor, progress, **how)
        answers, tokens = answer_with_each_recipe(
            loaded, processor, seen, question, chosen, progress, max_new_tokens
        )
    height, width = seen.frames.shape[-2:]
    facts = {"model": model, "video": video, "question": question, "frames": len(seen), "device": device}
    facts |= {"fps": round(seen.fps, 4), "size": [height, width]}
    told = _as_object(answers, facts, tokens, compare)
    if as_json:
        print_json(told)
    else:
        out().print(comparison_tables(answers, facts, tokens))
    if report is not None:
        write_html_page(told, report, seen)


def answer_with_each_recipe(
    model: nn.Module,
    processor: Any,
    video: Video,
    question: str,
    recipes: Mapping[str, Recipe],
    progress: Progress,
    max_new_tokens: int,
) -> tuple[dict[str, Answer], int]:
    """Answer the question under each of `recipes`, in order; also return the number of video tokens in the prompt.

    With several recipes a short untimed run comes first, so that start-up costs do not count against the first recipe.
    """
    text = {"type": "text", "text": question}
    if len(recipes) > 1:
        few = prompt_inputs(
            processor, [{"type": "video", "video": video.slice_frames(0, min(8, len(video)))}, text], model
        )
        answer(model, processor, few, max_new_tokens=2)
    inputs = prompt_inputs(processor, [{"type": "video", "video": video}, text], model)
    found = {}
    for name, recipe in recipes.items():
        with (
            _layers(model, recipe, progress, max_new_tokens) as streamer,
            choices.attach_recipe(model, recipe, progress) as fast,
        ):
            found[name] = answer(fast, processor, inputs, max_new_tokens=max_new_tokens, streamer=streamer)
    return found, candidate_columns(adapter_for(model).layout(model, inputs)).numel()


class _Counted:
    """A streamer that moves a bar for each token after the prompt."""

    def __init__(self, progress: Progress, most: int) -> None:
        self.progress, self.most, self.prompt = progress, most, True
        self.task: Any = None

    def put(self, value: Any) -> None:
        # The prompt comes first, before it is run.
        if self.prompt:
            self.prompt = False
            return
        if self.task is None:
            self.task = self.progress.add_task("answer", total=self.most, unit="tokens")
        self.progress.advance(self.task, value.numel())

    def end(self) -> None:
        if self.task is not None:
            self.progress.remove_task(self.task)


@contextmanager
def _layers(model: nn.Module, recipe: Recipe, progress: Progress, most: int) -> Iterator[_Counted]:
    """Bars that follow one generation: a step a layer for frames and prompt, then a step a token.

    A bar shows while its layers run. Of a long prompt one layer's attention is one call that can take most of a minute, so
    that what is under way is told beside what is done.
    """
    adapter, streamer = adapter_for(model), _Counted(progress, most)
    inside = set(adapter.text_model(model).modules())
    modules = (m for m in adapter.multimodal(model).modules() if m not in inside)
    vision = max((m for m in modules if isinstance(m, nn.ModuleList)), key=len, default=())

    def updates(task: Any, **change: Any) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            if streamer.task is None:
                progress.update(task, **change)

        return hook

    with ExitStack() as stack:
        for name, layers in (("encode", list(vision)), ("prefill", list(adapter.layers(model)))):
            whole = len(layers) if recipe.chunk is None or name == "encode" else None
            task = progress.add_task(name, total=whole, unit="layers", visible=False)
            stack.callback(progress.remove_task, task)
            for number, layer in enumerate(layers, 1):
                entered = updates(task, visible=True, unit=f"layers, in layer {number}")
                attends = updates(task, visible=True, unit=f"layers, in the attention of layer {number}")
                hooks = [layer.register_forward_pre_hook(entered)]
                for part, block in layer.named_children():
                    if part in ATTENTION:
                        hooks.append(block.register_forward_pre_hook(attends))
                        hooks.append(block.register_forward_hook(entered))
                hooks.append(layer.register_forward_hook(updates(task, advance=1)))
                for hook in hooks:
                    stack.enter_context(hook)
        yield streamer


def comparison_tables(answers: Mapping[str, Answer], facts: Mapping[str, Any], tokens: int) -> Group:
    """Format the answers for the console: the question, and tables with a column for each recipe, as many as fit the width.

    tokens  video tokens of the prompt
    """
    prompt = next(iter(answers.values())).report.prompt_tokens
    rate = f" at {facts['fps']:.3g} a second" if "fps" in facts else ""
    head = Text(
        f"{facts['question']}\n{facts['model']}, {plural(facts['frames'], 'frame')}{rate}, {plural(prompt, 'token')}",
        overflow="fold",
    )
    # On a CPU it is the process that is measured, from its start on: a later column cannot show less.
    peak = "peak memory" if str(facts["device"]).startswith("cuda") else "peak memory (process so far)"
    rows: Sequence[tuple[str, Any]] = (
        ("answer", lambda a: a.text or "(nothing)"),
        ("ends", lambda a: describe_cut_off(a.finish_reason, a.report.new_tokens)),
        ("first token", lambda a: format_number(a.report.ttft_s, ".2f", " s")),
        ("decode", lambda a: format_answer_speed(a.report.new_tokens, a.report.tokens_per_s)),
        ("pairs computed", lambda a: format_attention_share(a.report.kept)),
        ("heads", lambda a: format_head_counts(a.report.heads())),
        ("drafted", lambda a: describe_draft(a.report.draft)),
        ("video", lambda a: describe_kept_tokens(_count_video_tokens(a, tokens))),
        ("cache", lambda a: describe_kv_memory(a.report.kv) if a.report.kv.get("bytes") else ""),
        (peak, lambda a: bytes_text(a.report.peak_bytes)),
        ("notes", lambda a: "\n".join([*a.report.draft["notes"], *a.report.notes])),
    )
    tables = []
    for names in group_table_columns(list(answers), room=out().width - LABELS, wide=COLUMN):
        table = Table("", *(Column(name, overflow="fold") for name in names))
        for label, show in rows:
            cells = [show(answers[name]) for name in names]
            if any(cells):
                table.add_row(label, *(Text(cell) for cell in cells))
        tables.append(table)
    unlike = any(len(answer.report.heads()) > 1 for answer in answers.values())
    return Group(head, *tables, *([Text(BY_HEAD)] if unlike else []))


def _count_video_tokens(answer: Answer, whole: int) -> dict[str, int]:
    """Count video tokens: `whole` in the prompt, those that a pruner kept from each layer on, and those that a draft
    read."""
    told = {"prompt": whole}
    for name, count in answer.report.kv.items():
        if name.startswith("visual "):
            told[name.removeprefix("visual ")] = int(count)
    draft = answer.report.recipe["draft"]
    pruner = draft.get("prune")
    if pruner is not None and draft.get("prune_when") != "measured":
        # Every pruner of drafts leaves its quota; what is measured says in the draft's notes which share it was.
        told["in the draft"] = share_token_count(pruner["retention"], whole)
    return told


def _as_object(
    answers: Mapping[str, Answer], facts: Mapping[str, Any], tokens: int, compare: bool = False
) -> dict[str, Any]:
    """Return the JSON object of a run: the figures of the first recipe; under `dense` those without a recipe, if compared;
    under `runs` those of each recipe, if there are several.

    tokens  video tokens of the prompt
    """
    runs = [{"recipe": name, **_figures(answer, tokens)} for name, answer in answers.items()]
    others = [run for run in runs if not (compare and run["recipe"] == "dense")] or runs
    result = {**others[0], **facts}
    if compare:
        result["dense"] = next(run for run in runs if run["recipe"] == "dense")
    if len(others) > 1:
        result["runs"] = others
    return result


def _figures(answer: Answer, tokens: int) -> dict[str, Any]:
    """The figures of one answer. `heads` counts heads over all layers by the pattern they ran; `patterns` and
    `kept_by_head` are by layer and head; `cache` has bytes, and tokens held and seen; `fields` are those of the recipe."""
    report, draft = answer.report, dict(answer.report.draft)
    draft.pop("sequences", None)  # there is one
    drafted = draft.get("rounds") or draft.get("failed")
    return {
        "answer": answer.text,
        "finish_reason": answer.finish_reason,
        **{name: getattr(report, name) for name in FIGURES},
        "heads": dict(report.heads()),
        "draft": {**draft, "accepted_length": report.accepted_length()} if drafted else None,
        "patterns": report.patterns,
        "kept_by_head": report.kept_by_head,
        "cache": {
            name: int(report.kv[name]) for name in ("bytes", "held", "held_mean", "seen") if name in report.kv
        },
        "video_tokens": _count_video_tokens(answer, tokens),
        "fields": report.recipe,
        "notes": report.notes,
    }
