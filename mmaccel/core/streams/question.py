"""What is known of a stream beside its memory; a question on it and its answer, which the decoding loop runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mmaccel.core.adapter import Branches, Runner
from mmaccel.core.attach import StreamAdapter, StreamModel
from mmaccel.core.decoding.draft import DraftStrategy, Prompt
from mmaccel.core.decoding.generate import CarefulDraft, Deadline, Evidence, FinishReason, speculate
from mmaccel.core.decoding.watching import Around, CarefulDraftStream
from mmaccel.core.errors import warn
from mmaccel.core.layout import VIDEO, TokenLayout
from mmaccel.core.memory.kv import StreamPass, StreamState
from mmaccel.core.prefill.attention import MIN_ROWS
from mmaccel.core.recipe import Recipe
from mmaccel.core.report import Meter
from mmaccel.core.streams.listening import Listening
from mmaccel.core.streams.parts import Choosing, Moment, Question, RunningStates

WATCHED = (
    "sparse: frames given to watch see what the memory shows; the pattern acts on those given to ingest, and on questions "
    f"of {MIN_ROWS} tokens and of more than dense_tail"
)


def joined(parts: Sequence[Tensor]) -> Tensor:
    """[n, E] parts [., E] of what enters the layers, one after the other; those without what others have beside them
    (`StreamModel.spoken`) have zeros."""
    wide = max(part.shape[1] for part in parts)
    return torch.cat([torch.nn.functional.pad(part, (0, wide - part.shape[1])) for part in parts])


@contextmanager
def kept(running: RunningStates | None) -> Iterator[None]:
    """What layers carry is afterwards as it was."""
    mark = None if running is None else running.mark()
    try:
        yield
    finally:
        if running is not None:
            running.back(mark)


def planned_rows(recipe: Recipe, asking: Question, rows: int, device: torch.device) -> TokenLayout | None:
    """[1, rows] what the rows of the question `asking` are, those of a video's marks first, where the pattern of `recipe`
    may plan some of them."""
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
class StreamInfo:
    """What is known of a stream beside its memory.

    size     (height, width) of the frames of the first clip; `unit` the tokens of a unit of them
    fps      the rate of the first clip, for which positions are made
    marks    [m, E] features of what ends any video
    timed    whether the times of frames are known, and not made up: positions in seconds then follow them
    spans    (first frame, frames) of each unit; `times` the seconds at which each frame was shown
    pending  frames of a unit not yet complete; `raw` their (height, width)
    """

    size: tuple[int, int]
    fps: float | None
    unit: int
    marks: Tensor
    timed: bool = False
    raw: tuple[int, int] | None = None
    spans: list[tuple[int, int]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    pending: Tensor | None = None

    def shown(self, first: int, count: int | None = None) -> list[float]:
        """The seconds at which `count` units from number `first` on were shown; None: all of them."""
        end = None if count is None else first + count
        return [self.times[frame] for frame, _ in self.spans[first:end]]

    def moments(self, pace: int, frames: Sequence[int]) -> list[Moment]:
        """What is written beside units of `pace` frames that begin with `frames`."""
        return [(frame, self.times[frame : frame + pace]) for frame in frames]


@dataclass(eq=False)
class QuestionRunner(Runner):
    """A question and its answer on the memory of a stream: the target of the decoding loop.

    run       `StreamRunner.run_pass`
    running   what layers carry beside the memory `state`
    ids       [n] of the words after the video
    left      the tokens of an answer for which the model has positions
    meter     counts what is decoded
    evidence  gives the frames that the answer rests on, after the question has run
    question  its text, and `beside` the stream of a draft, which is asked it too
    check     called between two layers of the question; may raise `Ended`
    pause     called with False between two passes of the answer
    counted   gives the figures of the memory
    choosing  how the tokens of the answer are chosen
    around    what is laid round the memory while it lasts; `Listening` tells a draft's pruner what it attended to
    logits    [1, V] of the first token, set by `prefill`
    """

    adapter: StreamModel
    run: Callable[..., Tensor]
    state: StreamState
    running: RunningStates | None
    deadline: Deadline
    ids: Tensor
    left: int
    meter: Meter
    evidence: Callable[[], tuple[Evidence, ...]]
    question: Any
    beside: CarefulDraftStream
    around: Around
    check: Callable[[], None]
    pause: Callable[[bool], None]
    counted: Callable[[], dict[str, float]]
    choosing: Choosing
    logits: Tensor = field(init=False)

    def prefill(self, inputs: Mapping[str, Any], keep: Tensor | None = None, compact: bool = False) -> Tensor:
        """Logits [1, V] after a question; `inputs` holds its `stream_pass` and `embeds` [n, E].

        Raises `Ended` when the deadline passes before the last layer.
        """
        stream_pass, embeds = inputs["stream_pass"], inputs["embeds"]
        how = {"check": self.check, "meter": self.meter, "running": self.running}
        hidden = self.run(self.state, stream_pass, embeds, few=True, **how)
        self.logits = self.adapter.logits(hidden[-1:])
        return self.logits

    def step(self, ids: Tensor, branches: Branches | None = None) -> Tensor:
        self.pause(False)
        more: dict[str, Any] = {} if branches is None else {"branches": branches}
        stream_pass = StreamPass(kind="answer", rows=ids.shape[1], **more)
        hidden = self.run(
            self.state, stream_pass, self.adapter.words(ids[0]), few=True, running=self.running, **more
        )
        return self.adapter.logits(hidden)[None]

    def accept(self, path: Tensor) -> None:
        self.state.accept(path)

    def truncate(self, length: int) -> None:
        if self.running is not None:
            self.running.crop(self.state.length() - length)
        self.state.truncate(length)

    def length(self) -> int:
        return self.state.length()

    def decode(
        self, strategy: DraftStrategy, most: int, put: Callable[[str], None] | None
    ) -> tuple[str, tuple[int, ...], FinishReason]:
        """Decode at most `most` tokens after the prefill: the text, its ids, and why it ends.

        `put` gets new text as it comes. Warns when the answer ends with the model's positions.
        """
        adapter = self.adapter
        assert isinstance(adapter, StreamAdapter)
        ends, tokens, shown = adapter.ends(), list[int](), ""
        ids = torch.cat([adapter.head(), self.ids])[None]
        start = ids.shape[1]
        choosing = self.choosing
        beside = self.beside
        reason: FinishReason = "stop"

        def stop(ids: Tensor) -> bool:
            """Whether the answer ends with the last of `ids` [1, S]; notes why."""
            nonlocal reason
            count, over = ids.shape[1] - start, self.deadline.over()
            if int(ids[0, -1]) in ends:
                return True
            if count >= most:
                reason = "length"
            elif count >= self.left:
                reason = "positions"
            elif over is not None:
                reason = over
            return reason != "stop" or choosing.stop(ids)

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
            meter.token(new.numel())
            tokens.extend(token for token in new.tolist() if token not in ends)
            if put is not None:
                text(whole=False)

        meter = self.meter.sequence()
        draft = CarefulDraft(meter)
        try:
            with beside.dropping() as stream:
                if stream is not None:
                    heard = self.around.heard() if isinstance(self.around, Listening) else None
                    stream.ask(self.question, most, *([] if heard is None else [heard]))
            more: dict[str, Any] = {
                "max_new_tokens": most,
                "stream": beside.stream,
                "deadline": self.deadline,
            }
            prompt = Prompt({"input_ids": ids}, ids, choosing.warp, choosing.generator, **more)
            if beside.failed:
                meter.draft_failed(beside.failed)
            elif strategy.active:
                with draft.dropping():
                    draft.state = strategy.open(adapter.view)
                    draft.state.begin(prompt)
            speculate(self, draft, prompt, self.logits, stop=stop, emit=emit, meter=meter)
        finally:
            draft.close()
            with beside.dropping() as stream:
                if stream is not None:
                    stream.done()
        if reason == "positions":
            warn(
                "max_new_tokens: the answer ends early, for the model has no position left (max_position_embeddings); "
                "ask in fewer words, or choose a kv that keeps less."
            )
        return text(whole=True).strip(), tuple(tokens), reason
