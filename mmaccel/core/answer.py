"""An answer on a stream: what was said, how fast, and on which frames it rests; whole, or token by token."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from mmaccel.core.deadline import Deadline
from mmaccel.core.errors import ModelError
from mmaccel.core.kv import Piece, StreamState
from mmaccel.core.runner import Branches, Runner
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


class Turn(Runner):
    """A question at work on a memory: the target of the decoding loop."""

    def __init__(self, seam: StreamAdapter, state: StreamState, hidden: bool, deadline: Deadline) -> None:
        self._seam, self._state, self._hidden, self._deadline = seam, state, hidden, deadline

    def prefill(self, inputs: Mapping[str, Any], keep: Tensor | None = None, compact: bool = False) -> Tensor:
        """Logits [1, V] after a question; `inputs` holds its `piece` and `embeds` [n, E].

        Raises `Ended` when the deadline passes before the last layer.
        """
        return self._pass(inputs["piece"], inputs["embeds"], last=True)

    def step(self, ids: Tensor, branches: Branches | None = None) -> Tensor:
        if branches is not None:
            raise ModelError("draft: a stream's memory takes chains, not trees; leave the draft out.")
        piece = Piece(kind="answer", rows=ids.shape[1])
        return self._pass(piece, self._seam.words(ids[0]))[None]

    def _pass(self, piece: Piece, embeds: Tensor, last: bool = False) -> Tensor:
        self._state.enter(piece)
        check = self._deadline.check if last else None
        hidden = self._seam.run(self._state, embeds, self._hidden, few=True, check=check)
        self._state.leave()
        return self._seam.logits(hidden[-1:] if last else hidden)

    def truncate(self, length: int) -> None:
        self._state.truncate(length)

    def length(self) -> int:
        return self._state.length()


class Reply(Iterator[str]):
    """The pieces of an answer's text as they come; `answer` is the whole once they are all there.

    Decoding goes on by itself while a piece is being read. Closing it, or leaving it to be collected, ends the answer.
    """

    def __init__(self, work: Callable[[Callable[[str], None]], Answer], deadline: Deadline) -> None:
        self.answer: Answer | None = None
        # The thread holds none of `self`, so that an answer nobody reads is collected, and ends.
        pieces: queue.SimpleQueue[str | BaseException | None] = queue.SimpleQueue()
        found: list[Answer] = []
        self._pieces, self._found, self._deadline = pieces, found, deadline

        def run() -> None:
            try:
                found.append(work(pieces.put))
                pieces.put(None)
            except BaseException as error:  # told where the pieces are read
                pieces.put(error)

        self._thread = threading.Thread(target=run, name="mmaccel-answer", daemon=True)
        self._thread.start()
        self._over = False

    def __next__(self) -> str:
        if self._over:
            raise StopIteration
        piece = self._pieces.get()
        if isinstance(piece, str):
            return piece
        self._over = True
        self._thread.join()
        if piece is not None:
            raise piece
        self.answer = self._found[0]
        raise StopIteration

    def close(self) -> None:
        """End the answer; what was said so far is lost with it."""
        self._over = True
        self._deadline.cancel()
        self._thread.join()

    def __del__(self) -> None:
        self._deadline.cancel()


class Said:
    """The text of an answer as it grows; `put` gets what is new of it."""

    def __init__(self, decode: Callable[[Tensor], str], put: Callable[[str], None] | None) -> None:
        self._decode, self._put = decode, put
        self.ids: list[int] = []
        self._told = ""

    def add(self, ids: list[int]) -> None:
        """Tokens that were said."""
        self.ids += ids
        if self._put is not None:
            self._tell(self._text(), whole=False)

    def finish(self) -> str:
        """The whole text."""
        text = self._text()
        self._tell(text, whole=True)
        return text.strip()

    def _text(self) -> str:
        return self._decode(torch.tensor(self.ids, dtype=torch.long)) if self.ids else ""

    def _tell(self, text: str, whole: bool) -> None:
        # A character of several tokens is a replacement mark until its last one.
        if self._put is not None and len(text) > len(self._told) and (whole or not text.endswith("\ufffd")):
            self._put(text[len(self._told) :])
            self._told = text
