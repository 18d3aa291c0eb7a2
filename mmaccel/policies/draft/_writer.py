"""A draft model writing: one sequence that can be taken back to any of its tokens and written on from there."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmaccel.core.adapter import Runner
from mmaccel.core.draft import Warp


@dataclass(frozen=True)
class Written:
    """`ids` the draft wrote, the seconds that took, and the seconds its prompt had taken."""

    ids: list[int]
    seconds: float
    prompt_s: float = 0.0


class Writer:
    """Writes greedily after a prompt. `line` are the tokens after the prompt, of which the first `_run` have been run."""

    def __init__(self, runner: Runner, device: torch.device | str, vocab: int) -> None:
        self._runner, self._device, self._vocab = runner, torch.device(device), vocab
        self.line: list[int] = []
        self._run = 0
        self.steps = 0
        self.prompt_s = 0.0

    def read(
        self,
        inputs: Mapping[str, Any],
        keep: Tensor | None = None,
        compact: bool = False,
        warp: Warp | None = None,
    ) -> None:
        """Run the prompt, or the columns `keep` of it. `warp` shapes what is likeliest, as it does for the target."""
        began = time.perf_counter()
        self._prompt = inputs["input_ids"][0].cpu()
        self._warp = warp
        told = {name: x.to(self._device) if isinstance(x, Tensor) else x for name, x in inputs.items()}
        runner = self._runner
        first = runner.prefill(told) if keep is None else runner.prefill(told, keep, compact)
        self._after_prompt = first[0]
        self._origin = runner.length()
        self.prompt_s = time.perf_counter() - began

    def write(self, length: int, fix: Sequence[int], count: int) -> Written:
        """Go back to the first `length` tokens, take `fix` as the next ones, and write `count` more."""
        began = time.perf_counter()
        self.line[length:] = fix
        # At least one token is run, for the logits after it.
        run = min(self._run, length, max(len(self.line) - 1, 0))
        if run < self._run:
            self._runner.truncate(self._origin + run)
        self._run = run
        start = len(self.line)
        for _ in range(count):
            self.line.append(self._next())
        return Written(self.line[start:], time.perf_counter() - began, self.prompt_s)

    def _next(self) -> int:
        if not self.line:
            logits = self._after_prompt
        else:
            feed = torch.tensor([self.line[self._run :]], device=self._device)
            self._run = len(self.line)
            self.steps += 1
            logits = self._runner.step(feed)[0, -1]
        logits = logits[: self._vocab]
        if self._warp is not None:
            before = torch.cat([self._prompt, torch.tensor(self.line, dtype=torch.long)])
            logits = self._warp(before.to(logits.device), logits)
        return int(logits.argmax())


@torch.no_grad()
def bare_step_s(runner: Runner, device: torch.device | str) -> float:
    """Seconds of a step after hardly any prompt: no pruner makes steps faster than this."""
    ids = torch.zeros(1, 4, dtype=torch.long, device=device)
    runner.prefill({"input_ids": ids})
    times = []
    for _ in range(7):
        began = time.perf_counter()
        int(runner.step(ids[:, :1])[0, -1].argmax())
        times.append(time.perf_counter() - began)
    return statistics.median(times[2:])  # the first ones may be compiled and captured
