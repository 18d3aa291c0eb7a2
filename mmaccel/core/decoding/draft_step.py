"""Steps that a draft asks for, so that drafts of several sequences on one model take theirs as one."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn.functional import pad

from mmaccel.core.adapter import Runner


@dataclass(frozen=True, eq=False)
class DraftStep:
    """A step of `runner` over `ids` [n] for a draft.

    The draft gets what follows the last of them: logits [vocab], or the likeliest token [1] if it is `greedy`. Tokens of
    `never` are not said, and a model of fewer tokens than `vocab` says none of the others.
    """

    runner: Runner
    ids: Tensor
    vocab: int
    never: tuple[int, ...] = ()
    greedy: bool = True

    @property
    def kind(self) -> tuple[Any, ...]:
        """Steps of one kind may be `said` together."""
        return self.vocab, self.never, self.greedy

    def said(self, logits: Tensor) -> Tensor:
        """What drafts get of `logits` [m, V], a row each: [m, vocab] or, if greedy, [m, 1]."""
        logits = resize(logits, self.vocab, float("-inf"))
        if self.never:
            logits = logits.index_fill(1, logits.new_tensor(self.never).long(), float("-inf"))
        return logits.argmax(-1, keepdim=True) if self.greedy else logits


Drafting = Generator[DraftStep, Tensor, Any]
"""Work of a draft that is sent what each step that it yields says."""


def sent(work: Drafting, given: Tensor | Exception | None) -> DraftStep:
    """The next step of `work`, after what the last one said (None: the first) or raised; raises `StopIteration` with what
    the work gives at its end."""
    return work.throw(given) if isinstance(given, Exception) else work.send(given)  # type: ignore[arg-type]


def alone(work: Drafting) -> Any:
    """What `work` gives, whose steps are taken one by one."""
    given: Tensor | Exception | None = None
    while True:
        try:
            asked = sent(work, given)
        except StopIteration as over:
            return over.value
        try:
            given = asked.said(asked.runner.step(asked.ids[None])[0, -1:])[0]
        except Exception as error:
            given = error


def resize(x: Tensor, vocab: int, fill: float) -> Tensor:
    """`x` [..., V'] cut or lengthened with `fill` to [..., vocab]."""
    short = vocab - x.shape[-1]
    return x[..., :vocab] if short <= 0 else pad(x, (0, short), value=fill)
