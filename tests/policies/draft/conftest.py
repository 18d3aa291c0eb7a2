"""A draft's process of the toy, and its target."""

from collections.abc import Iterator
from contextlib import closing

import pytest

from mmaccel.core.adapter import ModelView
from mmaccel.core.attach import adapter_for
from mmaccel.core.decoding.worker import READY, Worker
from tests.models.streams import pair
from tests.policies.draft.toy_service import forking, started

NAME = "tiny-ov"


@pytest.fixture(scope="module")
def forked() -> Iterator[None]:
    with forking():
        yield


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with forking(), closing(started(30.0)) as made:
        made.wait(READY, 60)
        yield made


@pytest.fixture(scope="module")
def target() -> Iterator[ModelView]:
    model, _ = pair(NAME)
    view = ModelView(model, adapter_for(model), adapter_for)
    yield view
    view.close_cached_objects()
