"""Batches made ahead by worker processes, in order of step.

Arrays travel by pickle through pipes: no shared memory, which containers often keep small.
"""

from __future__ import annotations

import itertools
import multiprocessing
import signal
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from mmaccel_lab.tiny.configs import SPECS
from mmaccel_lab.train import plan as plans
from mmaccel_lab.train.data import Batch, make_batch
from mmaccel_lab.train.dialect import Dialect

AHEAD = 2
"""Batches that each worker makes ahead."""


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


class Maker(Dataset[Batch]):
    """The batch of each step, at the progress that `progress.value` tells."""

    def __init__(self, recipe: Recipe, progress: Any) -> None:
        self.recipe, self.progress = recipe, progress
        spec = SPECS[recipe.name]
        self.dialect = Dialect(spec)
        self.phases = plans.DRAFT if spec.target else plans.TARGET

    def __getitem__(self, step: int) -> Batch:
        recipe = self.recipe
        progress = self.progress.value if recipe.steps is None else step / recipe.steps
        rng = Random(recipe.seed * 1_000_003 + step)
        plan = plans.draw(self.phases, progress, recipe.budget, rng, recipe.longest)
        return make_batch(plan, self.dialect, rng)


def _same(batch: Any) -> Any:
    return batch


def _leave_stops_to_the_run(worker: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class Feeder:
    """Iterates over batches from step `start`. `workers` 0 makes them in this process."""

    def __init__(self, recipe: Recipe, start: int, workers: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._progress = context.Value("d", 0.0)
        self._batches: Any = iter(
            DataLoader(
                Maker(recipe, self._progress),
                batch_size=None,
                sampler=itertools.count(start),
                num_workers=workers,
                collate_fn=_same,
                worker_init_fn=_leave_stops_to_the_run,
                multiprocessing_context=context if workers else None,
                prefetch_factor=AHEAD if workers else None,
                generator=torch.Generator(),  # else the seed of the workers is drawn from the process's own
            )
        )

    def next(self, progress: float) -> Batch:
        """The batch of the next step. What a worker's batch fails with is raised here; where a worker dies, torch raises
        `RuntimeError` in the main thread, whatever that is at."""
        self._progress.value = progress
        batch: Batch = next(self._batches)
        return batch

    def close(self) -> None:
        """Stop the workers, also where an error still holds their iterator; a second call does nothing."""
        batches, self._batches = self._batches, iter(())
        getattr(batches, "_shutdown_workers", lambda: None)()
