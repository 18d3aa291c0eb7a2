"""The language model's prefill of the tiny models, dense and sparse in turns; and how often greedy answers differ.

    python bench/cpu_prefill.py --out bench/results/cpu_prefill_cpu_202601.jsonl
    python bench/cpu_prefill.py --out ... --answers 200 --frames 140
    python bench/cpu_prefill.py --out ... --stock --models tiny-qwen
    python bench/cpu_prefill.py --out ... --stock --models qwen2.5-vl-7b --tokens 130000 --device cuda --warmup 1

A prompt is a world's video up to `--tokens` with a question; both ways start from the same input embeddings, vision
encoding left out. Every row is one model and one recipe: medians of interleaved runs, so that what else the machine does
weighs on both. With `--answers`, so many questions about worlds of `--frames` frames are answered greedily by both; each
is a row, written at once, and those the file holds already are not asked again. The last row has the share of answers
that differ, with its 95% interval (Wilson). With `--stock` it is `generate` of one token from the pixels on, in a stock
model (of a published shape with random weights too) and inside ``accelerate(model, "long-video")``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
from replayed import question
from timing import Log, compare

import mmaccel
from mmaccel.cli.answer import ask, prompt_inputs
from mmaccel.core.attach import adapter_for
from mmaccel.core.recipe import Recipe
from mmaccel.models import shapes
from mmaccel_lab.eval.cases import Case, Film, cases, tokens_per_frame
from mmaccel_lab.eval.haystack import interval

RECIPES = ("searched", "short-window")
WINDOW = {"name": "a_shape", "sink": 128, "window": 1024}


def recipe_of(name: str) -> Recipe:
    """A preset by name, or the short window."""
    return Recipe.load(sparse=WINDOW) if name == "short-window" else Recipe.load(name)


def embedded(model: nn.Module, processor: Any, tokens: int, film: Film) -> dict[str, Any]:
    """Keyword arguments of the multimodal model's language part for a prompt of about `tokens` tokens, and its layout."""
    frames = (tokens - 64) // tokens_per_frame(processor)
    case = next(cases(frames, 1, 7, ["needle"]))
    inputs = prompt_inputs(processor, case.content(film.watch(case.world)), model)
    return dict(inputs)


def prefill(model: nn.Module, inputs: dict[str, Any], recipe: Recipe | None) -> tuple[Callable[[], Any], Any]:
    """A call that runs the language model over the prompt's embeddings under `recipe`, and what tells of it after."""
    adapter = adapter_for(model)
    with torch.no_grad():
        embeds = adapter.embed(model, inputs)
    layout = adapter.layout(model, inputs)
    positions = adapter.positions(model, inputs)
    text = adapter.text_model(model)
    held: dict[str, Any] = {}

    def run() -> None:
        with torch.no_grad(), mmaccel.accelerate(model, recipe) as fast:
            from mmaccel.models.hf import NOTE, ForwardPassInfo

            told = {NOTE: ForwardPassInfo(layout=layout)}
            text(inputs_embeds=embeds, position_ids=positions, use_cache=False, **told)
            held["report"] = fast.report()

    return run, held


def timings(name: str, options: argparse.Namespace, log: Log, film: Film) -> None:
    # In float32, as the command computes on a CPU.
    model, processor = mmaccel.load_model(name, dtype=torch.float32), mmaccel.load_processor(name)
    inputs = embedded(model, processor, options.tokens, film)
    tokens = int(inputs["input_ids"].shape[1])
    runs, held = {}, {}
    for recipe in ("dense", *options.recipes):
        runs[recipe], held[recipe] = prefill(
            model, inputs, Recipe.load("dense") if recipe == "dense" else recipe_of(recipe)
        )
    times = compare(runs, warmup=options.warmup, repeats=options.repeats)
    against = times["dense"].median
    for recipe, taken in times.items():
        report = held[recipe]["report"]
        row = dict(
            case="prefill", model=name, recipe=recipe, tokens=tokens, kept=report.kept, backend=report.backend
        )
        log.row(**row, **taken.row(), against_s=against, speedup=against / taken.median)
        print(
            f"{name:10} {recipe:12} {tokens} tokens {taken.median:8.2f} s, {against / taken.median:5.2f} x",
            flush=True,
        )


def stock(name: str, options: argparse.Namespace, log: Log, film: Film) -> None:
    device = options.device
    if name in shapes.SHAPES:
        model, inputs = shapes.build_model(name, device=device), question(name, options.tokens, device)
        inputs["mm_token_type_ids"] = (inputs["input_ids"] == model.config.video_token_id).int() * 2
    else:
        model = mmaccel.load_model(name, torch.float32, device)
        inputs = embedded(model, mmaccel.load_processor(name), options.tokens, film)

    def run(attach: Callable[..., Any]) -> None:
        with attach(model, "long-video"):
            model.generate(**inputs, max_new_tokens=1, do_sample=False)

    runs = {"stock": partial(run, lambda *_: nullcontext()), "long-video": partial(run, mmaccel.accelerate)}
    stock, line = compare(runs, warmup=options.warmup, repeats=options.repeats, device=device).values()
    told = dict(case="stock", model=name, tokens=inputs["input_ids"].shape[1], **line.row())
    log.row(**told, against_s=stock.median, speedup=stock.median / line.median)
    print(f"{name} {told['tokens']} tokens {line.median:.2f} s, {stock.median / line.median:.2f} x stock")


def asked_before(path: Path) -> set[tuple[str, str, int, int, str]]:
    rows = (
        [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    )
    return {
        (r["model"], r["recipe"], r["frames"], r["seed"], r["kind"])
        for r in rows
        if r.get("case") == "answer"
    }


def questions(options: argparse.Namespace) -> Iterator[Case]:
    kinds = ["needle", "order", "count", "combine"]
    yield from cases(options.frames, -(-options.answers // len(kinds)), 1000, kinds)


def answers(name: str, options: argparse.Namespace, log: Log, film: Film) -> None:
    model, processor = mmaccel.load_model(name, dtype=torch.float32), mmaccel.load_processor(name)
    done = asked_before(log.path)
    dense = Recipe.load("dense")
    for case in questions(options):
        where = case.world.frames, case.world.seed, case.kind
        left = [r for r in options.recipes if (name, r, *where) not in done]
        if not left:
            continue
        inputs = prompt_inputs(processor, case.content(film.watch(case.world)), model)
        plain = ask(model, processor, inputs, dense, max_new_tokens=8)
        for recipe in left:
            said = ask(model, processor, inputs, recipe_of(recipe), max_new_tokens=8)
            log.row(
                case="answer",
                model=name,
                recipe=recipe,
                frames=where[0],
                seed=where[1],
                kind=where[2],
                tokens=int(inputs["input_ids"].shape[1]),
                kept=said.report.kept,
                same=said.raw == plain.raw,
                right=case.right(said.raw),
                right_dense=case.right(plain.raw),
            )
    rows = [json.loads(line) for line in log.path.read_text(encoding="utf-8").splitlines()]
    for recipe in options.recipes:
        mine = [
            r
            for r in rows
            if r.get("case") == "answer"
            and (r["model"], r["recipe"], r["frames"]) == (name, recipe, options.frames)
        ]
        differ = sum(not r["same"] for r in mine)
        low, high = interval(differ, len(mine))
        told = dict(
            case="answers", model=name, recipe=recipe, frames=options.frames, asked=len(mine), differ=differ
        )
        right = {k: sum(r[k] for r in mine) for k in ("right", "right_dense")}
        log.row(**told, share=differ / max(1, len(mine)), low=low, high=high, **right)
        print(
            f"{name:10} {recipe:12} {differ} of {len(mine)} answers differ ({low:.3f} to {high:.3f})",
            flush=True,
        )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", required=True, help="file of result rows; rows are added to it")
    parser.add_argument("--models", nargs="+", default=["tiny-qwen", "tiny-ov"])
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=0)
    parser.add_argument(
        "--answers", type=int, default=0, help="questions to answer both ways instead of timing"
    )
    parser.add_argument("--frames", type=int, default=140)
    parser.add_argument("--stock", action="store_true", help="generate, beside a stock model's")
    parser.add_argument("--device", default="cpu", help="of --stock")
    options = parser.parse_args(argv)
    if options.repeats < 2:
        parser.error(f"--repeats {options.repeats}: a spread needs 2 or more.")
    log = Log(options.out, options.device)
    with Film() as film:
        for name in options.models:
            (stock if options.stock else answers if options.answers else timings)(name, options, log, film)


if __name__ == "__main__":
    main()
