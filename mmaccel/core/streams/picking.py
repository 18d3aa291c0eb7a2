"""Runs the frames that a `FrameMemory` chooses for a question through the model, into a memory of keys and values."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch

from mmaccel.core.memory.frames import FrameMemory
from mmaccel.core.memory.kv import StreamState, UnitEvidence
from mmaccel.core.report import Meter
from mmaccel.core.streams.parts import RunningStates, StreamInfo
from mmaccel.core.streams.stream_runner import StreamRunner

FEW = 4
"""Units of a memory of frames that go through the vision tower at a time."""


def encode_selected_frames(
    live: StreamRunner,
    state: FrameMemory,
    info: StreamInfo,
    check: Callable[[], None],
    meter: Meter,
    running: RunningStates | None,
) -> tuple[StreamState, Callable[[], dict[int, UnitEvidence]]]:
    """Run the frames that `state` chooses for a question into a new memory of keys and values; return it, and a function for
    the evidence. `check` is called between passes and may raise; `running`, recurrent states, read the frames too."""
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
