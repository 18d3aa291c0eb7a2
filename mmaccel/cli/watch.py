"""`mmaccel watch`: take in a video as it comes, and answer questions in between."""

from __future__ import annotations

import os
import queue
import stat
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmaccel.cli import choices
from mmaccel.cli.ask import Device, Dtype, Json, Model
from mmaccel.cli.console import bars, counter, err, many, print_json, remark, sentence
from mmaccel.cli.evidence import ask_and_show
from mmaccel.cli.footage import described, ended, rated, until_broken
from mmaccel.cli.journal import EVERY_S, Keeper, Reading, opening, point_of
from mmaccel.cli.stopping import shielded
from mmaccel.core import outside
from mmaccel.core.answer import MAX_NEW_TOKENS
from mmaccel.core.errors import ModelError, RecipeError, VideoError, shown

if TYPE_CHECKING:
    from mmaccel.core.session import VideoSession
    from mmaccel.media import Video

RECIPE = "mosaic"
INPUT = "-"
"""In the place of a question: those on standard input."""

PATIENCE_S = 1.0
"""Seconds after which a standard input that does not end is told of."""

Asked = tuple[float | None, str]
"""A question, and the seconds after which it is asked; None: at the end."""


def watch(
    video: Annotated[
        str | None, typer.Argument(help="A video file, URL or camera; none asks what --load holds.")
    ] = None,
    model: Model = "tiny-ov",
    recipe: Annotated[
        str | None, typer.Option("--recipe", help=f"A memory's name or a YAML file ({RECIPE}).")
    ] = None,
    fps: Annotated[float, typer.Option("--fps", help="Frames a second to look at.")] = 0.5,
    question: Annotated[
        list[str] | None,
        typer.Option(
            "--question", help="QUESTION@SECONDS, or QUESTION for the end; - reads standard input; several."
        ),
    ] = None,
    load: Annotated[Path | None, typer.Option("--load", help="Go on from a saved session.")] = None,
    save: Annotated[Path | None, typer.Option("--save", help="Save the session to this folder.")] = None,
    clip: Annotated[int, typer.Option("--clip", min=1, help="Frames taken in at a time.")] = 16,
    follow: Annotated[bool, typer.Option("--follow", help="The file is still being written.")] = False,
    format: Annotated[str | None, typer.Option("--format", help="Of a device, such as v4l2.")] = None,
    timeout: Annotated[
        float, typer.Option("--timeout", help="Seconds of silence after which a live source has stalled.")
    ] = 10.0,
    gaps: Annotated[
        str, typer.Option("--gaps", help="A frame that stands: hold (taken again), skip, mark (and listed).")
    ] = "hold",
    every: Annotated[
        float, typer.Option("--save-every", min=0, help="Seconds between two saves; 0 saves at the end.")
    ] = EVERY_S,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", min=1, help="Longest answer.")
    ] = MAX_NEW_TOKENS,
    evidence: Annotated[
        int,
        typer.Option(
            "--evidence",
            min=0,
            help="How many of the moments that an answer rests on to show, best first; 0 computes none.",
        ),
    ] = 5,
    device: Device = "auto",
    dtype: Dtype = "auto",
    as_json: Json = False,
) -> None:
    """Watch a video and answer questions on what was seen so far, and on which frames the answers rest.

    On a terminal, questions are typed while it watches; Ctrl-D ends them, Ctrl-C or SIGTERM ends the watching. From a
    pipe or a file on standard input they are read first, one a line, unless --question gives them.

    With --save the session is saved while it watches too. After one that was stopped or killed, --load goes on with the
    same file behind the last frame that was saved.
    """
    from mmaccel import media
    from mmaccel.core.session import VideoSession
    from mmaccel.core.session_io import recipe_of, writable
    from mmaccel.media.address import is_url

    if video is None and load is None:
        raise VideoError("watch: there is no video; name one, or a saved session with --load.")
    asked = [parsed(text) for text in question or [] if text != INPUT]
    if load is not None and recipe is not None:
        raise RecipeError("--recipe: a saved session has its own; leave --recipe or --load out.")
    if save is not None:
        writable(save)
    with opening(save):
        chosen = choices.memory(recipe or RECIPE) if load is None else recipe_of(load)
        place, kept_in = choices.where(device), choices.dtype(dtype)
        processor = choices.processor(model)
        clips: Iterator[Video] = iter(())
        reading, point, broken = None, None, list[VideoError]()
        if video is not None:
            # What is live runs away while a model is loaded, and cannot be gone on with.
            live = format is not None or is_url(video)
            if not live and os.path.isfile(video):
                reading = Reading.of(video, follow, fps, gaps)
                point = point_of(load, reading) if load is not None else None
            how: dict[str, Any] = {"follow": follow, "timeout": timeout, "format": format, "gaps": gaps}
            start = 0.0 if point is None else point.until
            if point is None or not point.whole:
                clips = media.clips(video, fps=fps, frames_per_clip=clip, start=start, **how)
            # Of a camera, or of a file that grows, the rate is a guess.
            clips = rated(clips, video, fps, guess=follow or format is not None, quiet=as_json)
            clips = until_broken(clips, broken)
            if not live and not follow:
                # Opened before a model is loaded.
                clips = chain([one for one in [next(clips, None)] if one is not None], clips)
        asked += piped(question or [])
        terminal = sys.stdin is not None and sys.stdin.isatty() and not as_json
        if video is None and not asked and not terminal:
            raise ModelError("--load without a video: there is no question; give one with --question.")
        asked.sort(key=lambda one: float("inf") if one[0] is None else one[0])
        session = VideoSession(choices.load(model, place, kept_in), processor, chosen)
        if load is not None:
            session.load(load)
    typed = Typed(terminal)
    stopped, kept, whole, failed = False, False, False, list[Exception]()
    with session:
        keeper = Keeper(session, save, reading, point, every)
        work = Watching(
            session, asked, fps, partial(ask_and_show, session, max_new_tokens, evidence, as_json)
        )
        try:
            with bars() as progress:
                seen = counter(progress, "watch", "frames")
                for part in clips:
                    if keeper.shift is None:
                        keeper.shift = work.shift(part)
                    work.take(replace(part, clock=part.clock + keeper.shift), seen)
                    keeper.now_and_then()
                    work.typed(typed.so_far())
            # What was seen before a stall or a fault is asked about all the same.
            whole = not broken
            if whole and point is not None and not (point.whole or len(session) > work.had):
                remark(f"nothing of {video} is left to watch behind {point.until:g} s.")
            work.answer(asked, last=True)
            work.typed(typed.rest())
        except KeyboardInterrupt:
            stopped = True
        except Exception as error:
            failed.append(error)
        failed = [*broken, *failed]
        # Also when a camera fell silent, or a memory is full, after hours of watching.
        try:
            with shielded():
                kept = keeper.save(whole)
        except KeyboardInterrupt:
            stopped = True
        except Exception as error:
            failed.append(error)
        events, left, told = work.uneven.give(), work.left, work.told
        facts: dict[str, Any] = {
            "video": video,
            "model": model,
            "recipe": session.recipe.to_dict(),
            "frames": len(session),
            "seconds": session.seconds,
            "began": work.begin,
            "counters": session.counters(),
            "saved": str(save) if kept else None,
            "complete": not stopped and not failed,
            "ended": "stopped" if stopped else ended(broken, failed),
            "events": [asdict(one) for one in events],
            "error": " ".join(map(in_words, failed)) or None,
            "unanswered": [{"question": text, "at": at} for at, text in left],
        }
        saved = keeper.saved()
    frames = many(facts["frames"], "frame")
    if as_json:
        print_json({**facts, "answers": told})
    else:
        for one in events:
            remark(described(one))
        if left:
            remark(
                "not answered: "
                + ", ".join(f"{text!r}" + ("" if at is None else f" (for {at:g} s)") for at, text in left)
            )
        if not failed:
            end = "stopped after" if stopped else "watched"
            closing = f"{end} {frames}, {facts['seconds']:.0f} s"
            closing += "; the source is over" if follow and not stopped else ""
            remark(closing + (f"; {saved}" if saved else ""))
    if failed:
        if saved:
            remark(f"saved {frames} to {save}" if kept else saved)
        for another in failed[1:]:
            remark(f"error: {in_words(another)}")
        raise failed[0]
    if stopped:
        raise typer.Exit(130)


class Watching:
    """A session that takes in clips, and the questions that are asked of it when they are due.

    begin, had  seconds of the last frame, and the frames, of a saved session that it went on from; None, 0: of none
    asked       questions with a time that is still to come, in order, then those for the end
    left, told  questions that have no answer yet; the answers, JSON-ready
    uneven      gaps and irregular times of the source
    """

    def __init__(
        self, session: VideoSession, asked: list[Asked], fps: float, ask: Callable[..., dict[str, Any]]
    ) -> None:
        from mmaccel.media.sampling import Log

        self._session, self._fps, self.ask = session, fps, ask
        self.begin, self.had = session.seconds if len(session) else None, len(session)
        self.asked, self.left = asked, list(asked)
        self.told: list[dict[str, Any]] = []
        self.uneven = Log()

    def shift(self, first: Video) -> float:
        """Seconds by which the source is moved, so that it follows a saved session; `first` is its first clip."""
        start = float(first.clock[0])
        return self.begin + 1 / self._fps - start if self.begin is not None and start <= self.begin else 0.0

    def take(self, part: Video, seen: Callable[[int, int | None], None]) -> None:
        """Take in a clip, and answer each question after the last frame of its time."""
        for one in part.events:
            self.uneven.add(one.kind, one.time, one.seconds)
        for piece, due in cut(part, self.asked):
            if piece is not None:
                self._session.watch(piece)
            seen(len(self._session), None)
            self.answer(due)

    def answer(self, due: list[Asked], last: bool = False) -> None:
        """Answer questions that are due, or the `last` ones; says where a time lies outside of what was watched."""
        for at, text in due:
            if last and at is not None and at > self._session.seconds + 1 / self._fps:
                asked_there(text, f"{at:g} s, past the last frame at {self._session.seconds:g} s")
            elif not last and at is not None and self.begin is not None and at < self.begin:
                asked_there(text, f"{at:g} s, before the saved session's end at {self.begin:g} s")
            self.told.append(self.ask(text, at))
            self.left.remove((at, text))

    def typed(self, texts: Iterable[str]) -> None:
        """Answer what is typed."""
        for text in texts:
            self.told.append(self.ask(text))


def in_words(error: Exception) -> str:
    """An error in a sentence; what nobody foresaw by its name."""
    return sentence(error) or f"{type(error).__name__}: {error}"


def parsed(text: str, source: str = "--question") -> Asked:
    """A question and when it is asked; `source` names in an error where it came from."""
    outside.words(text, source)
    words, at, when = text.rpartition("@")
    try:
        seconds = float(when) if at else None
    except ValueError:
        if when.split() == [when]:
            raise VideoError(
                f"{source}: {shown(when)} after the @ of {shown(text)} is not a time; give seconds from the start, such as "
                "@12.5, or put a space after an @ that belongs to the question."
            ) from None
        words, seconds = text, None
    words = words if at and seconds is not None else text
    if not words.strip():
        raise ModelError(f"{source}: {shown(text)} has no question; give QUESTION@SECONDS.")
    if seconds is not None and not 0 <= seconds < float("inf"):
        raise VideoError(f"{source}: {seconds:g} is not a time in a video; give seconds from its start.")
    return seconds, words.strip()


def piped(given: Sequence[str]) -> list[Asked]:
    """The questions that a pipe or a file holds on standard input, to its end; `given` are those of the options.

    Beside questions of options it is read only when one of them is ``-``: it may be meant for another command.
    """
    if INPUT not in given:
        try:
            mode = os.fstat(sys.stdin.fileno()).st_mode
        except (AttributeError, OSError, ValueError):
            return []  # closed, or none
        if not (stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISSOCK(mode)):
            return []
        if given:
            err().print(
                "standard input is not read beside --question; --question - reads it.", highlight=False
            )
            return []
    slow = threading.Timer(
        PATIENCE_S,
        lambda: err().print("questions are read from standard input until it ends.", highlight=False),
    )
    slow.daemon = True
    slow.start()
    try:
        # Not as text: a locale may let bytes through that are none.
        data = b"" if sys.stdin is None else sys.stdin.buffer.read(outside.TEXT_BYTES + 1)
    finally:
        slow.cancel()
    lines = outside.decoded(data, "standard input", ModelError, fix="give one question a line, in UTF-8")
    found = [parsed(line, "standard input") for line in lines.replace("\r", "\n").split("\n") if line.strip()]
    timed = sum(at is not None for at, _ in found)
    err().print(
        f"{many(len(found), 'question')} from standard input: {timed} at a time, {len(found) - timed} at the end.",
        highlight=False,
    )
    return found


def asked_there(text: str, when: str) -> None:
    """Say that a question is not asked at its time."""
    remark(f"{text!r} is for {when}; it is asked there.")


def cut(part: Video, asked: list[Asked]) -> Iterator[tuple[Video | None, list[Asked]]]:
    """A clip in pieces, each with the questions that are due after its last frame; these are taken from `asked`."""
    times, start = part.clock.tolist(), 0
    while start < len(part):
        when = asked[0][0] if asked else None
        stop = len(part) if when is None else sum(moment <= when for moment in times)
        # A question whose time has passed between two clips is due before this one.
        piece = part.cut(start, stop) if stop > start else None
        due: list[Asked] = []
        if stop < len(part):
            while asked and asked[0][0] is not None and asked[0][0] < times[stop]:
                due.append(asked.pop(0))
        yield piece, due
        start = max(start, stop)


class Typed:
    """Questions that are typed while the command works on something else."""

    def __init__(self, listen: bool) -> None:
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._over = not listen
        if listen:
            err().print("type a question and press return; Ctrl-D ends.", highlight=False)
            threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        try:
            for line in sys.stdin:
                try:
                    self._lines.put(outside.words(line.strip(), "this question"))
                except ModelError as error:
                    remark(str(error))
        except UnicodeDecodeError:
            err().print("what was typed is not UTF-8 text; no more questions are read.", highlight=False)
        finally:
            self._lines.put(None)

    def so_far(self) -> Iterator[str]:
        """What was typed since the last time."""
        while not self._over and not self._lines.empty():
            yield from self._next()

    def rest(self) -> Iterator[str]:
        """What is typed from now on, until it ends."""
        while not self._over:
            yield from self._next()

    def _next(self) -> Iterator[str]:
        line = self._lines.get()
        self._over = line is None
        if line:
            yield line
