"""Families for the tests of models, and what their tests need of torch."""

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from mmaccel.core.decoding import replay
from tests.core.test_replay import Repeated
from tests.models.tiny_random import BUILD


@pytest.fixture(scope="module", params=sorted(BUILD))
def family(request: pytest.FixtureRequest) -> tuple[str, Any]:
    """A family's short name, and a tiny model of it, of as many layers as `LAYERS` of the module says."""
    return request.param, BUILD[request.param](layers=getattr(request.module, "LAYERS", 2))


@pytest.fixture
def dynamo() -> Iterator[None]:
    """Nothing compiled comes to the test, or is left by it."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Nothing is collected but what nobody refers to."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device, where work is replayed: what the host gave the first time is what is read."""
    plain = replay.CudaGraphCache.__init__

    def works(one: Any, device: torch.device) -> None:
        plain(one, device)
        one.works = True

    monkeypatch.setattr(replay, "_Replay", Repeated)
    monkeypatch.setattr(replay.CudaGraphCache, "__init__", works)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
