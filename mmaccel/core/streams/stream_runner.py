"""`StreamRunner`: runs the frames and questions of one video stream through the model, into its KV memory."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cached_property, partial
from time import monotonic
from typing import Any

import torch
from torch import Tensor

from mmaccel.core.adapter import ModelView
from mmaccel.core.attach import StreamModel
from mmaccel.core.decoding.draft import DraftStrategy
from mmaccel.core.decoding.generate import CallEnded, Deadline
from mmaccel.core.decoding.watching import DraftStream, DraftStreamSettings
from mmaccel.core.errors import DraftError, warn
from mmaccel.core.memory.frames import FrameMemory
from mmaccel.core.memory.kv import Stream, StreamPass, StreamPolicy, StreamState
from mmaccel.core.memory.split import create_multi_device_state
from mmaccel.core.prefill.attention import MIN_ROWS
from mmaccel.core.streams.joint import UNITS, QueuedUnits, run_queued_units
from mmaccel.core.streams.listening import AttentionRecording
from mmaccel.core.streams.parts import MemoryWrapper, StreamInfo, restore_states_at_exit
from mmaccel.core.streams.sources import LayerHook, pad_to_units, units_per_ingest_pass

WATCHED = (
    "sparse: frames given to watch see all that the memory shows; the pattern acts on those given to ingest, and on "
    f"questions of {MIN_ROWS} tokens and of more than dense_tail where it saves something"
)
ROWS = {"cuda": 1 << 16}
"""Tokens of a pass of an ingestion where the recipe has no `chunk`; elsewhere half as many."""
SLOW, SLOW_S = 2.0, 20.0
"""How many times what all else takes, and how many seconds, a draft's stream may hold up one that is watched."""


class GuardedDraftStream:
    """Wraps the stream of a draft so that its failure ends only drafting.

    `stream` is None if no draft watches, and after a failure, whose reason is `failed`. A draft that takes more than `SLOW`
    times as long as all other work is dropped as too slow.
    """

    def __init__(self, watch: Callable[[], DraftStream] | None = None) -> None:
        self.stream: DraftStream | None = None
        self.failed = ""
        self._born, self._held_up_s = monotonic(), 0.0
        if watch is not None:
            with self.drop_on_error():
                self.stream = watch()

    @classmethod
    def open(cls, draft: DraftStrategy, target: ModelView, told: DraftStreamSettings) -> GuardedDraftStream:
        """Open the stream of `draft` with the session's settings `told`, and wrap it; a draft without video has none."""
        asks = draft.active and "video" in draft.needs
        return cls(partial(draft.open_stream, target, told) if asks else None)

    @contextmanager
    def drop_on_error(self) -> Iterator[DraftStream | None]:
        """Context that gives the draft's stream (or None); an error inside drops the draft and is not raised."""
        try:
            yield self.stream
        except Exception as error:
            stream, self.stream = self.stream, None
            self.failed = f"{type(error).__name__}: {error}"
            warn(f"the draft's own stream failed and was dropped; answers go on without it ({self.failed}).")
            if stream is not None:
                # It is broken already; that it cannot tidy up either is no news.
                with suppress(Exception):
                    stream.close()

    def add_frames(
        self, frames: Tensor, times: Sequence[float], fps: float | None, timed: bool, ingest: bool
    ) -> None:
        """Pass `frames` on to the draft's stream, if there is one; `ingest`: they are of a stored video."""
        with self.drop_on_error() as stream:
            if stream is None or not len(frames):
                return
            stream.wait_for_device()  # for the target's pass, which the draft does not hold up
            began = monotonic()
            stream.add_frames(frames, times, fps, timed, ingest)
            now = monotonic()
            self._held_up_s += now - began
            others_s = now - self._born - self._held_up_s
            if self._held_up_s > max(SLOW_S, SLOW * others_s):
                raise DraftError(
                    f"it held up the stream for {self._held_up_s:.0f} s where all else took {others_s:.0f} s; give it "
                    "a cheaper kv, or leave the draft out"
                )

    def end_ingest(self) -> None:
        """Tell the draft's stream that no more frames come for now."""
        with self.drop_on_error() as stream:
            if stream is not None:
                stream.end_ingest()

    @contextmanager
    def question_scope(self, question: Any, room: int, around: MemoryWrapper) -> Iterator[DraftStream | None]:
        """Context that gives the draft's stream, prepared for `question`; its pruner gets what `around` has recorded."""
        try:
            with self.drop_on_error() as stream:
                if stream is not None:
                    heard = around.recorded_attention() if isinstance(around, AttentionRecording) else None
                    stream.prepare_question(question, room, heard)
            yield self.stream
        finally:
            with self.drop_on_error() as stream:
                if stream is not None:
                    stream.end_question()

    def checkpoint(self) -> Any:
        """Return the present state of the draft's stream, for `restore`; None without a draft."""
        with self.drop_on_error() as stream:
            return None if stream is None else stream.checkpoint()

    def restore(self, mark: Any) -> None:
        """Restore the draft's stream to its state at `checkpoint`."""
        with self.drop_on_error() as stream:
            if stream is not None:
                stream.restore(mark)

    def close(self, collected: bool = False) -> None:
        """Release what the draft's stream holds (see `DraftStream.close`); a second call does nothing."""
        with self.drop_on_error() as stream:
            self.stream = None
            if stream is not None:
                stream.close(collected)


class StreamRunner:
    """Runs one video stream on a model; holds its facts `info`, its KV memory `state`, and the draft's `draft_stream`."""

    def __init__(self, adapter: StreamModel, kv: StreamPolicy, chunk: int | None, info: StreamInfo) -> None:
        """An empty memory for the stream of `info`. With times and no rate, positions have one unit a second."""
        self.adapter, self.kv, self.info, self.draft_stream = adapter, kv, info, GuardedDraftStream()
        self.hidden = "hidden" in kv.needs
        tokens = info.tokens_per_unit
        self._step = kv.clip or (UNITS if chunk is None else max(1, chunk // tokens))
        rows = ROWS.get(adapter.device.type, 1 << 15) if chunk is None else chunk
        self.bulk = max(1, rows // tokens)
        pruner, depth = adapter.attention.recipe.draft.pruner, adapter.view.geometry.layers
        self.around = MemoryWrapper() if pruner is None else AttentionRecording(pruner, depth)
        self._warned, self._full, self.ingests, self.pruned = False, False, False, dict[str, float]()
        fps = float(adapter.frames_per_unit) if info.timed and info.fps is None else info.fps
        ids, head = adapter.position_ids(info.size, fps), adapter.head_ids().numel()
        words, unit, dtype = adapter.text_around_unit, adapter.frames_per_unit, adapter.dtype
        self.stream = Stream(
            tokens_per_unit=tokens, words=words, head=head, frames_per_unit=unit, positions=ids, dtype=dtype
        )
        one = len(set(adapter.layer_devices)) == 1
        opened = kv.open_stream if one else partial(create_multi_device_state, kv, adapter.layer_devices)
        self.waits: deque[float] = deque(maxlen=1024)
        """Seconds that each of the last passes of frames waited for its turn; `waited_s` is of all, and of a pass with
        frames of other streams what these took."""
        self.waited_s = 0.0
        self._moved: Callable[[float], None] | None = None
        self.state = opened(self.stream, adapter.view.geometry, adapter.view, adapter.device)
        self.running = adapter.new_running_states()

    @classmethod
    def start_stream(
        cls,
        adapter: StreamModel,
        kv: StreamPolicy,
        chunk: int | None,
        frames: Tensor,
        fps: float | None,
        timed: bool = False,
        quiet: bool = False,
    ) -> StreamRunner:
        """Start a stream of frames like `frames`: run the prompt before the video. `timed`: frame times are known."""
        size = frames.shape[2], frames.shape[3]
        unit = adapter.frames_per_unit
        features, marks = adapter.features(pad_to_units(frames[:unit], unit), size)
        unit = adapter.embed_units(features, [(0, [0.0])]).shape[1]
        live = cls(
            adapter,
            kv,
            chunk,
            StreamInfo(size, fps, unit, marks[:, : adapter.view.geometry.hidden], timed, size),
        )
        live._warned = live._full = quiet
        try:
            if not isinstance(live.state, FrameMemory):
                live.run_prompt_head(live.state)
        except BaseException:
            live.state.close()
            raise
        return live

    # Frames come in.

    def add_frames(
        self,
        frames: Tensor,
        moments: list[float],
        progress: Callable[[int], None],
        deadline: Deadline,
        ingest: bool = False,
        moved: Callable[[int, int, float], None] | None = None,
    ) -> int:
        """Take in frames [T, 3, H, W] shown at `moments` (seconds); `progress` gets the number read so far. Return the
        number taken in: if the deadline comes first, those of complete passes. `ingest`: they are of a stored video; call
        the state's `end_ingest` after it, `restore` if the deadline came. ``moved(before, count, share)`` is called before
        each layer: `before` frames were read in earlier passes, and a `share` (0 to 1) of this pass's `count` frames."""
        if ingest:
            self.state.begin_ingest()
        elif not (isinstance(self.state, FrameMemory) or self.adapter.attention.recipe.sparse.dense):
            self.adapter.attention.meter.add_note(WATCHED)
        info, per_unit = self.info, self.adapter.frames_per_unit
        before, frames = len(info.times), self._alike(frames)
        if info.pending is not None:
            frames = torch.cat([info.pending.to(frames.device), frames])
        pending = frames.shape[0] - len(moments)
        whole = frames.shape[0] // per_unit
        step = units_per_ingest_pass(frames, per_unit, self.bulk) if ingest else self._step
        turns, self.ingests, first = self.adapter.turns, ingest, 0
        try:
            for first in range(0, whole, step):
                last = min(first + step, whole)
                shown = moments[len(info.times) - before : last * per_unit - pending]
                some, others = frames[first * per_unit : last * per_unit], 0.0
                self._moved = moved and partial(moved, max(0, first * per_unit - pending), len(shown))
                with turns.ending(deadline.check if ingest else None):
                    if turns.is_contended:
                        ours = run_queued_units(QueuedUnits(self, some, shown), deadline)
                        waited, others = ours.waited, ours.others
                    else:
                        with turns.hold(deadline, over=lambda: False) as waited:
                            info.times += shown
                            self.encode_frames(some)
                turns.wait_for_device()
                self.waits.append(waited)
                self.waited_s += waited + others
                progress(last * per_unit - pending)
        except CallEnded:
            taken = max(0, first * per_unit - pending)
            del info.times[before + taken :]
            info.pending = info.pending if first == 0 else None
            return taken
        finally:
            self.ingests, self._moved = False, None
        info.times += moments[len(info.times) - before :]
        rest = frames[whole * per_unit :]
        info.pending = rest.clone() if len(rest) else None
        if len(rest):
            progress(len(info.times) - before)
        self._tell_of_the_end()
        return len(moments)

    def _tell_of_the_end(self) -> None:
        """Warn, once, when the stream leaves no position for a question."""
        positions = self.stream.positions
        units, own = self.state.shown_units(StreamPass(kind="question", rows=1))
        if self._full or positions.fits_limit(units, 0, 1, own):
            return
        self._full = True
        warn(
            f"the stream takes {positions.last_position(units, 0, 1, own)[1]} of the model's {positions.limit} positions "
            f"(max_position_embeddings): kv {self.kv.name!r} cannot answer questions from now on; open a session with a kv "
            "that shows fewer frames."
        )

    def _alike(self, frames: Tensor) -> Tensor:
        """Frames that can follow those before: of their size where a unit is begun. Told once when they are resized."""
        info, adapter, size = self.info, self.adapter, (frames.shape[2], frames.shape[3])
        if size == info.raw:
            return frames
        if not self._warned and not adapter.accepts_frames(frames, info.size):
            self._warned = True
            (height, width), (h, w) = info.size, size
            warn(f"frames of {w}x{h} are resized to {width}x{height}, the size with which the stream began.")
        if info.pending is not None and info.raw is not None:
            return adapter.resize_frames(frames, info.raw)
        info.raw = size
        return frames

    def encode_frames(self, frames: Tensor) -> None:
        """Take whole units of frames [T, 3, H, W] into the memory."""
        info, state, per_unit = self.info, self.state, self.adapter.frames_per_unit
        if not isinstance(state, FrameMemory):
            return self.run_units(state, *self.record_units(self.adapter.features(frames, info.size)[0]))
        state.store_frames(frames)
        start = sum(info.spans[-1]) if info.spans else 0
        info.spans += [(start + i, per_unit) for i in range(0, frames.shape[0], per_unit)]

    def record_units(self, features: Tensor) -> tuple[Tensor, list[int]]:
        """Record which frames each unit with `features` [n, P, E] spans, once the memory has merged units, if it does.
        Return the features [m, P, E] to run and the number of each unit's first frame, for `run_units`."""
        spans, per_unit = self.info.spans, self.adapter.frames_per_unit
        start = sum(spans[-1]) if spans else 0
        features, counts = self.state.merge_units(features)
        begins = [start + per_unit * past for past in itertools.accumulate(counts, initial=0)][: len(counts)]
        spans += [(begin, count * per_unit) for begin, count in zip(begins, counts, strict=True)]
        return features, begins

    def run_units(self, state: StreamState, features: Tensor, numbers: Sequence[int], **how: Any) -> None:
        """Run units with `features` [n, P, E] into the memory `state`; `numbers` are those of their first frames."""
        done = 0
        while done < len(features):
            stream_pass, rows = self.build_next_pass(state, features[done:], numbers[done:])
            if self._moved is not None:
                how["check"] = LayerHook(self.adapter, self._moved, done, stream_pass.count, len(features))
            self.run_pass(state, stream_pass, rows, **how)
            done += stream_pass.count
            if "proxy" in self.kv.needs:
                self.run_pass(state, StreamPass(kind="proxy", rows=self._proxy.shape[0]), self._proxy)

    def build_next_pass(
        self, state: StreamState, features: Tensor, numbers: Sequence[int]
    ) -> tuple[StreamPass, Tensor]:
        """Return the next pass, over as many of the units (see `run_units`) as fit in one, and its input rows [n, E]."""
        info, adapter, first = self.info, self.adapter, state.units()
        if info.timed and state is self.state:
            self.stream.positions.record_unit_times(first, info.unit_times(first))
        count = state.units_that_fit(first, len(features))
        part, frames = features[:count], numbers[:count]
        shown, wide = tuple(info.times[frame] for frame in frames), adapter.view.geometry.hidden
        look = part[..., :wide].float().mean(1) if "look" in self.kv.needs else None
        part = adapter.embed_units(part, info.unit_moments(adapter.frames_per_unit, frames))
        rows = count * info.tokens_per_unit
        told: dict[str, Any] = {"times": shown, "look": look, "pause": adapter.turns.yield_to_answers}
        return StreamPass(kind="units", rows=rows, first=first, count=count, **told), part.flatten(0, 1)

    @cached_property
    def _proxy(self) -> Tensor:
        """[n, E] embeddings of the template's words between a question and its answer."""
        question = self.adapter.make_question("?")
        rows = question.embeds[question.words[1] :]
        return rows if len(rows) else question.embeds[-1:]  # a prompt may end with its words

    def run_prompt_head(self, state: StreamState, **how: Any) -> None:
        embeds = self.adapter.head_embeds()
        self.run_pass(state, StreamPass(kind="head", rows=len(embeds)), embeds, **how)

    def run_pass(self, state: StreamState, stream_pass: StreamPass, embeds: Tensor, **how: Any) -> Tensor:
        """Run `stream_pass` over `embeds` [n, E] with memory `state`; return final states (`run_layers`)."""
        how |= {} if self.draft_stream.failed else self.around.run_options(stream_pass.kind)
        running, kind = how.setdefault("running", self.running), stream_pass.kind
        mine = self.adapter.turns.answering(kind == "answer")
        with mine, restore_states_at_exit(running if kind == "proxy" else None):
            stream_pass.pause()
            state.begin_pass(stream_pass)
            hidden = self.adapter.run_layers(state, embeds, self.hidden, **how)
            stream_pass.pause()
            state.end_pass()
        return hidden

    def unit_time(self, unit: int) -> float:
        """Return when a unit (frame) was shown, in seconds of the stream."""
        return self.info.times[self.info.spans[unit][0]]

    def is_pinned(self, unit: int) -> bool:
        """Return whether a unit (frame) was shown at a time that the user pinned: the memory then never forgets it."""
        return any(begin <= self.unit_time(unit) <= end for begin, end in self.info.pins)

    # Going back.

    def checkpoint(self) -> Any:
        """Return the present state of the stream (memory, times, recurrent states, draft's stream), for `restore`."""
        info = self.info
        lengths, states = (len(info.spans), len(info.times)), self.running and self.running.fork()
        return self.state.checkpoint(), replace(info), *lengths, self.draft_stream.checkpoint(), states

    def restore(self, mark: Any) -> None:
        """Restore the stream to its state at `checkpoint`."""
        memory, info, spans, times, draft, states = mark
        del info.spans[spans:], info.times[times:]
        self.info = info
        self.state.restore(memory)
        if self.running is not None:
            self.running.restore(states)
        self.draft_stream.restore(draft)
        self.around.forget_after(self.state.units() * info.tokens_per_unit)

    def counters(self, state: StreamState | None = None) -> dict[str, float]:
        """Return the counters of the memory (or of its snapshot `state`) and, with a pruner, how many visual tokens it kept:
        of all units (frames), or of those that the last question retrieved."""
        counted = {**(self.state if state is None else state).counters(), **self.pruned}
        dropped = self.adapter.pruned_per_unit
        if dropped is not None:
            units, unit = self.state.units(), self.info.tokens_per_unit
            counted |= {"visual": float(units * (unit + dropped)), "visual from layer 0": float(units * unit)}
        return counted

    @property
    def token_counts(self) -> tuple[int, int]:
        """Numbers of visual tokens and of units (frames) that the stream has taken in."""
        units = len(self.info.spans)
        return units * (self.stream.tokens_per_unit - sum(self.stream.words)), units

    def close(self, collected: bool = False) -> None:
        """Release what is held outside the device, also by the draft's stream (see `DraftStream.close`)."""
        self.state.close()
        self.draft_stream.close(collected)
