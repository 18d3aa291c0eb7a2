"""Batches made ahead by worker processes, in order of step.

Worker w makes steps w, w + W, w + 2W, ...; each has a short queue of its own, so order needs no sorting. Arrays
travel by pickle through pipes: no shared memory, which containers often keep small.
"""

from __future__ import annotations

import multiprocessing
import queue
import signal
from dataclasses import dataclass
from random import Random
from typing import Any

import torch

from mmaccel_lab.tiny.configs import SPECS
from mmaccel_lab.train import plan as plans
from mmaccel_lab.train.data import Batch, make_batch
from mmaccel_lab.train.dialect import Dialect

AHEAD = 2


@dataclass(frozen=True)
class Recipe:
    """What makes the batches of a run: the model, the seed, about how many frames a step and the longest video.

    `steps`: with a number, progress is step / steps; otherwise the run's clock tells it.
    """

    name: str
    seed: int
    budget: int
    longest: int
    steps: int | None = None


class Maker:
    """Makes the batch of a step."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        spec = SPECS[recipe.name]
        self.dialect = Dialect(spec)
        self.phases = plans.DRAFT if spec.target else plans.TARGET

    def __call__(self, step: int, progress: float) -> Batch:
        if self.recipe.steps is not None:
            progress = step / self.recipe.steps
        rng = Random(self.recipe.seed * 1_000_003 + step)
        plan = plans.draw(self.phases, progress, self.recipe.budget, rng, self.recipe.longest)
        return make_batch(plan, self.dialect, rng)


def _work(recipe: Recipe, first: int, stride: int, progress: Any, out: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    maker = Maker(recipe)
    parent = multiprocessing.parent_process()
    step = first
    while True:
        batch = maker(step, progress.value)
        while True:
            try:
                out.put(batch, timeout=5)
                break
            except queue.Full:
                if parent is not None and not parent.is_alive():
                    return
        step += stride


class Feeder:
    """Iterates over batches from step `start`. `workers` 0 makes them in this process."""

    def __init__(self, recipe: Recipe, start: int, workers: int) -> None:
        self.step = start
        self._maker = Maker(recipe) if workers == 0 else None
        context = multiprocessing.get_context("spawn")
        self._progress = context.Value("d", 0.0)
        self._queues = [context.Queue(AHEAD) for _ in range(workers)]
        self._processes = [
            context.Process(target=_work, args=(recipe, start + w, workers, self._progress, out), daemon=True)
            for w, out in enumerate(self._queues)
        ]
        self._start = start
        for process in self._processes:
            process.start()

    def next(self, progress: float) -> Batch:
        """The batch of the next step. Raises `RuntimeError` when a worker died."""
        self._progress.value = progress
        if self._maker is not None:
            batch = self._maker(self.step, progress)
        else:
            batch = self._take((self.step - self._start) % len(self._queues))
        self.step += 1
        return batch

    def _take(self, worker: int) -> Batch:
        while True:
            try:
                batch: Batch = self._queues[worker].get(timeout=10)
                return batch
            except queue.Empty:
                if not self._processes[worker].is_alive():
                    raise RuntimeError(f"Data worker {worker} died; its traceback is above.") from None

    def close(self) -> None:
        """Stop the workers."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(timeout=5)
        for out in self._queues:
            out.cancel_join_thread()
            out.close()
