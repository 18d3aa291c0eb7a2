"""A tiny model of each of two families, and of a hybrid where a test asks for it, for pruners at work."""

from typing import Any

import pytest

from tests.models.tiny_random import BUILD, EVERY

HYBRID = "qwen3_5"
WITH_HYBRID = pytest.mark.parametrize("family", [*BUILD, HYBRID], indirect=True, scope="module")
"""A hybrid too, every second layer of which has a running state; layers are counted without these."""


@pytest.fixture(scope="module", params=BUILD)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def model(family: str) -> Any:
    return EVERY[family](layers=12 if family == HYBRID else 6, seed=5)
