"""A target and its draft, for the parts of `decode_gpu.py`: what is built once, and the figures of a generation."""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import sys
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
import replayed
from replayed import after, cache_bytes, decode, make_ready, model_of, second_process, warm
from timing import Log, measure

from mmaccel.cli import answer
from mmaccel.core.decoding.draft import Prompt
from mmaccel.core.decoding.worker import READY, Worker
from mmaccel.models.runner import HFRunner
from mmaccel.policies.draft import Parallel, _remote_drafter
from mmaccel.policies.draft.parallel import ParallelDraftState
from mmaccel.policies.draft.sequential import SequentialDraftState
from mmaccel.policies.draft.tree import _Gardener
from mmaccel_lab.eval import simulate

SELF = 256 << 10
"""Columns of the longer of two contexts."""
WIDTHS = (1, 2, 4, 8)
"""Rows of a target's steps that a measured window and the last tokens may come to, captured before anything is timed."""


def following(devices: Sequence[str]) -> str:
    """The device after all of `devices`; the first of them where there is none."""
    kind, after = torch.device(devices[0]).type, 1 + max(torch.device(one).index or 0 for one in devices)
    return f"cuda:{after}" if kind == "cuda" and after < torch.cuda.device_count() else devices[0]


class InTurns(SequentialDraftState):
    """A draft in turns whose prompt is assumed."""

    def begin(self, prompt: Prompt) -> None:
        runner: Any = self._runner
        runner.truncate(prompt.inputs["assumed"][0])
        self._warp, self._generator = None, None
        self._remaining, self._prompt = prompt.max_new_tokens, prompt.ids.shape[1]
        self._tokens, self._late = [prompt.ids[0]], [prompt.ids[0, :0]]


class InTrees(_Gardener):
    """A tree whose prompt is assumed."""

    def begin(self, prompt: Prompt) -> None:
        runner: Any = self._runner
        runner.truncate(prompt.inputs["assumed"][0])
        self._pending = self._said = prompt.ids[0, :0]


class Bench:
    """What steps share: models, the draft's process, and the figures that others are held against."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given, self.devices = given, given.devices
        self.device = torch.device(given.device)
        self.other = given.draft_device or following(given.devices)
        self.columns = max(given.context // given.shrink, 64)
        self.pruned = self.columns // 10 + 2 * replayed.LATER
        self.tokens = max(given.tokens // given.shrink, 24)
        self.worker: Worker | None = None
        self.found: dict[str, Any] = {}

    @cached_property
    def rate(self) -> float:
        return answer.memory_bandwidth(self.device, 1 << (31 if self.device.type == "cuda" else 24))

    @cached_property
    def target(self) -> nn.Module:
        """The target alone on its devices; of the pipeline's and of every other part."""
        if self.given.parts[0] == "pipeline":
            self.start()  # it loads while this process does
        devices = self.devices if len(self.devices) > 1 else ()
        return quiet(model_of(self.given.target, self.given.device, self.given.layers, devices))

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
        warm(found, (*WIDTHS, *self.given.windows), self.device)
        return found

    def start(self) -> Worker:
        """The draft's process, which is kept."""
        if self.worker is None:
            self.worker = second_process(self.given, self.other)
            self.heard = False
        return self.worker

    def ready(self, columns: int) -> Worker:
        """The same, ready for a sequence whose draft holds `columns`."""
        worker = self.start()
        if not self.heard:
            worker.wait(READY, 240.0)
            self.heard = True
        make_ready(worker, columns)
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
    floor = answer.min_decode_step_s(model, cache_bytes(model, columns), bench.rate)
    found = []
    for count in rows:
        ids = torch.ones(1, count, dtype=torch.long, device=model.device)

        def run(ids: torch.Tensor = ids) -> None:
            HFRunner.step(runner, ids)
            runner.truncate(columns)

        times = measure(run, warmup=3, repeats=bench.given.repeats, device=model.device)
        row = {**told, "columns": columns, "rows": count, "floor_s": floor, "read_rate": bench.rate}
        parts = [] if runner.steps is None else runner.steps.parts
        ways = [way for part in parts for held in part.replays._held.values() for way in held.values()]
        captured = bool(parts) and "unfit" not in ways
        told_of = {"of_floor": times.median / floor, "captured": captured}
        found.append({**row, **times.row(), **told_of})
    return found


def one(device: torch.device) -> torch.Tensor:
    """One token to run."""
    return torch.ones(1, 1, dtype=torch.long, device=device)


def seeds(given: argparse.Namespace) -> list[int]:
    return list(range(1, given.draws + 1))


def piped(
    bench: Bench, worker: Worker, window: int | None, columns: int, held: int, seed: int
) -> dict[str, Any]:
    """One generation by the pipeline, whose draft holds `held` columns."""
    choice, remote = (
        Parallel(model="shape", window=window),
        _remote_drafter.RemoteDrafter(worker, replayed.VOCAB),
    )
    devices = list(dict.fromkeys(torch.device(name) for name in bench.devices))
    draft = ParallelDraftState(remote, choice, devices, replayed.VOCAB)
    return decode(bench.runner, draft, [columns, held], bench.tokens, seed)


def spread(paces: Sequence[float]) -> tuple[float, float | None]:
    """Tokens a second of draws that say as many tokens each: all tokens over all seconds, and the standard error of that
    (none of a single draw). Verdicts differ by draw, so that the slow ones count as the fast ones do."""
    each = [1 / pace for pace in paces]
    pace = 1 / statistics.fmean(each)
    if len(each) < 2:
        return pace, None
    return pace, pace**2 * statistics.stdev(each) / math.sqrt(len(each))


def pooled(rows: Sequence[dict[str, Any]], alone: float) -> dict[str, Any]:
    """Several draws of one way (`replayed.decode`) as one row, beside decoding alone (tokens a second): sums of tokens,
    steps and seconds, what failed in any of them, counters as means over the draws."""
    paces = [row["tokens_per_s"] for row in rows]
    pace, error = spread(paces)
    steps, seconds = sum(row["steps"] for row in rows), sum(row["seconds"] for row in rows)
    told: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row["counters"].items():
            told.setdefault(name, []).append(value)
    return {
        "draws": len(rows),
        "tokens": sum(row["tokens"] for row in rows),
        "steps": steps,
        "seconds": seconds,
        "tokens_per_s": pace,
        "error_per_s": error,
        "each_per_s": paces,
        "a_step": pace * seconds / steps,
        "failed": [reason for row in rows for reason in row["failed"]],
        "counters": {name: statistics.fmean(values) for name, values in told.items()},
        "speedup": pace / alone,
        "speedup_error": None if error is None else error / alone,
    }


def against(rows: Sequence[dict[str, Any]], alone: float, keep: float) -> dict[str, Any]:
    """Several draws of the pipeline, and what the simulator says of the steps' times: at the chance that verdicts are drawn
    with, and at the share that was kept. Of the steps' times the median, which no draw's first steps move."""
    row = pooled(rows, alone)
    kept = row["counters"]["keep_rate"]
    window = round(statistics.median(one["counters"]["window"] for one in rows))
    draft = statistics.median(one["counters"]["draft_step_s"] for one in rows)
    costs = simulate.Costs(step=1 / alone, draft=draft)
    expected = simulate.speedup(keep, window, costs, parallel=True)
    return {
        **row,
        "window": window,
        "c": costs.ratio,
        "draft_step_s": draft,
        "simulated": expected,
        "of_simulated": row["speedup"] / expected,
        "kept_share": kept,
        "simulated_at_kept": simulate.speedup(kept, window, costs, parallel=True),
        "simulated_best": simulate.best(keep, costs, parallel=True),
    }
