"""Decode steps, drafting and pruned drafts at published shapes, random weights, on CUDA devices.

    python bench/decode_gpu.py pipeline --out bench/results/pipeline_h200x2_202601.jsonl
    python bench/decode_gpu.py pipeline --target llava-onevision-72b --draft llava-onevision-7b --device cuda:{0,1} --out ...
    python bench/decode_gpu.py steps prune flash prefill batch --target qwen2.5-vl-7b --out ...
    python bench/decode_gpu.py pipeline --device cpu --layers 1 --target qwen2.5-vl-3b --draft qwen2.5-vl-3b --shrink 64 ...

Parts, each of some steps whose rows are written as they are made:

steps     a captured step of one and of several rows, beside the time in which the device reads weights and cache once
pipeline  a draft on the next device ahead of its target: alone, the pipeline at two windows and at the measured one, in
          turns, trees, all with replayed acceptance (see replayed.py); then whole, through `generate`, prefill and pruning
          included; the most memory that the pipeline and drafting in turns take on all devices; both models on one device
          with two streams; a model that drafts for itself after 256k columns; a batch
sharded   the target spread over both devices, both ways round
ratios    a step of the target after all columns, and of a draft that keeps 1, 0.5, 0.1, 0.05, 0.01 and none of them: T_p,
          T_q and their ratio, the window that is worth most and what it gains (the paper's Tables 3 and 5)
prune     a step after all columns and after a tenth of them, beside the ratio of the bytes that they read; and eagerly
flash     a step of the model by transformers' own code without and with a flash kernel, beside the captured one
prefill   seconds to read a video and to say a token after it, at several lengths
lossy     the same of a target under each lossy pruner, as it comes and without one, vision tower and all: the first token, a
          captured step and one through the modules, in turns, the most memory beyond the weights, and what is held
batch     several prompts at once through `generate`, replayed acceptance, target and draft on one device: plain steps of the
          batch beside a draft in turns and one that `in_batches` lets draft where it was measured to be faster
together  sequences of calls of their own in steps that they share, beside one at a time (together.py)
verified  the same with a draft of each, replayed acceptance, judged in shared steps, beside plain shared steps (together.py)

A target that fills one device and some of a second, the draft beside it there: --device cuda:0 cuda:0 cuda:0 cuda:1
--draft-device cuda:1.

A row of several draws has all their tokens over all their seconds, the standard error of that, and each draw's pace. One
generation of 512 tokens at p = 0.81 keeps 0.81 +- 0.017 of them: three are too few.

A step that fails or outlasts its time leaves the others alone; one whose row is in the file is not run again.
"""

from __future__ import annotations

import argparse
import math
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
import replayed
from pair import SEATS, SELF, Bench, read_and_say, tell, timed_step
from pipeline import pipeline_part, sharded_part
from replayed import after
from steps import Step, run_steps
from timing import Log, compare, measure
from together import together_part, verified_part

from mmaccel.cli import answer
from mmaccel.core.attach import accelerate, adapter_for
from mmaccel.core.recipe import Recipe
from mmaccel.core.registry import registry
from mmaccel.models import shapes
from mmaccel.models.attention import KVCache
from mmaccel.models.runner import HFRunner
from mmaccel.policies.draft import Off, Sequential
from mmaccel_lab.eval import simulate

LENGTHS = (8 << 10, 16 << 10, 24 << 10, 32 << 10)
"""Tokens of video at which prefill and flash kernels are timed."""
KEPT = (1.0, 0.5, 0.1, 0.05, 0.01, 0.0)
"""Shares of the video that a draft keeps where T_p / T_q is told."""
PRUNED = (25_088, 100_352, SELF)
"""Columns of which a draft keeps a tenth."""


def steps_part(bench: Bench) -> Iterator[Step]:
    def run(options: argparse.Namespace, log: Log) -> None:
        for columns in (bench.columns, SELF // options.shrink):
            for row in timed_step(
                bench, bench.target, columns, (1, 4, 5, 6), case="step", shape=options.target
            ):
                tell(log, **row)

    yield Step("steps", 60.0, run)


def ratios_part(bench: Bench) -> Iterator[Step]:
    """T_p / T_q as the draft is pruned. One model after the other on one device: a pair need not fit on it."""
    given = bench.given

    def run(options: argparse.Namespace, log: Log) -> None:
        (target,) = timed_step(bench, bench.target, bench.columns, (1,))
        if given.draft != given.target:
            bench.drop("runner", "target")
        model = bench.target if given.draft == given.target else bench.small
        shape = {"target": given.target, "draft": given.draft, "columns": bench.columns, "keep": given.keep}
        for share in KEPT:
            held = int(share * bench.columns) + replayed.LATER
            (draft,) = timed_step(bench, model, held, (1,))
            costs = simulate.Costs(step=target["median_s"], draft=draft["median_s"])
            window, gain = simulate.best(given.keep, costs, parallel=True)
            told = {"retention": share, "held": held, "step_s": costs.step, "draft_step_s": costs.draft}
            told |= {"c": costs.ratio, "byte_ratio": target["floor_s"] / draft["floor_s"]}
            tell(log, case="ratios", **shape, **told, window=window, simulated=gain)
        bench.drop("small")

    yield Step("ratios", 60.0, run)


def prune_part(bench: Bench) -> Iterator[Step]:
    """What pruning at 0.9 makes of a step of the target's own shape, and what drafting for itself could gain with it."""

    def captured(columns: int) -> Callable[[argparse.Namespace, Log], None]:
        def run(options: argparse.Namespace, log: Log) -> None:
            model, whole = bench.target, columns // options.shrink
            held = whole // 10
            (all_of,) = timed_step(bench, model, whole, (1,), case="prune all", shape=options.target)
            (some,) = timed_step(bench, model, held, (1,), case="prune tenth", shape=options.target)
            ratio = all_of["median_s"] / some["median_s"]
            read = all_of["floor_s"] / some["floor_s"]
            costs = simulate.Costs(step=all_of["median_s"], draft=some["median_s"])
            for row in (all_of, some):
                tell(log, **row)
            gain = simulate.best(0.9, costs, parallel=True)
            told = {"ratio": ratio, "byte_ratio": read, "of_bytes": ratio / read, "self_gain_at_0.9": gain}
            tell(log, case="prune", shape=options.target, columns=[whole, held], **told)

        return run

    def eager(options: argparse.Namespace, log: Log) -> None:
        found = []
        for columns in (bench.columns, bench.columns // 10):
            found.append(plain_step(bench, columns, 1))
        tell(
            log,
            case="prune eager",
            shape=options.target,
            columns=[bench.columns, bench.columns // 10],
            seconds=found,
            ratio=found[0] / found[1],
        )

    for columns in PRUNED:
        yield Step(f"prune:{columns}", 35.0 if columns == PRUNED[0] else 12.0, captured(columns))
    yield Step("prune:eager", 10.0, eager)


def plain_step(bench: Bench, columns: int, rows: int) -> float:
    """Seconds of a step by transformers' own code and cache, which grows by copies."""
    model = bench.target
    held = after(model, columns)
    runner = HFRunner(model, adapter_for(model), held.cache)
    ids = torch.ones(1, rows, dtype=torch.long, device=bench.device)

    def run() -> None:
        with torch.no_grad():
            runner.step(ids)
        runner.truncate(columns)

    return measure(run, warmup=2, repeats=bench.given.repeats, device=bench.device).median


def flash_part(bench: Bench) -> Iterator[Step]:
    """A step without a flash kernel (scores of all columns in memory), with one, and ours."""

    def run(options: argparse.Namespace, log: Log) -> None:
        model: Any = bench.target
        for length in LENGTHS:
            columns = length // options.shrink
            for rows in (1, 6):
                row: dict[str, Any] = {
                    "case": "flash",
                    "shape": options.target,
                    "columns": columns,
                    "rows": rows,
                }
                for way, name in (("without_s", "eager"), ("with_s", "sdpa")):
                    model.set_attn_implementation(name)
                    row[way] = plain_step(bench, columns, rows)
                (own,) = timed_step(bench, model, columns, (rows,))
                tell(log, **row, captured_s=own["median_s"], gain=row["without_s"] / row["with_s"])

    yield Step("flash", 20.0, run)


def prefill_part(bench: Bench) -> Iterator[Step]:
    def at(length: int) -> Callable[[argparse.Namespace, Log], None]:
        def run(options: argparse.Namespace, log: Log) -> None:
            inputs = replayed.question(options.target, length // options.shrink, options.device)
            tell(log, case="prefill", shape=options.target, **read_and_say(bench.target, inputs))

        return run

    for length in LENGTHS:
        yield Step(f"prefill:{length}", 8.0, at(length))


def lossy_part(bench: Bench) -> Iterator[Step]:
    """The whole shape, on its own: other parts have one layer of vision."""
    given = bench.given
    names = [None, *(name for name, kind in registry("prune").items() if kind.stage != "draft")]
    build = {"layers": given.layers, "vision_layers": given.layers, "dtype": torch.bfloat16}
    models: list[torch.nn.Module] = []

    def under(name: str | None) -> Callable[[argparse.Namespace, Log], None]:
        def run(options: argparse.Namespace, log: Log) -> None:
            if not models:
                models.append(shapes.build_model(given.target, device=given.device, **build))
            inputs = replayed.question(given.target, bench.columns, given.device)
            row = read_under(models[0], name, inputs, bench.device, given.repeats)
            tell(log, case="lossy", shape=given.target, prune=name or "none", **row)

        return run

    for name in names:
        yield Step(f"lossy:{name or 'none'}", 25.0 if name is None else 10.0, under(name))


def read_under(
    model: torch.nn.Module,
    name: str | None,
    inputs: dict[str, torch.Tensor],
    device: torch.device,
    repeats: int,
) -> dict[str, Any]:
    """The figures of one prompt under the pruner `name`."""
    ids, taken, cuda = torch.ones(1, 1, dtype=torch.long, device=device), [], device.type == "cuda"
    before = torch.cuda.memory_allocated(device) if cuda else 0
    with accelerate(model, prune=name) as fast:
        for _ in range(3):
            runner = fast.view.runner()
            if cuda:
                torch.cuda.reset_peak_memory_stats(device)
            replayed.wait(device)
            began = time.perf_counter()
            runner.prefill(inputs)
            replayed.wait(device)
            taken.append(time.perf_counter() - began)
        peak = torch.cuda.max_memory_allocated(device) - before if cuda else None
        held = runner.cache.state.counters()
        modules = HFRunner(model, fast.adapter, KVCache(fast.open_kv_state(), fast.view.geometry.layers))
        modules.prefill(inputs)
        length = runner.length()

        def step(one: HFRunner) -> Callable[[], None]:
            def run() -> None:
                one.step(ids)
                one.truncate(length)

            return run

        both = {"step": step(runner), "modules": step(modules)}
        times = compare(both, warmup=4, repeats=repeats, device=device)
    told = {"columns": length, "first_s": min(taken), "first_runs_s": taken, "peak_bytes": peak, "held": held}
    return {**told, **times["step"].row("step_"), **times["modules"].row("modules_")}


def batch_part(bench: Bench) -> Iterator[Step]:
    """Equal prompts at once through `generate`: plain steps of the batch, a draft in turns, and one that `in_batches` lets
    draft where it was measured to be faster; the draft lies beside the target."""
    given = bench.given

    def of(count: int) -> Callable[[argparse.Namespace, Log], None]:
        def run(options: argparse.Namespace, log: Log) -> None:
            one = replayed.question(given.target, bench.columns, given.device)
            drafts: dict[str, Any] = {"plain": Off()}
            for choice in ("always", "measured"):
                drafts[choice] = Sequential(model=bench.small, window=given.windows[0], in_batches=choice)
            found = {}
            for way, draft in drafts.items():
                with replayed.replaying(bench.target, given.keep, given.seed):
                    found[way] = batched_pace(bench, draft, one, count)
            row = {f"{way}_per_s": pace for way, (pace, _) in found.items()}
            plain = row["plain_per_s"]
            told = {"case": "batched", "target": given.target, "draft": given.draft, "keep": given.keep}
            told |= {"sequences": count, "columns": bench.columns, "window": given.windows[0], **row}
            told |= {f"{way}_over_plain": row[f"{way}_per_s"] / plain for way in ("always", "measured")}
            tell(log, **told, measured_drafts=found["measured"][1] > 0)

        return run

    for count in SEATS:
        yield Step(f"batch:{count}", 120.0, of(count))


def batched_pace(bench: Bench, draft: Any, one: dict[str, torch.Tensor], count: int) -> tuple[float, int]:
    """Tokens a second, after the first two, that `count` sequences get together, and the rounds of the draft in it.

    What the draft's choice rests on is measured first: a prompt alone and two calls of the batch. The best of up to three
    timings counts.
    """
    many = {name: torch.cat([x] * count) for name, x in one.items()}
    tokens, taken = max(24, bench.tokens // 4), dict[int, float]()
    with accelerate(bench.target, Recipe(draft=draft)) as fast:
        for inputs in (one, many, many):
            answer.generate(fast, inputs, max_new_tokens=tokens, eos_token_id=None)
        for length in (2, tokens) * min(bench.given.repeats, 3):
            replayed.wait(bench.device)
            began = time.perf_counter()
            _, report = answer.generate(fast, many, max_new_tokens=length, eos_token_id=None)
            replayed.wait(bench.device)
            taken[length] = min(time.perf_counter() - began, taken.get(length, math.inf))
    return count * (tokens - 2) / (taken[tokens] - taken[2]), report.draft["rounds"]


PARTS: dict[str, Callable[[Bench], Iterator[Step]]] = {
    "pipeline": pipeline_part,
    "sharded": sharded_part,
    "steps": steps_part,
    "ratios": ratios_part,
    "prune": prune_part,
    "flash": flash_part,
    "prefill": prefill_part,
    "lossy": lossy_part,
    "batch": batch_part,
    "together": together_part,
    "verified": verified_part,
}


class Overrun(BaseException):
    """A step outlasted its time; no handler of errors on the way may take it for a draft's."""


def limited(step: Step) -> Step:
    """`step`, broken off when it takes three times what it should."""
    seconds = 20 + 3 * step.seconds

    def late(*_: object) -> None:
        raise Overrun

    def run(options: argparse.Namespace, log: Log) -> None:
        before = signal.signal(signal.SIGALRM, late)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            step.run(options, log)
        except Overrun:
            raise TimeoutError(f"took more than {seconds:g} s") from None
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    return Step(step.name, step.seconds, run)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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
        run_steps([limited(step) for part in options.parts for step in PARTS[part](bench)], options)
    finally:
        bench.stop()


if __name__ == "__main__":
    main()
