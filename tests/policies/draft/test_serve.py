"""What the draft's process does before it loads the draft."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mmaccel.policies.draft import _remote_drafter


@pytest.mark.parametrize(("device", "named"), [("cpu", []), ("cuda", []), ("cuda:1", [1])])
def test_the_process_opens_its_own_device_alone(
    device: str, named: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That which has no number is the current one already, and cannot be made it by name."""
    told: list[int] = []

    class LoadedNoMoreError(Exception):
        pass

    def registry(kind: str) -> Any:
        raise LoadedNoMoreError

    monkeypatch.setattr(torch._C, "_cuda_setDevice", told.append, raising=False)
    monkeypatch.setattr(_remote_drafter, "registry", registry)
    wire: Any = None
    with pytest.raises(LoadedNoMoreError):
        _remote_drafter.serve(wire, {"device": device})
    assert told == named
