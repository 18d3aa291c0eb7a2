"""The speculative decoding loop (draft, verify, commit) for all drafts; plain decoding is a draft that proposes nothing.

Also `Deadline`, which ends a call, and `Answer`, the result of a question on a stream.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from time import monotonic, perf_counter
from typing import Any, Literal

import torch
from torch import Tensor

from mmaccel.core.adapter import Runner, TokenTree
from mmaccel.core.decoding.draft import DraftState, DraftStep, Prompt, Proposal, accept, run_draft, validate
from mmaccel.core.decoding.trees import accept_tree
from mmaccel.core.errors import DraftError, ModelError, quoted, warn
from mmaccel.core.report import DraftRounds

Over = Literal["timeout", "cancelled"]
Offer = tuple[Tensor] | tuple[Tensor, TokenTree]
FinishReason = Literal["stop", "length", "positions", "timeout", "cancelled"]

LATE = 64
"""More tokens than these a draft that rested runs as it does a prompt: while other drafts wait (`Batch`)."""
MAX_NEW_TOKENS = 128
"""The default of `max_new_tokens`, in sessions and on the command line."""


def decode_speculatively(*given: Any, **how: Any) -> Tensor:
    """Decode one sequence to its end; return prompt and generated ids [1, S + m]. For arguments see `Speculation`."""
    sequence = Speculation(*given, **how)
    decode_round_robin([sequence])
    return sequence.ids


def decode_round_robin(sequences: Sequence[Speculation]) -> None:
    """Decode several sequences to their ends, one round of draft and verification of each in turn.

    Each gets the tokens it would get alone, and the target reads its weights once for each (`batch.Batch` shares steps). A
    draft in another process works on one sequence while the target verifies another. All drafts are closed, also on errors.
    """
    try:
        while live := [sequence for sequence in sequences if not sequence.ended]:
            for sequence in live:
                sequence.commit_next_tokens()
    finally:
        for sequence in sequences:
            sequence.close()


class GuardedDraft:
    """Wraps a draft so that its failure ends only drafting, not decoding; `state` is None before it opens and after it ends.

    lasts  whether a later turn may follow; then `next_state` is what the draft's `state_for_next_turn` returned
    """

    def __init__(self, meter: DraftRounds, state: DraftState | None = None, lasts: bool = False) -> None:
        self.state, self._meter, self._lasts = state, meter, lasts
        self.next_state: Any = None

    @contextmanager
    def drop_on_error(self) -> Iterator[DraftState | None]:
        """Context that gives the draft's state (None if dropped); an error inside drops the draft and is not raised."""
        try:
            yield self.state
        except CallEnded:  # of the call, which ends with the next token
            self.close()
        except Exception as error:
            self.drop_draft(error)

    def drop_draft(self, error: Exception) -> None:
        """Drop the draft after `error`, with a warning; decoding goes on without it."""
        draft, self.state = self.state, None
        self._failed(error)
        if draft is not None:
            # It is broken already; that it cannot tidy up either is no news.
            with suppress(Exception):
                draft.close()
            self._tell(draft)

    def _failed(self, error: Exception) -> None:
        reason = f"{type(error).__name__}: {error}"
        self._meter.record_draft_failure(reason)
        warn(f"the draft failed and was dropped; decoding goes on without it ({reason}).")

    def close(self) -> None:
        """Close the draft, whatever its state; a second call does nothing."""
        draft, self.state = self.state, None
        if draft is not None:
            try:
                with closing(draft):
                    self.next_state = draft.state_for_next_turn() if self._lasts else None
            except Exception as error:
                self.next_state = None
                self._failed(error)
            self._tell(draft)

    def _tell(self, draft: DraftState) -> None:
        """Put what the draft, which is closed, has to tell into the report."""
        try:
            self._meter.record_draft_end(draft.counters(), list(draft.report_notes()))
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            message = f"the report lacks its counters; the answer is complete ({why})"
            self._meter.record_draft_end({}, [message])
            warn(f"the draft failed after the answer: {message}.")


class Speculation:
    """Decodes one sequence: `ids` [1, S + m] are the prompt's and the committed ones, `ended` whether it is complete.

    `draft` (None: plain decoding) knows its prompt (`begin`); `target` has run it, giving logits `first` [1, V]. `stop` is
    called once for each new token, in order, with all ids up to it [1, S']; the first True ends the sequence at that token,
    even if later ones were accepted. `emit` gets new tokens [m'] as they are committed. To the list `rows`, if given, the
    logits [1, V] float32 of each are appended before `stop` is called. At the end the target has run all ids but the last.

    A draft that raises is dropped, with a `MmaccelWarning` and a note to the meter, and the target goes on alone: no token
    is lost or changed. The meter counts what verification accepted, before `stop` cuts.
    """

    def __init__(
        self,
        target: Runner,
        draft: DraftState | GuardedDraft | None,
        prompt: Prompt,
        first: Tensor,
        *,
        stop: Callable[[Tensor], bool],
        emit: Callable[[Tensor], None] | None = None,
        meter: DraftRounds,
        rows: list[Tensor] | None = None,
    ) -> None:
        self.ids, self.ended = prompt.ids, False
        self.target, self._prompt, self._meter = target, prompt, meter
        self._stop, self._emit, self._rows = stop, emit, rows
        self._draft = draft if isinstance(draft, GuardedDraft) else GuardedDraft(meter, draft)
        self._first: Tensor | None = first
        self._proposal, self._rests, self.judged = Proposal.empty(), False, (0, 0)
        self._told, self._vocab = prompt.ids.shape[1], first.shape[-1]  # `_told`: ids that the draft knows
        self._origin = target.length() - prompt.ids.shape[1]

    @torch.no_grad()
    def commit_next_tokens(self) -> None:
        """Commit the next tokens: the first call the one after the prompt, later calls those of one round."""
        offered = run_draft(self.rows_to_verify())
        self.verify_logits(None if offered is None else self.target.step(*offered)[0])

    @torch.no_grad()
    def rows_to_verify(self, most: int | None = None) -> Generator[DraftStep, Tensor, Offer | None]:
        """Return the rows of the target's next step: the last token and the draft's proposal (at most `most` tokens if it
        can choose; 0: none), with `TokenTree` for a tree; None for the first token, as the prompt's logits are there. The
        draft's own steps are yielded. Call `verify_logits` next."""
        self._proposal, self._rests = Proposal.empty(), most == 0
        if self._first is not None:
            return None
        self.target.truncate(self._origin + self.ids.shape[1] - 1)  # what a step that broke off left is gone
        if self._rests or self._draft.state is None:
            return (self.ids[:, -1:],)
        self._tell_draft()
        with self._draft.drop_on_error() as draft:
            if draft is not None:
                offered = yield from draft.draft_steps(most)
                validate(offered)
                self._proposal = offered
        proposal = self._proposal
        drafted = proposal.ids.to(self.ids.device)
        # A token the target does not have is refused in any case; it must only not break the embedding.
        rows = torch.cat([self.ids[:, -1:], drafted.clamp(0, self._vocab - 1)[None]], 1)
        return (rows,) if proposal.parents is None else (rows, proposal.branches)

    @torch.no_grad()
    def verify_logits(self, logits: Tensor | None) -> None:
        """Verify the rows of `rows_to_verify` by the target's logits [n, V] for them, and commit the accepted tokens."""
        first, self._first = self._first, None
        if first is not None:
            prompt = self._prompt
            committed, kept = accept(Proposal.empty(), first, self.ids[0], prompt.warp, prompt.generator)
            judged = first
        else:
            assert logits is not None
            committed, kept, judged = self._judged(logits)
            self._meter.count_round(*self.judged)
        grown = torch.cat([self.ids, committed.to(self.ids.device)[None]], 1)
        if self._rows is not None:
            self._rows += judged[: committed.numel()].to(torch.float32, copy=True).split(1)  # type: ignore[no-untyped-call]
        for length in range(self.ids.shape[1] + 1, grown.shape[1] + 1):
            self.ended = self._stop(grown[:, :length])
            if self.ended:
                committed, grown = committed[: length - self.ids.shape[1]], grown[:, :length]
                break
        if self._rows is not None:
            del self._rows[grown.shape[1] - self._prompt.ids.shape[1] :]
        self.ids = grown
        run = self._origin + self.ids.shape[1] - 1
        if run < self.target.length():
            self.target.truncate(run)
        if first is not None and self._emit is not None:
            # Before the draft hears of it: one in this process may read its prompt only now.
            self._emit(committed)
        if not (self.ended or self._rests):
            # Before anyone reads the tokens: a draft elsewhere goes on meanwhile.
            self._tell_draft(kept)
        if first is None and self._emit is not None:
            self._emit(committed)
        if self.ended:
            self.close()

    def _tell_draft(self, kept: int = 0) -> None:
        """Have the draft observe what was committed since it last did, whose first `kept` tokens it proposed."""
        if self._told < self.ids.shape[1]:
            with self._draft.drop_on_error() as draft:
                if draft is not None:
                    draft.observe_committed(self.ids[0, self._told :].clone(), kept)
            self._told = self.ids.shape[1]

    def _judged(self, logits: Tensor) -> tuple[Tensor, int, Tensor]:
        """What the target commits of the proposal, how many of these tokens stood in it, and the logits [m, V] that each was
        judged by, first of all."""
        ids, prompt, proposal = self.ids, self._prompt, self._proposal
        if proposal.parents is not None:
            committed, path = accept_tree(proposal, logits, ids[0], prompt.warp, prompt.generator)
            taken = torch.cat([path.new_zeros(1), path + 1])
            self.target.accept(taken)
            self.judged = proposal.ids.numel(), path.numel()
            return committed, path.numel(), logits[taken.to(logits.device)]
        with self._draft.drop_on_error() as draft:
            if draft is not None and not self._rests:
                tail = draft.tail_token()
                validate(tail)
                if tail.ids.numel() > 1 or tail.parents is not None:
                    raise DraftError(f"DraftState.tail is one token or none; it is {tail.ids.tolist()}.")
                proposal = proposal.concatenate(tail)
        try:
            committed, kept = accept(proposal, logits, ids[0], prompt.warp, prompt.generator)
        except DraftError as error:
            self._draft.drop_draft(error)
            committed, kept = accept(Proposal.empty(), logits[:1], ids[0], prompt.warp, prompt.generator)
        self.judged = proposal.ids.numel(), kept
        return committed, kept, logits

    @property
    def may_adapt_draft_length(self) -> bool:
        """Whether the number of drafted tokens may vary; under sampling it may not, as it would change the random draws."""
        return getattr(self._draft.state, "chooses", False) and self._prompt.warp is None

    @property
    def needs_draft_prefill(self) -> bool:
        """Whether this sequence's draft must prefill the prompt, or many tokens of a long rest, before it proposes."""
        late = self.ids.shape[1] - self._told > LATE
        return self._first is None and (late or getattr(self._draft.state, "unread", False))

    def close(self) -> None:
        """Close the draft, whatever its state; a second call does nothing."""
        if self._rests:
            self._tell_draft()  # for the next turn
        self._draft.close()


class CallEnded(Exception):
    """Internal signal that a call must end: `reason` is "timeout" or "cancelled". Users never see it."""

    def __init__(self, reason: Over) -> None:
        super().__init__(reason)
        self.reason = reason


class Deadline:
    """The end of one call: `seconds` from now (None: no limit), or when any thread calls `cancel` or sets `event`, which
    several calls may share. Raises `ModelError` if `seconds` is not a positive number."""

    def __init__(self, seconds: float | None = None, event: threading.Event | None = None) -> None:
        number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
        if seconds is not None and not (number and 0 < seconds <= threading.TIMEOUT_MAX):
            raise ModelError(f"timeout: {quoted(seconds)}; give a positive number of seconds, or None.")
        self.began = perf_counter()
        self._end = None if seconds is None else monotonic() + seconds
        self._cancelled, self._event = threading.Event(), event or threading.Event()

    def cancel(self) -> None:
        """Ask the running call to end at its next check of the deadline; may be called from any thread."""
        self._cancelled.set()

    def end_reason(self) -> Over | None:
        """Return why the call must end now, "timeout" or "cancelled"; None: it may continue."""
        if self._cancelled.is_set() or self._event.is_set():
            return "cancelled"
        return "timeout" if self._end is not None and monotonic() >= self._end else None

    def seconds_left(self) -> float | None:
        """Return the seconds left until the deadline; None without a timeout."""
        return None if self._end is None else max(0.0, self._end - monotonic())

    def check(self) -> None:
        """Raise `CallEnded` if the running call must end now, because of its timeout or a cancellation."""
        if (reason := self.end_reason()) is not None:
            raise CallEnded(reason)


@dataclass(frozen=True)
class Evidence:
    """Frames an answer is based on: one unit (step of time) of the stream.

    frames    first and last frame, numbered from the start of the stream
    seconds   when the first was shown
    share     share of layers that attended to it: retrieved it, or had it in their local window; 0 if they attended only to
              summaries that represent it
    recalled  share of layers that retrieved it
    score     this unit's part, 0 to 1, of all attention that leads from units to the answer's first token, followed through
              the layers (attention rollout); None if the KV memory does not compute it
    """

    frames: tuple[int, int]
    seconds: float
    share: float
    recalled: float
    score: float | None


@dataclass(frozen=True)
class Answer:
    """An answer about a stream: its text, why it ended, its times, and the frames it is based on.

    `ttft_s`: seconds from the question to the answer's first token; `tokens_per_s`: rate of the later tokens, or None.
    `evidence`: the frames, in order of time. `lines`: the timed texts (begin, end, text) in its prompt. `counters`: the KV
    memory's figures; events are counted over the whole session: those of this answer are the increase since the last.

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
    lines: tuple[tuple[float, float, str], ...] = ()

    def __repr__(self) -> str:
        """The text and what it took."""
        pace = "" if self.tokens_per_s is None else f", then {self.tokens_per_s:.1f} tokens/s"
        taken = f"token{'s' * (len(self.ids) != 1)}, the first after {self.ttft_s:.3f} s{pace}"
        return f"Answer({self.text!r}, finish_reason={self.finish_reason!r}, {len(self.ids)} {taken})"

    def top(self, count: int = 8) -> list[Evidence]:
        """Return the `count` pieces of evidence with the highest `score`, or without scores the largest `recalled`."""
        order = sorted(self.evidence, key=lambda one: (-(one.score or 0.0), -one.recalled, one.frames))
        return order[:count]


class StreamedAnswer(Iterator[str]):
    """Iterator over the pieces of an answer's text as they are generated; `answer` is the whole `Answer` at the end.

    Decoding goes on in its own thread. Closing or dropping the iterator ends the answer.
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
        """Stop generating the answer; its text so far is lost."""
        self._over = True
        self._deadline.cancel()
        self._thread.join()

    def __del__(self) -> None:
        self._deadline.cancel()
