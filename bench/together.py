"""Sequences decoded together: tokens a second in all, beside one sequence at a time. A part of `decode_gpu.py`:

python bench/decode_gpu.py together --target qwen2.5-vl-7b --device cuda:0 --tokens 256 --out ...
python bench/decode_gpu.py together --target llava-onevision-0.5b --device cpu --layers 2 --shrink 64 --out ...
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence

import torch
from pair import Bench, tell
from replayed import after, assumed, cache_bytes, wait
from steps import Step
from timing import Log, measure

from mmaccel.cli import answer
from mmaccel.core.attach import adapter_for
from mmaccel.core.decoding.batch import Batch
from mmaccel.core.decoding.generate import Speculation
from mmaccel.core.report import Meter
from mmaccel.models.decode import ROWS
from mmaccel.models.runner import HFRunner
from mmaccel.models.together import StepsTogether

COUNTS = (1, 2, 4, 8)
"""Sequences at once."""


def together_part(bench: Bench) -> Iterator[Step]:
    """The loop without a draft, random weights, each sequence after columns of its own: one after the other by the captured
    step of one, and together. Both say the same where rounding leaves them the same choice."""

    def run(options: argparse.Namespace, log: Log) -> None:
        model, columns = bench.target, bench.columns
        family, rows = adapter_for(model), ROWS if bench.device.type == "cuda" else ()
        runners = [HFRunner(model, family, after(model, columns).cache, rows) for _ in range(max(COUNTS))]
        alone, said = [], []
        for runner in runners:
            paces = [pace([runner], columns, bench.tokens) for _ in range(2)]  # captured in the first
            alone.append(paces[-1][0])
            said += paces[-1][1]
        one = statistics.median(alone)
        for runner in runners:
            runner.together = StepsTogether.of(runner, runners[0].together)
        for count in COUNTS:
            some = runners[:count]
            taken = [pace(some, columns, bench.tokens) for _ in range(1 + min(options.repeats, 3))][1:]
            ids = [torch.ones(1, 1, dtype=torch.long, device=model.device)] * count

            def step(some: Sequence[HFRunner] = some, ids: Sequence[torch.Tensor] = ids) -> None:
                some[0].together(some, ids)
                for runner in some:
                    runner.truncate(columns)

            for runner in some:
                runner.truncate(columns)
            times = measure(step, warmup=3, repeats=max(options.repeats, 2), device=model.device)
            floor = answer.floor_s(model, count * cache_bytes(model, columns), bench.rate)
            paces = [one for one, _ in taken]
            pairs = zip(taken[-1][1], said, strict=False)
            same = [int((a == b).long().cumprod(0).sum()) for a, b in pairs]
            told = {"shape": options.target, "columns": columns, "sequences": count, "tokens": bench.tokens}
            told |= {"tokens_per_s": max(paces), "each_per_s": paces, "alone_per_s": one}
            told |= {"over_alone": max(paces) / one, "floor_s": floor, "of_floor": times.median / floor}
            tell(log, case="together", **told, **times.row("step_"), agreed_tokens=same)

    yield Step("together", 60.0, run)


def pace(runners: Sequence[HFRunner], columns: int, tokens: int) -> tuple[float, list[torch.Tensor]]:
    """Tokens a second in all, after the first, of sequences that are decoded together, and what each said; those without a
    shared step take turns."""
    device, sequences = runners[0].model.device, []
    for seat, runner in enumerate(runners):
        runner.truncate(columns)
        said = assumed(columns, tokens, seat, device)
        end = said.ids.shape[1] + tokens
        first = torch.nn.functional.one_hot(said.ids[:, -1], 1000).float()
        stop = lambda out, end=end: out.shape[1] >= end  # noqa: E731
        sequences.append(Speculation(runner, None, said, first, stop=stop, meter=Meter().sequence()))
        sequences[-1].advance()
    wait(device)
    began = time.perf_counter()
    Batch().run(sequences)
    wait(device)
    return (tokens - 1) * len(runners) / (time.perf_counter() - began), [
        one.ids[0].cpu() for one in sequences
    ]
