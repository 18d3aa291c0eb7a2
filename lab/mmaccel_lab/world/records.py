"""What a world knows about itself: cards, scene segments and questions."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Card:
    """A card that fills most of one frame's height and shows one coloured shape."""

    frame: int
    colour: str
    shape: str


@dataclass(frozen=True)
class Segment:
    """Frames `start` to `stop` (exclusive) show one scene."""

    start: int
    stop: int
    scene: str


@dataclass(frozen=True)
class Question:
    """A question, its answer of one word, and the frames without which it cannot be answered.

    `frames` is empty where the evidence is text alone.
    """

    kind: str
    text: str
    answer: str
    frames: tuple[int, ...]
