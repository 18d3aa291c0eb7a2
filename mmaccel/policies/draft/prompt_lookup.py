"""The `prompt_lookup` draft: no model; copies what followed the last n tokens at an earlier occurrence."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mmaccel.core.adapter import ModelView
from mmaccel.core.decoding.draft import DraftState, DraftStrategy, Prompt, Proposal
from mmaccel.core.registry import at_least, limited, register


@register("draft", "prompt_lookup")
@dataclass(frozen=True, kw_only=True)
class PromptLookup(DraftStrategy):
    """Find the last tokens of the sequence earlier in prompt or answer, and propose the tokens that followed them there.

    The longest n-gram (n tokens in a row) is tried first; of several matches the last one counts. After prompt lookup
    decoding (Saxena 2023). Serves one beam, and on `past_key_values` of an earlier turn one sequence.

    window  most tokens proposed
    ngram   length of the longest n-gram that is looked for; shorter ones follow, down to one token
    """

    needs: ClassVar[frozenset[str]] = frozenset({"rollback"})

    window: int = limited(8, at_least(1))
    ngram: int = limited(3, at_least(1))

    @property
    def max_rollback(self) -> int:
        return self.window + 1

    def open(self, target: ModelView) -> DraftState:
        return _Finder(self.window, self.ngram)


class _Finder(DraftState):
    """Remembers, for each run of up to `ngram` tokens, where it last ended, so that finding an earlier occurrence is one
    look-up."""

    def __init__(self, window: int, ngram: int) -> None:
        self._window, self._ngram = window, ngram
        self._tokens: list[int] = []
        self._seen: dict[tuple[int, ...], int] = {}
        self._found = self._asked = 0

    def begin(self, prompt: Prompt) -> None:
        self._remaining = prompt.max_new_tokens or sys.maxsize
        self._take(prompt.ids[0].tolist())

    def _take(self, tokens: list[int]) -> None:
        for token in tokens:
            # What ends at the last token has a follower only now.
            end = len(self._tokens)
            for n in range(1, min(self._ngram, end) + 1):
                self._seen[tuple(self._tokens[end - n :])] = end
            self._tokens.append(token)

    def propose(self) -> Proposal:
        self._asked += 1
        count = min(self._window, self._remaining - 1)
        for n in range(min(self._ngram, len(self._tokens)), 0, -1):
            end = self._seen.get(tuple(self._tokens[-n:]))
            if end is not None and count > 0:
                self._found += 1
                return Proposal(torch.tensor(self._tokens[end : end + count]))
        return Proposal.empty()

    def observe_committed(self, committed: Tensor, kept: int) -> None:
        self._take(committed.tolist())
        self._remaining -= committed.numel()

    def counters(self) -> dict[str, float]:
        return {"lookups": float(self._asked), "found": float(self._found)}
