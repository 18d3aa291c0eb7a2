"""Captures of several threads, without a device."""

from __future__ import annotations

import contextlib
import threading
import time
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
