"""What `needles.py` asks, and in which order: units of work, round by round."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from needle_rows import OURS, Level, Setting

from mmaccel.cli import choices
from mmaccel_lab.eval.cases import Case, seed_at, tokens_per_frame
from mmaccel_lab.eval.haystack import whole_films
from mmaccel_lab.world import World

BASELINES = ("a_shape", "tri_shape", "sf_fixed", "sf_strided", "minference", "block_topk")
LESS = ("without_boundaries", "without_tail", "without_both")
METHODS = (*OURS, *BASELINES, "visionzip", *LESS)
TOKENS = 16
"""Tokens of a frame, about; a quarter of a document is text."""
SEGMENTS = 4


@dataclass(frozen=True)
class Unit:
    """What a process does at once: the questions `cases` of one video, by depth, to methods `names`, or, with `levels`, the
    budgets of these rivals. `turn` counts the rounds; what has the same may be done in any order. `alone`: questions go
    one by one, which takes less memory than a batch."""

    setting: Setting
    cases: tuple[Case, ...]
    names: tuple[str, ...]
    turn: int
    levels: tuple[str, ...] = ()
    fields: Mapping[str, Any] = field(default_factory=dict)
    alone: bool = False

    @property
    def world(self) -> World:
        return self.cases[0].world

    @property
    def kind(self) -> tuple[str, int, int]:
        """What a process has kernels for once it did it."""
        return self.setting.model, self.setting.documents, self.world.frames

    def needs(self) -> list[Level]:
        """The levels without which it cannot be asked."""
        at = replace(self.setting, dtype="")
        return [(at, self.world.frames, name) for name in self.names if name not in OURS]


def units(options: argparse.Namespace, dtype: str) -> Iterator[Unit]:
    """Every question of a run, round by round, the longest prompts of a round first."""
    films: dict[tuple[str, int, float], list[tuple[Case, ...]]] = {}
    for model in options.models:
        per_frame = tokens_per_frame(choices.processor(model))
        for documents in options.documents:
            for thousands in options.lengths:
                frames = frames_of(thousands, documents)
                told = {"documents": documents, "tokens_per_frame": per_frame}
                start = seed_at(options.seed, frames)
                films[model, documents, thousands] = list(
                    whole_films(frames, options.depths, options.samples, start, **told)
                )
    turns = count()

    def some(
        lengths: Sequence[float], number: int, dtype: str, names: Sequence[str], compress: str | None = None
    ) -> Iterator[Unit]:
        """One video of each length. Models and dtypes ask about the same worlds."""
        turn = next(turns)
        for thousands in lengths:
            for documents in options.documents:
                for model in options.models:
                    for cases in films[model, documents, thousands][number : number + 1]:
                        setting = Setting(model, documents, compress, dtype)
                        asked = [name for name in (*OURS, *rivals_of(setting)) if name in names]
                        yield Unit(setting, cases, tuple(asked), turn)

    lengths, names = sorted(options.lengths, reverse=True), options.methods
    first = min(2, options.samples)
    for number in range(first):
        yield from some(lengths, number, dtype, names)
    for number in range(first):
        two = list(dict.fromkeys((lengths[0], lengths[len(lengths) // 2])))
        yield from some(two, number, dtype, names, "visionzip")
    if dtype != "float32":
        yield from some(lengths, 0, "float32", [name for name in OURS if name in names])
    for number in range(first, options.samples):
        yield from some(lengths, number, dtype, names)


def rivals_of(setting: Setting) -> list[str]:
    """A compressor that comes before every method is no method."""
    return [name for name in METHODS if name not in OURS and name != setting.compress]


def frames_of(thousands: float, documents: int) -> int:
    """Frames of a prompt of so many thousand tokens, in whole segments."""
    share = 0.75 if documents else 1.0
    return round(thousands * 1024 * share / TOKENS / SEGMENTS) * SEGMENTS
