"""Interface of a memory that stores frames instead of keys and values, and how some of them are encoded for a question."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from mmaccel.core.memory.kv import StreamState, UnitEvidence
from mmaccel.core.report import Meter


class FrameMemory(StreamState):
    """A stream memory that stores frames instead of keys and values, and runs the model on some of them for each question.
    No forward pass uses it as its KV memory: for each question the frames of `choose_units` are run into a
    `new_kv_memory`, and the question runs on that."""

    @abstractmethod
    def store_frames(self, frames: Tensor) -> None:
        """Store frames [T, 3, H, W]: whole units, in the order of the stream."""

    @abstractmethod
    def choose_units(self, paid: Mapping[int, float]) -> list[tuple[int, Tensor]]:
        """Return the units to run for a question, ascending: of each its number and its frames [F, 3, H, W]. `paid`, for a
        draft's memory: unit number -> attention that the target's question paid to it; empty if unknown."""

    @abstractmethod
    def new_kv_memory(self) -> StreamState:
        """Return an empty KV memory, into which the chosen frames and one question are run."""


FEW = 4
"""Units of a memory of frames that go through the vision tower at a time."""


def encode_selected_frames(
    live: Any, state: FrameMemory, info: Any, check: Callable[[], None], meter: Meter, running: Any
) -> tuple[StreamState, Callable[[], dict[int, UnitEvidence]]]:
    """Run the frames that `state` chooses for a question into a new memory of keys and values; return it, and a function for
    the evidence. `live`: the `StreamRunner`; `info`: its `StreamInfo` as the question sees it. `check` is called between
    passes and may raise; `running`, recurrent states, read the frames too."""
    fresh, picked = state.new_kv_memory(), state.choose_units(getattr(live.around, "paid", {}))
    live.around.forget_after(0)
    live.run_prompt_head(fresh, running=running)
    if live.kv.ingests:
        fresh.begin_ingest()
    for at in range(0, len(picked), live.bulk):
        check()
        some = picked[at : at + live.bulk]
        runs = []
        # Each clip may have frames of a size of its own.
        for _, alike in itertools.groupby((one for _, one in some), lambda one: one.shape[2:]):
            while few := list(itertools.islice(alike, FEW)):
                runs.append(live.adapter.features(torch.cat(few), info.size)[0])
                check()
        begins = [info.spans[number][0] for number, _ in some]
        live.run_units(fresh, torch.cat(runs), begins, meter=meter, check=check, running=running)
    fresh.end_ingest()
    return fresh, lambda: {number: UnitEvidence(1.0, 1.0, None) for number, _ in picked}
