"""A capture that fails leaves nothing behind: shown with stand-ins for streams and graphs, for a device cannot be broken."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mmaccel.models.decode import _Graph


class Recorder:
    """A graph that tells whether it is capturing."""

    capturing = False

    def capture_begin(self, **_: Any) -> None:
        self.capturing = True

    def capture_end(self) -> None:
        self.capturing = False


@pytest.mark.parametrize("fails", [True, False])
def test_a_failed_capture_is_none(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Recorder] = []
    stream = SimpleNamespace(wait_stream=lambda _: None, cuda_stream=0)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: made.append(Recorder()) or made[-1])
    for name in ("Stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda: stream)
    for name in ("stream", "device"):
        monkeypatch.setattr(torch.cuda, name, lambda _: nullcontext())
    step = _Graph(SimpleNamespace(device=torch.device("cpu")), 1, False, None)  # type: ignore[arg-type]
    step.out = before = torch.zeros(1)

    def run() -> torch.Tensor:
        assert made[0].capturing
        if fails:
            raise RuntimeError("no room")
        return torch.ones(1)

    monkeypatch.setattr(step, "_run", run)
    if fails:
        with pytest.raises(RuntimeError, match="no room"):
            step._capture()
        assert step.graph is None and step.out is before
    else:
        step._capture()
        assert step.graph is made[0] and step.out is not before
    assert not made[0].capturing
