"""Contract test of drafts: a draft declares how far it rolls back, never fails, and does not change the target's text.

It runs on a toy language model of a few tokens whose next logits are a function of the previous ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mmaccel.contract.prefill import check_counters_are_floats, raise_unless
from mmaccel.core.adapter import Geometry, ModelAdapter, ModelView, Runner, TokenTree
from mmaccel.core.decoding.draft import DraftStrategy, Prompt
from mmaccel.core.decoding.generate import decode_speculatively
from mmaccel.core.layout import TokenLayout
from mmaccel.core.memory.kv import KVPolicy
from mmaccel.core.report import DraftRounds

Rule = Callable[[Sequence[int]], Tensor]


def bigram_rule(table: Tensor) -> Rule:
    """Return a toy model's rule (tokens so far -> next logits [V]): the row of `table` [V, V] for the last token."""
    return lambda tokens: table[tokens[-1]]


class ToyModel(nn.Module):
    """A toy model of `vocab` tokens, whose logits follow from the tokens so far by `rule`."""

    def __init__(self, rule: Rule, vocab: int) -> None:
        super().__init__()
        self.rule, self.vocab = rule, vocab
        self.anchor = nn.Parameter(torch.zeros(1))
        self.runners: list[ToyRunner] = []


class ToyRunner(Runner):
    """A `Runner` of a toy model; it records the tokens it has run and the number of steps."""

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

    def step(self, ids: Tensor, branches: TokenTree | None = None) -> Tensor:
        assert ids.shape[0] == 1 and ids.shape[1] > 0
        self.steps, self.last, before = self.steps + 1, ids.shape[1], len(self.tokens)
        self.tokens += ids[0].tolist()
        if branches is None:
            ends = range(before + 1, len(self.tokens) + 1)
            return torch.stack([self.rule(self.tokens[:end]) for end in ends])[None]
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
    """A model adapter for the toy model, with only the members that drafts use."""

    name = "toy"
    model_types = ("toy",)
    loads = 0

    def geometry(self, model: Any) -> Geometry:
        return Geometry(layers=2, heads=2, kv_heads=1, head_dim=4, hidden=8, vocab=model.vocab)

    def runner(self, model: Any, kv: KVPolicy | None = None) -> Runner:
        made = ToyRunner(model.rule)
        model.runners.append(made)
        return made

    def layout(self, model: Any, inputs: Mapping[str, Any]) -> TokenLayout:
        return TokenLayout.text(1, inputs["input_ids"].shape[1])

    def load(self, path: str, like: Any) -> nn.Module:
        self.loads += 1
        return ToyModel(like.rule, like.vocab)


def toy_view(rule: Rule, vocab: int) -> ModelView:
    """Return the `ModelView` of a toy model of `vocab` tokens, whose logits follow from the tokens so far by `rule`."""
    # Most of the contract is not there, and no draft asks for it.
    ToyAdapter.__abstractmethods__ = frozenset()
    adapter = ToyAdapter()  # type: ignore[abstract]
    return ModelView(ToyModel(rule, vocab), adapter, lambda model: adapter)


def toy_prompt(ids: Sequence[int], **choices: Any) -> Prompt:
    """Return a draft's `Prompt` with the token ids `ids`; `choices` set other fields of that `Prompt`."""
    tensor = torch.tensor([list(ids)])
    return Prompt(inputs={"input_ids": tensor, **choices.pop("inputs", {})}, ids=tensor, **choices)


def decode_greedily(rule: Rule, ids: Sequence[int], stop: Callable[[Tensor], bool]) -> list[int]:
    """Return `ids` continued by plain greedy decoding, one token at a time, until `stop`: the reference for drafts."""
    tokens = list(ids)
    while True:
        tokens.append(int(rule(tokens).argmax()))
        if stop(torch.tensor([tokens])):
            return tokens


VOCAB, TOKENS = 6, 25
RULE = bigram_rule(torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(0)))
"""A rule whose greedy text repeats, so that a draft that looks back finds the next tokens."""


def check_draft(strategy: DraftStrategy) -> None:
    """Test a draft policy on a toy target with six tokens, greedily; raises `RecipeError` if it violates its contract."""
    who, needs, max_rollback = f"draft {strategy.name!r}", strategy.needs, strategy.max_rollback
    raise_unless(
        needs <= {"branches", "rollback", "memory", "model", "prompt", "video"},
        f"{who}: needs is {sorted(needs)}; give some of 'branches', 'memory', 'model', 'prompt', 'rollback' and 'video'.",
    )
    raise_unless(
        max_rollback >= 0 and (max_rollback > 0) == ("rollback" in needs),
        f"{who}: max_rollback is {max_rollback} and needs {sorted(needs)}; name 'rollback' in needs where it is above 0, "
        "and there alone.",
    )
    if "memory" in needs or not strategy.active:
        return  # the toy has no memory to read: models alone can try this one; what is not active is never opened
    draft = strategy.open(toy_view(RULE, VOCAB))
    said, target, rounds = toy_prompt([3, 1], max_new_tokens=TOKENS - 2), ToyRunner(RULE), DraftRounds()

    def stop(ids: Tensor) -> bool:
        return ids.shape[1] >= TOKENS

    draft.begin(said)
    ids = decode_speculatively(target, draft, said, target.prefill(said.inputs), stop=stop, meter=rounds)
    raise_unless(rounds.failed is None, f"{who}: it fails with {(rounds.failed or '').rstrip('.')}; fix it.")
    raise_unless(
        ids[0].tolist() == decode_greedily(RULE, [3, 1], stop),
        f"{who}: the text is not the target's own; leave what the target holds as it was.",
    )
    most = max(rounds.windows, default=0)
    raise_unless(
        not most or most + 1 <= max_rollback,
        f"{who}: {most} tokens were proposed and max_rollback is {max_rollback}; give one more than the most proposed.",
    )
    check_counters_are_floats(who, draft.counters())
    notes = draft.report_notes()
    raise_unless(
        isinstance(notes, list) and all(isinstance(note, str) for note in notes),
        f"{who}: report_notes gives {notes!r}; give a list of sentences.",
    )
    draft.close()  # a second time does no harm
