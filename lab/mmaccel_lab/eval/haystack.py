"""Needle in a haystack as a map: is a card found, by how long the video is and how deep in it the card lies.

V-NIAH and MM-NIAH of MMInference (§4.1, Figures 5 and 13). Every question goes to every recipe, so that recipes are compared
question by question.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from mmaccel.cli.answer import Answer
from mmaccel.core.errors import warn
from mmaccel.core.recipe import Recipe
from mmaccel_lab.eval.cases import Case, Film, subject
from mmaccel_lab.eval.encoded import Encoded
from mmaccel_lab.eval.needle import judge, mean
from mmaccel_lab.eval.rivals import computed
from mmaccel_lab.world import World

MOST_WORLDS = 400
"""So many worlds are tried at a length; more would not fill a depth that the first ones left open."""
Z = 1.96
"""Standard deviations of a 95% interval."""


@dataclass(frozen=True)
class Shot:
    """One question to one recipe: the length, which of the depths the card lies in (0 is the start), the world's seed, what
    was asked, whether the answer was right, the prompt's tokens, and the share of attention that was computed."""

    recipe: str
    frames: int
    depth: int
    seed: int
    question: str
    right: bool
    tokens: int
    kept: float | None

    @classmethod
    def of(cls, recipe: str, depth: int, case: Case, answer: Answer) -> Shot:
        """Of an answer."""
        report, world = answer.report, case.world
        right, kept = case.right(answer.raw), computed(answer.report)
        return cls(recipe, world.frames, depth, world.seed, case.question, right, report.prompt_tokens, kept)


def haystack_cases(
    frames: int,
    depths: int,
    samples: int,
    seed: int,
    *,
    documents: int = 0,
    tokens_per_frame: int = 16,
    worlds: int = MOST_WORLDS,
) -> Iterator[tuple[int, Case]]:
    """(depth, case) until `samples` needles of each of `depths` equal stretches of the video were asked for.

    Worlds have seeds `seed`, `seed` + 1, ..., and each is asked about every card that lies where one is still wanted.
    `documents` > 0: text between so many video segments, a quarter of the tokens (MM-NIAH).
    """
    left = [samples] * depths
    for number in range(seed, seed + worlds):
        if not any(left):
            return
        world, pieces, questions = subject(number, frames, documents, tokens_per_frame)
        for question in questions(["needle"]):
            depth = question.frames[0] * depths // frames
            if left[depth]:
                left[depth] -= 1
                yield depth, Case(world, "needle", pieces, question.text, question.answer)


def whole_films(
    frames: int, depths: int, samples: int, seed: int, *, documents: int = 0, tokens_per_frame: int = 16
) -> Iterator[tuple[Case, ...]]:
    """The questions of `samples` videos that show a card in each of `depths` equal stretches: one a depth, in order.

    A video is then one sample of a whole column of the map, which costs one film and one run of the vision tower; its
    questions are not independent (see `spread_by`). Of the worlds `seed`, `seed` + 1, ... the others are left out, so that
    the ones asked about hold more cards than most. Warns where the worlds that are tried hold fewer such videos.
    """
    found, tried = 0, MOST_WORLDS * samples
    for number in range(seed, seed + tried):
        if found == samples:
            return
        cards = World.generate(number, frames).cards
        if len({card.frame * depths // frames for card in cards}) < depths:
            continue
        more = {"documents": documents, "tokens_per_frame": tokens_per_frame}
        asked = dict(haystack_cases(frames, depths, 1, number, worlds=1, **more))
        if len(asked) == depths:
            found += 1
            yield tuple(asked[depth] for depth in range(depths))
    if found < samples:
        kind = f"documents of {documents} segments and {frames}" if documents else f"videos of {frames}"
        warn(
            f"only {found} of {samples} {kind} frames have a card in each of {depths} depths, of {tried} that were tried; "
            "the others are not asked about."
        )


def shots(
    model: nn.Module,
    processor: Any,
    recipes: Mapping[str, Recipe],
    asked: Iterator[tuple[int, Case]],
    film: Film,
) -> Iterator[list[Shot]]:
    """The answers to one question under every recipe, question by question; stop when you like."""
    seen = Encoded()
    for depth, case in asked:
        for judged in judge(model, processor, recipes, [case], film, seen=seen):
            yield [Shot.of(name, depth, case, answer) for name, answer in judged.answers.items()]


@dataclass(frozen=True)
class Gap:
    """How much more often one is right than another: the mean difference, its 95% interval, the number of questions."""

    mean: float
    low: float
    high: float
    asked: int

    @classmethod
    def of(cls, pairs: Sequence[tuple[bool, bool]], effect: float = 1.0) -> Gap:
        """Of answers to the same questions, right or wrong, in pairs; `effect` is that of `spread_by`.

        The interval is that of Agresti and Min (2005) for paired shares: half a question is added to each of the four
        outcomes, so that it has a width also where the two never differ.
        """
        asked = len(pairs)
        if not asked:
            return cls(0.0, -1.0, 1.0, 0)
        count = asked / effect
        ahead = sum(mine and not its for mine, its in pairs)
        behind = sum(its and not mine for mine, its in pairs)
        more, less = ahead / effect + 0.5, behind / effect + 0.5
        middle = (more - less) / (count + 2)
        half = Z * math.sqrt((more + less) / (count + 2) - middle**2) / math.sqrt(count + 2)
        return cls((ahead - behind) / asked, max(-1.0, middle - half), min(1.0, middle + half), asked)


def spread_by(films: Sequence[Hashable], values: Sequence[float]) -> float:
    """How many times the variance of the mean of `values` grows because those of one film go together: at least 1.

    The design effect: the variance between the films' sums (Cochran's, of a ratio) over that of independent values. So many
    times fewer questions are as good as independent (Korn and Graubard 1998). 1 where all values are equal, for these say
    nothing of it.
    """
    count, mean = len(values), sum(values) / max(len(values), 1)
    off: dict[Hashable, float] = defaultdict(float)
    for film, value in zip(films, values, strict=True):
        off[film] += value - mean
    alone = sum((value - mean) ** 2 for value in values) / max(count - 1, 1)
    if len(off) < 2 or alone < 1e-12:
        return 1.0
    between = sum(one**2 for one in off.values()) * len(off) / (len(off) - 1)
    return max(1.0, between / (count * alone))


def interval(right: int, asked: int, effect: float = 1.0) -> tuple[float, float]:
    """The 95% interval of a share right (Wilson); `effect` is that of `spread_by`."""
    if not asked:
        return 0.0, 1.0
    share, spread = right / asked, Z**2 * effect / asked
    middle = (share + spread / 2) / (1 + spread)
    half = Z * math.sqrt(effect * (share * (1 - share) + spread / 4) / asked) / (1 + spread)
    return max(0.0, middle - half), min(1.0, middle + half)


@dataclass
class Haystack:
    """What was asked so far, and the figures that follow from it."""

    depths: int
    shots: list[Shot] = field(default_factory=list)

    @property
    def recipes(self) -> list[str]:
        return list(dict.fromkeys(shot.recipe for shot in self.shots))

    @property
    def lengths(self) -> list[int]:
        return sorted({shot.frames for shot in self.shots})

    def cells(self, recipe: str) -> dict[tuple[int, int], tuple[int, int]]:
        """(frames, depth) -> (right, asked)."""
        found: dict[tuple[int, int], tuple[int, int]] = defaultdict(lambda: (0, 0))
        for shot in self._of(recipe):
            right, asked = found[shot.frames, shot.depth]
            found[shot.frames, shot.depth] = right + shot.right, asked + 1
        return dict(found)

    def mean(self, recipe: str) -> float | None:
        """The mean accuracy over the cells of the map, each cell weighing the same; None before the first answer."""
        return mean([right / asked for right, asked in self.cells(recipe).values()])

    def kept(self, recipe: str, frames: int) -> float | None:
        """The mean share of attention computed at one length."""
        return mean([s.kept for s in self._of(recipe) if s.frames == frames and s.kept is not None])

    def against(self, recipe: str, other: str) -> Gap:
        """How much more often `recipe` is right than `other`, over the questions both were asked."""
        mine, its = (
            {(s.frames, s.seed, s.question): s.right for s in self._of(name)} for name in (recipe, other)
        )
        return Gap.of([(mine[at], its[at]) for at in mine.keys() & its.keys()])

    def share(self, recipe: str) -> tuple[int, int]:
        """Right and asked, over everything."""
        mine = self._of(recipe)
        return sum(shot.right for shot in mine), len(mine)

    def rows(self) -> list[dict[str, Any]]:
        """One mapping a recipe and length, JSON-ready: tokens, accuracy and its interval, right and asked of each depth,
        kept."""
        rows = []
        for recipe in self.recipes:
            cells = self.cells(recipe)
            for frames in self.lengths:
                mine = [shot for shot in self._of(recipe) if shot.frames == frames]
                if not mine:
                    continue
                by_depth = [cells.get((frames, depth), (0, 0)) for depth in range(self.depths)]
                rows.append(
                    {
                        "recipe": recipe,
                        "frames": frames,
                        "tokens": round(sum(shot.tokens for shot in mine) / len(mine)),
                        "accuracy": sum(shot.right for shot in mine) / len(mine),
                        "interval": list(interval(sum(shot.right for shot in mine), len(mine))),
                        "right": [right for right, _ in by_depth],
                        "asked": [asked for _, asked in by_depth],
                        "kept": self.kept(recipe, frames),
                    }
                )
        return rows

    def _of(self, recipe: str) -> Sequence[Shot]:
        return [shot for shot in self.shots if shot.recipe == recipe]
