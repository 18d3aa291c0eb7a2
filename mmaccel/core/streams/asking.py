"""Runs a question on a stream up to its first token, decodes the answer, and restores the memory when the answer ends."""

from __future__ import annotations

import bisect
import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mmaccel.core.adapter import Runner, TokenTree
from mmaccel.core.attach import StreamAdapter, StreamModel
from mmaccel.core.decoding.draft import DraftStrategy, Prompt
from mmaccel.core.decoding.generate import Deadline, Evidence, FinishReason, GuardedDraft, Speculation
from mmaccel.core.errors import ModelError, warn
from mmaccel.core.layout import VIDEO, TokenLayout
from mmaccel.core.memory.frames import FrameMemory, encode_selected_frames
from mmaccel.core.memory.kv import StreamPass, StreamState, UnitEvidence
from mmaccel.core.prefill.attention import MIN_ROWS
from mmaccel.core.prefill.recalled import RetrievedTokenPruning, TimeRangeMemory, warn_idle_pruner
from mmaccel.core.recipe import Recipe
from mmaccel.core.report import Meter
from mmaccel.core.streams.parts import (
    MemoryWrapper,
    Question,
    RunningStates,
    StreamInfo,
    TokenChoice,
    concat_padded,
    restore_states_at_exit,
)
from mmaccel.core.streams.sources import pad_to_units
from mmaccel.core.streams.stream_runner import GuardedDraftStream, StreamRunner
from mmaccel.core.streams.timed_text import (
    TOKENS,
    TimedText,
    layer_share_per_unit,
    lines_for_question,
    trim_lines_to_tokens,
)

GONE = "between: kv {!r} holds nothing of that time any more; ask for a later one, or choose a kv that keeps all frames."


@contextmanager
def run_question(
    live: StreamRunner,
    question: Any,
    room: int,
    weigh: bool = True,
    deadline: Deadline | None = None,
    concurrent: bool = False,
    settings: Mapping[str, Any] | None = None,
    between: tuple[float, float] | None = None,
) -> Iterator[QuestionRunner]:
    """Context that runs a question (`StreamModel.make_question`) on `live` up to its first token; at exit the memory is as
    before.

    room    tokens that the answer may have
    weigh   whether `evidence` of the answer will be asked for
    concurrent  whether new frames may be run between the question's layers and the answer's tokens. The question does not
            see them, if the memory supports `StreamState.snapshot`; the caller holds the `turns` of the model
    settings  sampling and stop settings of the answer (`StreamAdapter.token_choice`)
    between   (begin, end) in seconds of the stream: the question sees only units (frames) that were shown in that time

    Raises `ModelError`, before anything is run, if the model has no position left for an answer, and `CallEnded` if the
    deadline comes before the first token.
    """
    if live.ingests:
        raise ModelError("ask: a video is being ingested; ask when that call has ended.")
    info, state, adapter, stream = live.info, live.state, live.adapter, live.stream
    running, turns, gives_way = live.running, adapter.turns, list[bool]()
    deadline = deadline or Deadline()
    meter = Meter(started=deadline.began if concurrent else time.perf_counter())

    def pause(reading: bool) -> None:
        if gives_way:  # not of `taken` itself, which keeps this function
            turns.yield_lock(reading) if gives_way[0] or not reading else turns.yield_to_answers()

    if concurrent:
        turns.wait_for_queue(adapter.device)
    asking, waiting, positions = adapter.make_question(question), state.waiting_features(), stream.positions
    inside = None if between is None else _units_between(info, *between)
    if between is not None and info.times[-1] > between[1]:
        waiting, info = None, replace(info, pending=None)

    def token_choice(ids: Tensor) -> TokenChoice:
        if not settings:
            return TokenChoice()
        assert isinstance(adapter, StreamAdapter)
        before, drafts = torch.cat([adapter.head_ids(), ids])[None], adapter.attention.recipe.draft.active
        return adapter.token_choice(before, room, settings, drafts)

    choice = token_choice(asking.ids)
    if info.timed and not isinstance(state, FrameMemory):
        # Those of the units that the memory has not taken in yet.
        times = [] if waiting is None else [info.times[sum(info.spans[-1]) if info.spans else 0]]
        times += [] if info.pending is None else [info.times[-info.pending.shape[0]]]
        positions.record_unit_times(state.units(), times)
    own_stream = replace(stream, positions=copy.copy(positions))
    taken = state.snapshot(own_stream, lambda: pause(False)) if concurrent else None
    if taken is not None:
        gives_way.append(taken.parts)
        state, stream, positions = taken, own_stream, own_stream.positions
        info = replace(info, spans=list(info.spans), times=list(info.times))
        running = None if live.running is None else live.running.fork()

    def check() -> None:
        pause(True)
        deadline.check()

    pending = info.tokens_per_unit * ((info.pending is not None) + (0 if waiting is None else len(waiting)))
    before = pending + info.marks.shape[0]
    rows, words = before + len(asking.ids), (before + asking.words[0], before + asking.words[1])
    stream_pass = StreamPass(kind="question", rows=rows, pending=pending, words=words, room=room, weigh=weigh)
    if asking.after is not None and taken is not None:
        marks = torch.arange(info.marks.shape[0], device=asking.after.device).expand(positions.axes, -1)
        positions.follows = torch.cat([marks, asking.after + marks.shape[1]], 1)
    elif asking.after is not None and concurrent:
        raise ModelError(
            f"question: kv {live.kv.name!r} has no snapshot, which images need here; ask in words."
        )
    units, own = state.shown_units(stream_pass)
    last, used = positions.last_position(units, pending, rows, own)
    if not positions.fits_limit(units, pending, rows, own):
        raise ModelError(
            f"question: the stream and the question take {used} of the model's {positions.limit} positions "
            "(max_position_embeddings) and leave none for an answer; ask in fewer words, or choose a kv that "
            "keeps less."
        )
    left = positions.limit - 1 - last
    room = min(room, left)  # none for what no position is left for
    rest, reads = asking.ids[:0], min(TOKENS, left // 2) if info.timed_texts else 0
    if reads:
        # Lines come behind the words, once it is known what these recall, with what the template has there.
        spoken, behind = asking.split()
        if state.shown_units(replace(stream_pass, rows=rows - len(behind)))[1] == own:
            asking, rest, rows = spoken, behind, rows - len(behind)
        else:
            reads = 0  # units would stand where they leave no room for them
    if info.timed_texts and not reads:
        meter.add_note("text: no line found room behind the question")
    planned = question_rows_layout(adapter.attention.recipe, asking, rows - pending, adapter.device)
    stream_pass = replace(stream_pass, rows=rows, room=room + reads + len(rest), layout=planned)
    deadline.check()
    seen_as, evidence, shows = state, state.evidence, list(range(len(info.spans)))
    if inside is not None:
        state.limit_to_units(*inside)
    if isinstance(state, FrameMemory):
        running = adapter.new_running_states()
        state, evidence = encode_selected_frames(live, state, info, check, meter, running)
        shows = list(evidence())
        if inside is not None and not shows:
            raise ModelError(GONE.format(live.kv.name))
    prune = adapter.attention.recipe.prune
    acts = None if prune is None else prune.for_stream()
    depth, seen = adapter.view.geometry.layers, before + asking.visual
    pruned = None
    numbers = [info.spans[unit][0] // adapter.frames_per_unit for unit in shows]
    timed = None
    if inside is not None and not isinstance(seen_as, FrameMemory):
        state = timed = TimeRangeMemory(state, stream, *inside)
        evidence = timed.evidence
    state = live.around(state, stream, seen, numbers)
    if acts is not None and (acts.stage == "layer" or acts.scoring_layer is not None):
        state = pruned = RetrievedTokenPruning(state, acts, stream, depth, seen)
    parts = [info.marks, asking.embeds]
    if info.pending is not None:
        unit = adapter.features(pad_to_units(info.pending, adapter.frames_per_unit), info.size)[0]
        at = [len(info.times) - info.pending.shape[0]]
        parts.insert(0, adapter.embed_units(unit, info.unit_moments(adapter.frames_per_unit, at))[0])
        check()
    if waiting is not None:
        at = [sum(info.spans[-1]) if info.spans else 0]
        parts.insert(
            0, adapter.embed_units(waiting, info.unit_moments(adapter.frames_per_unit, at)).flatten(0, 1)
        )
    limit = dict if pruned is None else partial(pruned.limit_evidence, numbers=shows)
    shown = (lambda: _shown(info, limit(evidence()))) if weigh else tuple
    given = adapter, live, state, running, deadline, asking.ids, left, meter, shown, question
    runner = QuestionRunner(
        *given, live.draft_stream, live.around, check, pause, lambda: live.counters(seen_as), choice
    )
    alone = running is not None or adapter.attention.recipe.draft.active
    runner.shares = taken is not None and not alone and type(live.around) is MemoryWrapper
    with state.question_scope(), restore_states_at_exit(running if running is live.running else None):
        try:
            runner.prefill({"stream_pass": stream_pass, "embeds": concat_padded(parts), "goes_on": reads})
            if timed is not None and not timed.count:
                raise ModelError(GONE.format(live.kv.name))
            if reads:
                share = {} if between else layer_share_per_unit(state, depth, stream.tokens_per_unit, shows)
                runner.run_text_lines(lines_for_question(info, share, between), reads, rest)
                runner.token_choice = token_choice(runner.ids)
            meter.prompt_tokens = runner.length()
            if pruned is not None:
                live.pruned = pruned.counts
                if not pruned.counts["visual"]:
                    warn_idle_pruner(pruned.pruner, meter)
            yield runner
        finally:
            # The scope's end changes what a pass of frames reads.
            turns.wait_for_paused_pass()


def _units_between(info: StreamInfo, begin: float, end: float) -> tuple[int, int]:
    """The first unit that was shown from `begin` to `end`, and the one behind the last; raises `ModelError` for none."""
    shown = info.unit_times(0)
    first, last = bisect.bisect_left(shown, begin), bisect.bisect_right(shown, end)
    if first >= last:
        to = info.times[-1]
        raise ModelError(
            f"between: no frame was shown from {begin:g} to {end:g} s; the stream is at {to:g} s."
        )
    return first, last


def _shown(info: StreamInfo, evidence: Mapping[int, UnitEvidence]) -> tuple[Evidence, ...]:
    spans, times = info.spans, info.times
    return tuple(
        Evidence((first, first + count - 1), times[first], seen.share, seen.retrieved, seen.score)
        for (first, count), seen in ((spans[number], seen) for number, seen in sorted(evidence.items()))
    )


def question_rows_layout(
    recipe: Recipe, asking: Question, rows: int, device: torch.device
) -> TokenLayout | None:
    """Return the layout [1, rows] by which a sparse pattern plans the rows of a question: the tokens that end the video,
    then `asking`. None if the rows stay dense: the recipe's pattern is dense, or the rows are few."""
    if recipe.sparse.dense or rows < MIN_ROWS or rows <= recipe.dense_tail:
        return None
    count = len(asking.ids)
    own = TokenLayout.text(1, count, device) if asking.layout is None else asking.layout
    return (
        TokenLayout.build(own.modality.new_full((1, rows - count), VIDEO)).append(own)
        if rows > count
        else own
    )


@dataclass(eq=False)
class QuestionRunner(Runner):
    """The `Runner` of a question and its answer on a stream's memory: the target of the decoding loop.

    live      the stream; `running`: recurrent states beside the memory `state`
    ids       [n] of the prompt after the video
    tokens_left  the number of tokens of an answer for which the model has positions
    meter     counts what is decoded
    evidence  returns the frames that the answer is based on, after the question has run
    question  its text; `draft_stream`: that of the draft model, which is asked the question too
    check     called between two layers of the question; may raise `CallEnded`
    pause     lets other threads use the model: called with True between two layers, with False between two passes
    counted   returns the counters of the memory; `token_choice`: how the tokens of the answer are chosen
    shares    whether steps of the answer may be batched with other answers'
    lines     the timed texts (subtitles) of the stream that the prompt contains
    around    wraps the memory during the question, such as an `AttentionRecording` for a draft's pruner
    logits    [1, V] of the first token, set by `prefill`
    """

    adapter: StreamModel
    live: StreamRunner
    state: StreamState
    running: RunningStates | None
    deadline: Deadline
    ids: Tensor
    tokens_left: int
    meter: Meter
    evidence: Callable[[], tuple[Evidence, ...]]
    question: Any
    draft_stream: GuardedDraftStream
    around: MemoryWrapper
    check: Callable[[], None]
    pause: Callable[[bool], None]
    counted: Callable[[], dict[str, float]]
    token_choice: TokenChoice
    shares: bool = field(default=False, init=False)
    lines: tuple[TimedText, ...] = field(default=(), init=False)
    logits: Tensor = field(init=False)

    def prefill(self, inputs: Mapping[str, Any], keep: Tensor | None = None, compact: bool = False) -> Tensor:
        """Run the question, or a later piece of its prompt; return the last row's logits [1, V]. `inputs` has "stream_pass",
        its "embeds" [n, E], and "goes_on" if more follows. Raises `CallEnded` if the deadline comes first."""
        stream_pass, embeds = inputs["stream_pass"], inputs["embeds"]
        how = {"check": self.check, "meter": self.meter, "running": self.running}
        hidden = self.live.run_pass(self.state, stream_pass, embeds, few=True, **how)
        self.logits = self.adapter.logits(hidden[-1:])
        if not inputs.get("goes_on"):
            with self.adapter.turns.answering():
                self.adapter.warm_up_decoding(self.state, self.running)
        return self.logits

    def run_text_lines(self, lines: Sequence[TimedText], room: int, rest: Tensor) -> None:
        """After the question, run the text of those `lines` that fit into `room` tokens, then the prompt's `rest` [n]."""
        assert isinstance(self.adapter, StreamAdapter)
        self.lines, text, ids = trim_lines_to_tokens(lines, room, self.adapter.text_ids)
        if len(self.lines) < len(lines):
            self.meter.add_note(f"text: {len(lines) - len(self.lines)} of {len(lines)} lines found no room")
        self.tokens_left -= len(ids)
        if text and isinstance(self.question, str):
            self.question += text
        if len(ids := torch.cat([ids, rest])):
            self.ids, embeds = torch.cat([self.ids, ids]), self.adapter.embed_tokens(ids)
            self.prefill({"stream_pass": StreamPass(kind="answer", rows=len(ids)), "embeds": embeds})

    def step(self, ids: Tensor, branches: TokenTree | None = None) -> Tensor:
        self.pause(False)
        more: dict[str, Any] = {} if branches is None else {"branches": branches}
        stream_pass = StreamPass(kind="answer", rows=ids.shape[1], **more)
        hidden = self.live.run_pass(
            self.state, stream_pass, self.adapter.embed_tokens(ids[0]), few=True, running=self.running, **more
        )
        return self.adapter.logits(hidden)[None]

    def accept(self, path: Tensor) -> None:
        if self.running is not None:
            self.running.accept(path)
        self.state.accept(path)

    def truncate(self, length: int) -> None:
        if self.running is not None:
            self.running.undo_rows(self.state.length() - length)
        self.state.truncate(length)

    def length(self) -> int:
        return self.state.length()

    def decode(
        self, strategy: DraftStrategy, most: int, put: Callable[[str], None] | None
    ) -> tuple[str, tuple[int, ...], FinishReason]:
        """Decode at most `most` tokens after the prefill: return the text, its ids, and why it ended. `put` gets each new
        piece of text. Warns if the model's positions are used up."""
        adapter = self.adapter
        assert isinstance(adapter, StreamAdapter)
        ends, tokens, shown = adapter.end_token_ids(), list[int](), ""
        ids = torch.cat([adapter.head_ids(), self.ids])[None]
        start = ids.shape[1]
        token_choice, draft_stream = self.token_choice, self.draft_stream
        reason: FinishReason = "stop"

        def stop(ids: Tensor) -> bool:
            """Whether the answer ends with the last of `ids` [1, S]; notes why."""
            nonlocal reason
            count, over = ids.shape[1] - start, self.deadline.end_reason()
            if int(ids[0, -1]) in ends:
                return True
            if count >= most:
                reason = "length"
            elif count >= self.tokens_left:
                reason = "positions"
            elif over is not None:
                reason = over
            return reason != "stop" or token_choice.stop(ids)

        def text(whole: bool) -> str:
            """The text so far; `put` gets what is new of it, a character of several tokens with its last one."""
            nonlocal shown
            text = adapter.decode(torch.tensor(tokens, dtype=torch.long)) if tokens else ""
            # Until then such a character is a replacement mark.
            if put is not None and len(text) > len(shown) and (whole or not text.endswith("\ufffd")):
                put(text[len(shown) :])
                shown = text
            return text

        def emit(new: Tensor) -> None:
            """Take in the tokens `new` [n]; those that end an answer are not part of its text."""
            meter.count_tokens(new.numel())
            tokens.extend(token for token in new.tolist() if token not in ends)
            if put is not None:
                text(whole=False)

        meter = self.meter.new_sequence()
        draft = GuardedDraft(meter)
        with draft_stream.question_scope(self.question, most, self.around) as stream:
            more: dict[str, Any] = {"max_new_tokens": most, "stream": stream, "deadline": self.deadline}
            prompt = Prompt({"input_ids": ids}, ids, token_choice.warp, token_choice.generator, **more)
            try:
                if draft_stream.failed:
                    meter.record_draft_failure(draft_stream.failed)
                elif strategy.active:
                    with draft.drop_on_error():
                        draft.state = strategy.open(adapter.view)
                        draft.state.begin(prompt)
                one = Speculation(self, draft, prompt, self.logits, stop=stop, emit=emit, meter=meter)
                adapter.turns.decode_answer(one, self.shares)
            finally:
                draft.close()
        adapter.turns.wait_for_queue(adapter.device)
        if reason == "positions":
            warn(
                "max_new_tokens: the answer ends early, for the model has no position left (max_position_embeddings); "
                "ask in fewer words, or choose a kv that keeps less."
            )
        return text(whole=True).strip(), tuple(tokens), reason
