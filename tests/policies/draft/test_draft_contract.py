"""What holds for every registered draft; registering one is getting it tested."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import mmaccel.policies.draft  # noqa: F401 - fills the registry
from mmaccel import check_policy
from mmaccel.core.decoding.draft import DraftStrategy
from mmaccel.core.errors import RecipeError
from mmaccel.core.registry import registry
from tests.core.toy import ToyModel, bigram

NAMES = list(registry("draft"))
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
    assert isinstance(strategy.needs, frozenset) and isinstance(strategy.active, bool)
    with pytest.raises(dataclasses.FrozenInstanceError):
        strategy.name = "other"  # type: ignore[misc]
    with pytest.raises(RecipeError):
        registry("draft").build(name, {"no_such_field": 1})


# Those that read an accelerated model's memory need one; tests/models holds them to the same.
@pytest.mark.parametrize("name", NAMES)
def test_greedy_output_is_the_targets(name: str) -> None:
    check_policy(build(name))
