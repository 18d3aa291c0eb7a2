"""What holds for every registered draft; registering one is getting it tested."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import mmaccel.policies.draft  # noqa: F401 - fills the registry
from mmaccel.core.draft import DraftState, DraftStrategy
from mmaccel.core.errors import RecipeError
from mmaccel.core.generate import speculate
from mmaccel.core.registry import registry
from tests.core.toy import Meter, ToyModel, ToyRunner, alone, bigram, prompt, view

NAMES = list(registry("draft"))
RULE = bigram(torch.randn(6, 6, generator=torch.Generator().manual_seed(0)))
SMALL = bigram(torch.randn(6, 6, generator=torch.Generator().manual_seed(1)))


def build(name: str) -> DraftStrategy:
    """The strategy with its defaults, and a toy draft model where it asks for one."""
    fields: dict[str, Any] = {}
    if "model" in [f.name for f in dataclasses.fields(registry("draft")[name])]:
        fields["model"] = ToyModel(SMALL, 6)
    if name == "parallel":
        fields["process"] = False
    strategy = registry("draft").build(name, fields)
    assert isinstance(strategy, DraftStrategy)
    return strategy


@pytest.mark.parametrize("name", NAMES)
def test_a_strategy_is_a_frozen_record_that_declares_itself(name: str) -> None:
    strategy = build(name)
    assert strategy.name == name and type(strategy).__doc__
    assert isinstance(strategy.needs, frozenset) and strategy.place in ("same", "stream", "process")
    assert isinstance(strategy.active, bool)
    assert strategy.lookback >= 0
    assert (strategy.lookback > 0) == ("rollback" in strategy.needs)
    with pytest.raises(dataclasses.FrozenInstanceError):
        strategy.name = "other"  # type: ignore[misc]
    with pytest.raises(RecipeError):
        registry("draft").build(name, {"no_such_field": 1})


# Those that read an accelerated model's memory need one; tests/models holds them to the same.
@pytest.mark.parametrize("name", [name for name in NAMES if "memory" not in registry("draft")[name].needs])
def test_greedy_output_is_the_targets(name: str) -> None:
    draft = build(name).open(view(RULE, 6))
    assert isinstance(draft, DraftState)
    said, target, meter = prompt([3, 1], max_new_tokens=23), ToyRunner(RULE), Meter()
    draft.begin(said)
    ids = speculate(
        target, draft, said, target.prefill(said.inputs), stop=lambda ids: ids.shape[1] >= 25, meter=meter
    )
    assert ids[0].tolist() == alone(RULE, [3, 1], lambda ids: ids.shape[1] >= 25)
    assert not meter.failures
    assert all(isinstance(value, float) for value in draft.counters().values())
    draft.close()  # a second time does no harm
