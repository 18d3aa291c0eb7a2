"""Draft, then verify: a small model writes a window of tokens, the target checks them in one pass."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmaccel.core.adapter import ModelView
from mmaccel.core.decoding.draft import DraftState, Prompt, Proposal, draw, resize
from mmaccel.core.errors import RecipeError, check_least, shown
from mmaccel.core.registry import register
from mmaccel.policies.draft._draft_model import PeerState, PeerStrategy


@register("draft", "sequential")
@dataclass(frozen=True, kw_only=True)
class Sequential(PeerStrategy):
    """A smaller model of the target's family drafts `window` tokens, one after the other, between the target's steps.

    The draft is given the whole prompt, pixels included: it sees the video; in a session it watches what the target watches.
    When sampling it draws from its own distribution under the same temperature, cuts and penalties as the target, which is
    what speculative sampling needs. After Leviathan et al. 2023 (arXiv 2211.17192).

    One beam, from an empty cache, tokens only (no scores). A batch is drafted for and verified sequence by sequence, a round
    of each in turn: exact for each, and no faster than one prompt after the other.

    model   folder, hub or shipped name of the draft model, "beside" (the target's, with -draft), or the loaded module
    window  tokens drafted a round, at least 1; fewer when fewer may still be generated
    confidence  a window ends before a token whose likeliest choice has less than this probability, 0 to 1; the first is
            drafted in any case; what was drawn decides nothing, so that sampling stays exact
    prune   a pruner of stage "draft": the draft reads only what the target's early layers find worth keeping
    kv      the memory of the draft's own stream, in a session; null: one like the target's
    """

    window: int = 5
    confidence: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least(self, 1, "window")
        if isinstance(self.confidence, bool) or not 0 <= self.confidence <= 1:
            raise RecipeError(
                f"{self.name}: confidence is {shown(self.confidence)}; give a probability, 0 to 1."
            )

    @property
    def max_rollback(self) -> int:
        return self.window + 1

    def open(self, target: ModelView) -> DraftState:
        peer = self.peer(target)
        return Drafter(peer.runner(), peer.device, self, target.geometry.vocab)


class Drafter(PeerState):
    """Within a round the runner has run drafted tokens past `_mark`, of which there are `_fed`."""

    _choice: Sequential
    _mark = _fed = _drafted = 0

    def begin(self, prompt: Prompt) -> None:
        super().begin(prompt)
        self._warp, self._generator = prompt.warp, prompt.generator
        self._ids = prompt.ids[0]
        self._left = prompt.max_new_tokens or sys.maxsize

    def propose(self) -> Proposal:
        # The target adds a token of its own to whatever it keeps.
        count = min(self._choice.window, self._left - 1)
        if count < 1:
            return Proposal.empty()
        self._mark = self._open().length() + self._pending.numel()
        ids, feed, rows = self._ids, self._pending, []
        drafted = 0
        while drafted < count:
            logits = self._step(feed)
            self._pending, self._fed = self._pending[:0], drafted
            row = None if self._warp is None else self._warp(ids, logits)
            least = self._choice.confidence if drafted else 0.0
            if least and (logits.float().softmax(-1) if row is None else row).max() < least:
                break
            if row is None:
                feed = logits.argmax(-1, keepdim=True)
            else:
                rows.append(row)
                feed = draw(row, self._generator)
            ids, drafted = torch.cat([ids, feed]), drafted + 1
        self._drafted += drafted
        return Proposal(ids[self._ids.numel() :], q=torch.stack(rows) if rows else None)

    def observe(self, committed: Tensor, kept: int) -> None:
        committed = committed.to(self._ids.device)
        run = min(kept, self._fed)
        if run < self._fed:
            self._open().truncate(self._mark + run)
        # After a full acceptance these are the last drafted token, which was never run, and the target's bonus.
        self._pending = torch.cat([self._pending, committed[run:]])
        self._said = torch.cat([self._said, committed])
        self._ids = torch.cat([self._ids, committed])
        self._fed = 0
        self._left -= committed.numel()

    def leave(self) -> Any:
        if self._fed:
            self._open().truncate(self._mark)  # what was drafted last may have been refused
            self._fed = 0
        return super().leave()

    def counters(self) -> dict[str, float]:
        return {"drafted": float(self._drafted), "draft_steps": float(self._steps)}

    def _step(self, ids: Tensor) -> Tensor:
        """Logits [V] of the token after `ids`, over the target's vocabulary."""
        self._steps += 1
        logits = self._open().step(ids.to(self._device)[None])[0, -1]
        return resize(logits.to(self._ids.device), self._vocab, float("-inf"))
