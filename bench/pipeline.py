"""The parts of `decode_gpu.py` in which a draft works beside its target: what they share, and their steps."""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
import replayed
from replayed import after, cache_bytes, decode, make_ready, model_of, second_process, warm
from steps import Step
from timing import Log, measure

from mmaccel.core.draft import DraftState, Prompt
from mmaccel.core.worker import READY, Worker
from mmaccel.eval import acceptance, simulate
from mmaccel.models import spread as spreading
from mmaccel.models.decode import StaticRunner
from mmaccel.policies.draft import Off, Parallel, Tree, _remote
from mmaccel.policies.draft.parallel import Pipeline
from mmaccel.policies.draft.sequential import Drafter
from mmaccel.policies.draft.tree import _Gardener

SELF = 256 << 10
"""Columns after which a model drafts for itself."""
SEATS = (2, 4)
"""Sequences of a batch."""


class Elsewhere(Parallel):
    """The pipeline over the draft's process of this benchmark."""

    held: Worker | None = None

    def _worker(self, target: Any) -> Worker:
        assert Elsewhere.held is not None
        return Elsewhere.held


class InTurns(Drafter):
    """A draft in turns whose prompt is assumed."""

    def begin(self, prompt: Prompt) -> None:
        runner: Any = self._runner
        runner.truncate(prompt.inputs["assumed"][0])
        self._warp, self._generator = None, None
        self._ids, self._left = prompt.ids[0], prompt.max_new_tokens
        self._pending = self._ids[:0]


class InTrees(_Gardener):
    """A tree whose prompt is assumed."""

    def begin(self, prompt: Prompt) -> None:
        runner: Any = self._runner
        runner.truncate(prompt.inputs["assumed"][0])
        self._pending = prompt.ids[0, :0]


class Bench:
    """What steps share: models, the draft's process, and the figures that others are held against."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        self.device = torch.device(given.device)
        count = torch.cuda.device_count() if self.device.type == "cuda" else 1
        self.other = f"cuda:{(self.device.index or 0) + 1}" if count > 1 else given.device
        self.columns = max(given.context // given.shrink, 64)
        self.pruned = self.columns // 10 + 2 * replayed.LATER
        self.tokens = max(given.tokens // given.shrink, 24)
        self.worker: Worker | None = None
        self.found: dict[str, Any] = {}

    @cached_property
    def rate(self) -> float:
        return acceptance.read_rate(self.device, 1 << (31 if self.device.type == "cuda" else 24))

    @cached_property
    def target(self) -> nn.Module:
        """The target alone on its device; of the pipeline's and of every other part."""
        if self.given.parts[0] == "pipeline":
            self.start()  # it loads while this process does
        return quiet(model_of(self.given.target, self.given.device, self.given.layers))

    @cached_property
    def draft(self) -> nn.Module:
        """The draft in this process, on the second device; its own process has gone by then."""
        self.stop()
        return model_of(self.given.draft, self.other, self.given.layers)

    @cached_property
    def small(self) -> nn.Module:
        """The draft's shape as a target."""
        return model_of(self.given.draft, self.given.device, self.given.layers)

    @cached_property
    def runner(self) -> replayed.Counting:
        """The target after its columns."""
        found = after(self.target, self.columns, keep=self.given.keep)
        warm(found, (1, *self.given.windows), self.device)
        return found

    def start(self) -> Worker:
        """The draft's process, which is kept."""
        if self.worker is None:
            self.worker = second_process(self.given, self.other)
            self.heard = False
        return self.worker

    def ready(self, columns: int, seats: int = 1) -> Worker:
        """The same, ready for sequences whose draft holds `columns`."""
        worker = self.start()
        if not self.heard:
            worker.wait(READY, 240.0)
            self.heard = True
        make_ready(worker, columns, seats)
        return worker

    def stop(self) -> None:
        if self.worker is not None:
            self.worker.close()
        self.worker = None

    def drop(self, *names: str) -> None:
        """Free what is no longer needed."""
        for name in names:
            self.__dict__.pop(name, None)
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def used(self) -> list[int] | None:
        """Bytes taken on each device, by all processes."""
        if self.device.type != "cuda":
            return None
        told = (torch.cuda.mem_get_info(n) for n in range(torch.cuda.device_count()))
        return [total - free for free, total in told]


def tell(log: Log, **row: Any) -> None:
    """Write and print a row."""
    log.row(**row)
    print(json.dumps(row), flush=True)


def quiet(model: nn.Module) -> nn.Module:
    """No token ends what the model says."""
    config: Any = model.generation_config
    config.eos_token_id, config.pad_token_id = None, 0
    return model


def timed_step(
    bench: Bench, model: nn.Module, columns: int, rows: Sequence[int], **told: Any
) -> list[dict[str, Any]]:
    """A row for a captured step of each number of rows after `columns`."""
    runner = after(model, columns)
    floor = acceptance.floor_s(model, cache_bytes(model, columns), bench.rate)
    found = []
    for count in rows:
        ids = torch.ones(1, count, dtype=torch.long, device=model.device)

        def run(ids: torch.Tensor = ids) -> None:
            StaticRunner.step(runner, ids)
            runner.truncate(columns)

        times = measure(run, warmup=3, repeats=bench.given.repeats, device=model.device)
        row = {**told, "columns": columns, "rows": count, "floor_s": floor, "read_rate": bench.rate}
        found.append({**row, **times.row(), "of_floor": times.median / floor})
    return found


def pipeline_part(bench: Bench) -> Iterator[Step]:
    given = bench.given
    shape = {"target": given.target, "draft": given.draft, "replayed": True, "keep": given.keep}

    def steps(options: argparse.Namespace, log: Log) -> None:
        rows = sorted({1, *given.windows, max(given.windows) + 1})
        for row in timed_step(bench, bench.target, bench.columns, rows, case="step", shape=given.target):
            tell(log, **row)

    def alone(options: argparse.Namespace, log: Log) -> None:
        once = decode([bench.runner], [Off().open(None)], [bench.columns, 0], bench.tokens, 1)  # type: ignore[arg-type]
        bench.found["alone"] = once["tokens_per_s"]
        floor = acceptance.floor_s(bench.target, cache_bytes(bench.target, bench.columns), bench.rate)
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
            for seed in [0, *seeds(given)]:  # the first captures what is left
                own: DraftState
                if kind == "sequential":
                    own = InTurns(small, device, given.windows[0], replayed.VOCAB)
                else:
                    own = InTrees(small, device, Tree(model="shape"), replayed.VOCAB)
                short = bench.tokens if seed else 48
                rows.append(decode([bench.runner], [own], [bench.columns, columns], short, seed))
            pace = median([row["tokens_per_s"] for row in rows[1:]])
            step = measure(lambda: small.step(one(device)), repeats=7, device=device).median
            costs = simulate.Costs(step=1 / bench.found["alone"], draft=step)
            told = {
                "case": kind,
                **shape,
                "columns": [bench.columns, columns],
                **rows[-1],
                "tokens_per_s": pace,
            }
            if kind == "sequential":
                expected = simulate.speedup(given.keep, given.windows[0], costs, parallel=False)
                told |= {"window": given.windows[0], "simulated": expected}
            told |= {"draft_step_s": step, "c": costs.ratio, "speedup": pace / bench.found["alone"]}
            tell(log, **told, used=bench.used())

        return run

    def batch(options: argparse.Namespace, log: Log) -> None:
        bench.drop("runner")
        for count in SEATS:
            runners = [after(bench.target, bench.columns, keep=given.keep) for _ in range(count)]
            for runner in runners:
                warm(runner, (1, *given.windows[:1]), bench.device)
            worker = bench.ready(bench.pruned, count)
            some = max(24, bench.tokens // 4)
            row = piped(bench, runners, worker, given.windows[0], bench.columns, bench.pruned, 1, some)
            told = {"case": "batch", **shape, "sequences": count, "window": given.windows[0], **row}
            tell(log, **told, speedup=row["tokens_per_s"] / bench.found["alone"])

    yield Step("pipeline:steps", 70.0, steps)
    yield Step("pipeline:alone", 20.0, alone)
    for window in (*given.windows, None):
        yield Step(f"pipeline:parallel:{window or 'measured'}", 25.0, ahead(window))
    yield from end_steps(bench, ("alone", "parallel"), shape)
    yield from self_steps(bench)
    yield Step("pipeline:batch", 30.0, batch)
    for kind in ("sequential", "specvlm", "tree"):
        yield Step(f"pipeline:{kind}", 30.0, turns(kind))
    yield from end_steps(bench, ("sequential", "specvlm", "eager"), shape)


def one(device: torch.device) -> torch.Tensor:
    """One token to run."""
    return torch.ones(1, 1, dtype=torch.long, device=device)


def seeds(given: argparse.Namespace) -> list[int]:
    return list(range(1, given.draws + 1))


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def piped(
    bench: Bench,
    runners: list[replayed.Counting],
    worker: Worker,
    window: int | None,
    columns: int,
    held: int,
    seed: int,
    tokens: int = 0,
) -> dict[str, Any]:
    """One generation of each runner by the pipeline, whose draft holds `held` columns."""
    choice = Parallel(model="shape", window=window)
    devices = [runners[0].model.device]
    states = [Pipeline(_remote.Remote(worker, replayed.VOCAB), choice, devices) for _ in runners]
    return decode(runners, states, [columns, held], tokens or bench.tokens, seed)


def against(rows: list[dict[str, Any]], alone: float, keep: float) -> dict[str, Any]:
    """Several draws of one way, beside decoding alone (tokens a second) and what the simulator says of the steps' times."""
    last = rows[-1]
    pace, window = median([row["tokens_per_s"] for row in rows]), round(last["counters"]["window"])
    draft = median([row["counters"]["draft_step_s"] for row in rows])
    kept = median([row["counters"]["keep_rate"] for row in rows])
    costs = simulate.Costs(step=1 / alone, draft=draft)
    expected = simulate.speedup(keep, window, costs, parallel=True)
    return {
        **last,
        "window": window,
        "tokens_per_s": pace,
        "each_per_s": [row["tokens_per_s"] for row in rows],
        "speedup": pace / alone,
        "c": costs.ratio,
        "draft_step_s": draft,
        "simulated": expected,
        "of_simulated": pace / alone / expected,
        "kept_share": kept,
        "simulated_at_kept": simulate.speedup(kept, window, costs, parallel=True),
        "simulated_best": simulate.best(keep, costs, parallel=True),
    }


def self_steps(bench: Bench) -> Iterator[Step]:
    given = bench.given

    def run(options: argparse.Namespace, log: Log) -> None:
        bench.drop("runner")
        columns = SELF // options.shrink
        held = columns // 10 + 2 * replayed.LATER
        runner = after(bench.small, columns, keep=0.9)
        warm(runner, (1, 2), bench.device)
        alone = decode([runner], [Off().open(None)], [columns, 0], bench.tokens, 1)["tokens_per_s"]  # type: ignore[arg-type]
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

    yield Step("pipeline:self", 60.0, run)


def end_steps(bench: Bench, kinds: Sequence[str], shape: dict[str, Any]) -> Iterator[Step]:
    """The whole way of a prompt, through `generate`: pixels, prefill, pruning, captures, decoding."""
    from mmaccel.core.attach import accelerate
    from mmaccel.core.recipe import Recipe
    from mmaccel.policies.draft import Sequential
    from mmaccel.policies.prune import AttentionPrune, UVPrune

    given = bench.given

    def strategy(kind: str) -> Any:
        if kind == "parallel":
            Elsewhere.held = bench.ready(bench.pruned)
            return Elsewhere(model="shape", window=given.windows[0], prune=UVPrune(retention=0.1))
        if kind == "sequential":
            return Sequential(model=bench.draft, window=given.windows[0])
        if kind == "specvlm":
            return Tree(model=bench.draft, prune=AttentionPrune(retention=0.1, compact=True))
        return Off()

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
            model = bench.target
            bench.drop("runner")
            inputs = replayed.question(given.target, bench.columns, given.device)
            with (
                replayed.replaying(model, given.keep, given.seed),
                accelerate(model, Recipe(draft=strategy(kind))) as fast,
            ):
                acceptance.generate(fast, inputs, 48)
                bench.drop()
                _, report = acceptance.generate(fast, inputs, bench.tokens)
                used = bench.used()
            pace, first = report.tokens_per_s, report.ttft_s
            assert pace is not None and first is not None
            seconds = first + (report.new_tokens - 1) / pace
            told: dict[str, Any] = {"case": "end", "way": kind, **shape, "prompt": report.prompt_tokens}
            told |= {"ttft_s": first, "tokens_per_s": pace, "seconds": seconds, "tokens": report.new_tokens}
            told |= {"a_step": (report.new_tokens - 1) / max(report.draft["target_steps"], 1), "used": used}
            told |= {"peak_bytes": report.peak_bytes, "failed": report.draft["failed"]}
            base = bench.found.setdefault("end", told)
            told |= {"speedup": pace / base["tokens_per_s"], "end_to_end": base["seconds"] / seconds}
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
            undo = spreading.spread(model, devices)
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


def read_and_say(model: nn.Module, inputs: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Seconds to read a prompt, and to say a token after it, by our own loop; and the first tokens that are said."""
    from mmaccel.core.attach import accelerate

    taken: list[float] = []
    with accelerate(model) as fast:
        for _ in range(2):
            runner = fast.view.runner()
            replayed.wait(model.device)
            began = time.perf_counter()
            logits = runner.prefill(inputs)
            replayed.wait(model.device)
            taken.append(time.perf_counter() - began)
        said = [int(logits.argmax())]
        for _ in range(4):
            said.append(int(runner.step(torch.full((1, 1), said[-1], device=model.device))[0, -1].argmax()))
        step = measure(lambda: runner.step(one(model.device)), repeats=7, device=model.device).median
    return {"prompt": inputs["input_ids"].shape[1], "prefill_s": min(taken), "step_s": step, "said": said}
