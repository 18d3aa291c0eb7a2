"""Fixtures of tests of KV memories."""

import pytest


@pytest.fixture
def small_rooms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables begin small, and are moved as a short stream grows."""
    monkeypatch.setattr("mmaccel.core.memory.buffers.LEAST", 64)
    monkeypatch.setattr("mmaccel.policies.kv.store.slabs.ROWS", 0)
    monkeypatch.setattr("mmaccel.policies.kv._index.LEAST", 8)
