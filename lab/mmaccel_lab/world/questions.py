"""Questions about a world, with their answers.

Only questions with one right answer are asked: a shape is named only where the video shows it once, a count
only up to the largest number word. Order and pairs come from the world's own seed, so the list is the same
every time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from random import Random
from typing import TYPE_CHECKING

from mmaccel.core.errors import WorldError
from mmaccel_lab.world.records import Card, Question
from mmaccel_lab.world.words import NUMBERS, QUESTIONS

if TYPE_CHECKING:
    from mmaccel_lab.world.world import World

KINDS: tuple[str, ...] = tuple(QUESTIONS)
PAIRS = 4  # at most this many questions of a kind that asks about two cards, unless told otherwise


def _question(kind: str, names: Sequence[str], answer: str, frames: Sequence[int]) -> Question:
    return Question(kind, QUESTIONS[kind].format(*names), answer, tuple(frames))


def _needle(cards: list[Card], world: World, rng: Random, most: int) -> list[Question]:
    return [_question("needle", [card.shape], card.colour, [card.frame]) for card in cards]


def _pairs(cards: list[Card], rng: Random, most: int) -> Iterator[tuple[list[Card], list[Card]]]:
    """At most `most` pairs of cards, each as it is shown and as it is asked about."""
    pairs = list(combinations(cards, 2))
    for pair in rng.sample(pairs, min(most, len(pairs))):
        yield list(pair), list(pair if rng.random() >= 0.5 else reversed(pair))


def _order(cards: list[Card], world: World, rng: Random, most: int) -> list[Question]:
    return [
        _question("order", [card.shape for card in named], shown[0].shape, [card.frame for card in shown])
        for shown, named in _pairs(cards, rng, most)
    ]


def _count(cards: list[Card], world: World, rng: Random, most: int) -> list[Question]:
    shown = len(world.cards)
    if not 1 <= shown <= len(NUMBERS):
        return []
    return [_question("count", [], NUMBERS[shown - 1], [card.frame for card in world.cards])]


def _scene(cards: list[Card], world: World, rng: Random, most: int) -> list[Question]:
    seen, asked = set(), []
    for before, segment in zip((None, *world.segments), world.segments, strict=False):
        if before is not None and segment.scene not in seen:
            frames = [before.stop - 1, segment.start]
            asked.append(_question("scene", [segment.scene], before.scene, frames))
        seen.add(segment.scene)
    return asked


def _combine(cards: list[Card], world: World, rng: Random, most: int) -> list[Question]:
    asked = []
    for shown, named in _pairs(cards, rng, most):
        answer = " and ".join(card.colour for card in named)
        frames = [card.frame for card in shown]
        asked.append(_question("combine", [card.shape for card in named], answer, frames))
    return asked


def _after(cards: list[Card], world: World, rng: Random, most: int) -> list[Question]:
    named = set(cards)
    return [
        _question("after", [card.shape], f"{later.shape} in {later.colour}", [card.frame, later.frame])
        for card, later in zip(world.cards, world.cards[1:], strict=False)
        if card in named
    ]


_ASK: dict[str, Callable[[list[Card], World, Random, int], list[Question]]] = {
    "needle": _needle,
    "order": _order,
    "count": _count,
    "scene": _scene,
    "combine": _combine,
    "after": _after,
}


def checked_kinds(kinds: Sequence[str] | str | None, known: Sequence[str]) -> tuple[str, ...]:
    """The kinds to ask, in the order of `known`. Raises `WorldError` for an unknown one."""
    if kinds is None:
        return tuple(known)
    asked = {kinds} if isinstance(kinds, str) else set(kinds)
    for kind in sorted(asked.difference(known)):
        raise WorldError(f"unknown question kind {kind!r}; choose from {', '.join(known)}.")
    return tuple(kind for kind in known if kind in asked)


def ask(world: World, kinds: Sequence[str] | str | None, most: int = PAIRS) -> list[Question]:
    """The questions of the given kinds (all when None), grouped in the order of `KINDS`; of kinds that ask about two cards
    `most` at most."""
    wanted = checked_kinds(kinds, KINDS)
    shapes = [card.shape for card in world.cards]
    cards = [card for card in world.cards if shapes.count(card.shape) == 1]
    # A stream for each kind: leaving one out does not change the others.
    return [
        question
        for kind in wanted
        for question in _ASK[kind](cards, world, Random(world.seed * 16 + 2 + KINDS.index(kind)), most)
    ]
