"""Frames beside a question where each device has a memory for its layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mmaccel
from mmaccel.core.memory.split import SplitState
from tests.models.streams import FPS, QUESTION, every_stream, film, pair

KV = every_stream(frames=6, window=4)
CPU, OTHER = torch.device("cpu"), torch.device("cpu:0")


@pytest.mark.parametrize("kv", ["full", "mosaic", "livevlm"])
def test_frames_meanwhile_and_a_stretch_of_time(kv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with mmaccel.VideoSession(*pair("random-ov", 4), None, kv=KV[kv]) as session:
        adapter: Any = session._stream_adapter
        adapter.layer_devices, adapter.ends = [CPU, CPU, OTHER, OTHER], frozenset
        session.watch(film(14), fps=FPS)
        assert session._live is not None and isinstance(session._live.state, SplitState)
        alone, rest = session.ask(QUESTION, 12), iter(film(25)[14:].split(1))
        early = session.ask(QUESTION, 4, between=(1.0, 3.0))
        assert all(1.0 <= one.seconds <= 3.0 for one in early.evidence)
        way = adapter.turns.give_way

        def often(inside: bool = False) -> None:
            """A frame comes, in this thread, for its turn is held already."""
            if (frame := next(rest, None)) is not None and not inside:
                session.watch(frame, fps=FPS)
            way(inside)

        monkeypatch.setattr(adapter.turns, "give_way", often)
        busy = session.ask(QUESTION, 12)
        monkeypatch.undo()
        assert session.frames > 14 and (busy.ids, busy.evidence) == (alone.ids, alone.evidence)
