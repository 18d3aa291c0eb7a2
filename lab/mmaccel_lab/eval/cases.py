"""Questions about worlds, each world a real H.264 file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mmaccel import media
from mmaccel.core.errors import WorldError
from mmaccel.media import Video
from mmaccel_lab.world import Document, Question, World, write_mp4

Piece = tuple[Any, ...]
DOCUMENT_KINDS: tuple[str, ...] = ("needle",)
"""What is asked of documents unless told otherwise: a card in the video, as MMInference's MM-NIAH asks for an inserted
image (§4.1: all settings but the text between align with V-NIAH). A note in the text is a kind of its own."""


LAST_SEED = 2**31
"""Evaluation asks about worlds of seeds below this one; training draws its own from 2**32 on."""


def checked_seed(seed: int) -> int:
    """The seed, if it is one to evaluate on. Raises `WorldError`."""
    if not 0 <= seed < LAST_SEED:
        raise WorldError(
            f"seed must lie between 0 and {LAST_SEED - 1}, not {seed}; training has seen others."
        )
    return seed


def seed_at(seed: int, frames: int) -> int:
    """The first seed of a row of `frames` frames, far from those of other lengths: a seed has the same cards at each."""
    return (checked_seed(seed) + 100_003 * frames) % LAST_SEED


@dataclass(frozen=True)
class Case:
    """One question: `pieces` (``("video", start, stop)`` in frames of the world, ``("text", words)``), and what is right."""

    world: World
    kind: str
    pieces: tuple[Piece, ...]
    question: str
    answer: str

    def content(self, video: Video) -> list[dict[str, Any]]:
        """The turn to ask, with the frames that were read from the world's file."""
        turn: list[dict[str, Any]] = []
        for piece in self.pieces:
            if piece[0] == "text":
                turn.append({"type": "text", "text": piece[1]})
            else:
                turn.append({"type": "video", "video": video.slice_frames(piece[1], piece[2])})
        return [*turn, {"type": "text", "text": self.question}]

    def right(self, said: str) -> bool:
        """Whether an answer is the true one, letter case aside."""
        return said.strip().lower() == self.answer


def subject(
    seed: int, frames: int, documents: int, tokens_per_frame: int
) -> tuple[World, tuple[Piece, ...], Callable[[Sequence[str]], list[Question]]]:
    """The world of a seed, what is shown of it (its video, or a document of so many video segments), and the questions of
    given kinds about that."""
    if documents:
        document = Document.generate(seed, frames, documents, tokens_per_frame)
        return document.world, document.pieces, document.questions
    world = World.generate(seed, frames)
    return world, (("video", 0, frames),), world.questions


def cases(
    frames: int,
    samples: int,
    seed: int,
    kinds: Sequence[str],
    *,
    documents: int = 0,
    tokens_per_frame: int = 16,
    worlds: int | None = None,
) -> Iterator[Case]:
    """`samples` questions of each kind about worlds of `frames` frames with seeds `seed`, `seed` + 1, ...

    A world is asked at most one question of a kind and skipped where it has none; at most `worlds` worlds are tried, so
    fewer questions come where a kind hardly exists (an order needs two cards). `documents` > 0: interleaved documents of
    so many video segments.
    """
    checked_seed(seed)
    left = dict.fromkeys(kinds, samples)
    for number in range(seed, seed + (50 + 10 * samples if worlds is None else worlds)):
        wanted = [kind for kind in kinds if left[kind]]
        if not wanted:
            return
        world, pieces, questions = subject(number, frames, documents, tokens_per_frame)
        for kind in wanted:
            asked = questions([kind])
            if asked:
                question = asked[number % len(asked)]
                left[kind] -= 1
                yield Case(world, kind, pieces, question.text, question.answer)


class Film(AbstractContextManager["Film"]):
    """Worlds as files: writes each once, reads it back through `media.read`, and keeps the last one read.

    Without a folder the files live in a temporary one, and each is deleted when the next is asked for.
    `progress(what, done, total)` is called while frames are written (``"write"``) and read (``"read"``).
    """

    def __init__(
        self, folder: str | Path | None = None, progress: Callable[[str, int, int | None], None] | None = None
    ) -> None:
        self._progress = progress
        self._temporary = TemporaryDirectory(prefix="mmaccel-") if folder is None else None
        self.folder = Path(self._temporary.name if self._temporary is not None else str(folder))
        self.folder.mkdir(parents=True, exist_ok=True)
        self._last: tuple[Path, Video] | None = None

    def path(self, world: World) -> Path:
        """Where the world's file is, or will be."""
        # Worlds of one seed and length differ by what they were asked to hold.
        told = json.dumps(world.truth(), sort_keys=True).encode()
        mark = hashlib.sha256(told).hexdigest()[:12]
        return self.folder / f"{world.style}-{world.frames}-{world.seed}-{mark}.mp4"

    def watch(self, world: World) -> Video:
        """Every frame of the world's file, as a reader of the file sees it."""
        path, tell = self.path(world), self._progress
        if self._last is not None and self._last[0] == path:
            return self._last[1]
        if self._last is not None and self._temporary is not None:
            self._last[0].unlink(missing_ok=True)
        if not path.is_file():
            write_mp4(world, path, progress=tell and partial(tell, "write"))
        video = media.read(path, progress=tell and partial(tell, "read"))
        self._last = (path, video)
        return video

    def __exit__(self, *broken: object) -> None:
        if self._temporary is not None:
            self._temporary.cleanup()


def tokens_per_frame(processor: Any) -> int:
    """How many tokens one more frame of a world costs."""
    world = World.generate(0, 3)
    with Film() as film:
        video = film.watch(world)
    pieces = [{"type": "video", "video": video.slice_frames(0, count)} for count in (1, 3)]
    lengths = [processor.chat([piece])["input_ids"].shape[1] for piece in pieces]
    return int((lengths[1] - lengths[0]) // 2)
