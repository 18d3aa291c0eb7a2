"""Tests of a module that hold for each family or memory take these in turn; with all of them they are `slow`."""

import gc
import zlib
from collections.abc import Iterator
from itertools import groupby
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


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Obey `in_turn(name, count)`: of what a test is given as `name`, `count` values stay by default, from the one on at
    which the test before it in the module ended; so does each value of what else it is given."""
    for module, tests in groupby(items, lambda item: item.nodeid.partition("::")[0]):
        first = zlib.crc32(module.encode())
        for _, cases in groupby(tests, lambda item: item.nodeid.partition("[")[0]):
            some = [
                case for case in cases if hasattr(case, "callspec") and not case.get_closest_marker("slow")
            ]
            for mark in some[0].iter_markers("in_turn") if some else ():
                first = _thin(some, first, *mark.args)


def _thin(cases: list[Any], first: int, name: str, count: int) -> int:
    """Mark `slow` what does not stay of the cases of a test; the value with which the next test begins."""
    given = [{key: repr(value) for key, value in case.callspec.params.items()} for case in cases]
    values = list(dict.fromkeys(one[name] for one in given if name in one))
    if len(values) <= count:
        return first
    stay = {values[(first + n) % len(values)] for n in range(count)}
    seen = {pair for one in given if one.get(name) in stay for pair in one.items()}
    for case, one in zip(cases, given, strict=True):
        if one.get(name) not in stay:
            others = {pair for pair in one.items() if pair[0] != name}
            if others <= seen:
                case.add_marker(pytest.mark.slow)
            seen |= others
    return first + count
