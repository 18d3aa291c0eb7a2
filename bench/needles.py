"""Needles by length and depth for both models and both tasks, every method at one share of attention, by several processes.

    python bench/needles.py --processes 14 --limit 300 --levels bench/results/haystack_h200_202611.jsonl --out needles.jsonl
    python bench/needles.py --rows needles.jsonl --maps docs          # asks nothing: figures and maps from rows alone

A sample of the map is a round: one video for each length, task and model, with a question at every depth
(the lab's `eval.haystack.whole_films`). Rounds follow each other, so that a run that is cut is a whole map of fewer samples;
after the second come a compressor before every method (two lengths), and dense attention and ours in float32. The questions
of a video go through a method in one batch, whose prompts have one length, and the vision tower sees the video once for all
methods; a method that drops tokens takes them one by one, and so do all where questions differ in their number of tokens.
Intervals know that questions of a video go together. What a process had no memory for is asked once more when all else is
done, by half as many processes and one by one. Every row is written when it is there; the same command with the same --out
goes on with what that file lacks.

A row is an answer (`eval.haystack.Shot` of the lab; `kept` is a mean over what was asked at once), or a level: the fields
of a rival at a length, and the share it computes of the first prompts there, where `wanted` was wanted. Both say the model,
the video segments of a document (0: one video), the compressor and the dtype. Levels hold for all dtypes, and may come out
of another file.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
import timing
from jobs import ends_in_order
from needle_rows import OURS, Rows, Setting, draw, summary
from needle_units import METHODS, SEGMENTS, Unit, rivals_of, units

from mmaccel.cli import choices
from mmaccel.cli.answer import ask_each, prompt
from mmaccel_lab.cli.haystack import methods_of
from mmaccel_lab.eval.cases import Case, Film
from mmaccel_lab.eval.encoded import Encoded
from mmaccel_lab.eval.haystack import Shot
from mmaccel_lab.eval.methods import Methods
from mmaccel_lab.eval.needle import MAX_NEW_TOKENS
from mmaccel_lab.world import World, write_mp4

WAIT = 0.2
"""Seconds between two looks at what is ready."""


class Asker:
    """What a process holds: models, methods, the last video. Processes begin with another method each (`number`), so that
    they do not all compile the same kernels at the same time."""

    def __init__(self, device: str, films: str, number: int = 0) -> None:
        self.device, self.number = device, number
        self.film = Film(films)
        self.models: dict[tuple[str, str], Any] = {}
        self.methods: dict[tuple[str, str | None], Methods] = {}
        self.last: tuple[Any, list[dict[str, Any]], list[dict[str, Any]], Encoded] | None = None

    def rows(self, unit: Unit) -> Iterator[dict[str, Any]]:
        """The rows of a unit, as they come."""
        setting, about = unit.setting, asdict(unit.setting)
        model = self._model(setting.model, setting.dtype)
        processor = choices.processor(setting.model)
        methods = self._methods(setting)
        key = setting.model, setting.dtype, unit.cases, unit.alone
        if self.last is None or self.last[0] != key:
            # What is held of the last video goes first.
            self.last, seen = None, Encoded()
            alone = prompts(processor, unit.cases, self.film, model)
            one_length = len({one["input_ids"].shape[1] for one in alone}) == 1
            batches = [seen.together(alone)] if one_length and not unit.alone else alone
            self.last = key, alone, batches, seen
        _, alone, batches, seen = self.last
        for name in _turned(unit.names, self.number) if not unit.levels else ():
            recipe = methods.fixed.get(name) or methods.recipe(unit.fields[name])
            with seen.shared(model, recipe):
                # A pruner takes one sequence.
                asked = batches if recipe.prune is None else alone
                answers = [
                    answer
                    for inputs in asked
                    for answer in ask_each(model, processor, inputs, recipe, max_new_tokens=MAX_NEW_TOKENS)
                ]
            for depth, (case, answer) in enumerate(zip(unit.cases, answers, strict=True)):
                yield {**about, **Shot.of(name, depth, case, answer).to_dict()}
        if unit.levels:
            inputs = (batches if setting.compress is None else alone)[0]
            wanted = methods.wanted(model, processor, inputs, seen)
            for name in _turned(unit.levels, self.number):
                prunes = methods.recipe(methods.rivals[name].make(1.0)).prune is not None
                whole = (alone if prunes else batches)[0]
                fields, share = methods.levelled(name, wanted, model, processor, whole, seen)
                row = {"level": name, "frames": unit.world.frames, "fields": fields, "share": share}
                yield {**about, **row, "wanted": wanted}

    def release(self) -> None:
        """Give back the memory of the device, models too."""
        self.last = None
        self.models.clear()
        gc.collect()
        if self.device.startswith("cuda"):
            torch.cuda.empty_cache()

    def _model(self, name: str, dtype: str) -> Any:
        if (name, dtype) not in self.models:
            self.models[name, dtype] = choices.load(name, self.device, dtype)
        return self.models[name, dtype]

    def _methods(self, setting: Setting) -> Methods:
        key = setting.model, setting.compress
        if key not in self.methods:
            self.methods[key] = methods_of(
                setting.model, self.device, OURS, rivals_of(setting), compress=setting.compress
            )
        return self.methods[key]


def prompts(processor: Any, cases: Sequence[Case], film: Film, model: Any) -> list[dict[str, Any]]:
    """The prompts of questions about one video, which differ in their last words; the pixels are made once."""
    video = film.watch(cases[0].world)
    first = prompt(processor, cases[0].content(video), model)
    told = [processor.chat([{"type": "text", "text": case.question}])["input_ids"][0] for case in cases]
    made = []
    for case, words in zip(cases, told, strict=True):
        ids, own = first["input_ids"], len(words) == len(told[0])
        unlike = (words != told[0]).nonzero()[:, 0].tolist() if own else []
        end = len(words) - unlike[0] if unlike else 0
        if own and torch.equal(ids[0, ids.shape[1] - end :].cpu(), told[0][len(words) - end :]):
            ids = ids.clone()
            ids[0, ids.shape[1] - end :] = words[len(words) - end :].to(ids.device)
            made.append({**first, "input_ids": ids})
        else:
            made.append(prompt(processor, case.content(video), model))
    return made


def _turned(names: Sequence[str], number: int) -> list[str]:
    """The names in turn, from another one on."""
    begin = number % max(1, len(names))
    return [*names[begin:], *names[:begin]]


@dataclass(frozen=True)
class Fault:
    """Why a unit was not done, and whether it is that there was no memory for it."""

    trace: str
    memory: bool


def _work(device: str, films: str, number: int, line: Any) -> None:
    """Does the units that come down the line, until there is None."""
    torch.set_num_threads(1)
    asker = Asker(device, films, number)
    while (unit := line.recv()) is not None:
        fault = _tried(asker, unit, line)
        if fault is not None and fault.memory:
            # Not before the error is gone, whose frames hold tensors.
            asker.release()
        line.send(fault)


def _tried(asker: Asker, unit: Unit, line: Any) -> Fault | None:
    """Does a unit, if it can."""
    try:
        for row in asker.rows(unit):
            line.send(row)
    except Exception as error:
        # Kernels that find no memory say so in errors of other classes.
        memory = isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error).lower()
        return Fault(traceback.format_exc(), memory)
    return None


def _render(worlds: Sequence[World], films: str) -> None:
    """Writes the films of worlds ahead of those who watch them."""
    torch.set_num_threads(1)
    film = Film(films)
    for world in worlds:
        if not film.path(world).is_file():
            write_mp4(world, film.path(world))


class Run:
    """Processes, and the units that they have not done."""

    def __init__(self, options: argparse.Namespace, rows: Rows, films: str) -> None:
        self.options, self.rows, self.films = options, rows, films
        self.faults: list[str] = []
        self.todo: list[Unit] = []
        self.again: list[Unit] = []
        self.wanted = list(units(options, options.dtype))
        self.known: dict[Any, set[tuple[str, int, int]]] = {}
        self.path = functools.cache(Film(films).path)
        planned = set(rows.levels)
        for _, turn in groupby(self.wanted, lambda unit: unit.turn):
            asked = []
            for unit in turn:
                unit = self._lacking(unit)
                if new := [level for level in unit.needs() if level not in planned]:
                    planned.update(new)
                    self.todo.append(replace(unit, names=(), levels=tuple(name for _, _, name in new)))
                if unit.names:
                    asked.append(unit)
            self.todo += asked

    def __call__(self) -> None:
        """Until all is done, or the time is up."""
        ends = time.monotonic() + self.options.limit
        self._go(self.options.processes, ends)
        if self.again and time.monotonic() < ends:
            # With it goes what waited for a level that is among it.
            self.todo, self.again = sorted([*self.again, *self.todo], key=lambda unit: unit.turn), []
            self._go(self.options.processes // 2 or 1, ends)

    def missing(self) -> tuple[int, int]:
        """How many of the answers that are wanted there are not, and how many are wanted."""
        there = [
            self.rows.has(unit.setting, name, case)
            for unit in self.wanted
            for name in unit.names
            for case in unit.cases
        ]
        return there.count(False), len(there)

    def _lacking(self, unit: Unit) -> Unit:
        """A unit without the methods and levels that are there."""
        at, frames = replace(unit.setting, dtype=""), unit.world.frames
        names = [
            name
            for name in unit.names
            if not all(self.rows.has(unit.setting, name, case) for case in unit.cases)
        ]
        levels = [name for name in unit.levels if (at, frames, name) not in self.rows.levels]
        return replace(unit, names=tuple(names), levels=tuple(levels))

    def _go(self, processes: int, ends: float) -> None:
        """Do what there is to do, by new processes, until it is done or `ends`."""
        options, context = self.options, multiprocessing.get_context("spawn")
        self.known = {}
        lines: dict[Any, Unit | None] = {}
        workers, renderers = [], []
        for number in range(min(processes, max(1, len(self.todo)))):
            mine, its = context.Pipe()
            lines[mine] = None
            told = options.device, self.films, number, its
            workers.append(context.Process(target=_work, args=told, daemon=True))
        worlds = list(dict.fromkeys(unit.world for unit in self.todo))
        for one in range(options.renderers):
            some = worlds[one :: options.renderers]
            renderers.append(context.Process(target=_render, args=(some, self.films), daemon=True))
        for process in (*renderers, *workers):
            process.start()
        try:
            while lines and (left := ends - time.monotonic()) > 0:
                rendering = any(process.is_alive() for process in renderers)
                for line in [line for line, unit in lines.items() if unit is None]:
                    if (unit := self._next(line, rendering)) is not None:
                        lines[line] = unit
                        line.send(unit)
                busy = [line for line, unit in lines.items() if unit]
                if not busy and not (rendering and self.todo):
                    break
                # Who has nothing to do waits for a film or a level.
                for line in wait(busy, min(left, WAIT)) if busy else ():
                    self._hear(line, lines)
                if not busy:
                    time.sleep(min(left, WAIT))
        finally:
            for process in (*renderers, *workers):
                process.kill()
            for process in (*renderers, *workers):
                process.join()

    def _hear(self, line: Any, lines: dict[Any, Unit | None]) -> None:
        try:
            told = line.recv()
        except (EOFError, ConnectionError):
            self.faults.append(f"a process died at {lines.pop(line)}")
            return
        if isinstance(told, dict):
            self.rows.add_new(told)
            return
        unit, lines[line] = lines[line], None
        if told is None:
            return
        assert unit is not None
        if told.memory and not unit.alone:
            self.again.append(replace(self._lacking(unit), alone=True))
        else:
            self.faults.append(told.trace)

    def _next(self, line: Any, rendering: bool) -> Unit | None:
        """A unit of the earliest round of which one can be done: levels are known and, while films are written, its own is.

        A process stays with the models and lengths that it has kernels for; otherwise it takes what none has yet.
        """
        ready: list[Unit] = []
        for unit in self.todo:
            if ready and (unit.turn, bool(unit.levels)) != (ready[0].turn, bool(ready[0].levels)):
                break
            known = all(level in self.rows.levels for level in unit.needs())
            if known and not (rendering and not self.path(unit.world).is_file()):
                ready.append(unit)
        if not ready:
            return None
        mine = self.known.setdefault(line, set())
        everyones = set().union(*self.known.values())
        unit = min(ready, key=lambda unit: (unit.kind not in mine, unit.kind in everyones))
        mine.add(unit.kind)
        self.todo = [one for one in self.todo if one is not unit]
        return replace(unit, fields={level[2]: self.rows.levels[level]["fields"] for level in unit.needs()})


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="file of rows; rows are added to it")
    parser.add_argument(
        "--rows", nargs="+", type=Path, help="ask nothing: show what these files hold together"
    )
    parser.add_argument("--maps", type=Path, help="folder for the maps, one picture a setting")
    parser.add_argument("--levels", type=Path, help="a file of rows whose levels are taken over")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--renderers", type=int, default=4, help="processes that write films ahead")
    parser.add_argument("--limit", type=float, default=7 * 86400.0, help="seconds after which it stops")
    parser.add_argument("--films", help="folder in which films are kept (default: one that goes away)")
    parser.add_argument("--models", nargs="+", default=["tiny-ov", "tiny-qwen"])
    parser.add_argument("--documents", nargs="+", type=int, choices=(0, SEGMENTS), default=[0, SEGMENTS])
    parser.add_argument("--lengths", nargs="+", type=float, default=[2, 4, 8, 16, 32], help="thousand tokens")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--depths", type=int, default=5)
    parser.add_argument("--samples", type=int, default=8, help="questions of each cell: rounds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", choices=choices.DTYPES, default="auto", help="auto: bfloat16 on a GPU")
    options = parser.parse_args(argv)
    if options.rows:
        rows = Rows(None)
        for path in options.rows:
            rows.gather(Rows(path))
    elif options.out is None:
        parser.error("--out: name a file for the rows, or --rows that are there.")
    else:
        options.device = choices.where(options.device)
        if options.dtype == "auto":
            options.dtype = "float32" if options.device == "cpu" else "bfloat16"
        rows = ask_all(options)
    print("\n".join(summary(rows)))
    if options.maps:
        options.maps.mkdir(parents=True, exist_ok=True)
        draw(rows, options.maps)


def ask_all(options: argparse.Namespace) -> Rows:
    """Ask what the file lacks."""
    rows = Rows(options.out)
    settings = {name: getattr(options, name) for name in ("depths", "samples", "seed")}
    start = {"environment": timing.environment(options.device), "settings": settings}
    rows.take(start)
    rows.write(start)
    if options.levels:
        # They stand in the file like those found here, so that its figures follow from it alone.
        for (setting, frames, name), told in Rows(options.levels).levels.items():
            if (setting, frames, name) not in rows.levels:
                rows.add({**asdict(setting), "level": name, "frames": frames, **told})
    with ends_in_order(), contextlib.ExitStack() as stack:
        films = options.films or stack.enter_context(tempfile.TemporaryDirectory(prefix="mmaccel-"))
        Path(films).mkdir(parents=True, exist_ok=True)
        run = Run(options, rows, films)
        run()
    for fault in dict.fromkeys(run.faults):
        print(fault, file=sys.stderr)
    missing, wanted = run.missing()
    if missing:
        told = f"not complete: {missing} of {wanted} answers are missing; the same command goes on."
        print(told, file=sys.stderr)
    return rows


if __name__ == "__main__":
    main()
