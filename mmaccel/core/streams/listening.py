"""A draft's own pruner on a stream: what the target's question attends to, and what a draft then reads of its recall."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from mmaccel.core.decoding.watching import Heard
from mmaccel.core.layout import TokenLayout
from mmaccel.core.memory.kv import CacheSlot, KVView, Stream, StreamState
from mmaccel.core.prefill.prune import Stage, TokenPruner, paid
from mmaccel.core.prefill.recalled import AroundMemory, RecallPruning


class Around(Protocol):
    """Lays something round a memory while a question lasts, the first `before` rows of which are no words. `numbers` has for
    each unit of the memory the number that models of the same pace give it, however either merges units or picks them."""

    def __call__(
        self, state: StreamState, stream: Stream, before: int, numbers: Sequence[int]
    ) -> StreamState: ...


class Listening:
    """Lays a `StreamListener` round the memory of each question to a target of `depth` layers, for a draft's `pruner`."""

    def __init__(self, pruner: TokenPruner, depth: int) -> None:
        (self._stage,), self._made = pruner.stages(depth), list[StreamListener]()

    def __call__(
        self, state: StreamState, stream: Stream, before: int, numbers: Sequence[int]
    ) -> StreamState:
        self._made = [StreamListener(state, self._stage, stream, before, numbers)]
        return self._made[0]

    def heard(self) -> Heard | None:
        """What the question that ran last attended to; None: none did. Asked once."""
        made, self._made = self._made, []
        return made[0].heard() if made else None


class StreamListener(AroundMemory):
    """The memory `state`, whose question's attention to units is collected where `stage` reads it.

    The layers that are read run without captured steps while the question is read, and with them from its first token on.
    A pruner of the target drops out of what is shown after this: what it drops has been heard.
    """

    def __init__(
        self, state: StreamState, stage: Stage, stream: Stream, before: int, numbers: Sequence[int]
    ) -> None:
        super().__init__(state)
        self._stage, self._stream, self._before, self._numbers = stage, stream, before, numbers
        self._layers = {layer for group in stage.attention for layer in group}
        self._heard: dict[int, tuple[Tensor, Tensor]] = {}

    def _listens(self, layer: int) -> bool:
        return self._pass is not None and self._pass.kind == "question" and layer in self._layers

    def write_slot(self, layer: int, query: Tensor) -> CacheSlot | None:
        return None if self._listens(layer) else self.state.write_slot(layer, query)

    def view(self, layer: int, query: Tensor) -> KVView:
        view = self.state.view(layer, query)
        if self._listens(layer):
            base, first = view.key.shape[2] - self._tail, self._stream.head + self.state.summaries(layer)
            tokens, rows = self.state.seen(layer), self._tail - self._before
            if tokens is not None and len(tokens) == base - first > 0:
                key, turned = view.key[0], query if view.query is None else view.query
                at = torch.arange(key.shape[1] - rows, key.shape[1], device=key.device)
                looks = paid(turned[0, :, -rows:], key, at, key.shape[-1] ** -0.5, view.bias)
                self._heard[layer] = tokens.to(key.device), looks.mean(0)[first:base]
        return view

    def heard(self) -> Heard:
        """What was heard of the question."""
        groups, unit = self._stage.attention, self._stream.unit
        if not self._heard:
            return Heard(self._stage, unit, torch.zeros(0, dtype=torch.long), torch.zeros(len(groups), 0))
        home = next(iter(self._heard.values()))[0].device
        parts = {layer: (tokens.to(home), looks.to(home)) for layer, (tokens, looks) in self._heard.items()}
        tokens = torch.unique(torch.cat([one for one, _ in parts.values()]))
        out = torch.zeros(len(groups), len(tokens), device=home)
        for n, group in enumerate(groups):
            for layer in group:
                if layer in parts:
                    one, looks = parts[layer]
                    out[n].index_add_(0, torch.searchsorted(tokens, one), looks / len(group))
        numbers = torch.tensor(self._numbers, dtype=torch.long, device=home)
        return Heard(self._stage, unit, numbers[tokens // unit] * unit + tokens % unit, out)


class Guided:
    """Lays a `GuidedRecall` round the memory of a draft for one question.

    counts  what it showed
    paid    what the target's question paid to each unit that it saw, by number
    """

    def __init__(self, pruner: TokenPruner, heard: Heard) -> None:
        self._pruner, self._heard = pruner, heard
        self.counts: dict[str, float] = {}
        units, paid = (heard.tokens // heard.unit).tolist(), heard.paid.sum(0).tolist()
        self.paid = dict.fromkeys(units, 0.0)
        for number, weight in zip(units, paid, strict=True):
            self.paid[number] += weight

    def __call__(
        self, state: StreamState, stream: Stream, before: int, numbers: Sequence[int]
    ) -> StreamState:
        made = GuidedRecall(state, self._pruner, stream, before, self._heard, numbers)
        self.counts = made.counts
        return made


class GuidedRecall(RecallPruning):
    """The memory of a draft, of whose recalled units a question sees what the draft's `pruner` leaves of each layer's.

    The pruner is given what the target's question paid to the same tokens (`Heard`), as if by one row. What the target did
    not see it paid nothing to; of a memory that cannot say which tokens it shows all are alike, and where all are alike the
    pruner of attention spreads its choice evenly.
    """

    def __init__(
        self,
        state: StreamState,
        pruner: TokenPruner,
        stream: Stream,
        before: int,
        heard: Heard,
        numbers: Sequence[int],
    ) -> None:
        super().__init__(state, pruner, stream, 0, before)
        self._heard, self._numbers = heard, numbers
        self._stages, self._first = {0: heard.stage}, 0
        self.counts |= {"visual from layer 0": 0.0}

    def _drop(self, layer: int, view: KVView, query: Tensor, layout: TokenLayout, alike: bool) -> None:
        tokens, unit = self.state.seen(layer), self._stream.unit
        first, base = self._stream.head + self.state.summaries(layer), layout.length - self._tail
        looks = torch.zeros(len(self._heard.paid), 1, layout.length, device=layout.device)
        if tokens is not None and len(tokens) == base - first:
            tokens = tokens.to(layout.device)
            numbers = torch.tensor(self._numbers, dtype=torch.long, device=layout.device)
            looks[:, 0, first:base] = self._heard.to(numbers[tokens // unit], tokens % unit, unit)
        self._columns[layer] = self._cut(self._heard.stage, list(looks), layout, None)
