"""Fixtures of tests of KV memories."""

import pytest

from mmaccel.core.memory import buffers
from mmaccel.policies.kv.store import slabs


@pytest.fixture
def small_rooms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables begin small, and are moved as a short stream grows."""
    monkeypatch.setattr(buffers, "LEAST", 64)
    monkeypatch.setattr(slabs, "ROWS", 0)
