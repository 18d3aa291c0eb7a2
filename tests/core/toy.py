"""Enumerable language models for tests: the next token's logits are a rule of the tokens before it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from mmaccel.core.adapter import Geometry, ModelAdapter, ModelView, Runner
from mmaccel.core.draft import Branches, DraftState, Prompt, Proposal
from mmaccel.core.kv import KVPolicy
from mmaccel.core.layout import TokenLayout

Rule = Callable[[Sequence[int]], Tensor]


def bigram(table: Tensor) -> Rule:
    """Logits [V, V] by the last token."""
    return lambda tokens: table[tokens[-1]]


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
            p[a, b, c] = (
                shape(self.one.double())[a]
                * shape(self.two[a].double())[b]
                * shape(self.three[a, b].double())[c]
            )
        return p


class ToyModel(nn.Module):
    """A rule that poses as a model of `vocab` tokens."""

    def __init__(self, rule: Rule, vocab: int) -> None:
        super().__init__()
        self.rule, self.vocab = rule, vocab
        self.anchor = nn.Parameter(torch.zeros(1))
        self.runners: list[ToyRunner] = []


class ToyRunner(Runner):
    """Keeps the tokens it has run, and how it was used."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.tokens: list[int] = []
        self.inputs: Mapping[str, Any] = {}
        self.steps = self.last = 0

    def prefill(self, inputs: Mapping[str, Any], keep: Tensor | None = None, compact: bool = False) -> Tensor:
        assert not self.tokens
        self.inputs = inputs
        ids = inputs["input_ids"][0]
        self.tokens = (ids if keep is None else ids[keep]).tolist()
        return self.rule(self.tokens)[None]

    def step(self, ids: Tensor, branches: Branches | None = None) -> Tensor:
        assert ids.shape[0] == 1 and ids.shape[1] > 0
        self.steps += 1
        self.last = ids.shape[1]
        if branches is None:
            rows = []
            for token in ids[0].tolist():
                self.tokens.append(token)
                rows.append(self.rule(self.tokens))
            return torch.stack(rows)[None]
        self.tokens += ids[0].tolist()
        assert branches.sees.shape[0] == ids.shape[1]
        before = len(self.tokens) - branches.sees.shape[1]
        seen = [[t for t, s in zip(self.tokens[before:], row, strict=True) if s] for row in branches.sees]
        assert [len(s) - 1 for s in seen] == branches.depth.tolist()
        return torch.stack([self.rule(self.tokens[:before] + branch) for branch in seen])[None]

    def accept(self, path: Tensor) -> None:
        start = len(self.tokens) - self.last
        self.tokens[start:] = [self.tokens[start + i] for i in path.tolist()]

    def truncate(self, length: int) -> None:
        assert 0 <= length <= len(self.tokens)
        del self.tokens[length:]

    def length(self) -> int:
        return len(self.tokens)


class ToyAdapter(ModelAdapter):
    """Only what drafts ask of an adapter."""

    name = "toy"
    model_types = ("toy",)
    loads = 0

    def geometry(self, model: nn.Module) -> Geometry:
        return Geometry(layers=2, heads=2, kv_heads=1, head_dim=4, hidden=8, vocab=model.vocab)

    def runner(self, model: nn.Module, kv: KVPolicy | None = None) -> Runner:
        model.runners.append(ToyRunner(model.rule))
        return model.runners[-1]

    def layout(self, model: nn.Module, inputs: Mapping[str, Any]) -> TokenLayout:
        return TokenLayout.text(1, inputs["input_ids"].shape[1])

    def load(self, path: str, like: nn.Module) -> nn.Module:
        self.loads += 1
        return ToyModel(like.rule, like.vocab)


ToyAdapter.__abstractmethods__ = frozenset()


def view(rule: Rule, vocab: int) -> ModelView:
    adapter = ToyAdapter()
    return ModelView(ToyModel(rule, vocab), adapter, lambda model: adapter)


@dataclass
class Meter:
    """What the decoding loop wrote down."""

    rounds: list[tuple[int, int]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def round(self, proposed: int, accepted: int) -> None:
        self.rounds.append((proposed, accepted))

    def draft_failed(self, reason: str) -> None:
        self.failures.append(reason)


def prompt(ids: Sequence[int], **choices: Any) -> Prompt:
    tensor = torch.tensor([list(ids)])
    return Prompt(inputs={"input_ids": tensor, **choices.pop("inputs", {})}, ids=tensor, **choices)


def alone(rule: Rule, ids: Sequence[int], stop: Callable[[Tensor], bool]) -> list[int]:
    """Greedy decoding, one token at a time: the reference."""
    tokens = list(ids)
    while True:
        tokens.append(int(rule(tokens).argmax()))
        if stop(torch.tensor([tokens])):
            return tokens


class Scripted(DraftState):
    """A draft that proposes what it is told; `propose` and `tail` get all committed tokens."""

    def __init__(
        self,
        propose: Callable[[list[int]], Proposal],
        tail: Callable[[list[int]], int | None] = lambda tokens: None,
    ) -> None:
        self._propose, self._tail = propose, tail
        self.tokens: list[int] = []
        self.fates: list[tuple[list[int], int]] = []
        self.closed = 0

    def begin(self, prompt: Prompt) -> None:
        self.tokens = prompt.ids[0].tolist()

    def propose(self) -> Proposal:
        return self._propose(self.tokens)

    def tail(self) -> int | None:
        return self._tail(self.tokens)

    def observe(self, committed: Tensor, kept: int) -> None:
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
