"""Questions about worlds, each world a real H.264 file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any

from mmaccel import media
from mmaccel.core.errors import WorldError
from mmaccel.media import Video
from mmaccel_lab.world import Document, World, write_mp4

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
        if documents:
            document = Document.generate(number, frames, documents, tokens_per_frame)
            world, pieces, source = document.world, document.pieces, document.questions
        else:
            world = World.generate(number, frames)
            pieces, source = (("video", 0, frames),), world.questions
        for kind in wanted:
            asked = source([kind])
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

    def _counter(self, what: str) -> Callable[[int, int | None], None] | None:
        tell = self._progress
        return None if tell is None else lambda done, total: tell(what, done, total)

    def watch(self, world: World) -> Video:
        """Every frame of the world's file, as a reader of the file sees it."""
        path = self.path(world)
        if self._last is not None and self._last[0] == path:
            return self._last[1]
        if self._last is not None and self._temporary is not None:
            self._last[0].unlink(missing_ok=True)
        if not path.is_file():
            write_mp4(world, path, progress=self._counter("write"))
        video = media.read(path, progress=self._counter("read"))
        self._last = (path, video)
        return video

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._temporary is not None:
            self._temporary.cleanup()


def tokens_per_frame(processor: Any) -> int:
    """How many tokens one more frame of a world costs."""
    world = World.generate(0, 3)
    with Film() as film:
        video = film.watch(world)
    lengths = []
    for count in (1, 3):
        piece = {"type": "video", "video": video.slice_frames(0, count)}
        lengths.append(processor.chat([piece])["input_ids"].shape[1])
    return int((lengths[1] - lengths[0]) // 2)
