"""`VideoSession`: watches an endless video stream and answers questions about it in between."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn, overload

import torch
from torch import Tensor, nn

from mmaccel.core.attach import StreamAdapter, adapter_for, stream_attention_config
from mmaccel.core.decoding.generate import MAX_NEW_TOKENS, Answer, CallEnded, Deadline, StreamedAnswer
from mmaccel.core.errors import ModelError, quoted
from mmaccel.core.recipe import Recipe, stream_policy
from mmaccel.core.report import Meter, Report
from mmaccel.core.streams import session_io
from mmaccel.core.streams.asking import run_question
from mmaccel.core.streams.intake import AT_ONCE, FrameIntake
from mmaccel.core.streams.parts import Between, Messages, as_messages
from mmaccel.core.streams.sources import Tell
from mmaccel.core.streams.standing import AnswerChange, StandingQuestion, end_questions
from mmaccel.core.streams.stream_runner import StreamRunner
from mmaccel.core.streams.timed_text import make_timed_text, merge_timed_lines, read_timed_lines


class VideoSession(FrameIntake):
    """A video stream on one model: `watch` any number of times, `ask` in between, `save`, `load`, `close`.

    model      a model of a supported family, not accelerated; it is unchanged between two calls
    processor  its processor (`mmaccel.load_processor`)
    recipe     a name, a mapping, a YAML path or a `Recipe`, whose kv is a memory of streams

    A question never changes the stream, even when it fails. A `watch` that fails or is interrupted keeps nothing of that
    call; when it reads a path, it keeps the clips before the failure. One exception: with spill "drop_oldest" and a full
    host memory, new frames overwrite the oldest, and a failed `watch` does not bring these back. `counters` counts them as
    "host_dropped"; calls with fewer frames lose fewer. Sessions on one model are independent and may be used from several
    threads: their passes take turns. Raises `RecipeError` or `ModelError` in one sentence.
    """

    def __init__(
        self,
        model: nn.Module,
        processor: Any,
        recipe: Recipe | str | Path | Mapping[str, Any] | None = "mosaic",
        **choices: Any,
    ) -> None:
        super().__init__()
        self.recipe = Recipe.load(recipe, **choices)
        self._kv = stream_policy(self.recipe)
        self._stream_adapter: StreamAdapter = adapter_for(model).stream_adapter(model, processor)
        self._stream_adapter.attention = stream_attention_config(self.recipe, self._stream_adapter)
        self.recipe.draft.check_target(self._stream_adapter.view)
        self._processor = processor
        self._meter = Meter()
        self.history: list[Mapping[str, Any]] = []
        """The turns of `ask` with `chat`, oldest first; clear it to begin anew."""

    @classmethod
    def resume(cls, model: nn.Module, processor: Any, path: str | Path) -> VideoSession:
        """Return a session with the recipe and the stream that `save` wrote to `path`."""
        session: VideoSession = session_io.open_saved_session(partial(cls, model, processor), Path(path))
        session.load(path)
        return session

    def watch(
        self,
        video: Any,
        times: Sequence[float] | Tensor | None = None,
        fps: float | None = None,
        progress: Tell | None = None,
        *,
        timeout: float | None = None,
        reconnect: bool = False,
        subtitles: Any = None,
    ) -> int:
        """Take in frames: [T, 3, H, W] uint8, images, a `media.Video`, an iterator of these, or a path. Returns how many.

        times  seconds of each frame, ascending; else the video's own, shifted to follow what was watched before, or one
               every ``1 / fps`` (1). `fps` is also the rate at which a path is read (0.5). If the model's positions are
               seconds, as Qwen2.5-VL's are, they follow the times; if units get consecutive positions, or the first clip
               has neither times nor a rate, they follow the first clip's rate.
        `progress(done, total)` counts frames; `total` is None for a path. After an error the session keeps nothing of this
        call; of a path without `times` it keeps the clips before the error. A live source that sends nothing for 10 s raises
        `VideoStalled`; watch it again to wait longer. For spill "drop_oldest" see the class. `timeout`: seconds from the
        start of this call. When they are over, or `cancel` is called, the call ends after the current pass of frames, or at
        once while it waits for frames of a path. The session keeps the frames that the model has read, drops the others, and
        a warning gives the number kept. If a live source sends nothing for half a second, the model reads what has come.
        `reconnect`: a source that stalls, fails or ends is opened again, after growing delays, until the call is cancelled
        or times out; `events` records this, and frames continue at the time at which they come. For endless sources,
        watch each clip of ``mmaccel.media.clips(...)``.
        `subtitles`: an SRT or WebVTT file, or (begin, end, text) triples in seconds of the video (of the stream with
        `times`): as frames come, their lines are told to the stream (`tell`). Lines that begin before the frames of this
        call are left out, but for those in a gap of up to a second before them.
        """
        return self._take_in(
            "watch", video, times, fps, progress, self._deadline(timeout), reconnect, subtitles
        )

    def ingest(
        self,
        video: Any,
        fps: float | None = None,
        progress: Tell | None = None,
        *,
        timeout: float | None = None,
        subtitles: Any = None,
    ) -> int:
        """Take in a stored video as `watch` does, in passes of the recipe's `chunk` (32768 tokens, 65536 on CUDA) with its
        pattern. A frame sees all earlier frames of the video, not only the window. At the end, the memory offloads or drops
        frames outside the window, as it does in `watch`. Returns the number of frames. Clips wait until a pass is full, so
        that a path, clips and a tensor are stored alike; a pass has at most 2 GiB of decoded frames.
        A memory's field `ingest_frames` limits how many frames before it a frame sees; the counter "ingest_seen" is the
        share that frames saw, on average, of all frames before them. `progress` is also called between layers; of a path
        and of clips, a frame counts half once it is decoded, and wholly once the model has read it. All of the video is
        taken in or nothing; a `timeout` or `cancel` leaves a warning.
        """
        return self._take_in("ingest", video, None, fps, progress, self._deadline(timeout), False, subtitles)

    def tell(self, text: str | Sequence[Any], at: float | None = None, until: float | None = None) -> None:
        """Add a line of text (what was said, or read) to the stream, shown from `at` (None: now) to `until` seconds of it
        (None: at `at` alone); or several lines, (begin, end, text) each.

        Lines are kept beside the memory, not in it: a question reads those that fall on frames it recalls or has in its
        window (with `between` those of that time), with their times, after its words; `Answer.lines` has them. Of more than
        2048 tokens of lines, it reads first those of the frames that most layers saw. A line of a later time is read once
        frames of that time have come. Lines are saved with the stream, and are dropped with the frames in which they begin;
        beyond 2,097,152 characters (64 more for each line) the oldest are dropped. Special tokens in a line count as plain
        text. The call waits for the clip that is being taken in, or for the end of an `ingest` or a `watch` with `times`.
        Raises `ModelError` for impossible times or an invalid text.
        """
        now = self.seconds if at is None else at
        lines = [make_timed_text(now, until, text)] if isinstance(text, str) else read_timed_lines(text)
        with self._working(self._stream), self._turn():
            info = self._opened("tell").info
            info.timed_texts = merge_timed_lines(info.timed_texts, lines)

    @overload
    def ask(
        self, question: str | Messages, max_new_tokens: int = ..., stream: Literal[False] = ..., **how: Any
    ) -> Answer: ...

    @overload
    def ask(
        self, question: str | Messages, max_new_tokens: int = ..., *, stream: Literal[True], **how: Any
    ) -> StreamedAnswer: ...

    def ask(
        self,
        question: str | Messages,
        max_new_tokens: int = MAX_NEW_TOKENS,
        stream: bool = False,
        *,
        timeout: float | None = None,
        evidence: bool = True,
        chat: bool = False,
        between: tuple[float, float] | None = None,
        **settings: Any,
    ) -> Answer | StreamedAnswer:
        """Answer a question on what was watched so far; the stream stays as it was.

        question  a text; content pieces, such as ``{"type": "image", "image": ...}``; or messages, ``{"role": "user",
                  "content": ...}``: earlier turns of user and assistant, and a system message, which is read after the
                  video, for the stream begins with the template's own. Earlier turns are text, and no part of the stream
        max_new_tokens  most tokens of the answer
        stream    return the text in pieces as it is generated (`StreamedAnswer`), instead of the whole `Answer`
        timeout   seconds from the start of this call; the answer then ends with the tokens generated so far, perhaps none
        evidence  also find the frames that the answer is based on; False answers a long question sooner
        chat      read the turns in `history` before the question, and append question and answer to it
        between   (begin, end) in seconds of the stream, such as (725.0, 730.0): it sees only frames shown in that time
        settings  of `generate`: do_sample with temperature, top_k, top_p and a seed; repetition_penalty; stop_strings;
                  logits_processor or prefix_allowed_tokens_fn, as libraries make them for answers in JSON; by default greedy

        The question sees the stream as it is when its answer begins. Questions of a session are read one after another, and
        frames are taken in meanwhile. Without frames yet, the call waits for the first if another thread is about to add it.
        `Answer.finish_reason` says why it ends. Raises `ModelError`, before the model runs, for a question that leaves no
        position for an answer. An answer that reaches the last position ends there, with a warning.
        """
        deadline = self._deadline(timeout)
        work = self._answering(question, max_new_tokens, deadline, evidence, chat, between, **settings)
        if not stream:
            return work(None)
        (self._stream_adapter.question_ids if self._frame_comes() else self._check)(question)
        return StreamedAnswer(work, deadline)

    def ask_all(
        self, questions: Sequence[str | Messages], max_new_tokens: int = MAX_NEW_TOKENS, **how: Any
    ) -> list[Answer]:
        """Answer several questions at once; return the answers in order, each as of `ask`. `timeout` is for all together.
        Answers are decoded as one batch, except: with `chat`, a draft or a pruner; with kv `full` or `offload` or spill
        "drop_oldest"; on several devices; with recurrent layers. All answers end before an error is raised."""
        if isinstance(questions, str):
            raise ModelError("ask_all: questions is one text; give a list of questions, or call ask.")
        given = max_new_tokens, self._deadline(how.pop("timeout", None))
        with ThreadPoolExecutor(AT_ONCE) as pool:
            made = [pool.submit(self._answering(one, *given, **how), None) for one in questions]
        return [one.result() for one in made]

    def _answering(
        self,
        question: str | Messages,
        most: int,
        deadline: Deadline,
        evidence: bool = True,
        chat: bool = False,
        between: Between = None,
        **settings: Any,
    ) -> Callable[[Callable[[str], None] | None], Answer]:
        """What answers a question when it is called, with what gets the pieces of text; see `ask`."""
        if not isinstance(most, int) or most < 1:
            raise ModelError(f"max_new_tokens: {most!r}; give at least 1.")
        return partial(self._answer, question, most, evidence, deadline, chat, between, settings)

    def _check(self, question: str | Messages) -> StreamRunner:
        """The stream to ask; raises `ModelError` where nothing was watched, or the question is none."""
        self._stream_adapter.question_ids(question)
        return self._opened("ask")

    def _opened(self, call: str) -> StreamRunner:
        if self._live is None or not self.frames:
            raise ModelError(f"{call}: the session has seen no frame; watch something first.")
        return self._live

    def _answer(
        self,
        question: str | Messages,
        most: int,
        evidence: bool,
        deadline: Deadline,
        chat: bool,
        between: Between,
        settings: Mapping[str, Any],
        put: Callable[[str], None] | None,
    ) -> Answer:
        if (schema := settings.get("schema")) is not None:
            # Compiled, and kept, before frames have to wait for it.
            self._stream_adapter.token_choice(
                torch.zeros(1, 1, dtype=torch.long), most, {"schema": schema}, False
            )
        try:
            self._await_first_frame(deadline)
            with (
                self._asking.hold_to_ask(deadline) as leave,
                self._working(self._stream_adapter.turns, deadline=deadline),
            ):
                said = [*self.history, *as_messages(question)] if chat else question
                live = self._check(said)
                if callable(between):
                    between = between(self.seconds)
                with run_question(live, said, most, evidence, deadline, True, settings, between) as turn:
                    alone = chat or live.pruned or self.recipe.draft.active
                    if turn.shares and live.state.several and not alone:
                        leave()
                    text, ids, reason = turn.decode(self.recipe.draft, most, put)
                    self._meter, report = turn.meter, self._told(turn.meter, turn.counted())
                    counters, draft = dict(report.kv), report.draft
                    names = {"drafted": "proposed", "accepted": "accepted", "draft_wait_seconds": "wait_s"}
                    counters |= {told: float(draft[x]) for told, x in names.items() if draft["rounds"]}
                    speed = report.ttft_s or 0.0, report.tokens_per_s
                    answer = Answer(text, ids, *speed, turn.evidence(), counters, reason, turn.lines)
                if chat:
                    self.history = [*said, {"role": "assistant", "content": text}]
                return answer
        except CallEnded as end:
            return Answer("", (), 0.0, None, counters={}, finish_reason=end.reason)

    def on(
        self,
        question: str,
        call: Callable[[AnswerChange], object],
        *,
        every: float = 2.0,
        last: float | None = None,
        says: str | None = None,
        max_new_tokens: int = 16,
        fails: Callable[[Exception], object] | None = None,
    ) -> StandingQuestion:
        """Ask `question` again and again while frames come, and run `call` with an `AnswerChange` when its answer changes.

        every  seconds of the stream between two questions at least; one that is due during the previous answer is skipped
        last   ask only about the last so many seconds; None: about all frames
        says   run `call` only when the answer begins to contain this text ("yes"), and the previous one did not
        max_new_tokens  most tokens of an answer; raise it where 16 cut an answer off
        fails  run with the error that ends the question (of the model, or of `call`), instead of a warning

        `call` runs in a thread of its own, as the questions do; frames do not wait for it. `StandingQuestion.cancel` ends
        it, and so does `close`, which waits up to 10 s for a running `call`. Raises `ModelError` for an invalid question.
        """
        with self._working():
            self._stream_adapter.question_ids(question)
        return StandingQuestion(
            self, question, call, every=every, last=last, says=says, most=max_new_tokens, fails=fails
        )

    def __len__(self) -> int:
        return self.frames

    def __bool__(self) -> bool:
        return True

    @property
    def seconds(self) -> float:
        """When the last frame was shown, in seconds from the start of the stream."""
        return self._live.info.times[-1] if self._live is not None and self._live.info.times else 0.0

    def counters(self) -> dict[str, float]:
        """Return figures of the stream's KV memory, read between two forward passes."""
        with self._stream_adapter.turns.hold():
            return {} if self._live is None else self._live.counters()

    def report(self) -> Report:
        """Return the recipe in use and figures of the last answer, like `Accelerated.report` after `generate`.

        prompt_tokens are the columns of the stream, as its memory counts them, and of the question; `kv` counts what the
        memory holds now; kept and patterns are those of the last `ingest` under a pattern and of the question; peak_bytes
        are since the last reset on CUDA. Before the first answer, figures of an answer are 0 or None.
        """
        return self._told(self._meter, self.counters())

    def _told(self, meter: Meter, counters: dict[str, float]) -> Report:
        own, device = self._stream_adapter.attention, self._stream_adapter.device
        whole = meter.merged_with(own.meter, (0, 0) if self._live is None else self._live.token_counts)
        why = "" if own.choice is None else own.choice.why
        return whole.report(self.recipe.to_dict(), own.backend, counters, device, why)

    def clusters(self) -> dict[str, Tensor]:
        """Return level name -> cluster index [L or 1, N] of N stored entries at each of L layers (1: the same at all), for a
        memory that clusters frames; else {}. Entries are in order of time, equally many for each time step of `shown`.
        """
        with self._stream_adapter.turns.hold():
            return {} if self._live is None else self._live.state.clusters()

    @property
    def shown(self) -> list[float]:
        """The seconds at which each step of time (a frame, or a temporal patch of frames) began."""
        return [] if self._live is None else self._live.info.unit_times(0)

    def pin(self, begin: float, end: float) -> None:
        """Keep frames shown from `begin` to `end`, in seconds of the stream, past or future, even if the memory forgets
        others for age or lack of room (`keep_seconds`, spill "drop_oldest"), until `unpin`. Saved with the stream."""
        self._pins.append(self._stretch("pin", begin, end))

    def unpin(self, begin: float, end: float) -> None:
        """Undo a `pin` of the same stretch of seconds."""
        if (stretch := self._stretch("unpin", begin, end)) not in self._pins:
            raise ModelError(f"unpin: nothing is pinned from {begin:g} to {end:g} s; give those of a pin.")
        self._pins.remove(stretch)

    def _stretch(self, call: str, begin: float, end: float) -> tuple[float, float]:
        with suppress(TypeError), self._working():  # of what is no number
            if -math.inf < begin <= end < math.inf:
                return float(begin), float(end)
        told = f"{quoted(begin)} to {quoted(end)}"
        raise ModelError(f"{call}: {told}; give two numbers of seconds, the earlier one first.")

    def save(self, path: str | Path) -> None:
        """Write the stream into the folder `path` (safetensors and JSON), atomically replacing a session saved there."""
        with self._working(self._stream):
            session_io.save_session(Path(path), self.recipe, self._opened("save"))

    def load(self, path: str | Path) -> None:
        """Continue from what `save` wrote, with the same model and kv; on an error the session stays as it was."""
        with self._working(self._stream, self._asking):
            given = self._stream_adapter, self.recipe, self._kv, self._open_draft_stream
            before, self._live = self._live, session_io.load_session(Path(path), *given)
            self._pins = self._live.info.pins
            if before is not None:
                before.close()

    def close(self) -> None:
        """Close the session and release what its stream holds; a second call does nothing. Changes that standing questions
        (`on`) have found are reported first; answers of theirs that are not whole are dropped."""
        self._asking.check_not_answering()
        if self._standing:
            end_questions(self._standing)
        with self._stream.hold(), self._asking.hold(), self._stream_adapter.turns.hold():
            if self._live is not None:
                self._live.close()
            self._live, self._closed = None, True
            self._stream_adapter.view.close_cached_objects()
        for one in list(self._standing):  # which a report began meanwhile
            one.stop()

    def __enter__(self) -> VideoSession:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise ModelError("a session can be neither copied nor pickled; `save` it, and `resume` another.")

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{self.frames} frames"
        return f"<VideoSession {state}, kv {self._kv.name!r}>"
