"""The `sequential` draft: a small model drafts a window of tokens, then the target verifies them in one pass."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmaccel.core.adapter import ModelView
from mmaccel.core.decoding.draft import (
    Drafting,
    DraftState,
    DraftStep,
    Prompt,
    Proposal,
    run_draft,
    sample_index,
)
from mmaccel.core.registry import at_least, in_range, limited, register
from mmaccel.policies.draft._draft_model import DraftModelState, DraftModelStrategy, VideoDraftStrategy

ROWS = 64
"""Most tokens in a step by which a draft catches up after a rest: wider steps are not captured as CUDA graphs."""


@dataclass(frozen=True, kw_only=True)
class ChainStrategy(DraftModelStrategy):
    """The base of drafts whose model drafts a window one token after the other. `Sequential` describes the fields."""

    window: int = limited(5, at_least(1))
    confidence: float = limited(0.0, in_range(0, 1, "a probability, 0 to 1"))

    @property
    def max_rollback(self) -> int:
        return self.window + 1


@register("draft", "sequential")
@dataclass(frozen=True, kw_only=True)
class Sequential(VideoDraftStrategy, ChainStrategy):
    """A smaller model of the target's family drafts `window` tokens, one after the other, between the target's steps.

    The draft is given the whole prompt, pixels included: it sees the video; on a stream it watches what the target watches.
    When sampling it draws from its own distribution under the target's temperature, limits (such as top-p) and penalties, as
    speculative sampling needs. After Leviathan et al. 2023 (arXiv 2211.17192).

    Serves one beam, and on `past_key_values` of an earlier turn one sequence. A batch is drafted for and verified sequence
    by sequence, a round of each in turn: exact for each, and no faster than one prompt after the other.

    model   folder, hub or shipped name of the draft model, "beside" (the target's folder plus ``-draft``), or the loaded
            module
    window  tokens drafted a round, at least 1; fewer when fewer may still be generated
    confidence  stop drafting when the draft's top-1 probability falls below this, 0 to 1; at least one token is always
            drafted. Which token is drawn has no influence on it, so sampling stays exact
    prune   a pruner of stage "draft": the draft reads only what the target's early layers find worth keeping
    kv      in a session, the memory of the draft's own stream; null: one like the target's
    """

    def open(self, target: ModelView) -> DraftState:
        peer = self.peer(target)
        return SequentialDraftState(peer.runner(), peer.device, self, target.geometry.vocab)


class SequentialDraftState(DraftModelState):
    """The state of the `sequential` draft: its model drafts a window token by token, and then the target verifies it.

    `observe_committed` only records tokens, so that a draft that is not used costs nothing. `_tokens` holds the prompt and
    all committed tokens, `_late` the committed tokens that the draft model has not run yet, both as lists of tensors. Within
    a round the model has run `_fed` drafted tokens after column `_mark` of its cache.
    """

    _choice: ChainStrategy
    _never: tuple[int, ...] = ()
    chooses = True
    _mark = _fed = _drafted = 0

    def begin(self, prompt: Prompt) -> None:
        super().begin(prompt)
        self._warp, self._generator = prompt.warp, prompt.generator
        self._tokens, self._late, self._prompt = [prompt.ids[0]], [prompt.ids[0, :0]], prompt.ids.shape[1]
        self._remaining = prompt.max_new_tokens or sys.maxsize

    def propose(self) -> Proposal:
        return run_draft(self.draft_steps())  # type: ignore[no-any-return]

    def draft_steps(self, most: int | None = None) -> Drafting:
        # The target adds a token of its own to whatever it keeps.
        window = self._choice.window
        count = min(window if most is None else most, window, self._remaining - 1)
        if count < 1:
            return Proposal.empty()
        runner, least = self._open(), self._choice.confidence
        before, feed, rows = torch.cat(self._tokens), torch.cat(self._late), list[Tensor]()
        if not feed.numel():  # nobody judged what was last proposed
            runner.truncate(self._mark - 1)
            feed, self._fed = before[-1:], 0
        self._tokens, drafted = [before], list[Tensor]()
        self._mark = runner.length() + feed.numel()
        greedy = self._warp is None and not least
        while feed.numel() > ROWS:
            yield DraftStep(runner, feed[:ROWS].to(self._device), self._vocab, self._never, greedy)
            feed = feed[ROWS:]
            self._late = [feed]
        while len(drafted) < count:
            said = yield DraftStep(runner, feed.to(self._device), self._vocab, self._never, greedy)
            said = said.to(before.device)
            self._late, self._fed = [before[:0]], len(drafted)
            self._steps += 1
            if greedy:
                feed = said
            else:
                row = None if self._warp is None else self._warp(torch.cat([before, *drafted]), said)
                sure = least and drafted
                if sure and (said.float().softmax(-1) if row is None else row).max() < least:
                    break
                if row is None:
                    feed = said.argmax(-1, keepdim=True)
                else:
                    rows.append(row)
                    feed = sample_index(row, self._generator)
            drafted.append(feed)
        self._drafted += len(drafted)
        return Proposal(torch.cat(drafted), q=torch.stack(rows) if rows else None)

    def observe_committed(self, committed: Tensor, kept: int) -> None:
        committed = committed.to(self._tokens[0].device)
        run = min(kept, self._fed)
        if run < self._fed:
            self._open().truncate(self._mark + run)
        # After a full acceptance these are the last drafted token, which was never run, and the target's bonus.
        self._late.append(committed[run:])
        self._tokens.append(committed)
        self._fed = 0
        self._remaining -= committed.numel()

    def state_for_next_turn(self) -> Any:
        if self._fed:
            self._open().truncate(self._mark)  # what was drafted last may have been refused
            self._fed = 0
        self._said = torch.cat(self._tokens)[self._prompt :]
        return super().state_for_next_turn()

    def counters(self) -> dict[str, float]:
        return {"drafted": float(self._drafted), **super().counters()}
