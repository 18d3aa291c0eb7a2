"""A question on a stream and its answer: decoding, the text as it grows, and the frames on which the answer rests."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from mmaccel.core.adapter import Branches, Runner
from mmaccel.core.draft import DraftStrategy, Prompt
from mmaccel.core.errors import ModelError, warn
from mmaccel.core.generate import Deadline, speculate
from mmaccel.core.kv import StreamPass, StreamState
from mmaccel.core.report import Meter
from mmaccel.core.stream_adapter import StreamAdapter

MAX_NEW_TOKENS = 128
"""The default of `max_new_tokens`, in sessions and on the command line."""

FinishReason = Literal["stop", "length", "positions", "timeout", "cancelled"]


@dataclass(frozen=True)
class Evidence:
    """Frames an answer rests on: one unit of the stream.

    frames    first and last frame, numbered from the start of the stream
    seconds   when the first was shown
    share     of the layers, how many looked at it: recalled it, or had it in their local window; 0 where all that they
              looked at is what stands for it, or for it and others
    recalled  of the layers, how many recalled it
    score     of all that reached the answer's first token from units, the part that came from this one, 0 to 1, by attention
              from layer to layer (rollout); None where the memory does not tell it
    """

    frames: tuple[int, int]
    seconds: float
    share: float
    recalled: float
    score: float | None


@dataclass(frozen=True)
class Answer:
    """What was said of a stream, and what it took.

    `ttft_s` seconds from the question to its first token on the host; `tokens_per_s` of the tokens after it, or None when
    there was none; `evidence` in order of time; `counters` those of the memory and of the draft. The memory's are of the
    session up to this answer, watching and earlier questions too: what one question copied (`host_copies_in`,
    `host_bytes_in`) is its counters less `VideoSession.counters()` before it was asked.

    finish_reason  why the answer ends: "stop", the model generated an end token; "length", it has `max_new_tokens`;
                   "positions", the model has no position for another token; "timeout" or "cancelled", the caller ended
                   it, perhaps before its first token (then `ids` is empty and `ttft_s` 0)
    """

    text: str
    ids: tuple[int, ...]
    ttft_s: float
    tokens_per_s: float | None
    evidence: tuple[Evidence, ...] = ()
    counters: dict[str, float] = field(default_factory=dict)
    finish_reason: FinishReason = "stop"

    def __repr__(self) -> str:
        """The text and what it took; evidence and counters are attributes."""
        pace = "" if self.tokens_per_s is None else f", then {self.tokens_per_s:.1f} tokens/s"
        taken = f"{len(self.ids)} tokens, the first after {self.ttft_s:.3f} s{pace}"
        return f"Answer({self.text!r}, finish_reason={self.finish_reason!r}, {taken})"

    def top(self, count: int = 8) -> list[Evidence]:
        """The frames of which most reached the answer, best first; where that is not known those most layers recalled."""
        order = sorted(self.evidence, key=lambda one: (-(one.score or 0.0), -one.recalled, one.frames))
        return order[:count]


@dataclass(eq=False)
class QuestionRunner(Runner):
    """A question and its answer on the memory of a stream: the target of the decoding loop.

    hidden    the memory is told what enters each layer
    ids       [n] of the words after the video
    left      the tokens of an answer for which the model has positions
    meter     counts what is decoded
    evidence  gives the frames that the answer rests on, after the question has run
    logits    [1, V] of the first token, set by `prefill`
    """

    seam: StreamAdapter
    state: StreamState
    hidden: bool
    deadline: Deadline
    ids: Tensor
    left: int
    meter: Meter
    evidence: Callable[[], tuple[Evidence, ...]]
    logits: Tensor = field(init=False)

    def prefill(self, inputs: Mapping[str, Any], keep: Tensor | None = None, compact: bool = False) -> Tensor:
        """Logits [1, V] after a question; `inputs` holds its `piece` and `embeds` [n, E].

        Raises `Ended` when the deadline passes before the last layer.
        """
        hidden = self._pass(inputs["piece"], inputs["embeds"], self.deadline.check)
        self.logits = self.seam.logits(hidden[-1:])
        return self.logits

    def step(self, ids: Tensor, branches: Branches | None = None) -> Tensor:
        if branches is not None:
            raise ModelError("draft: a stream's memory takes chains, not trees; set draft to 'off'.")
        piece = StreamPass(kind="answer", rows=ids.shape[1])
        return self.seam.logits(self._pass(piece, self.seam.words(ids[0])))[None]

    def _pass(self, piece: StreamPass, embeds: Tensor, check: Callable[[], None] | None = None) -> Tensor:
        self.state.begin_pass(piece)
        hidden = self.seam.run(self.state, embeds, self.hidden, few=True, check=check)
        self.state.end_pass()
        return hidden

    def truncate(self, length: int) -> None:
        self.state.truncate(length)

    def length(self) -> int:
        return self.state.length()

    def decode(
        self, strategy: DraftStrategy, most: int, put: Callable[[str], None] | None
    ) -> tuple[str, tuple[int, ...], FinishReason]:
        """Decode at most `most` tokens after the prefill: the text, its ids, and why it ends.

        `put` gets new text as it comes. Warns when the answer ends with the model's positions.
        """
        seam, ends, tokens, shown = self.seam, self.seam.ends(), list[int](), ""
        ids = torch.cat([seam.head(), self.ids])[None]
        start = ids.shape[1]
        draft = strategy.open(seam.view)
        prompt = Prompt({"input_ids": ids}, ids, max_new_tokens=most)
        draft.begin(prompt)
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
            return reason != "stop"

        def text(whole: bool) -> str:
            """The text so far; `put` gets what is new of it, a character of several tokens with its last one."""
            nonlocal shown
            text = seam.decode(torch.tensor(tokens, dtype=torch.long)) if tokens else ""
            # Until then such a character is a replacement mark.
            if put is not None and len(text) > len(shown) and (whole or not text.endswith("\ufffd")):
                put(text[len(shown) :])
                shown = text
            return text

        def emit(new: Tensor) -> None:
            """Take in the tokens `new` [n]; those that end an answer are not part of its text."""
            self.meter.token(new.numel())
            tokens.extend(token for token in new.tolist() if token not in ends)
            if put is not None:
                text(whole=False)

        speculate(self, draft, prompt, self.logits, stop=stop, emit=emit, meter=self.meter)
        if reason == "positions":
            warn(
                "max_new_tokens: the answer ends early, for the model has no position left (max_position_embeddings); "
                "ask in fewer words, or open the session with a kv that keeps less."
            )
        return text(whole=True).strip(), tuple(tokens), reason


class Reply(Iterator[str]):
    """The pieces of an answer's text as they come; `answer` is the whole once they are all there.

    Decoding goes on by itself while a piece is being read. Closing it, or leaving it to be collected, ends the answer.
    """

    def __init__(self, work: Callable[[Callable[[str], None]], Answer], deadline: Deadline) -> None:
        self.answer: Answer | None = None
        # The thread holds none of `self`, so that an answer nobody reads is collected, and ends.
        pieces: queue.SimpleQueue[str | Answer | BaseException] = queue.SimpleQueue()
        self._pieces, self._deadline, self._over = pieces, deadline, False

        def run() -> None:
            try:
                pieces.put(work(pieces.put))
            except BaseException as error:  # told where the pieces are read
                pieces.put(error)

        self._thread = threading.Thread(target=run, name="mmaccel-answer", daemon=True)
        self._thread.start()

    def __next__(self) -> str:
        if self._over:
            raise StopIteration
        piece = self._pieces.get()
        if isinstance(piece, str):
            return piece
        self._over = True
        self._thread.join()
        if isinstance(piece, BaseException):
            raise piece
        self.answer = piece
        raise StopIteration

    def close(self) -> None:
        """End the answer; what was said so far is lost with it."""
        self._over = True
        self._deadline.cancel()
        self._thread.join()

    def __del__(self) -> None:
        self._deadline.cancel()
