"""The decoding loop: draft, verify, commit. One loop for every draft; no draft at all is the draft that proposes nothing."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Protocol

import torch
from torch import Tensor

from mmaccel.core.adapter import Runner
from mmaccel.core.draft import DraftState, Prompt, Proposal
from mmaccel.core.errors import DraftError, MmaccelWarning
from mmaccel.core.verify import accept, accept_tree, check


class RoundMeter(Protocol):
    """Where the loop writes down what happened."""

    def round(self, proposed: int, accepted: int) -> None:
        """One target step judged `proposed` tokens (0: it decoded one by itself) and agreed to `accepted` of them."""

    def draft_failed(self, reason: str) -> None:
        """The draft was dropped; decoding goes on by itself."""


@torch.no_grad()
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
    """The prompt's ids and the generated ones, [1, S + m].

    `draft` has begun and `target` has run the prompt, with `first` [1, V] as logits. `stop` is asked once for each new
    token, in order, with all ids up to it [1, S']; the first True ends the sequence at that token, inside a verified window
    too. `emit` gets new tokens [m'] as they are committed. At the end the target has run all ids but the last.

    The draft is closed in every case. One that raises is dropped, with a `MmaccelWarning` and a word to the meter, and the
    target goes on alone: no token is lost or changed. The meter counts what verification agreed to, before `stop` cuts.
    """
    guard = _Guard(draft, meter)
    vocab = first.shape[-1]
    ids = prompt.ids
    origin = target.length() - ids.shape[1]
    try:
        committed, kept = accept(Proposal.empty(), first, ids[0], prompt.warp, prompt.generator)
        while True:
            committed, done = _cut(ids, committed, stop)
            ids = torch.cat([ids, committed.to(ids.device)[None]], 1)
            run = origin + ids.shape[1] - 1
            if run < target.length():
                target.truncate(run)
            if not done:
                # Before anyone reads the tokens: a draft elsewhere goes on meanwhile.
                guard.observe(committed, kept)
            if emit is not None:
                emit(committed)
            if done:
                return ids
            proposal = guard.propose()
            drafted = proposal.ids.to(ids.device)
            # A token the target does not have is refused in any case; it must only not break the embedding.
            rows = torch.cat([ids[:, -1:], drafted.clamp(0, vocab - 1)[None]], 1)
            if proposal.parents is not None:
                logits = target.step(rows, proposal.branches())[0]
                committed, path = guard.accept_tree(proposal, logits, ids[0], prompt)
                target.accept(torch.cat([path.new_zeros(1), path + 1]))
                kept = path.numel()
                meter.round(drafted.numel(), kept)
                continue
            logits = target.step(rows)[0]
            tail = guard.tail()
            committed, kept = guard.accept(proposal, logits, ids[0], prompt)
            # The last token was drawn from the target, whatever the tail is: keeping the tail when they agree is exact.
            if tail is not None and kept == drafted.numel() and int(committed[-1]) == tail:
                kept += 1
            meter.round(drafted.numel() + (tail is not None), kept)
    finally:
        guard.close()


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

    def tail(self) -> int | None:
        with self._dropping():
            if self._draft is not None:
                return self._draft.tail()
        return None

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
        warnings.warn(message, MmaccelWarning, stacklevel=2)
