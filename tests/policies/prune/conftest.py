"""A tiny model of each of two families, for pruners at work."""

from typing import Any

import pytest

from tests.models.tiny_random import BUILD


@pytest.fixture(scope="module", params=BUILD)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def model(family: str) -> Any:
    return BUILD[family](layers=6, seed=5)
