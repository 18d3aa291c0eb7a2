"""Captures of several threads and streams, without a device."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from mmaccel.core import replay


def test_one_capture_is_over_before_another_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """All captures on a device are on one stream, which cannot begin a second one: sessions on two models in two threads."""
    order: list[str] = []

    class Graph:
        def capture_begin(self, **_: Any) -> None:
            order.append("begin")
            # Time for another thread.
            time.sleep(0.02)

        def capture_end(self) -> None:
            order.append("end")

    monkeypatch.setattr(replay, "_side", mock.MagicMock())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "current_stream", mock.MagicMock())
    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda _: contextlib.nullcontext())
    threads = [
        threading.Thread(target=replay.captured, args=(lambda: None, torch.device("cuda"), None))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert order == ["begin", "end"] * 4


def test_what_is_replayed_on_two_streams_is_captured_on_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library's workspace hangs on the stream of the capture, and both may be at work at a time."""
    number, used = itertools.count(), list[int]()
    now = SimpleNamespace(cuda_stream=0, wait_stream=lambda other: None)

    def stream(side: Any) -> Any:
        used.append(side.number)
        return contextlib.nullcontext()

    monkeypatch.setattr(torch.cuda, "CUDAGraph", mock.MagicMock)
    monkeypatch.setattr(
        torch.cuda, "Stream", lambda: SimpleNamespace(number=next(number), wait_stream=lambda other: None)
    )
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: now)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "stream", stream)
    replay._side.cache_clear()
    for now.cuda_stream in (0, 5, 0, 5):
        replay.captured(lambda: None, torch.device("cuda"), None)
    replay._side.cache_clear()
    assert used == [0, 1, 0, 1]


def test_what_cannot_be_captured_is_run_as_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """And is not tried again, until what it reads has been moved."""
    tried = []

    def refuses(*_: Any) -> Any:
        tried.append(1)
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(replay, "_Replay", type("Refuses", (), {"__new__": refuses}))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    replays = replay.Replays(torch.device("cpu"))
    replays._works = True
    one = torch.ones(3)
    for count in range(1, 5):
        (two,) = replays("twice", lambda x: (2 * x,), one * count)
        assert torch.equal(two, 2.0 * one * count)
    assert len(tried) == 1
    replays.under("elsewhere")
    for _ in range(3):
        replays("twice", lambda x: (2 * x,), one)
    assert len(tried) == 2
