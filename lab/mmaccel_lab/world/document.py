"""An interleaved document: segments of one video and passages of text, with facts in both.

The task follows MM-NIAH (arXiv 2406.07230): a needle may lie in the images or in the text, and the text is a
quarter of the document's tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from mmaccel.core.errors import WorldError
from mmaccel_lab.world.questions import KINDS, checked_kinds
from mmaccel_lab.world.records import Question
from mmaccel_lab.world.words import COLOURS, NOTE, NOTE_QUESTION, OBJECTS, PEOPLE, PROSE, THINGS
from mmaccel_lab.world.world import World

Piece = tuple[str, int, int] | tuple[str, str]

DOCUMENT_KINDS: tuple[str, ...] = (*KINDS, "note")
MOST_NOTES = 6
_NOTE_WORDS = len(NOTE.split())
_COLOURS = tuple(COLOURS)


@dataclass(frozen=True)
class Document:
    """Pieces `("video", start, stop)` and `("text", words)` in reading order, over one world.

    The video pieces are equally long and cover the world's frames in order. `notes` maps each household
    object that a passage tells of to its colour.
    """

    world: World
    pieces: tuple[Piece, ...]
    notes: tuple[tuple[str, str], ...]

    @classmethod
    def generate(cls, seed: int, frames: int, segments: int, tokens_per_frame: int = 16) -> Document:
        """The document of a seed: `segments` video pieces of `frames / segments` frames each.

        Text is a third as long as the video (so a quarter of all), a word counted as one token, and at least
        one note long. Raises `WorldError` where the frames do not divide or a number is too small.
        """
        if segments < 1:
            raise WorldError(f"segments must be 1 or more, not {segments}.")
        if tokens_per_frame < 1:
            raise WorldError(f"tokens_per_frame must be 1 or more, not {tokens_per_frame}.")
        world = World.generate(seed, frames)
        if frames % segments:
            raise WorldError(f"frames ({frames}) must be a multiple of segments ({segments}).")
        rng = Random(seed * 16 + 15)
        words = max(_NOTE_WORDS, round(frames * tokens_per_frame / 3))
        notes = _notes(rng, words)

        # Gaps before the first video piece, between pieces and after the last; an outer one may stay empty.
        gaps = list(range(segments + 1))
        ends = ("first", "last", "both", "neither")
        outer = rng.choice(ends if segments > 1 else ends[:3])
        if outer not in ("first", "both"):
            gaps.remove(0)
        if outer not in ("last", "both"):
            gaps.remove(segments)
        used = sorted(rng.sample(gaps, max(1, min(len(gaps), words // (2 * _NOTE_WORDS)))))
        passages = dict(zip(used, _passages(rng, words, len(used), notes), strict=True))

        length = frames // segments
        pieces: list[Piece] = []
        for i in range(segments + 1):
            if i in passages:
                pieces.append(("text", passages[i]))
            if i < segments:
                pieces.append(("video", i * length, (i + 1) * length))
        return cls(world, tuple(pieces), notes)

    def questions(self, kinds: Sequence[str] | str | None = None) -> list[Question]:
        """Questions about the video (the world's kinds) and about the text (kind "note"), in a fixed order.

        Raises `WorldError` for an unknown kind.
        """
        wanted = checked_kinds(kinds, DOCUMENT_KINDS)
        asked = self.world.questions([kind for kind in wanted if kind in KINDS])
        if "note" in wanted:
            asked += [Question("note", NOTE_QUESTION.format(name), colour, ()) for name, colour in self.notes]
        return asked


def _notes(rng: Random, words: int) -> tuple[tuple[str, str], ...]:
    # Notes take at most half of the text, so that they have something to hide in.
    most = max(1, min(MOST_NOTES, words // (2 * _NOTE_WORDS)))
    names = rng.sample(OBJECTS, rng.randint(1, most))
    return tuple((name, rng.choice(_COLOURS)) for name in names)


def _passages(rng: Random, words: int, count: int, notes: tuple[tuple[str, str], ...]) -> list[str]:
    """`count` passages of about equal length and `words` words in all, the notes spread over them."""
    held: list[list[str]] = [[] for _ in range(count)]
    room = [words * (i + 1) // count - words * i // count for i in range(count)]
    for name, colour in notes:
        fitting = [i for i in range(count) if room[i] >= _NOTE_WORDS]
        i = rng.choice(fitting)
        held[i].append(NOTE.format(name, colour))
        room[i] -= _NOTE_WORDS
    carried = 0
    for i in range(count):
        prose, carried = _prose(rng, room[i] + carried)
        for sentence in held[i]:
            prose.insert(rng.randint(0, len(prose)), sentence)
        held[i] = prose
    return [" ".join(sentences) for sentences in held]


def _prose(rng: Random, words: int) -> tuple[list[str], int]:
    """Sentences of `words` words in all, and the words that were too few for a sentence."""
    shortest = min(PROSE)
    sentences: list[str] = []
    while words >= shortest:
        # Never leave a rest that no sentence fits.
        length = rng.choice([n for n in PROSE if n == words or n <= words - shortest])
        people = rng.sample(PEOPLE, 2)
        form = rng.choice(PROSE[length])
        sentences.append(form.format(people[0], rng.choice(THINGS), rng.choice(_COLOURS), people[1]))
        words -= length
    return sentences, words
