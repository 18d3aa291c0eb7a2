"""Decode steps and drafting at published shapes, random weights, on CUDA devices.

    python bench/decode_gpu.py pipeline --out bench/results/pipeline_h200x2_202601.jsonl
    python bench/decode_gpu.py pipeline --target llava-onevision-72b --draft llava-onevision-7b --device cuda:{0,1} --out ...
    python bench/decode_gpu.py pipeline --device cpu --layers 1 --target qwen2.5-vl-3b --draft qwen2.5-vl-3b --shrink 64 ...

Parts, each of some steps whose rows are written as they are made:
steps     a captured step of one and of several rows, beside the time in which the device reads weights and cache once
pipeline  a draft on the next device ahead of its target: alone, the pipeline at two windows and at the measured one, in
          turns, trees, all with replayed acceptance (see replayed.py); then whole, through `generate`, prefill and pruning
          included
together  sequences of calls of their own in steps that they share, beside one at a time (together.py)
verified  the same with a draft of each, replayed acceptance, judged in shared steps, beside plain shared steps (together.py)

A target on one device and some of a second, the draft beside it: --device cuda:0 cuda:0 cuda:1 --draft-device cuda:1. A row
of several draws has all their tokens over all their seconds, the standard error of that, and each draw's pace.
A step that fails leaves the others alone; one whose row is in the file is not run again.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
import replayed
from pair import SELF, Bench, InTrees, InTurns, against, one, piped, pooled, seeds, tell, timed_step
from replayed import after, cache_bytes, decode, warm
from steps import Step, run_steps
from timing import Log, documented_parser, measure
from together import together_part, verified_part

from mmaccel.cli import answer
from mmaccel.core.attach import accelerate
from mmaccel.core.decoding.draft import DraftState
from mmaccel.core.decoding.worker import Worker
from mmaccel.core.recipe import Recipe
from mmaccel.core.report import Report
from mmaccel.policies.draft import Off, Parallel, Sequential, Tree
from mmaccel.policies.prune import AttentionPrune, UVPrune
from mmaccel_lab.eval import simulate


def steps_part(bench: Bench) -> Iterator[Step]:
    def run(options: argparse.Namespace, log: Log) -> None:
        for columns in (bench.columns, SELF // options.shrink):
            for row in timed_step(
                bench, bench.target, columns, (1, 4, 5, 6), case="step", shape=options.target
            ):
                tell(log, **row)

    yield Step("steps", 60.0, run)


class Elsewhere(Parallel):
    """The pipeline over the draft's process of this benchmark."""

    held: Worker | None = None

    def _worker(self, target: Any) -> Worker:
        assert Elsewhere.held is not None
        return Elsewhere.held


def pipeline_part(bench: Bench) -> Iterator[Step]:
    given = bench.given
    shape = {"target": given.target, "draft": given.draft, "replayed": True, "keep": given.keep}

    def alone(options: argparse.Namespace, log: Log) -> None:
        once = decode(bench.runner, None, [bench.columns, 0], bench.tokens, 1)
        bench.found["alone"] = once["tokens_per_s"]
        floor = answer.min_decode_step_s(bench.target, cache_bytes(bench.target, bench.columns), bench.rate)
        tell(log, case="alone", **shape, **once, of_floor=1 / once["tokens_per_s"] / floor)

    def ahead(window: int | None) -> Callable[[argparse.Namespace, Log], None]:
        def run(options: argparse.Namespace, log: Log) -> None:
            worker = bench.ready(bench.pruned)
            rows = [piped(bench, worker, window, bench.columns, bench.pruned, seed) for seed in seeds(given)]
            told = {"case": "parallel", **shape, "asked": window, "columns": [bench.columns, bench.pruned]}
            tell(log, **told, **against(rows, bench.found["alone"], given.keep), used=bench.used())

        return run

    def turns(kind: str) -> Callable[[argparse.Namespace, Log], None]:
        def run(options: argparse.Namespace, log: Log) -> None:
            columns = bench.pruned if kind == "specvlm" else bench.columns
            small = after(bench.draft, columns)
            device = torch.device(bench.other)
            warm(small, (1, 2, 4, 8), device)
            rows = []
            for seed in [0, *seeds(given)]:  # the first captures what is left, and is dropped
                own: DraftState
                if kind == "sequential":
                    own = InTurns(
                        small, device, Sequential(model="shape", window=given.windows[0]), replayed.VOCAB
                    )
                else:
                    own = InTrees(small, device, Tree(model="shape"), replayed.VOCAB)
                short = bench.tokens if seed else 48
                rows.append(decode(bench.runner, own, [bench.columns, columns], short, seed))
            step = measure(lambda: small.step(one(device)), repeats=7, device=device).median
            costs = simulate.Costs(step=1 / bench.found["alone"], draft=step)
            row = pooled(rows[1:], bench.found["alone"])
            told = {"case": kind, **shape, "columns": [bench.columns, columns], **row}
            if kind == "sequential":
                expected = simulate.speedup(given.keep, given.windows[0], costs, parallel=False)
                told |= {"window": given.windows[0], "simulated": expected}
                told["of_simulated"] = row["speedup"] / expected
            tell(log, **told, draft_step_s=step, c=costs.ratio, used=bench.used())

        return run

    yield Step("pipeline:alone", 20.0, alone)
    for window in (*given.windows, None):
        yield Step(f"pipeline:parallel:{window or 'measured'}", 5.0 * given.draws + 10, ahead(window))
    yield from end_steps(bench, ("alone", "parallel"), shape)
    for kind in ("sequential", "specvlm", "tree"):
        yield Step(f"pipeline:{kind}", 6.0 * given.draws + 10, turns(kind))
    yield from end_steps(bench, ("sequential", "specvlm", "eager"), shape)


def strategy(bench: Bench, kind: str) -> Any:
    """A draft on the next device, in this process or in the second one."""
    window, tenth = bench.given.windows[0], UVPrune(retention=0.1)
    if kind == "parallel":
        Elsewhere.held = bench.ready(bench.pruned)
        return Elsewhere(model="shape", window=window, prune=tenth)
    if kind == "specvlm":
        return Tree(model=bench.draft, prune=AttentionPrune(retention=0.1, compact=True))
    return Sequential(model=bench.draft, window=window) if kind == "sequential" else Off()


def generation(bench: Bench, draft: Any) -> tuple[Report, list[int] | None]:
    """A generation by `draft`, after one that captures its steps; its report, and the bytes taken on each device."""
    given, model = bench.given, bench.target
    bench.drop("runner")
    inputs = replayed.question(given.target, bench.columns, given.device)
    with replayed.replaying(model, given.keep, given.seed), accelerate(model, Recipe(draft=draft)) as fast:
        answer.generate(fast, inputs, max_new_tokens=48)
        bench.drop()
        _, report = answer.generate(fast, inputs, max_new_tokens=bench.tokens)
        return report, bench.used()


def figures(report: Report) -> dict[str, Any]:
    """What a row tells of a whole generation."""
    pace, first = report.tokens_per_s, report.ttft_s
    assert pace is not None and first is not None
    # The draft's reading is part of its price.
    pace = 1 / (1 / pace + report.draft["wait_s"] / (report.new_tokens - 1))
    return {
        "prompt": report.prompt_tokens,
        "ttft_s": first,
        "tokens_per_s": pace,
        "seconds": first + (report.new_tokens - 1) / pace,
        "tokens": report.new_tokens,
        "a_step": (report.new_tokens - 1) / max(report.draft["target_steps"], 1),
        "peak_bytes": report.peak_bytes,
        "failed": report.draft["failed"],
    }


def end_steps(bench: Bench, kinds: Sequence[str], shape: dict[str, Any]) -> Iterator[Step]:
    """The whole way of a prompt, through `generate`: pixels, prefill, pruning, captures, decoding."""
    given = bench.given

    def eager(options: argparse.Namespace, log: Log) -> None:
        inputs = replayed.question(given.target, bench.columns, given.device)
        taken = []
        for tokens in (2, 2, 34):
            began = measure(
                lambda tokens=tokens: bench.target.generate(**inputs, max_new_tokens=tokens, do_sample=False),
                warmup=0,
                repeats=2,
                device=bench.device,
            )
            taken.append(min(began.seconds))
        pace = 32 / (taken[2] - taken[1])
        tell(log, case="end", way="eager", **shape, tokens_per_s=pace, ttft_s=taken[1] - 1 / pace)

    def whole(kind: str) -> Callable[[argparse.Namespace, Log], None]:
        def run(options: argparse.Namespace, log: Log) -> None:
            report, used = generation(bench, strategy(bench, kind))
            told = {"case": "end", "way": kind, **shape, **figures(report), "used": used}
            base = bench.found.setdefault("end", told)
            told["speedup"] = told["tokens_per_s"] / base["tokens_per_s"]
            told["end_to_end"] = base["seconds"] / told["seconds"]
            tell(log, **told, counters=report.draft["counters"])

        return run

    for kind in kinds:
        yield Step(f"pipeline:end:{kind}", 35.0, eager if kind == "eager" else whole(kind))


PARTS: dict[str, Callable[[Bench], Iterator[Step]]] = {
    "pipeline": pipeline_part,
    "steps": steps_part,
    "together": together_part,
    "verified": verified_part,
}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, write."""
    parser = documented_parser(__doc__)
    parser.add_argument("parts", nargs="+", choices=list(PARTS))
    parser.add_argument("--out", required=True, help="file of result rows; rows are added to it")
    parser.add_argument("--target", default="qwen2.5-vl-32b")
    parser.add_argument("--draft", default="qwen2.5-vl-7b")
    parser.add_argument(
        "--context", type=int, default=25_088, help="columns of a step and of the pipeline's target"
    )
    parser.add_argument(
        "--windows", type=int, nargs="+", default=[5, 4], help="the first is that of rivals too"
    )
    parser.add_argument("--keep", type=float, default=0.81, help="chance that a drafted token is kept")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument(
        "--draws", type=int, default=9, help="generations of a way, each with verdicts of its own"
    )
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--only", nargs="+", help="steps, or the beginnings of their names")
    parser.add_argument("--limit", type=float, default=520.0, help="seconds in all")
    parser.add_argument(
        "--device",
        nargs="+",
        default=["cuda:0"],
        dest="devices",
        help="which the target lies on, in even shares; one named twice has two",
    )
    parser.add_argument("--draft-device", help="default: the next one, if there is one")
    parser.add_argument("--layers", type=int, help="fewer layers: a smoke test")
    parser.add_argument("--shrink", type=int, default=1, help="divide all lengths: a smoke test")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    options.device = options.devices[0]
    bench = Bench(options)
    try:
        run_steps([step for part in options.parts for step in PARTS[part](bench)], options)
    finally:
        bench.stop()


if __name__ == "__main__":
    main()
