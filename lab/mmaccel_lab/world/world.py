"""A synthetic video with ground truth, made from a seed.

Scenes drift, cut and return; small balls and birds move; now and then one frame shows a large white card with
a coloured shape on it. All of it is decided here, on the CPU, from the seed; pixels are drawn by `render`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from random import Random
from typing import Any

from torch import Tensor

from mmaccel.core.errors import WorldError
from mmaccel_lab.world.questions import PAIRS, ask
from mmaccel_lab.world.records import Card, Question, Segment
from mmaccel_lab.world.table import make_table
from mmaccel_lab.world.words import APPEAR, CHANGE, COLOURS, ENDING, NUMBERS, OPENING, SCENES, SHAPES, article

STYLES: tuple[str, ...] = ("needle", "caption")
FPS = 1.0

_COLOURS = tuple(COLOURS)
_OPENING_WORDS, _ENDING_WORDS = len(OPENING.split()), len(ENDING.split())
_CHANGE_WORDS, _CARD_WORDS = len(CHANGE.split()), len(APPEAR.split())
_MOST_SEGMENTS = {"needle": 8, "caption": 6}


@dataclass(frozen=True)
class World:
    """One video: `frames` frames at `fps` frames per second, its cards and its scene segments.

    Cards stand in order of frame, at most one a frame; segments follow each other without a gap from 0 to
    `frames`. Two styles: "needle" has one to eight cards, each shape at most once, colours as they fall;
    "caption" has many cards, each pair of colour and shape at most once, so that its caption is long.
    """

    seed: int
    frames: int
    style: str
    cards: tuple[Card, ...]
    segments: tuple[Segment, ...]
    fps: float = FPS

    @classmethod
    def generate(cls, seed: int, frames: int, style: str = "needle", max_words: int = 480) -> World:
        """The world of a seed. `max_words` bounds the words of the caption in style "caption".

        Raises `WorldError` for a negative seed, fewer than one frame, an unknown style, or fewer words than
        the shortest caption needs.
        """
        if seed < 0:
            raise WorldError(f"seed must be 0 or more, not {seed}.")
        if frames < 1:
            raise WorldError(f"frames must be 1 or more, not {frames}.")
        if style not in STYLES:
            raise WorldError(f"unknown style {style!r}; choose from {', '.join(STYLES)}.")
        least = _OPENING_WORDS + _CARD_WORDS + _ENDING_WORDS
        if max_words < least:
            raise WorldError(f"max_words must be {least} or more, not {max_words}.")
        rng = Random(seed * 16)
        if style == "needle":
            segments = _segments(rng, frames, _MOST_SEGMENTS[style])
            cards = _needles(rng, frames)
        else:
            # The opening, the ending and one card always fit; scene changes take up to a quarter of the rest.
            spare = max_words - _OPENING_WORDS - _ENDING_WORDS - _CARD_WORDS
            segments = _segments(rng, frames, min(_MOST_SEGMENTS[style], 1 + spare // 4 // _CHANGE_WORDS))
            spare -= (len(segments) - 1) * _CHANGE_WORDS
            cards = _pairs(rng, frames, 1 + spare // _CARD_WORDS)
        return cls(seed, frames, style, cards, segments)

    def questions(self, kinds: Sequence[str] | str | None = None, pairs: int = PAIRS) -> list[Question]:
        """Questions of the given kinds (all when None), always in the same order; at most `pairs` of a kind about two cards.

        Raises `WorldError` for an unknown kind.
        """
        return ask(self, kinds, pairs)

    def caption(self) -> str:
        """What happens, in order: the opening scene, each card and each change of scene."""
        events = [(s.start, 0, CHANGE.format(s.scene)) for s in self.segments[1:]]
        events += [(c.frame, 1, APPEAR.format(article(c.shape), c.shape, c.colour)) for c in self.cards]
        told = [text for _, _, text in sorted(events)]
        return " ".join([OPENING.format(self.segments[0].scene), *told, ENDING])

    def truth(self) -> dict[str, Any]:
        """All that is known of the video, of plain JSON types."""
        return {
            "seed": self.seed,
            "frames": self.frames,
            "fps": self.fps,
            "style": self.style,
            "cards": [asdict(card) for card in self.cards],
            "scenes": [asdict(segment) for segment in self.segments],
            "questions": [{**asdict(one), "frames": list(one.frames)} for one in self.questions()],
            "caption": self.caption(),
        }

    def table(self, still: float = 0.0) -> dict[str, Tensor]:
        """What `render` needs, one row a frame, on the CPU; see `mmaccel_lab.world.table`.

        In a share `still` of the frames, from 0 to 1, the scenery does not move, as before a camera on a tripod. Raises
        `WorldError` for another share.
        """
        if not 0 <= still <= 1:
            raise WorldError(f"still must be from 0 to 1, not {still}.")
        return make_table(self, still)


def _segments(rng: Random, frames: int, most: int) -> tuple[Segment, ...]:
    count = rng.randint(min(2, most, max(1, frames // 4)), max(1, min(most, frames // 2)))
    shortest = max(1, frames // (3 * count))
    spare = frames - count * shortest
    cuts = sorted(rng.randint(0, spare) for _ in range(count - 1))
    starts = [0] + [(i + 1) * shortest + cut for i, cut in enumerate(cuts)]
    scenes: list[str] = []
    for _ in range(count):
        last = scenes[-1:]
        seen = [s for s in SCENES if s in scenes and s not in last]
        fresh = [s for s in SCENES if s not in scenes]
        again = not fresh or (seen and rng.random() < 0.4)
        scenes.append(rng.choice(seen if again else fresh))
    stops = [*starts[1:], frames]
    return tuple(Segment(*one) for one in zip(starts, stops, scenes, strict=True))


def _needles(rng: Random, frames: int) -> tuple[Card, ...]:
    count = rng.randint(1, min(len(NUMBERS), frames))
    shapes = rng.sample(SHAPES, count)
    colours = [rng.choice(_COLOURS) for _ in shapes]
    return _placed(rng, frames, list(zip(colours, shapes, strict=True)))


def _pairs(rng: Random, frames: int, most: int) -> tuple[Card, ...]:
    most = min(most, frames, len(_COLOURS) * len(SHAPES))
    chosen = rng.sample(range(len(_COLOURS) * len(SHAPES)), rng.randint((most + 1) // 2, most))
    return _placed(rng, frames, [(_COLOURS[i // len(SHAPES)], SHAPES[i % len(SHAPES)]) for i in chosen])


def _placed(rng: Random, frames: int, cards: list[tuple[str, str]]) -> tuple[Card, ...]:
    at = sorted(rng.sample(range(frames), len(cards)))
    # Shuffled again: the first colour drawn must not always belong to the first card.
    rng.shuffle(cards)
    return tuple(Card(frame, colour, shape) for frame, (colour, shape) in zip(at, cards, strict=True))
