"""`mmaccel watch`: ingest a stored video, or watch a live one, and answer questions meanwhile."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Exit, Option

from mmaccel.cli import choices
from mmaccel.cli.choices import Device, Dtype, Json, KeepSeconds, Longest, Model
from mmaccel.cli.console import echo, error_sentence, out, plural, print_json, progress_bars, remark, show_bar
from mmaccel.cli.journal import EVERY_S, FPS, PeriodicSaver, WatchSource, find_resume_point, resume_frame_rate
from mmaccel.cli.program import INTERRUPTED, delay_sigterm, delay_stop_signals
from mmaccel.cli.questions import (
    INPUT,
    Asked,
    Piece,
    TerminalQuestions,
    evidence_footer,
    evidence_table,
    parse_question,
    read_piped_questions,
    split_clip_at_questions,
    stream_status_lines,
)
from mmaccel.cli.report import Page, check_report_path, write_html_page
from mmaccel.core.decoding.generate import MAX_NEW_TOKENS
from mmaccel.core.errors import ModelError, RecipeError, VideoError, VideoStalled
from mmaccel.core.memory.kv import StreamPolicy
from mmaccel.core.streams.live import tune_python_for_streams
from mmaccel.core.streams.session import VideoSession
from mmaccel.core.streams.session_io import FACTS, check_session_path, saved_recipe
from mmaccel.core.streams.sources import StreamEvent
from mmaccel.core.streams.timed_text import TimedText, read_timed_lines, shift_lines

if TYPE_CHECKING:
    from mmaccel.media import Video

RECIPE = "mosaic"
LIVE, STORED = 16, 64
"""Frames read at a time, of a source that comes and of a stored video; the first are taken in at a time too."""
OF_REPORT = ("backend", "backend_why", "peak_bytes", "patterns", "kept_by_head")
"""What --json tells as the session's `Report` has it."""


def watch(
    video: Annotated[
        str | None, Argument(help="A video file, URL or camera; none with --load asks the saved session.")
    ] = None,
    model: Model = "tiny-ov",
    recipe: Annotated[
        str | None, Option(help=f"A recipe, a memory's name or a YAML file ({RECIPE}).")
    ] = None,
    fps: Annotated[
        float | None, Option(help=f"Frames to read per second ({FPS}; with --load as it was saved).")
    ] = None,
    question: Annotated[
        list[str] | None,
        Option(help="QUESTION@SECONDS, or QUESTION for the end; - reads standard input; several."),
    ] = None,
    load: Annotated[Path | None, Option(help="Continue a saved session.")] = None,
    save: Annotated[Path | None, Option(help="Save the session to this folder.")] = None,
    clip: Annotated[
        int | None, Option(min=1, help=f"Frames read at a time ({LIVE}; of a stored video {STORED}).")
    ] = None,
    live: Annotated[
        bool, Option("--live", help="Watch a file as a camera's: frames see only the newest before them.")
    ] = False,
    follow: Annotated[bool, Option("--follow", help="The file is still being written.")] = False,
    format: Annotated[str | None, Option(help="Input format of a capture device, such as v4l2.")] = None,
    timeout: Annotated[float, Option(help="Seconds of silence that stall a live source.")] = 10.0,
    reconnect: Annotated[bool, Option("--reconnect", help="Reopen a source that stalls or ends.")] = False,
    keep_seconds: KeepSeconds = None,
    host_bytes: Annotated[str | None, Option(help="Host memory, as 24GB; oldest frames are dropped.")] = None,
    subtitles: Annotated[Path | None, Option(help="Text with times: an SRT or WebVTT file.")] = None,
    gaps: Annotated[
        str, Option(help="Without a new frame: hold repeats the last, skip takes none, mark lists it too.")
    ] = "hold",
    every: Annotated[
        float, Option("--save-every", min=0, help="Seconds between two saves; 0 saves at the end.")
    ] = EVERY_S,
    max_new_tokens: Longest = MAX_NEW_TOKENS,
    evidence: Annotated[
        int, Option(min=0, help="Moments to show that an answer is based on, best first; 0: none.")
    ] = 5,
    device: Device = "auto",
    dtype: Dtype = "auto",
    as_json: Json = False,
    page: Page = None,
) -> None:
    """Watch a video and answer questions about what was seen so far, with the frames that answers are based on.

    A file is ingested as a stored video: each frame attends to all before it, by the recipe's sparse pattern. A timed
    question or a save ends this ingestion and starts another, whose frames see the last `window` frames before its start and
    all since. A camera, a URL, and a file with --follow or --live are watched live.

    On a terminal, type questions while it watches; Ctrl-D ends them, Ctrl-C or SIGTERM ends watching. From a pipe or file on
    standard input they are read first, one a line, unless --question gives them.

    With --save the session is also saved periodically. After it was stopped or killed, --load continues the same file after
    the last saved frame.
    """
    from mmaccel import media
    from mmaccel.media.address import is_url
    from mmaccel.models.taking import warn_tiny_model_video

    if video is None and load is None:
        raise VideoError("watch: there is no video; name one, or a saved session with --load.")
    check_report_path(page)
    lines = read_timed_lines(subtitles)
    asked = [parse_question(text) for text in question or [] if text != INPUT]
    if load is not None and recipe is not None:
        raise RecipeError("--recipe: a saved session has its own; leave --recipe or --load out.")
    if save is not None:
        check_session_path(save)
    try:
        chosen = choices.load_stream_recipe(recipe or RECIPE) if load is None else saved_recipe(load)
        if load is not None and (keep_seconds is not None or host_bytes is not None):
            raise RecipeError("--keep-seconds, --host-bytes: a saved session has its own; leave them out.")
        chosen = choices.set_frame_retention(chosen, keep_seconds, host_bytes, "host_bytes")
        fps = resume_frame_rate(load) if fps is None else fps
        processor = choices.load_supported_processor(model)
        clips: Iterator[Video] = iter(())
        reading, point, broken, breaks, stored = None, None, list[VideoError](), list[StreamEvent](), False
        if video is not None:
            warn_tiny_model_video(processor, video, format is not None)
            # What is live runs away while a model is loaded, and cannot be gone on with.
            comes = format is not None or is_url(video)
            if reconnect and not comes:
                raise VideoError(
                    f"--reconnect: {video} is a file, which is read once; give a camera or a URL, or leave it out."
                )
            if not comes and os.path.isfile(video):
                size = None if follow else os.path.getsize(video)
                reading = WatchSource(os.path.abspath(video), size, fps, gaps)
                point = find_resume_point(load, reading) if load is not None else None
                stored = not (live or follow) and isinstance(kv := chosen.kv, StreamPolicy) and kv.ingests
            how: dict[str, Any] = {"follow": follow, "timeout": timeout, "format": format, "gaps": gaps}
            start = 0.0 if point is None else point.until
            if point is None or not point.whole:
                count = clip or (STORED if stored else LIVE)
                opens = partial(media.clips, video, fps=fps, frames_per_clip=count, start=start, **how)
                clips = choices.reconnecting_clips(opens, breaks.append) if reconnect else opens()
            # Of a camera, or of a file that grows, the rate is a guess.
            clips = choices.clips_until_error(
                clips, video, fps, broken, guess=follow or format is not None, quiet=as_json
            )
            if not comes and not follow:
                # Opened before a model is loaded.
                clips = chain([one for one in [next(clips, None)] if one is not None], clips)
        asked += read_piped_questions(question or [])
        terminal = sys.stdin is not None and sys.stdin.isatty() and not as_json
        if video is None and not asked and not terminal:
            raise ModelError("--load without a video: there is no question; give one with --question.")
        asked.sort(key=lambda one: float("inf") if one[0] is None else one[0])
        session = VideoSession(choices.load_cli_model(model, device, dtype, load), processor, chosen)
        if load is not None:
            choices.load_session(session, load, asked if video is None else [])
    except KeyboardInterrupt:
        if save is None:
            raise
        is_there = (save / FACTS).is_file()
        what = f"the session in {save} is as it was" if is_there else f"nothing was saved to {save}"
        remark(f"stopped before the first frame; {what}.")
        raise Exit(INTERRUPTED) from None
    typed = TerminalQuestions(terminal)
    stopped, kept, whole, failed = False, False, False, list[Exception]()
    with session, tune_python_for_streams():
        keeper = PeriodicSaver(session, save, reading, point, every)
        work = WatchRun(session, asked, fps, max_new_tokens, evidence, as_json)
        work.lines = lines
        try:
            with progress_bars() as progress:
                seen = show_bar(progress, "ingest" if stored else "watch", "frames")
                pieces = work.split_clips_at_questions(clips, keeper)
                for piece in pieces:
                    work.feed_clip_piece(piece, pieces if stored else None, seen, keeper.is_due)
                    if piece[0] is not None:
                        keeper.save_if_due()
                    for text in typed.read():
                        work.ask(text)
            # What was seen before a stall or a fault is asked about all the same.
            whole = not broken
            if whole and point is not None and not (point.whole or len(session) > work.had):
                remark(f"nothing of {video} is left to watch behind {point.until:g} s.")
            work.answer(asked, last=True)
            for text in typed.read(waits=True):
                work.ask(text)
        except KeyboardInterrupt:
            stopped = True
        except Exception as error:
            failed.append(error)
        failed = [*broken, *failed]
        # Also when a camera fell silent, or a memory is full, after hours of watching.
        try:
            with delay_sigterm():
                kept = keeper.save(whole)
        except KeyboardInterrupt:
            stopped = True
        except Exception as error:
            failed.append(error)
        events, left = work.uneven.pop_until(), work.unanswered
        # How a watch that nobody stopped ended; another error than the source's is no end of it.
        ended = "error" if failed else "end"
        if broken:
            ended = "stall" if isinstance(broken[0].__cause__, VideoStalled) else "fault"
        report = session.report()
        facts: dict[str, Any] = {
            "video": video,
            "model": model,
            "recipe": session.recipe.to_dict(),
            "frames": len(session),
            "seconds": session.seconds,
            "began": work.begin,
            "shift": keeper.shift or 0.0,
            "counters": session.counters(),
            "kept": report.kept,
            "heads": dict(report.heads()),
            "draft": {n: x for n, x in report.draft.items() if n not in ("lengths", "windows", "sequences")},
            "notes": list(report.notes),
            **{name: getattr(report, name) for name in OF_REPORT},
            "saved": str(save) if kept else None,
            "complete": not stopped and not failed,
            "ended": "stopped" if stopped else ended,
            "events": [asdict(one) for one in events],
            "breaks": [asdict(one) for one in breaks],
            "let_go": [asdict(one) for one in session.events if one.kind == "let_go"],
            "error": " ".join(map(_error_text, failed)) or None,
            "unanswered": [{"question": text, "at": at} for at, text in left],
            "answers": work.answers,
        }
        saved = keeper.describe_saved()
    frames = plural(facts["frames"], "frame")
    if as_json:
        print_json(facts)
    else:
        for one in events:
            remark(f"{one.kind} at {one.time:g} s" + (f", {one.seconds:.3g} s" if one.seconds else ""))
        for gone in session.events:
            if gone.kind == "let_go":
                remark(
                    f"let go of frames shown from {gone.seconds - (gone.lasted or 0):g} to {gone.seconds:g} s"
                )
        if left:
            named = (f"{text!r}" + ("" if at is None else f" (for {at:g} s)") for at, text in left)
            remark(f"not answered: {', '.join(named)}")
        for line in stream_status_lines(report, work.ingested):
            remark(line)
        if not failed:
            closing = f"{'stopped after' if stopped else 'watched'} {frames}, {facts['seconds']:.0f} s"
            closing += "; the source is over" if follow and not stopped else ""
            remark(closing + (f"; {saved}" if saved else ""))
    if page is not None:
        write_html_page(facts, page, video)
    if failed:
        if saved:
            remark(f"saved {frames} to {save}" if kept else saved)
        for another in failed[1:]:
            remark(f"error: {_error_text(another)}")
        raise failed[0]
    if stopped:
        raise Exit(INTERRUPTED)


class WatchRun:
    """A running `watch` command: feeds clips to a session and asks the questions when they are due.

    most        tokens of an answer; `moments`: how many of its evidence frames are printed, unless `quiet`
    begin, had  seconds of the last frame, and number of frames, of the saved session it continues; None, 0 for none
    asked       questions whose time is still to come, in order, then those for the end
    unanswered  questions without an answer yet; `answers`: the answers, JSON-ready
    ingested    the first frame of the last ingestion, and the first after it
    uneven      log of gaps and irregular times of the source; `lines`: its subtitles, in the session's times
    """

    def __init__(
        self, session: VideoSession, asked: list[Asked], fps: float, most: int, moments: int, quiet: bool
    ) -> None:
        from mmaccel.media.sampling import EventLog

        self._session, self._fps, self.lines = session, fps, list[TimedText]()
        self._most, self._moments, self._quiet = most, moments, quiet
        self.begin, self.had = session.seconds if len(session) else None, len(session)
        self.asked, self.unanswered, self.ingested = asked, list(asked), (0, 0)
        self.answers: list[dict[str, Any]] = []
        self.uneven = EventLog()

    def time_shift(self, first: Video) -> float:
        """Return the seconds to add to the source's times so that its first clip `first` follows the saved session."""
        start = float(first.clock[0])
        return self.begin + 1 / self._fps - start if self.begin is not None and start <= self.begin else 0.0

    def split_clips_at_questions(self, clips: Iterator[Video], keeper: PeriodicSaver) -> Iterator[Piece]:
        """Yield the clips, cut after the last frame before each question. Their times are shifted to the session's, by
        `time_shift`, which is also stored in `keeper.shift`."""
        given = self.lines
        for part in clips:
            if keeper.shift is None:
                keeper.shift = self.time_shift(part)
            self.lines = shift_lines(given, keeper.shift)
            for one in part.events:
                self.uneven.add(one.kind, one.time, one.seconds)
            yield from split_clip_at_questions(replace(part, clock=part.clock + keeper.shift), self.asked)

    def feed_clip_piece(
        self,
        piece: Piece,
        rest: Iterator[Piece] | None,
        seen: Callable[[int, int | None], None],
        pause: Callable[[], bool],
    ) -> None:
        """Feed a piece to the session, then answer the questions due after it. `rest`: the later pieces of a stored video,
        also ingested until a question is due, `pause` returns True or the user interrupts. `seen` gets the frame count."""
        frames, due = piece
        before = len(self._session)
        if frames is not None and rest is None:
            self._session.watch(frames, subtitles=self.lines)
        elif frames is not None and rest is not None:
            due = []
            with delay_stop_signals() as stopped:

                def film(rest: Iterator[Piece]) -> Iterator[Video]:
                    for frames, asked in chain([piece], rest):
                        if stopped():
                            return
                        if frames is not None:
                            yield frames
                        due.extend(asked)
                        if asked or pause():
                            return

                self._session.ingest(
                    film(rest), progress=lambda n, _: seen(before + n, None), subtitles=self.lines
                )
            self.ingested = before, len(self._session)
        seen(len(self._session), None)
        self.answer(due)

    def answer(self, due: list[Asked], last: bool = False) -> None:
        """Ask the questions `due`; `last`: the video has ended. Prints a note if a question's time was not watched."""
        for at, text in due:
            end = self._session.seconds
            if last and at is not None and at > end + 1 / self._fps:
                remark(f"{text!r} is for {at:g} s, past the last frame at {end:g} s; it is asked there.")
            elif not last and at is not None and self.begin is not None and at < self.begin:
                when = f"{at:g} s, before the saved session's end at {self.begin:g} s"
                remark(f"{text!r} is for {when}; it is asked there.")
            self.ask(text, at)
            self.unanswered.remove((at, text))

    def ask(self, text: str, at: float | None = None) -> None:
        """Ask a question meant for `at` seconds (None: now), store its answer, and print it as it is generated unless
        `quiet`. Raises `VideoError` if no frame was seen yet."""
        session, moments = self._session, self._moments
        if not len(session):
            raise VideoError(f"--question: nothing was seen before {text!r} is asked; ask it later.")
        if self._quiet:
            answer = session.ask(text, self._most, evidence=moments > 0)
        else:
            console = out()
            console.print(f"[{session.seconds:.1f} s] {text}", markup=False, highlight=False)
            reply = session.ask(text, self._most, stream=True, evidence=moments > 0)
            for piece in reply:
                console.print(piece, end="", markup=False, highlight=False, soft_wrap=True)
            console.print()
            assert reply.answer is not None
            answer = reply.answer
            if answer.evidence:
                console.print(evidence_table(answer, moments))
            for line in evidence_footer(answer, moments):
                echo(f"  {line}")
        self.answers.append(
            {
                "question": text,
                "at": at,
                "asked_at": session.seconds,
                "frames": len(session),
                "answer": answer.text,
                "finish_reason": answer.finish_reason,
                "ttft_s": answer.ttft_s,
                "tokens_per_s": answer.tokens_per_s,
                "evidence": [asdict(one) for one in answer.top(moments)],
                "moments": len(answer.evidence),
                "lines": answer.lines,
                "counters": answer.counters,
            }
        )


def _error_text(error: Exception) -> str:
    """An error as one sentence; an unexpected one with its class name."""
    return error_sentence(error) or f"{type(error).__name__}: {error}"
