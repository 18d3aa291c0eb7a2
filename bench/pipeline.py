"""The parts of `decode_gpu.py` in which a draft works beside its target, and in which a target lies on two devices."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
import replayed
from held import asked, counting, together
from pair import (
    SEATS,
    SELF,
    WIDTHS,
    Bench,
    InTrees,
    InTurns,
    against,
    one,
    piped,
    pooled,
    read_and_say,
    seeds,
    tell,
    timed_step,
)
from replayed import after, cache_bytes, decode, warm
from steps import Step
from timing import Log, measure

from mmaccel.cli import answer
from mmaccel.core.attach import accelerate
from mmaccel.core.decoding.draft import DraftState
from mmaccel.core.decoding.worker import Worker
from mmaccel.core.recipe import Recipe
from mmaccel.core.report import Report
from mmaccel.models import loading
from mmaccel.policies.draft import Off, Parallel, Sequential, Tree
from mmaccel.policies.prune import AttentionPrune, UVPrune
from mmaccel_lab.eval import simulate


class Elsewhere(Parallel):
    """The pipeline over the draft's process of this benchmark."""

    held: Worker | None = None

    def _worker(self, target: Any) -> Worker:
        assert Elsewhere.held is not None
        return Elsewhere.held


def pipeline_part(bench: Bench) -> Iterator[Step]:
    given = bench.given
    shape = {"target": given.target, "draft": given.draft, "replayed": True, "keep": given.keep}

    def steps(options: argparse.Namespace, log: Log) -> None:
        rows = sorted({1, *given.windows, max(given.windows) + 1})
        for row in timed_step(bench, bench.target, bench.columns, rows, case="step", shape=given.target):
            tell(log, **row)

    def alone(options: argparse.Namespace, log: Log) -> None:
        once = decode([bench.runner], [None], [bench.columns, 0], bench.tokens, 1)
        bench.found["alone"] = once["tokens_per_s"]
        floor = answer.min_decode_step_s(bench.target, cache_bytes(bench.target, bench.columns), bench.rate)
        tell(log, case="alone", **shape, **once, of_floor=1 / once["tokens_per_s"] / floor)

    def ahead(window: int | None) -> Callable[[argparse.Namespace, Log], None]:
        def run(options: argparse.Namespace, log: Log) -> None:
            worker = bench.ready(bench.pruned)
            rows = [
                piped(bench, [bench.runner], worker, window, bench.columns, bench.pruned, seed)
                for seed in seeds(given)
            ]
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
                rows.append(decode([bench.runner], [own], [bench.columns, columns], short, seed))
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

    def batch(options: argparse.Namespace, log: Log) -> None:
        bench.drop("runner")
        for count in SEATS:
            step = measure(replayed.batched(bench.target, bench.columns, count), device=bench.device).median
            runners = [after(bench.target, bench.columns, keep=given.keep) for _ in range(count)]
            for runner in runners:
                warm(runner, (*WIDTHS, *given.windows[:1]), bench.device)
            worker = bench.ready(bench.pruned, count)
            some, window = max(24, bench.tokens // 4), given.windows[0]
            rows = [
                piped(bench, runners, worker, window, bench.columns, bench.pruned, seed, some)
                for seed in seeds(given)
            ]
            row = pooled(rows, bench.found["alone"])
            row |= {"batched_per_s": count / step, "over_batched": row["tokens_per_s"] * step / count}
            tell(log, case="batch", **shape, sequences=count, window=window, **row)

    yield Step("pipeline:steps", 70.0, steps)
    yield Step("pipeline:alone", 20.0, alone)
    for window in (*given.windows, None):
        yield Step(f"pipeline:parallel:{window or 'measured'}", 5.0 * given.draws + 10, ahead(window))
    yield from end_steps(bench, ("alone", "parallel"), shape)
    yield memory_step(bench, "parallel", shape)
    yield from self_steps(bench)
    yield Step("pipeline:batch", 7.0 * given.draws + 10, batch)
    for kind in ("sequential", "specvlm", "tree"):
        yield Step(f"pipeline:{kind}", 6.0 * given.draws + 10, turns(kind))
    yield from end_steps(bench, ("sequential", "specvlm", "eager"), shape)
    yield memory_step(bench, "sequential pruned", shape)
    yield one_device_step(bench, shape)


def self_steps(bench: Bench) -> Iterator[Step]:
    given = bench.given

    def run(options: argparse.Namespace, log: Log) -> None:
        bench.drop("runner")
        columns = SELF // options.shrink
        held = columns // 10 + 2 * replayed.LATER
        runner = after(bench.small, columns, keep=0.9)
        warm(runner, WIDTHS, bench.device)
        alone = decode([runner], [None], [columns, 0], bench.tokens, 1)["tokens_per_s"]
        worker = bench.ready(held)
        for window in (2, None):
            rows = [piped(bench, [runner], worker, window, columns, held, seed) for seed in seeds(given)]
            told = {
                "case": "self",
                "target": given.draft,
                "draft": given.draft,
                "replayed": True,
                "keep": 0.9,
            }
            tell(
                log,
                **told,
                asked=window,
                columns=[columns, held],
                alone_per_s=alone,
                **against(rows, alone, 0.9),
            )
        bench.drop("small")

    yield Step("pipeline:self", 6.0 * given.draws + 15, run)


def strategy(bench: Bench, kind: str) -> Any:
    """A draft on the next device, in this process or in the second one."""
    window, tenth = bench.given.windows[0], UVPrune(retention=0.1)
    if kind == "parallel":
        Elsewhere.held = bench.ready(bench.pruned)
        return Elsewhere(model="shape", window=window, prune=tenth)
    if kind == "specvlm":
        return Tree(model=bench.draft, prune=AttentionPrune(retention=0.1, compact=True))
    if kind in ("sequential", "sequential pruned"):
        return Sequential(
            model=bench.draft, window=window, prune=tenth if kind == "sequential pruned" else None
        )
    return Off()


def generation(bench: Bench, draft: Any, ended: Callable[[], Any], began: Any = None) -> tuple[Report, Any]:
    """A generation by `draft`, after one that captures its steps; its report, and what `ended` tells while its memory is
    still there. `began` is called before it."""
    given, model = bench.given, bench.target
    bench.drop("runner")
    inputs = replayed.question(given.target, bench.columns, given.device)
    with replayed.replaying(model, given.keep, given.seed), accelerate(model, Recipe(draft=draft)) as fast:
        answer.generate(fast, inputs, max_new_tokens=48)
        bench.drop()
        if began is not None:
            began()
        _, report = answer.generate(fast, inputs, max_new_tokens=bench.tokens)
        return report, ended()


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


def over(told: dict[str, Any], base: dict[str, Any]) -> dict[str, float]:
    """How much faster than `base` a generation was, decoding and as a whole."""
    return {
        "speedup": told["tokens_per_s"] / base["tokens_per_s"],
        "end_to_end": base["seconds"] / told["seconds"],
    }


def memory_step(bench: Bench, kind: str, shape: dict[str, Any]) -> Step:
    """The most bytes allocated on each device in a generation, by all processes; see held.py. The pipeline comes first,
    then drafting in turns with the same pruner and window, whose row has the ratio. Where both processes share a device, the
    sum of their peaks, which need not come at once, stands against one peak: that is no less than the true ratio."""

    def run(options: argparse.Namespace, log: Log) -> None:
        draft = strategy(bench, kind)
        own = [draft.model] if kind != "parallel" else []
        with counting(bench.device, bench.target, *own) as peaks:

            def began() -> None:
                peaks.reset()
                if kind == "parallel":
                    asked(bench.start())

            def ended() -> list[int]:
                mine = peaks.read()
                return together(mine, asked(bench.start())) if kind == "parallel" else mine

            report, bytes_of = generation(bench, draft, ended, began)
        told = {
            "case": "memory",
            "way": kind,
            **shape,
            "window": draft.window,
            "prompt": report.prompt_tokens,
        }
        told |= {"bytes": bytes_of, "total": sum(bytes_of), "failed": report.draft["failed"]}
        before = bench.found.setdefault("memory", told)
        if before is not told:
            told["parallel_over_this"] = before["total"] / told["total"]
        tell(log, **told)

    return Step(f"pipeline:memory:{kind.split()[0]}", 35.0, run)


def one_device_step(bench: Bench, shape: dict[str, Any]) -> Step:
    """Target and draft on one device and in one process: alone, in turns, and at once on two streams; a tenth of the video
    for the draft, through `generate`."""
    window, tenth = bench.given.windows[0], UVPrune(retention=0.1)

    def run(options: argparse.Namespace, log: Log) -> None:
        bench.stop()
        bench.drop("draft")
        ways = {
            "alone": Off(),
            "sequential": Sequential(model=bench.small, window=window, prune=tenth),
            "parallel": Parallel(model=bench.small, window=window, prune=tenth, process=False),
        }
        found: dict[str, dict[str, Any]] = {}
        for way, draft in ways.items():
            report, _ = generation(bench, draft, lambda: None)
            found[way] = told = figures(report)
            told |= over(told, found["alone"])
            counters = report.draft["counters"]
            tell(log, case="one device", way=way, **shape, window=window, **told, counters=counters)
        bench.drop("small")

    return Step("pipeline:one-device", 90.0, run)


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
            report, used = generation(bench, strategy(bench, kind), bench.used)
            told = {"case": "end", "way": kind, **shape, **figures(report), "used": used}
            base = bench.found.setdefault("end", told)
            told |= over(told, base)
            tell(log, **told, counters=report.draft["counters"])

        return run

    for kind in kinds:
        yield Step(f"pipeline:end:{kind}", 35.0, eager if kind == "eager" else whole(kind))


def sharded_part(bench: Bench) -> Iterator[Step]:
    def run(options: argparse.Namespace, log: Log) -> None:
        bench.drop("runner", "draft", "small")
        bench.stop()
        model = bench.target
        whole = read_and_say(model, replayed.question(options.target, bench.columns, options.device))
        tell(log, case="sharded end", shape=options.target, devices=[options.device], **whole)
        for devices in ([options.device, bench.other], [bench.other, options.device]):
            undo = loading.spread_layers_over_devices(model, devices)
            try:
                rows = timed_step(bench, model, bench.columns, (1, 5), case="sharded", shape=options.target)
                inputs = replayed.question(options.target, bench.columns, devices[0])
                whole = read_and_say(model, inputs)
            finally:
                undo()
                model.to(bench.device)
            for row in rows:
                tell(log, devices=devices, **row)
            tell(log, case="sharded end", shape=options.target, devices=devices, **whole)

    yield Step("sharded", 70.0, run)
