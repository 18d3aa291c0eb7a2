"""The decoding loop: draft, verify, commit. One loop for every draft; no draft at all is the draft that proposes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Protocol

import torch
from torch import Tensor

from mmaccel.core.draft import DraftState, Prompt, Proposal
from mmaccel.core.errors import DraftError, warn
from mmaccel.core.runner import Runner
from mmaccel.core.verify import accept, accept_tree, check


class RoundMeter(Protocol):
    """Where the loop writes down what happened."""

    def round(self, proposed: int, accepted: int) -> None:
        """One target step judged `proposed` tokens (0: it decoded one by itself) and agreed to `accepted` of them."""

    def draft_failed(self, reason: str) -> None:
        """The draft was dropped; decoding goes on by itself."""


def speculate(
    target: Runner,
    draft: DraftState,
    prompt: Prompt,
    first: Tensor,
    *,
    stop: Callable[[Tensor], bool],
    emit: Callable[[Tensor], None] | None = None,
    meter: RoundMeter,
) -> Tensor:
    """The prompt's ids and the generated ones, [1, S + m]: see `Speculation`, of which this is one by itself."""
    sequence = Speculation(target, draft, prompt, first, stop=stop, emit=emit, meter=meter)
    lockstep([sequence])
    return sequence.ids


def lockstep(sequences: Sequence[Speculation]) -> None:
    """Go on with several sequences, a round of each in turn, until all have ended; one that ended early takes no more turns.

    Each has a memory, a draft and random numbers of its own, and keeps what it would keep alone. So the target reads its
    weights once for each sequence and round: a batch takes the target as long as its sequences one after another. A draft
    elsewhere goes on with one sequence while the target verifies another. All drafts are closed in every case.
    """
    try:
        while live := [sequence for sequence in sequences if not sequence.ended]:
            for sequence in live:
                sequence.advance()
    finally:
        for sequence in sequences:
            sequence.close()


class Speculation:
    """One sequence being decoded: `ids` [1, S + m], the prompt's and those committed so far, and whether it has `ended`.

    `draft` has begun and `target` has run the prompt, with `first` [1, V] as logits. `stop` is asked once for each new
    token, in order, with all ids up to it [1, S']; the first True ends the sequence at that token, inside a verified window
    too. `emit` gets new tokens [m'] as they are committed; to `rows`, where given, the target's logits [m', V] float32 of
    these are appended. At the end the target has run all ids but the last.

    A draft that raises is dropped, with a `MmaccelWarning` and a word to the meter, and the target goes on alone: no token
    is lost or changed. The meter counts what verification agreed to, before `stop` cuts.
    """

    def __init__(
        self,
        target: Runner,
        draft: DraftState,
        prompt: Prompt,
        first: Tensor,
        *,
        stop: Callable[[Tensor], bool],
        emit: Callable[[Tensor], None] | None = None,
        meter: RoundMeter,
        rows: list[Tensor] | None = None,
    ) -> None:
        self.ids, self.ended = prompt.ids, False
        self._target, self._prompt, self._meter = target, prompt, meter
        self._stop, self._emit, self._rows = stop, emit, rows
        self._guard = _Guard(draft, meter)
        self._first: Tensor | None = first
        self._vocab = first.shape[-1]
        self._origin = target.length() - prompt.ids.shape[1]

    @torch.no_grad()
    def advance(self) -> None:
        """Commit the next tokens: at first that which follows the prompt, then those of a round."""
        first, self._first = self._first, None
        if first is not None:
            prompt = self._prompt
            committed, kept = accept(Proposal.empty(), first, self.ids[0], prompt.warp, prompt.generator)
            judged = first
        else:
            committed, kept, judged = self._round()
        committed, self.ended = _cut(self.ids, committed, self._stop)
        if self._rows is not None:
            self._rows.append(judged[: committed.numel()].to(torch.float32, copy=True))
        self.ids = torch.cat([self.ids, committed.to(self.ids.device)[None]], 1)
        run = self._origin + self.ids.shape[1] - 1
        if run < self._target.length():
            self._target.truncate(run)
        if first is not None:
            # Before the draft hears of it: one in this process may read its prompt only now.
            self._show(committed)
        if not self.ended:
            # Before anyone reads the tokens: a draft elsewhere goes on meanwhile.
            self._guard.observe(committed, kept)
        if first is None:
            self._show(committed)
        if self.ended:
            self.close()

    def _round(self) -> tuple[Tensor, int, Tensor]:
        """What the target commits of the draft's next proposal, how many of these tokens stood in it, and the logits [m, V]
        that each was judged by, first of all."""
        target, guard, prompt = self._target, self._guard, self._prompt
        ids = self.ids
        proposal = guard.propose()
        drafted = proposal.ids.to(ids.device)
        # A token the target does not have is refused in any case; it must only not break the embedding.
        rows = torch.cat([ids[:, -1:], drafted.clamp(0, self._vocab - 1)[None]], 1)
        if proposal.parents is not None:
            logits = target.step(rows, proposal.branches)[0]
            committed, path = guard.accept_tree(proposal, logits, ids[0], prompt)
            taken = torch.cat([path.new_zeros(1), path + 1])
            target.accept(taken)
            self._meter.round(drafted.numel(), path.numel())
            return committed, path.numel(), logits[taken.to(logits.device)]
        logits = target.step(rows)[0]
        whole = guard.tailed(proposal)
        committed, kept = guard.accept(whole, logits, ids[0], prompt)
        self._meter.round(whole.ids.numel(), kept)
        return committed, kept, logits

    def _show(self, committed: Tensor) -> None:
        if self._emit is not None:
            self._emit(committed)

    def close(self) -> None:
        """Close the draft, in whatever state it is; a second call does nothing."""
        self._guard.close()


def _cut(ids: Tensor, committed: Tensor, stop: Callable[[Tensor], bool]) -> tuple[Tensor, bool]:
    grown = torch.cat([ids, committed.to(ids.device)[None]], 1)
    for i in range(1, committed.numel() + 1):
        if stop(grown[:, : ids.shape[1] + i]):
            return committed[:i], True
    return committed, False


class _Guard:
    """A draft whose failure ends the draft, not the decoding."""

    def __init__(self, draft: DraftState, meter: RoundMeter) -> None:
        self._draft: DraftState | None = draft
        self._meter = meter

    def observe(self, committed: Tensor, kept: int) -> None:
        with self._dropping():
            if self._draft is not None:
                self._draft.observe(committed, kept)

    def propose(self) -> Proposal:
        with self._dropping():
            if self._draft is not None:
                proposal = self._draft.propose()
                check(proposal)
                return proposal
        return Proposal.empty()

    def tailed(self, proposal: Proposal) -> Proposal:
        """`proposal` with the draft's tail behind it."""
        with self._dropping():
            if self._draft is not None:
                tail = self._draft.tail()
                check(tail)
                if tail.ids.numel() > 1 or tail.parents is not None:
                    raise DraftError(f"DraftState.tail is one token or none; it is {tail.ids.tolist()}.")
                return proposal.then(tail)
        return proposal

    def accept(self, proposal: Proposal, logits: Tensor, ids: Tensor, prompt: Prompt) -> tuple[Tensor, int]:
        try:
            return accept(proposal, logits, ids, prompt.warp, prompt.generator)
        except DraftError as error:
            self._drop(error)
            return accept(Proposal.empty(), logits[:1], ids, prompt.warp, prompt.generator)

    def accept_tree(
        self, proposal: Proposal, logits: Tensor, ids: Tensor, prompt: Prompt
    ) -> tuple[Tensor, Tensor]:
        return accept_tree(proposal, logits, ids, prompt.warp, prompt.generator)

    def close(self) -> None:
        draft, self._draft = self._draft, None
        if draft is not None:
            try:
                draft.close()
            except Exception as error:
                self._tell(error)

    @contextmanager
    def _dropping(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._drop(error)

    def _drop(self, error: Exception) -> None:
        draft, self._draft = self._draft, None
        self._tell(error)
        if draft is not None:
            # It is broken already; that it cannot tidy up either is no news.
            with suppress(Exception):
                draft.close()

    def _tell(self, error: Exception) -> None:
        reason = f"{type(error).__name__}: {error}"
        self._meter.draft_failed(reason)
        message = f"the draft failed and was dropped; decoding goes on without it ({reason})."
        warn(message)
