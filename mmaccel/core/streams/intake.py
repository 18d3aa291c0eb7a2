"""How a session takes in frames: clip by clip, each entirely or not at all, while questions are answered in between."""

from __future__ import annotations

import math
import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from functools import partial
from time import sleep
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from mmaccel.core.attach import StreamAdapter
from mmaccel.core.decoding.generate import CallEnded, Deadline
from mmaccel.core.decoding.watching import DraftStreamSettings
from mmaccel.core.errors import ModelError, RecipeError, add_frames_kept_note, warn
from mmaccel.core.memory.kv import StreamPolicy
from mmaccel.core.recipe import Recipe
from mmaccel.core.streams import sources
from mmaccel.core.streams.fair_lock import QUESTION_S, SHORT_S, WAIT_S, FairLock
from mmaccel.core.streams.sources import Clip, IntakeProgress, StreamEvent, Tell
from mmaccel.core.streams.standing import StandingQuestion
from mmaccel.core.streams.stream_runner import GuardedDraftStream, StreamRunner
from mmaccel.core.streams.timed_text import (
    TimedText,
    lines_starting_between,
    lines_without_units,
    merge_timed_lines,
    read_timed_lines,
    stream_end_seconds,
)

How = Literal["watch", "ingest"]

AT_ONCE, FORGET_S = 16, 5.0
"""Answers of a session that may begin while others go on; then all end before the next, for a memory forgets between two
answers. It waits for the clip that is being taken in, so many seconds at most."""


class QuestionLock(FairLock):
    """Lets one question of a session run at a time, up to its answer's first token. Its answer may then leave the lock and
    go on beside others; `hold` waits for those. Once `AT_ONCE` have left, a question waits for all and runs `between`."""

    _inside: ClassVar[list[int]] = []  # threads of answers that left; each may run what others' call

    def __init__(self, between: Callable[[], None]) -> None:
        super().__init__()
        self._between = between
        self._left, self._joined, self._back = 0, 0, threading.Condition()

    @contextmanager
    def hold(self, deadline: Any = None, **how: Any) -> Iterator[float]:
        """Context that holds the lock once all answers that left have ended (`FairLock.hold`)."""
        self.check_not_answering()
        with super().hold(deadline, **how) as waited:
            self._wait(deadline)
            yield waited

    def check_not_answering(self) -> None:
        """Raise `ModelError` if this thread decodes an answer, which has released the lock: it would wait for itself."""
        if threading.get_ident() in self._inside:
            raise ModelError("an answer cannot wait for its own end; call this when the answer has ended.")

    def _wait(self, deadline: Deadline | None) -> None:
        self.check_not_answering()
        with self._back:
            while self._left:
                self._back.wait(WAIT_S)
                if deadline is not None:
                    deadline.check()

    @contextmanager
    def hold_to_ask(self, deadline: Deadline) -> Iterator[Callable[[], None]]:
        """Context of a question and its answer; gives a function that leaves the lock, so that others can ask meanwhile."""
        with ExitStack() as stack, ExitStack() as held:
            held.enter_context(super().hold(deadline))
            if self._joined >= AT_ONCE:
                self._wait(deadline)
                self._between()

            def leave() -> None:
                stack.callback(self._count, -1)
                self._count(1)
                held.close()

            yield leave

    def _count(self, more: int) -> None:
        with self._back:
            (self._inside.append if more > 0 else self._inside.remove)(threading.get_ident())
            self._left += more
            self._joined = self._joined + max(0, more) if self._left else 0
            self._back.notify_all()


class FrameIntake:
    """Base of `VideoSession`: takes in frames. Threads hold these locks, in this order:

    _source  during a call of `watch` or `ingest`, so that frames of two calls do not mix
    _stream  while a clip is taken in, and while the stream is saved, loaded or closed
    _asking  while a question is read, or answered; a clip that fails waits for all answers before it is rolled back. Its
             holder waits for `_stream` too, to let the memory forget between answers, but for at most `FORGET_S` seconds
    the model's `turns`, for one pass of frames, one token, or some layers of a question
    """

    recipe: Recipe
    _kv: StreamPolicy
    _stream_adapter: StreamAdapter
    _processor: Any
    _live: StreamRunner | None = None
    _closed = _changed = False

    def __init__(self) -> None:
        self._source, self._stream, self._cancelled = FairLock(), FairLock(), threading.Event()
        self._asking = QuestionLock(self._let_go_between_answers)
        self.events: deque[StreamEvent] = deque(maxlen=1000)
        """What befell sources that are reconnected, and what the memory let go of; the last ones."""
        self._standing, self._pins = list[StandingQuestion](), list[tuple[float, float]]()
        self._feeds: dict[Deadline, int] = {}  # calls that take in frames, and their threads

    @property
    def frames(self) -> int:
        """Number of video frames that the session has watched so far."""
        return 0 if self._live is None else len(self._live.info.times)

    def _deadline(self, timeout: float | None) -> Deadline:
        """The end of a call that begins now; `cancel` ends it too."""
        return Deadline(timeout, self._cancelled)

    def cancel(self) -> None:
        """Ask all running and waiting calls of `watch` and `ask` to end, from any thread; return at once.

        `ask` returns the tokens generated so far (`finish_reason` "cancelled"); `watch` keeps the frames that the model has
        read. Later calls run as usual.
        """
        cancelled, self._cancelled = self._cancelled, threading.Event()
        cancelled.set()

    @contextmanager
    def _feeding(self, deadline: Deadline) -> Iterator[None]:
        """Context of a call that takes in frames: a question that comes before the first frame waits for it."""
        self._feeds[deadline] = threading.get_ident()
        try:
            yield
        finally:
            self._feeds.pop(deadline, None)

    def _frame_comes(self) -> bool:
        """Whether there is no frame yet, and another thread is about to take in the first."""
        return not self.frames and any(one != threading.get_ident() for one in list(self._feeds.values()))

    def _await_first_frame(self, deadline: Deadline) -> None:
        """Wait for the first frame while another thread is about to take it in; raises `CallEnded` by `deadline`."""
        while self._frame_comes():
            deadline.check()
            sleep(WAIT_S)

    @contextmanager
    def _working(self, *turns: FairLock, deadline: Deadline | None = None) -> Iterator[None]:
        """Hold `turns` while the session is open."""
        # What is made in inference mode cannot be written to outside of it, and a stream may outlive the mode. A memory has
        # keys and values of the weights' type, whatever autocast makes of a product.
        exact = torch.autocast(self._stream_adapter.device.type, enabled=False)
        if self._asking in turns:
            self._asking.check_not_answering()
        with ExitStack() as stack:
            for one in turns:
                stack.enter_context(one.hold(deadline, ahead=QUESTION_S))
            with torch.inference_mode(False), torch.no_grad(), exact:
                if self._closed:
                    raise ModelError("the session is closed; open a new one, or resume a saved one.")
                yield

    def _take_in(
        self,
        how: How,
        video: Any,
        times: Sequence[float] | Tensor | None,
        fps: float | None,
        progress: Tell | None,
        deadline: Deadline,
        reconnect: bool = False,
        subtitles: Any = None,
    ) -> int:
        """`watch` or `ingest`, by `deadline`. Raises `RecipeError` where the memory does not ingest."""
        if how == "ingest" and not self._kv.ingests:
            raise RecipeError(f"kv {self._kv.name!r} does not ingest (ingests is not True); use watch.")
        if fps is not None and not 0 < fps < math.inf:
            raise ModelError(f"fps: {fps!r}; give a positive number of frames a second.")
        given = None if times is None else [float(moment) for moment in times]
        if given is not None and not all(map(math.isfinite, given)):
            raise ModelError("times: some are not finite numbers; give seconds from the start of the stream.")
        if reconnect and not (isinstance(video, str | os.PathLike) and times is None and how == "watch"):
            raise ModelError("reconnect: it opens a path or URL again, with its own times; leave it out.")
        lines = [] if subtitles is None else read_timed_lines(subtitles)
        # Times are given for all frames of a call: all are taken in, or none.
        apart = given is None and how == "watch"
        whole = partial(self._whole, how, deadline)
        each, every = (whole, nullcontext) if apart else (nullcontext, whole)
        done, part, over, moves = 0, False, None, IntakeProgress(progress, deadline)
        try:
            with (
                self._feeding(deadline),
                self._working(self._source, deadline=deadline),
                every(),
                closing(self._clips(how, video, fps, moves, reconnect)) as clips,
            ):
                if how == "ingest":
                    self._stream_adapter.attention.meter.clear()
                try:
                    for clip in clips:
                        with each():
                            taken = self._take(how, clip, given, done, moves, lines)
                            if not clip.part and (how == "watch" or taken == len(clip.frames)):
                                self._rest(how == "watch")
                        done, part = done + taken, clip.part
                        if apart:
                            self._let_go()
                        if taken < len(clip.frames):
                            over = deadline.end_reason()
                            break
                except CallEnded as end:  # while frames were awaited
                    over = end.reason
                if over is not None and how == "ingest":
                    done = 0
                    raise CallEnded(over)
                if given is not None and over is None and done != len(given):
                    raise ModelError(f"times: there are {len(given)} for {done} frames; give one each.")
                if part:
                    self._rest()
            if not apart:
                self._let_go()
        except CallEnded as end:  # while the call waited for its turn
            over = end.reason
        except Exception as error:
            if done and apart:
                add_frames_kept_note(error, done)
            raise
        if over is not None:
            why = "it reached its timeout" if over == "timeout" else "it was cancelled"
            warn(f"{how}: {why}; it took in {done} frames and left out the rest.")
        return done

    def _clips(
        self, how: How, video: Any, fps: float | None, moves: IntakeProgress, reconnect: bool
    ) -> Generator[Clip, None, None]:
        check = moves.deadline.check
        opens = partial(self._stream_adapter.iterate_clips, video, fps, check)
        if how == "ingest":
            return sources.regroup_clips_by_pass(opens(), self._room, moves.count_decoded_frames)
        if not reconnect:
            return opens()
        begin = self._live.info.times[-1] if self._live is not None else 0.0
        return sources.clips_with_reconnect(
            opens, check, self.events.append, begin, lambda one: one.times or [], sources.shift_clip
        )

    _waited = 0.0

    @property
    def waited_s(self) -> float:
        """Seconds that calls with frames, and their forward passes, have waited for a model in use by others."""
        return self._waited + (0.0 if self._live is None else self._live.waited_s)

    @contextmanager
    def _turn(self, deadline: Deadline | None = None) -> Iterator[None]:
        with self._stream_adapter.turns.hold(deadline, ahead=SHORT_S) as waited:
            self._waited += waited
            yield

    def _rest(self, idle: bool = False) -> None:
        """Tell the memory that no more frames come for now; with `idle`, unless others wait: the next question does it."""
        if self._live is not None and not (idle and self._stream_adapter.turns.is_contended):
            with self._turn():
                self._live.state.end_ingest()
                self._live.draft_stream.end_ingest()

    def _let_go_between_answers(self) -> None:
        """Let a memory forget that could not while answers overlapped; nothing is forgotten in the middle of a clip."""
        if self._live is not None and self._live.state.forgets:
            with suppress(CallEnded), self._working(self._stream, deadline=self._deadline(FORGET_S)):
                self._let_go()

    def _let_go(self) -> None:
        """Let the memory forget what it keeps no longer, and note it, as one event for all that goes in a row."""
        if (live := self._live) is None:
            return
        with self._turn():
            gone = live.state.forget_old_units(live.unit_time, live.is_pinned)
            if not gone:
                return
            live.info.timed_texts = lines_without_units(live.info, gone)
            spans, times = live.info.spans, live.info.times
            first, last = times[spans[min(gone)][0]], times[sum(spans[max(gone)]) - 1]
            event = self.events[-1] if self.events else None
            if event is None or event.kind != "let_go" or event.lasted is None:
                event = StreamEvent("let_go", last, "the memory keeps no more frames", 0.0)
                self.events.append(event)
            else:
                first = min(first, event.seconds - (event.lasted or 0.0))
            event.seconds = max(last, event.seconds)
            event.lasted = event.seconds - first

    @contextmanager
    def _whole(self, how: How, deadline: Deadline) -> Iterator[None]:
        """After an error inside, restore the stream as it was before. Questions wait for the end of an ingestion, and where
        a draft watches the stream, frames for that of an answer."""
        draft = self.recipe.draft
        alone = how == "ingest" or (draft.active and "video" in draft.needs)
        turns = self._stream_adapter.turns
        with self._working(self._stream, *([self._asking] if alone else []), deadline=deadline):
            with self._turn(deadline):
                self._let_go()  # what is gone does not come back with a stream that is restored
                before, self._changed, noted = self._live, False, tuple(self.events)
                mark = None if before is None else before.checkpoint()
            try:
                yield
            except BaseException:
                if not self._changed:
                    raise  # at once, beside an answer
                with self._asking.hold(), turns.hold():
                    if before is not None:
                        before.restore(mark)
                    elif self._live is not None:
                        self._live.close()
                    self._live = before
                    self.events.clear()
                    self.events.extend(noted)
                raise

    def _take(
        self,
        how: How,
        clip: Clip,
        given: list[float] | None,
        done: int,
        moves: IntakeProgress,
        lines: Sequence[TimedText],
    ) -> int:
        before, watched = None if self._live is None else self._live.info, 0
        shown, timed = sources.clip_shown_times(how, clip, given, done, before)
        changes = sources.find_clip_events(before, clip, shown)
        live = self._begun(clip, timed)
        since = stream_end_seconds(live.info) if live.info.times else -math.inf
        if not done:  # those of a short gap before the call belong to it
            since = max(min(since, shown[0]), shown[0] - sources.GAP_S)
        live.info.rate = clip.fps or live.info.rate
        own = clip.times[0] if clip.times else done / (clip.fps or live.info.fps or 1.0)
        shift = shown[0] - own if given is None else 0.0

        def tell(through: int) -> None:
            nonlocal watched, since
            some, watched = slice(watched, through), through
            if lines or live.draft_stream.stream is not None:
                with self._turn():
                    info, begin, since = live.info, since, stream_end_seconds(live.info)
                    new = lines_starting_between(lines, begin, since, shift)
                    info.timed_texts = merge_timed_lines(info.timed_texts, new)
                    told = clip.frames[some], shown[some], clip.fps, live.info.timed
                    live.draft_stream.add_frames(*told, how == "ingest")
            for one in list(self._standing):
                one.notify_frames()
            moves.report_frames_read(clip, done, through)

        moved = partial(moves.report_frames_read, clip, done) if how == "ingest" else None
        taken = live.add_frames(clip.frames, shown, tell, moves.deadline, how == "ingest", moved)
        # A break of the source is no gap besides.
        broken = [one.seconds for one in self.events if one.kind in ("stall", "fault", "end")][-1:]
        self.events += [one for one in changes if one.kind != "gap" or one.seconds not in broken]
        if not self.frames:
            live.close()
            self._live = None
        return taken

    def _begun(self, clip: Clip, timed: bool) -> StreamRunner:
        self._changed = True
        if self._live is None:
            parts = self._stream_adapter, self._kv, self.recipe.chunk, clip.frames, clip.fps
            with self._turn():
                self._live = StreamRunner.start_stream(*parts, timed)
                self._live.info.pins = self._pins
                self._live.draft_stream = self._open_draft_stream()
        return self._live

    def _room(self, clip: Clip) -> int:
        live = self._begun(clip, clip.times is not None or clip.fps is not None)
        frames_per_unit, pending = live.adapter.frames_per_unit, live.info.pending
        return sources.units_per_ingest_pass(clip.frames, frames_per_unit, live.bulk) * frames_per_unit - (
            0 if pending is None else len(pending)
        )

    def _open_draft_stream(self) -> GuardedDraftStream:
        """The stream of the draft, where it asks for one."""
        told = DraftStreamSettings(self._processor, self._kv, self.recipe.chunk)
        return GuardedDraftStream.open(self.recipe.draft, self._stream_adapter.view, told)
