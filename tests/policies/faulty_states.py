"""Memories and drafts as their writers get them wrong, one fault each; none is registered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from mmaccel.core.decoding.draft import DraftState, DraftStrategy, Proposal
from mmaccel.core.memory.kv import StreamPass
from mmaccel.policies.draft.prompt_lookup import PromptLookup
from mmaccel.policies.kv import StreamMemory, WindowedPolicy
from mmaccel.policies.kv.full import Full, FullStream


class _Patched(Full):
    """A sound memory of which one method is replaced."""

    wrong: ClassVar[dict[str, Any]] = {}

    def open(self, *given: Any) -> Any:
        state = super().open(*given)
        for name, method in self.wrong.items():
            object.__setattr__(state, name, lambda *told, method=method: method(state, *told))
        return state


class Miscounts(_Patched):
    """One column too many."""

    wrong: ClassVar = {"length": lambda state: type(state).length(state) + 1}


class Reverses(_Patched):
    """Beams in another order."""

    wrong: ClassVar = {"reorder": lambda state, rows: type(state).reorder(state, rows.flip(0))}


class TakesAnything(_Patched):
    """A cut to more columns than there are is taken."""

    wrong: ClassVar = {"truncate": lambda state, n: type(state).truncate(state, n) if n < 1000 else None}


class _Streams(WindowedPolicy):
    """A sound memory of the last frames, with another state."""

    name: ClassVar[str] = "faulty"
    state: ClassVar[type] = StreamMemory

    def stream(self, stream: Any, geometry: Any, model: Any, device: Any) -> Any:
        return self.state(stream, geometry, model, device, window=8, local=4)


class _Remembers(StreamMemory):
    def question_scope(self) -> Any:
        self.local += 1
        return super().question_scope()


class Remembers(_Streams):
    """A question is seen by the next one."""

    state: ClassVar[type] = _Remembers


class _OneWay(StreamMemory):
    def restore(self, mark: Any) -> None:
        pass


class OneWay(_Streams):
    """There is no way back."""

    state: ClassVar[type] = _OneWay


class _Forgets(StreamMemory):
    def begin_pass(self, stream_pass: StreamPass) -> None:
        super().begin_pass(stream_pass)
        if stream_pass.kind == "units":
            self._rings = [None] * len(self._rings)
            self._count = 0


class Forgets(_Streams):
    """Only the units of the last pass are counted."""

    state: ClassVar[type] = _Forgets

    def stream(self, *given: Any) -> Any:
        state = super().stream(*given)
        state.units = lambda: 0 if state._count == 0 else state._count - 1
        return state


class _Mislays(StreamMemory):
    def _layout(self, columns: int, few: int = 0) -> Any:
        return super()._layout(columns - 1, few)


class Mislays(_Streams):
    """The layout of what a question sees lacks a column."""

    state: ClassVar[type] = _Mislays


class _Lends(FullStream):
    def snapshot(self, *given: Any) -> Any:
        taken: Any = super().snapshot(*given)
        self._state._lent.clear()
        return taken


class Lends(Full):
    """What comes while an answer lasts is written over its columns."""

    def stream(self, *given: Any) -> Any:
        return _Lends(*given)


MEMORIES = {
    "length": (Miscounts, "length is 1 and held 0 when it is opened"),
    "beams": (Reverses, "reorder([1, 1, 0]) gives other rows"),
    "cuts": (TakesAnything, "truncate(1000) of fewer columns is taken; raise ModelError."),
    "a trace": (Remembers, "a question leaves a trace"),
    "no way back": (OneWay, "after restore there are 122 units"),
    "units": (Forgets, "units is "),
    "a snapshot": (Lends, "units that come change an answer that has begun"),
    "a layout": (Mislays, "the layout of a view is not of its columns"),
}
"""What is wrong -> the memory, and words of the sentence that tells it."""


class _Raises(DraftState):
    def begin(self, prompt: Any) -> None:
        pass

    def propose(self) -> Proposal:
        raise KeyError("nothing")

    def observe(self, committed: Any, kept: int) -> None:
        pass


@dataclass(frozen=True, kw_only=True)
class Raises(DraftStrategy):
    """Its proposals end in an error."""

    name: ClassVar[str] = "raises"

    def open(self, target: Any) -> DraftState:
        return _Raises()


class _Floats(_Raises):
    def propose(self) -> Proposal:
        return Proposal(torch.ones(2))


class Floats(Raises):
    """Its proposals are no token ids."""

    def open(self, target: Any) -> DraftState:
        return _Floats()


class Undeclared(PromptLookup):
    """It looks back, and needs does not say so."""

    needs: ClassVar[frozenset[str]] = frozenset()


class TooLittle(PromptLookup):
    """It proposes more than it says it rolls back."""

    max_rollback: ClassVar[int] = 2  # type: ignore[assignment]


DRAFTS = {
    "an error": (Raises, "it fails with KeyError: 'nothing'; fix it."),
    "floats": (Floats, "Proposal.ids must be [n] long"),
    "undeclared": (Undeclared, "name 'rollback' in needs"),
    "too little": (TooLittle, "tokens were proposed and max_rollback is 2"),
}
