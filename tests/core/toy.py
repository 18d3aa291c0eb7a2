"""Enumerable language models for tests: the next token's logits are a rule of the tokens before it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product

import torch
from torch import Tensor

from mmaccel.contract.draft import (
    Rule,
    ToyAdapter,
    ToyModel,
    ToyRunner,
    bigram_rule,
    decode_greedily,
    toy_prompt,
    toy_view,
)
from mmaccel.core.decoding.draft import DraftState, Prompt, Proposal

__all__ = ["Meter", "Rule", "Scripted", "ToyAdapter", "ToyModel", "ToyRunner", "Triples", "bigram_rule"]
__all__ += ["count_triples", "decode_greedily", "g_test", "toy_prompt", "toy_view"]


@dataclass
class Meter:
    """What the decoding loop wrote down."""

    rounds: list[tuple[int, int]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def count_round(self, proposed: int, accepted: int) -> None:
        self.rounds.append((proposed, accepted))

    def record_draft_failure(self, reason: str) -> None:
        self.failures.append(reason)

    def record_draft_end(self, counters: dict[str, float], notes: list[str]) -> None:
        assert all(isinstance(value, float) for value in counters.values())


class Triples:
    """Sequences of independent triples: their joint distribution is known, and each run gives many of them.

    After a prompt of `prompt` tokens, the first token of a triple depends on nothing, the second on the first, the third on
    both.
    """

    def __init__(self, vocab: int, seed: int, prompt: int = 1, sharp: float = 1.5) -> None:
        g = torch.Generator().manual_seed(seed)
        self.one, self.two, self.three = (sharp * torch.randn(*[vocab] * n, generator=g) for n in (1, 2, 3))
        self.vocab, self.prompt = vocab, prompt

    def __call__(self, tokens: Sequence[int]) -> Tensor:
        place = (len(tokens) - self.prompt) % 3
        if place == 0:
            return self.one
        return self.two[tokens[-1]] if place == 1 else self.three[tokens[-2], tokens[-1]]

    def joint(self, shape: Callable[[Tensor], Tensor]) -> Tensor:
        """[V, V, V] float64: the probability of each triple; `shape` makes probabilities of logits [V]."""
        p = torch.zeros(self.vocab, self.vocab, self.vocab, dtype=torch.float64)
        for a, b, c in product(range(self.vocab), repeat=3):
            one, two = shape(self.one.double())[a], shape(self.two[a].double())[b]
            p[a, b, c] = one * two * shape(self.three[a, b].double())[c]
        return p


class Scripted(DraftState):
    """A draft that proposes what it is told; `propose` and `tail_token` get all committed tokens."""

    def __init__(
        self,
        propose: Callable[[list[int]], Proposal],
        tail: Callable[[list[int]], int | Proposal | None] = lambda tokens: None,
    ) -> None:
        self._propose, self._tail = propose, tail
        self.tokens: list[int] = []
        self.fates: list[tuple[list[int], int]] = []
        self.closed = 0

    def begin(self, prompt: Prompt) -> None:
        self.tokens = prompt.ids[0].tolist()

    def propose(self) -> Proposal:
        return self._propose(self.tokens)

    def tail_token(self) -> Proposal:
        told = self._tail(self.tokens)
        if told is None:
            return Proposal.empty()
        return Proposal(torch.tensor([told])) if isinstance(told, int) else told

    def observe_committed(self, committed: Tensor, kept: int) -> None:
        self.tokens = self.tokens + committed.tolist()
        self.fates.append((committed.tolist(), kept))

    def close(self) -> None:
        self.closed += 1


def g_test(observed: Tensor, expected: Tensor) -> float:
    """p-value of counts against exact probabilities of the same shape; 0 when something impossible was seen."""
    observed, expected = observed.double().flatten(), expected.double().flatten()
    possible = expected > 0
    if bool((observed[~possible] > 0).any()):
        return 0.0
    observed, expected = observed[possible], expected[possible] * observed.sum()
    g = 2 * torch.special.xlogy(observed, observed / expected).sum()
    degrees = torch.tensor(float(possible.sum() - 1))
    return float(torch.special.gammaincc(degrees.double() / 2, (g / 2).clamp(min=0)))


def count_triples(tokens: Tensor, vocab: int) -> Tensor:
    """[V, V, V] counts of the rows of `tokens` [N, 3]."""
    flat = (tokens[:, 0] * vocab + tokens[:, 1]) * vocab + tokens[:, 2]
    return torch.bincount(flat, minlength=vocab**3).view(vocab, vocab, vocab)
