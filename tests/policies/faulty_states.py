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

from .faulty import wrong


class _Patched(Full):
    """A sound memory of which one method is replaced."""

    wrong: ClassVar[dict[str, Any]] = {}

    def open(self, *given: Any) -> Any:
        state = super().open(*given)
        for name, method in self.wrong.items():
            object.__setattr__(state, name, lambda *told, method=method: method(state, *told))
        return state


class _Streams(WindowedPolicy):
    """A sound memory of the last frames, with another state."""

    name: ClassVar[str] = "faulty"
    state: ClassVar[type] = StreamMemory

    def open_stream(self, stream: Any, geometry: Any, model: Any, device: Any) -> Any:
        return self.state(stream, geometry, model, device, window=8, local=4)


class _Remembers(StreamMemory):
    def question_scope(self) -> Any:
        self.local += 1
        return super().question_scope()


class _Forgets(StreamMemory):
    def begin_pass(self, stream_pass: StreamPass) -> None:
        super().begin_pass(stream_pass)
        if stream_pass.kind == "units":
            self._rings = [None] * len(self._rings)
            self._count = 0


class Forgets(_Streams):
    """Only the units of the last pass are counted."""

    state: ClassVar[type] = _Forgets

    def open_stream(self, *given: Any) -> Any:
        state = super().open_stream(*given)
        state.units = lambda: 0 if state._count == 0 else state._count - 1
        return state


class _Lends(FullStream):
    def snapshot(self, *given: Any) -> Any:
        taken: Any = super().snapshot(*given)
        self._state._lent.clear()
        return taken


def _one_column_less(state: StreamMemory, columns: int, few: int = 0) -> Any:
    return StreamMemory._layout(state, columns - 1, few)


MEMORIES = {
    "length": (
        wrong(_Patched, wrong={"length": lambda state: type(state).length(state) + 1}),
        "length is 1 and held 0 when it is opened",
    ),
    "beams": (
        wrong(_Patched, wrong={"reorder": lambda state, rows: type(state).reorder(state, rows.flip(0))}),
        "reorder([1, 1, 0]) gives other rows",
    ),
    "cuts": (
        wrong(
            _Patched,
            wrong={"truncate": lambda state, n: type(state).truncate(state, n) if n < 1000 else None},
        ),
        "truncate(1000) of fewer columns is taken; raise ModelError.",
    ),
    "a trace": (wrong(_Streams, state=_Remembers), "a question leaves a trace"),
    "no way back": (
        wrong(_Streams, state=wrong(StreamMemory, restore=lambda state, mark: None)),
        "after restore there are 122 units",
    ),
    "units": (Forgets, "units is "),
    # What comes while an answer lasts is written over its columns.
    "a snapshot": (
        wrong(Full, stream=lambda policy, *given: _Lends(*given)),
        "units that come change an answer that has begun",
    ),
    "a layout": (
        wrong(_Streams, state=wrong(StreamMemory, _layout=_one_column_less)),
        "the layout of a view is not of its columns",
    ),
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


DRAFTS = {
    "an error": (Raises, "it fails with KeyError: 'nothing'; fix it."),
    "floats": (
        wrong(Raises, open=lambda draft, target: wrong(_Raises, propose=lambda _: Proposal(torch.ones(2)))()),
        "Proposal.ids must be [n] long",
    ),
    "undeclared": (wrong(PromptLookup, needs=frozenset()), "name 'rollback' in needs"),
    "too little": (wrong(PromptLookup, max_rollback=2), "tokens were proposed and max_rollback is 2"),
}
"""What is wrong -> the draft, and words of the sentence that tells it."""
