"""The table by several processes: most of its time goes into writing and reading video files, which one core does."""

from __future__ import annotations

import multiprocessing
import queue
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from mmaccel.core.errors import ModelError
from mmaccel.core.recipe import Recipe
from mmaccel_lab.eval.cases import Film
from mmaccel_lab.eval.table import ENTRIES, Entry, Line, measure, step_line

Loaded = tuple[nn.Module, Any, nn.Module | None]
SECONDS = 5.0


@dataclass(frozen=True, kw_only=True)
class Job:
    """What each process does its share of. `load` gives model, processor and draft, and must survive pickling."""

    load: Callable[[], Loaded]
    samples: int
    seed: int
    recipe: Recipe
    entries: Sequence[Entry] = ENTRIES
    done: Sequence[Line] = ()
    videos: Path | None = None


def measure_in(
    jobs: int, job: Job, progress: Callable[[str, int, int], None] | None = None
) -> Iterator[Line]:
    """The lines of `measure` by `jobs` processes, the same figures whatever their number.

    A line comes when every process has done its share of it. Raises `ModelError` when a process dies.
    """
    context = multiprocessing.get_context("spawn")
    told: Any = context.Queue()
    processes = [context.Process(target=_work, args=(job, (i, jobs), told), daemon=True) for i in range(jobs)]
    for process in processes:
        process.start()
    parts: dict[tuple[str, int], list[Line]] = defaultdict(list)
    asked: dict[str, dict[int, tuple[int, int]]] = defaultdict(dict)
    running = set(range(jobs))
    try:
        while running:
            try:
                who, what, value = told.get(timeout=SECONDS)
            except queue.Empty:
                dead = [i for i in running if not processes[i].is_alive()]
                if dead:
                    raise ModelError(
                        f"process {dead[0]} of --jobs died; give fewer jobs if memory is short."
                    ) from None
                continue
            if what == "error":
                raise value
            if what == "done":
                running.discard(who)
            elif what == "progress":
                asked[value[0]][who] = value[1:]
                if progress is not None:
                    shares = asked[value[0]].values()
                    progress(value[0], sum(done for done, _ in shares), max(total for _, total in shares))
            else:
                same = parts[value.task, value.frames]
                same.append(value)
                if len(same) == jobs:
                    yield merged(same)
    finally:
        for process in processes:
            process.kill()
    if not any(line.task == "draft step" for line in job.done):
        model, _, draft = job.load()
        if draft is not None:
            yield step_line(model, draft)


def merged(parts: Sequence[Line]) -> Line:
    """One line of the shares of several processes; a share may be empty."""
    full = [part for part in parts if part.value is not None]
    count = sum(part.asked for part in full)
    if not count:
        return parts[0]
    value = sum((part.value or 0.0) * part.asked for part in full) / count
    tokens = round(sum(part.tokens * part.asked for part in full) / count)
    return replace(parts[0], value=value, asked=count, tokens=tokens)


def _work(job: Job, share: tuple[int, int], told: Any) -> None:
    import torch

    torch.set_num_threads(1)
    how = {name: value for name, value in vars(job).items() if name not in ("load", "videos")}
    try:
        model, processor, draft = job.load()
        with Film(job.videos) as film:
            for line in measure(
                model,
                processor,
                film,
                draft=draft,
                progress=lambda *what: told.put((share[0], "progress", what)),
                share=share,
                **how,
            ):
                told.put((share[0], "line", line))
        told.put((share[0], "done", None))
    except Exception as error:
        told.put((share[0], "error", error))
