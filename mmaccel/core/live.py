"""A stream at work: frames through the vision tower and the layers into a memory, and questions on top of it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from mmaccel.core.answer import Evidence, Turn
from mmaccel.core.deadline import Deadline
from mmaccel.core.errors import ModelError, warn
from mmaccel.core.kv import FrameState, Piece, Seen, Stream, StreamPolicy, StreamState
from mmaccel.core.report import Meter
from mmaccel.core.stream_adapter import StreamAdapter

UNITS = 16
"""Units that go through the layers together where neither recipe nor memory says otherwise."""


@dataclass(eq=False)
class Film:
    """What is known of a stream beside its memory.

    size   (height, width) of the frames of the first clip, and `unit` the tokens of a unit they came to
    fps    the rate of the first clip, for which positions are made
    timed  whether the times of frames are known, and not made up: positions in seconds then follow them
    marks  [m, E] features of what ends any video
    spans  (first frame, frames) of each unit; `times` the seconds at which each frame was shown
    pending  frames of a unit not yet complete; `raw` their (height, width)
    """

    size: tuple[int, int]
    fps: float | None
    unit: int
    marks: Tensor
    stream: Stream
    spans: list[tuple[int, int]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    pending: Tensor | None = None
    raw: tuple[int, int] | None = None
    timed: bool = False


@dataclass(frozen=True, eq=False)
class Question:
    """A question that has run up to its first token: the target of decoding, logits [1, V], ids [n] of the words after the
    video, for how many tokens of an answer the model has positions (`left`), and what tells the evidence."""

    turn: Turn
    logits: Tensor
    ids: Tensor
    meter: Meter
    left: int
    evidence: Callable[[], tuple[Evidence, ...]]


class Live:
    """The film and the memory of one stream."""

    def __init__(
        self, seam: StreamAdapter, kv: StreamPolicy, chunk: int | None, film: Film, state: StreamState
    ) -> None:
        self.seam, self.kv, self.film, self.state = seam, kv, film, state
        self._step = kv.clip or (UNITS if chunk is None else max(1, chunk // film.unit))
        self._hidden = "hidden" in kv.needs
        self._warned = self._full = False

    @classmethod
    def open(
        cls,
        seam: StreamAdapter,
        kv: StreamPolicy,
        chunk: int | None,
        size: tuple[int, int],
        fps: float | None,
        unit: int,
        marks: Tensor,
        timed: bool = False,
    ) -> Live:
        """A stream that has seen nothing. With times and no rate, positions have one unit a second."""
        stream = Stream(
            unit=unit,
            head=seam.head().numel(),
            pace=seam.pace,
            places=seam.places(size, float(seam.pace) if timed and fps is None else fps),
            dtype=seam.dtype,
        )
        state = kv.stream(stream, seam.view.geometry, seam.view, seam.device)
        return cls(seam, kv, chunk, Film(size, fps, unit, marks, stream, timed=timed), state)

    @classmethod
    def begin(
        cls,
        seam: StreamAdapter,
        kv: StreamPolicy,
        chunk: int | None,
        frames: Tensor,
        fps: float | None,
        timed: bool = False,
    ) -> Live:
        """A stream of frames like `frames`, its head run; `timed`: their times are known."""
        some = filled(frames[: seam.pace], seam.pace)
        size = _size(frames)
        features, marks = seam.features(some, size)
        live = cls.open(seam, kv, chunk, size, fps, features.shape[1], marks, timed)
        live.film.raw = size
        try:
            if not isinstance(live.state, FrameState):
                live._head(live.state)
        except BaseException:
            live.state.close()
            raise
        return live

    # Frames come in.

    def take(
        self,
        frames: Tensor,
        moments: list[float],
        progress: Callable[[int], None] | None = None,
        deadline: Deadline | None = None,
    ) -> int:
        """Take in frames [T, 3, H, W] shown at `moments`; calls `progress` with the number read so far. Gives the number
        taken in: when the deadline comes first, those whose passes were complete."""
        film, pace = self.film, self.seam.pace
        before = len(film.times)
        frames = self._alike(frames)
        if film.pending is not None:
            frames = torch.cat([film.pending.to(frames.device), frames])
        held = frames.shape[0] - len(moments)
        film.times += moments
        whole = frames.shape[0] // pace
        for first in range(0, whole, self._step):
            if deadline is not None and deadline.over() is not None:
                taken = max(0, first * pace - held)
                del film.times[before + taken :]
                film.pending = film.pending if first == 0 else None
                return taken
            last = min(first + self._step, whole)
            self._encode(frames[first * pace : last * pace])
            if progress is not None:
                progress(last * pace - held)
        rest = frames[whole * pace :]
        film.pending = rest.clone() if len(rest) else None
        if progress is not None and len(rest):
            progress(len(film.times) - before)
        self._tell_of_the_end()
        return len(moments)

    def _tell_of_the_end(self) -> None:
        """Warn, once, when the stream leaves no position for a question."""
        places = self.film.stream.places
        units, own = self.state.shown(Piece(kind="question", rows=1))
        if self._full or places.admits(units, 0, 1, own):
            return
        self._full = True
        warn(
            f"the stream takes {places.ends(units, 0, 1, own)[1]} of the model's {places.limit} positions "
            f"(max_position_embeddings): kv {self.kv.name!r} cannot answer questions from now on; open a session with a kv "
            "that shows fewer frames."
        )

    def _alike(self, frames: Tensor) -> Tensor:
        """Frames that can follow those before: of their size where a unit is begun. Told once when they are resized."""
        film, size, seam = self.film, _size(frames), self.seam
        if size == film.raw:
            return frames
        if not self._warned and not seam.fits(frames, film.size):
            self._warned = True
            (height, width), (h, w) = film.size, size
            warn(f"frames of {w}x{h} are resized to {width}x{height}, the size with which the stream began.")
        if film.pending is not None and film.raw is not None:
            return seam.resized(frames, film.raw)
        film.raw = size
        return frames

    def _encode(self, frames: Tensor) -> None:
        """Whole units into the memory."""
        film, state, pace = self.film, self.state, self.seam.pace
        start = sum(film.spans[-1]) if film.spans else 0
        if isinstance(state, FrameState):
            state.keep(frames)
            film.spans += [(start + i, pace) for i in range(0, frames.shape[0], pace)]
            return
        features, counts = state.merge(self.seam.features(frames, film.size)[0])
        for count in counts:
            film.spans.append((start, count * pace))
            start += count * pace
        self._units(state, features)

    def _units(self, state: StreamState, features: Tensor, times: Sequence[float] | None = None) -> None:
        total, done, film = features.shape[0], 0, self.film
        if film.timed and times is None:
            first = state.units()
            film.stream.places.told(first, [film.times[frame] for frame, _ in film.spans[first:]])
        while done < total:
            first = state.units()
            count = state.fit(first, total - done)
            part = features[done : done + count]
            if times is None:
                shown = [film.times[frame] for frame, _ in film.spans[first : first + count]]
            else:
                shown = list(times[done : done + count])
            piece = Piece(
                kind="units",
                rows=count * film.unit,
                first=first,
                count=count,
                times=tuple(shown),
                look=part.float().mean(1) if "look" in self.kv.needs else None,
            )
            self._pass(state, piece, part.flatten(0, 1))
            done += count
            if "proxy" in self.kv.needs:
                self._pass(state, Piece(kind="proxy", rows=self._proxy.shape[0]), self._proxy)

    @cached_property
    def _proxy(self) -> Tensor:
        """[n, E] embeddings of the template's words between a question and its answer."""
        tail = self.seam.tail("?")
        return self.seam.words(tail.ids[tail.words[1] :])

    def _head(self, state: StreamState) -> None:
        ids = self.seam.head()
        self._pass(state, Piece(kind="head", rows=ids.numel()), self.seam.words(ids))

    def _pass(self, state: StreamState, piece: Piece, embeds: Tensor) -> None:
        state.enter(piece)
        self.seam.run(state, embeds, self._hidden)
        state.leave()

    # A question.

    @contextmanager
    def asked(
        self, question: str, room: int, weigh: bool = True, deadline: Deadline | None = None
    ) -> Iterator[Question]:
        """A question run up to its first token; at exit the memory is as before. `room` tokens may follow.

        `weigh`: its evidence will be asked for. Raises `ModelError`, before anything is run, where the model has no
        position left for an answer, and `Ended` when the deadline comes before the first token.
        """
        film, state, seam = self.film, self.state, self.seam
        deadline = Deadline() if deadline is None else deadline
        meter = Meter(started=time.perf_counter())
        tail = seam.tail(question)
        waiting = state.waiting()
        pending = film.unit * ((film.pending is not None) + (0 if waiting is None else len(waiting)))
        before = pending + film.marks.shape[0]
        piece = Piece(
            kind="question",
            rows=before + tail.ids.numel(),
            pending=pending,
            words=(before + tail.words[0], before + tail.words[1]),
            room=room,
            weigh=weigh,
        )
        if film.timed and not isinstance(state, FrameState):
            film.stream.places.told(state.units(), self._pending_times(waiting))
        left = self._left(piece)
        piece = replace(piece, room=min(room, left))  # memory is taken for no more than there are positions
        deadline.check()
        evidence = state.evidence
        if isinstance(state, FrameState):
            state, evidence = self._picked(state, deadline)
        parts = [film.marks, seam.words(tail.ids)]
        if film.pending is not None:
            parts.insert(0, seam.features(filled(film.pending, seam.pace), film.size)[0][0])
        if waiting is not None:
            parts.insert(0, waiting.flatten(0, 1))
        turn = Turn(seam, state, self._hidden, deadline)
        with state.turn():
            logits = turn.prefill({"piece": piece, "embeds": torch.cat(parts)})
            meter.prompt_tokens = turn.length()
            shown = (lambda: self._shown(evidence())) if weigh else tuple
            yield Question(turn, logits, tail.ids, meter, left, shown)

    def _pending_times(self, waiting: Tensor | None) -> list[float]:
        """The times of the units that the memory has not taken in yet."""
        film, times = self.film, list[float]()
        if waiting is not None:
            times.append(film.times[sum(film.spans[-1]) if film.spans else 0])
        if film.pending is not None:
            times.append(film.times[-film.pending.shape[0]])
        return times

    def _left(self, piece: Piece) -> int:
        """The number of positions left for an answer; raises `ModelError` when there is none."""
        places = self.film.stream.places
        units, own = self.state.shown(piece)
        last, taken = places.ends(units, piece.pending, piece.rows, own)
        if not places.admits(units, piece.pending, piece.rows, own):
            raise ModelError(
                f"question: the stream and the question take {taken} of the model's {places.limit} positions "
                "(max_position_embeddings) and leave none for an answer; ask in fewer words, or open the session with "
                "a kv that keeps less."
            )
        return places.limit - 1 - last

    def _picked(
        self, state: FrameState, deadline: Deadline
    ) -> tuple[StreamState, Callable[[], dict[int, Seen]]]:
        """A memory of the frames that a memory of frames picks, and what the answer rests on."""
        fresh, picked, film = state.fresh(), state.pick(), self.film
        self._head(fresh)
        for at in range(0, len(picked), self._step):
            deadline.check()
            some = picked[at : at + self._step]
            # Each clip of the stream may have had a size of its own.
            alike = itertools.groupby((one for _, one in some), _size)
            runs = [self.seam.features(torch.cat(list(frames)), film.size)[0] for _, frames in alike]
            times = [film.times[film.spans[number][0]] for number, _ in some]
            self._units(fresh, torch.cat(runs), times)
        return fresh, lambda: {number: Seen(1.0, 1.0, None) for number, _ in picked}

    def _shown(self, evidence: Mapping[int, Seen]) -> tuple[Evidence, ...]:
        found = []
        for number, seen in sorted(evidence.items()):
            first, count = self.film.spans[number]
            span, when = (first, first + count - 1), self.film.times[first]
            found.append(Evidence(span, when, seen.share, seen.retrieved, seen.score))
        return tuple(found)

    # Going back.

    def mark(self) -> Any:
        """What `back` needs."""
        film = self.film
        return self.state.checkpoint(), replace(film), len(film.spans), len(film.times)

    def back(self, mark: Any) -> None:
        """As it was at `mark`."""
        held, film, spans, times = mark
        # The lists have only grown.
        del film.spans[spans:], film.times[times:]
        self.film = film
        self.state.restore(held)


def _size(frames: Tensor) -> tuple[int, int]:
    return int(frames.shape[2]), int(frames.shape[3])


def filled(frames: Tensor, pace: int) -> Tensor:
    """`frames` with the last repeated, as processors do, to fill whole units."""
    short = -len(frames) % pace
    return torch.cat([frames, frames[-1:].expand(short, -1, -1, -1)]) if short else frames


def moments(
    last: float | None, given: list[float] | None, count: int, fps: float | None, strict: bool
) -> list[float]:
    """Ascending seconds of `count` frames that follow one at `last`; `strict`: those given are not moved."""
    step = 1 / fps if fps else 1.0
    if given is None:
        start = 0.0 if last is None else last + step
        return [start + i * step for i in range(count)]
    rising = all(a < b for a, b in itertools.pairwise(given))
    if not rising or (strict and last is not None and given[0] <= last):
        after = "" if last is None else f" and be later than {last:g}, when the last frame was shown"
        raise ModelError(f"times: they must rise{after}; give seconds from the start of the stream.")
    # Another file begins at zero again.
    shift = last + step - given[0] if last is not None and given[0] <= last else 0.0
    return [moment + shift for moment in given]
