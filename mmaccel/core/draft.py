"""The contract of a draft: who proposes the next tokens, and what it is told of their fate."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from mmaccel.core.adapter import Branches, ModelView
from mmaccel.core.errors import DraftError, RecipeError
from mmaccel.core.kv import KVState
from mmaccel.core.layout import TokenLayout
from mmaccel.core.prune import TokenPruner
from mmaccel.core.registry import Policy

# (ids [S] before the token, its raw logits [V]) -> the probabilities [V] it is drawn from; one-hot where processors decide.
Warp = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Proposal:
    """Tokens the target is asked to verify in one pass.

    ids [n] long (n may be 0: then the target decodes one token by itself).
    parents [n] long or None: index of each token's parent among `ids`, before its own, -1 for the last committed token; None
    is a chain. Children of one parent are distinct tokens, chosen without chance (q is None).
    q [n, V] or None: the distribution each token was drawn from; None is a point mass (greedy or looked up).
    """

    ids: Tensor
    parents: Tensor | None = None
    q: Tensor | None = None

    @classmethod
    def empty(cls, device: torch.device | str = "cpu") -> Proposal:
        return cls(torch.empty(0, dtype=torch.long, device=device))

    def then(self, other: Proposal) -> Proposal:
        """This chain with the tokens of another behind it."""
        if not other.ids.numel():
            return self
        if not self.ids.numel():
            return other
        q = None
        if self.q is not None or other.q is not None:
            vocab = (self.q if self.q is not None else other.q).shape[-1]  # type: ignore[union-attr]
            odds = [one.odds(vocab) for one in (self, other)]
            if odds[0].shape[1] != odds[1].shape[1]:
                raise DraftError(
                    f"DraftState.tail has a q over {odds[1].shape[1]} tokens and the proposal one over {odds[0].shape[1]}; "
                    "give both over the target's vocabulary."
                )
            q = torch.cat([odds[0], odds[1].to(odds[0])])
        return Proposal(torch.cat([self.ids, other.ids.to(self.ids)]), q=q)

    def odds(self, vocab: int) -> Tensor:
        """[n, vocab] float32: `q`, or the point masses that its absence stands for."""
        if self.q is not None:
            return self.q
        return (self.ids[:, None] == torch.arange(vocab, device=self.ids.device)).float()

    @cached_property
    def branches(self) -> Branches:
        """The rows of the pass that verifies a tree: the last committed token, then `ids`; on the host."""
        assert self.parents is not None
        parents = self.parents.tolist()
        sees = torch.eye(len(parents) + 1, dtype=torch.bool)
        depth = [0]
        for row, parent in enumerate(parents, 1):
            sees[row] |= sees[parent + 1]
            depth.append(depth[parent + 1] + 1)
        return Branches(sees, torch.tensor(depth))


@dataclass(frozen=True)
class Prompt:
    """What a draft is told at the start: the raw model inputs (ids, pixels, grids), the ids [1, S], the sampling in force.

    `warp` turns the raw logits of one token into the distribution it is drawn from (temperature, top-k, penalties, given the
    ids before it), or is None for greedy decoding. `max_new_tokens` 0 means that no limit is known.
    """

    inputs: Mapping[str, Any]
    ids: Tensor
    warp: Warp | None = None
    generator: torch.Generator | None = None
    max_new_tokens: int = 0


class PrefillPass(Protocol):
    """What a `Probe` may read of a pass over new columns ``start .. start + n`` of a batch.

    layout covers every column up to the last new one; `state` is the memory, or None when the caller hands over all keys.
    """

    @property
    def layout(self) -> TokenLayout: ...

    @property
    def start(self) -> int: ...

    @property
    def state(self) -> KVState | None: ...


class Probe:
    """Reads what the layers of one pass compute. It belongs to the pass, so that passes of other threads do not reach
    it. Override what is to be read; an error raised here ends the pass.
    """

    def entering(self, run: PrefillPass, layer: int, hidden: Tensor) -> None:
        """`hidden` [B, n, E], the new columns of `run`, enters `layer`; where `layer` is the number of layers, it leaves
        the last one.

        Called only for the layers that the draft's pruner of the attached recipe reads.
        """

    def attending(
        self, run: PrefillPass, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> None:
        """What enters the attention of `layer`, before it is computed: query [B, H, n, D]; key, value [B, G, N, D]."""


class DraftState(ABC):
    """A draft at work on one sequence."""

    @abstractmethod
    def begin(self, prompt: Prompt) -> None:
        """Called once, before the target's prefill."""

    def pruner(self, given: TokenPruner | None) -> TokenPruner | None:
        """What chooses the columns of this prompt that the draft reads, `given` being the strategy's; asked after `begin`.
        None: it reads all of them."""
        return given

    def keep(self, columns: Tensor) -> None:
        """The columns [n] of the prompt that the strategy's pruner leaves to the draft.

        Called once, between `begin` and the first `observe`, as soon as the target's early layers have told.
        """
        raise DraftError(f"{type(self).__name__} cannot prune what its draft sees; leave prune out.")

    def probe(self) -> Probe | None:
        """What reads the target's prefill of this sequence; asked after `begin`. None: the draft reads nothing of it."""
        return None

    @abstractmethod
    def propose(self) -> Proposal:
        """The tokens to verify next; may be empty."""

    def tail(self) -> Proposal:
        """Asked after the target's step was issued: drafting that overlaps verification happens here.

        One token that follows the whole proposal, or none. It is judged as the last token of the proposal.
        """
        return Proposal.empty()

    @abstractmethod
    def observe(self, committed: Tensor, kept: int) -> None:
        """`committed` [m] new tokens of the sequence; the first `kept` of them stood in the last proposal."""

    def close(self) -> None:
        """Free what the draft holds; called in every case."""

    def counters(self) -> dict[str, float]:
        """Figures for the report, by names of the strategy's own; nobody else reads them."""
        return {}

    def notes(self) -> list[str]:
        """Sentences for the report, without a full stop: what the figures mean, such as why the draft rested."""
        return []


@dataclass(frozen=True, kw_only=True)
class DraftStrategy(Policy, ABC, kind="draft"):
    """A choice of draft; `open` gives the state for one sequence.

    active  whether this strategy drafts at all
    needs   what the strategy asks of the rest of the recipe; "rollback" asks the memory to take back `lookback` columns,
            "memory" that it holds every column of an accelerated model, for the draft to read; "prompt" asks for the
            prompt's own inputs, pixels included, which a stream has not

    in_batches  whether the sequences of a batch are drafted for, each in its turn: "always"; "never"; or "measured": where
                that was measured to be faster than plain steps of the whole batch, and never where tokens are sampled
    """

    active: ClassVar[bool] = True
    needs: ClassVar[frozenset[str]] = frozenset()

    in_batches: str = "measured"

    def __post_init__(self) -> None:
        if self.in_batches not in ("measured", "always", "never"):
            raise RecipeError(
                f"{self.name}: in_batches is {self.in_batches!r}; give measured, always or never."
            )

    @property
    def lookback(self) -> int:
        """The most columns a verified window may roll back."""
        return 0

    @property
    def pruner(self) -> TokenPruner | None:
        """What chooses the columns of the prompt that the draft sees; None: it sees all, or chooses by itself."""
        return None

    def check(self, target: ModelView) -> None:
        """Called when the recipe is attached: raise `DraftError` for a draft that cannot serve `target`. Of an config_only
        target, before it is loaded: from configurations alone."""

    @abstractmethod
    def open(self, target: ModelView) -> DraftState: ...
