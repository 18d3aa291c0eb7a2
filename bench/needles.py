"""Needles by length and depth for both models and both tasks, every method at one share of attention, by several processes.

    python bench/needles.py --processes 12 --limit 480 --levels bench/results/haystack_h200_202611.jsonl --out needles.jsonl
    python bench/needles.py --rows needles.jsonl --maps docs          # asks nothing: figures and maps from rows alone

What tells most comes first: the longest prompts of all methods, models and tasks, then shorter ones, then a compressor
before every method, then dense attention and ours in float32, then more questions of each cell, the longest again first.
Every row is written when it is there; the same command with the same --out goes on with what that file lacks.

A row is an answer (see `mmaccel.eval.haystack.Shot`), or a level: the fields of a rival at a length, and the share it
computes of the first prompt there, where `wanted` was wanted. Both say the model, the video segments of a document (0: one
video), the compressor and the dtype. Levels hold for all dtypes, and may come out of another file.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
import timing
from needle_rows import OURS, Level, Rows, Setting, draw, summary

from mmaccel.cli import choices
from mmaccel.cli.haystack import methods_of
from mmaccel.eval.answer import ask, prompt
from mmaccel.eval.cases import Case, Film, seed_at, tokens_per_frame
from mmaccel.eval.encoded import Encoded
from mmaccel.eval.haystack import Shot, haystack_cases
from mmaccel.eval.methods import Methods
from mmaccel.eval.needle import MAX_NEW_TOKENS
from mmaccel.world import World, write_mp4

BASELINES = ("a_shape", "tri_shape", "sf_fixed", "sf_strided", "minference", "block_topk")
LESS = ("without_boundaries", "without_tail", "without_both")
METHODS = (*OURS, *BASELINES, "visionzip", *LESS)
TOKENS = 16
"""Tokens of a frame, about; a quarter of a document is text."""
SEGMENTS = 4


@dataclass(frozen=True)
class Unit:
    """What a process does at once: one question to methods `names`, or, with `level`, the budget of that rival."""

    setting: Setting
    depth: int
    case: Case
    names: tuple[str, ...]
    level: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)

    def levels(self) -> list[Level]:
        """The levels that it needs."""
        at = replace(self.setting, dtype="")
        return [(at, self.case.world.frames, name) for name in self.names if name not in OURS]


def units(options: argparse.Namespace, dtype: str) -> Iterator[Unit]:
    """Every question of a run, what tells most first."""
    rounds: dict[tuple[str, int, float], list[dict[int, Case]]] = {}
    for model in options.models:
        per_frame = tokens_per_frame(choices.processor(model))
        for documents in options.documents:
            for thousands in options.lengths:
                frames = frames_of(thousands, documents)
                told = {"documents": documents, "tokens_per_frame": per_frame}
                held: list[dict[int, Case]] = [{} for _ in range(options.samples)]
                start = seed_at(options.seed, frames)
                for depth, case in haystack_cases(frames, options.depths, options.samples, start, **told):
                    next(one for one in held if depth not in one)[depth] = case
                rounds[model, documents, thousands] = held

    def some(
        thousands: float, number: int, dtype: str, names: Sequence[str], compress: str | None = None
    ) -> Iterator[Unit]:
        """One question of each cell of a length. Models and dtypes ask about the same worlds, one after the other."""
        for documents in options.documents:
            for depth in range(options.depths):
                for model in options.models:
                    case = rounds[model, documents, thousands][number].get(depth)
                    if case is not None:
                        setting = Setting(model, documents, compress, dtype)
                        asked = [name for name in (*OURS, *rivals_of(setting)) if name in names]
                        yield Unit(setting, depth, case, tuple(asked))

    lengths, names = sorted(options.lengths, reverse=True), options.methods
    first = min(2, options.samples)
    for thousands in lengths:
        for number in range(first):
            yield from some(thousands, number, dtype, names)
    for thousands in dict.fromkeys((lengths[0], lengths[len(lengths) // 2])):
        for number in range(first):
            yield from some(thousands, number, dtype, names, "visionzip")
    if dtype != "float32":
        for thousands in lengths:
            yield from some(thousands, 0, "float32", [name for name in OURS if name in names])
    for number in range(first, options.samples):
        for thousands in lengths:
            yield from some(thousands, number, dtype, names)


def rivals_of(setting: Setting) -> list[str]:
    """A compressor that comes before every method is no method."""
    return [name for name in METHODS if name not in OURS and name != setting.compress]


def frames_of(thousands: float, documents: int) -> int:
    """Frames of a prompt of so many thousand tokens, in whole segments."""
    share = 0.75 if documents else 1.0
    return round(thousands * 1024 * share / TOKENS / SEGMENTS) * SEGMENTS


class Asker:
    """What a process holds: models, methods, the last prompt."""

    def __init__(self, device: str, films: str) -> None:
        self.device = device
        self.film = Film(films)
        self.models: dict[tuple[str, str], Any] = {}
        self.methods: dict[tuple[str, str | None], Methods] = {}
        self.wanted: dict[Setting, dict[int, float]] = defaultdict(dict)
        self.last: tuple[Any, Any, Encoded] | None = None

    def rows(self, unit: Unit) -> Iterator[dict[str, Any]]:
        """The rows of a unit, as they come."""
        setting, about = unit.setting, asdict(unit.setting)
        model = self._model(setting.model, setting.dtype)
        processor = choices.processor(setting.model)
        methods = self._methods(setting)
        key = setting, unit.case
        if self.last is None or self.last[0] != key:
            inputs = prompt(processor, unit.case.content(self.film.watch(unit.case.world)), model)
            self.last = key, inputs, Encoded()
        inputs, seen = self.last[1:]
        for name in unit.names if unit.level is None else ():
            recipe = methods.fixed.get(name) or methods.recipe(unit.fields[name])
            with seen.shared(model, recipe):
                answer = ask(model, processor, inputs, recipe, max_new_tokens=MAX_NEW_TOKENS)
            yield {**about, **Shot.of(name, unit.depth, unit.case, answer).to_dict()}
        if unit.level is not None:
            frames = unit.case.world.frames
            if frames not in self.wanted[setting]:
                self.wanted[setting][frames] = methods.wanted(model, processor, inputs, seen)
            wanted = self.wanted[setting][frames]
            fields, share = methods.levelled(unit.level, wanted, model, processor, inputs, seen)
            row = {"level": unit.level, "frames": frames, "fields": fields, "share": share, "wanted": wanted}
            yield {**about, **row}

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


def _work(device: str, films: str, line: Any) -> None:
    """Does the units that come down the line, until there is None."""
    torch.set_num_threads(1)
    asker = Asker(device, films)
    while (unit := line.recv()) is not None:
        try:
            for row in asker.rows(unit):
                line.send(row)
            line.send(None)
        except Exception:
            line.send(traceback.format_exc())


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
        self.todo: deque[Unit] = deque()
        planned = set(rows.levels)
        for unit in units(options, options.dtype):
            names = [name for name in unit.names if not rows.has(unit.setting, name, unit.case)]
            unit = replace(unit, names=tuple(names))
            for level in unit.levels():
                if level not in planned:
                    planned.add(level)
                    self.todo.append(replace(unit, names=(), level=level[2]))
            if unit.names:
                self.todo.append(unit)

    def __call__(self) -> bool:
        """Until all is done, or the time is up; whether all is done."""
        options, context = self.options, multiprocessing.get_context("spawn")
        ends = time.monotonic() + options.limit
        lines: dict[Any, Unit | None] = {}
        processes = []
        for _ in range(min(options.processes, max(1, len(self.todo)))):
            mine, its = context.Pipe()
            lines[mine] = None
            processes.append(
                context.Process(target=_work, args=(options.device, self.films, its), daemon=True)
            )
        worlds = list(dict.fromkeys(unit.case.world for unit in self.todo))
        for one in range(options.renderers):
            some = worlds[one :: options.renderers]
            processes.append(context.Process(target=_render, args=(some, self.films), daemon=True))
        for process in processes:
            process.start()
        try:
            while time.monotonic() < ends and lines:
                for line in [line for line, unit in lines.items() if unit is None]:
                    if (unit := self._next()) is not None:
                        lines[line] = unit
                        line.send(unit)
                if not any(lines.values()):
                    break
                for line in wait(
                    [one for one, unit in lines.items() if unit], max(0.0, ends - time.monotonic())
                ):
                    self._hear(line, lines)
        finally:
            for process in processes:
                process.kill()
        return not self.todo and not any(lines.values()) and not self.faults

    def _hear(self, line: Any, lines: dict[Any, Unit | None]) -> None:
        try:
            told = line.recv()
        except (EOFError, ConnectionError):
            self.faults.append(f"a process died at {lines.pop(line)}")
            return
        if isinstance(told, dict):
            self.rows.add(told)
            return
        lines[line] = None
        if told is not None:
            self.faults.append(told)

    def _next(self) -> Unit | None:
        """The first unit whose levels are known."""
        for place, unit in enumerate(self.todo):
            levels = unit.levels()
            if unit.level is not None or all(level in self.rows.levels for level in levels):
                del self.todo[place]
                return replace(unit, fields={level[2]: self.rows.levels[level]["fields"] for level in levels})
        return None


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
    parser.add_argument("--renderers", type=int, default=2, help="processes that write films ahead")
    parser.add_argument("--limit", type=float, default=7 * 86400.0, help="seconds after which it stops")
    parser.add_argument("--films", help="folder in which films are kept (default: one that goes away)")
    parser.add_argument("--models", nargs="+", default=["tiny-ov", "tiny-qwen"])
    parser.add_argument("--documents", nargs="+", type=int, choices=(0, SEGMENTS), default=[0, SEGMENTS])
    parser.add_argument("--lengths", nargs="+", type=float, default=[2, 4, 8, 16, 32], help="thousand tokens")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--depths", type=int, default=5)
    parser.add_argument("--samples", type=int, default=8, help="questions of each cell")
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
    with contextlib.ExitStack() as stack:
        films = options.films or stack.enter_context(tempfile.TemporaryDirectory(prefix="mmaccel-"))
        Path(films).mkdir(parents=True, exist_ok=True)
        run = Run(options, rows, films)
        whole = run()
    for fault in dict.fromkeys(run.faults):
        print(fault, file=sys.stderr)
    if not whole:
        print("not complete: the same command goes on.", file=sys.stderr)
    return rows


if __name__ == "__main__":
    main()
