"""What is stored follows from the passes of a stream, however calls of `watch` and questions lie between them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.policies.kv.mosaic.driven import Driven
from tests.policies.kv.mosaic.scenes import partition


def called(sizes: list[int], ask: bool, **fields: Any) -> tuple[Driven, torch.Tensor]:
    """Passes of 4 units in calls of these sizes, each as a session makes it, and what their rows got from attention."""
    driven, out = Driven(**fields), []
    for size in sizes:
        driven.state.checkpoint()
        out += driven.watch(size)
        driven.state.idle()
        if ask:
            driven.ask(driven.scenes[3])
    return driven, torch.cat(out, 2)


@pytest.mark.numeric(by="torch")
@pytest.mark.parametrize(
    ("sizes", "ask"), [([4] * 15, True), ([16, 4, 28, 12], False)], ids=["often", "seldom"]
)
@pytest.mark.parametrize("fields", [{}, {"window": 2, "local": 1}], ids=str)
def test_calls_and_questions_change_nothing_of_what_is_stored(
    fields: dict[str, Any], sizes: list[int], ask: bool
) -> None:
    whole, rows = called([60], False, **fields)
    cut, others = called(sizes, ask, **fields)
    assert whole.state.counters()["deferred_splits"] > 0
    assert torch.equal(rows, others)
    assert partition(whole.index.tree) == partition(cut.index.tree)
    assert torch.equal(whole.ask(1), cut.ask(1))
