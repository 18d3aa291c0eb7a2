"""The checksum of a model's weights, which a saved session names."""

import copy
from typing import Any

import pytest
import torch

from mmaccel.core.errors import ModelError
from mmaccel.models import shards


def test_the_checksum_of_weights_is_never_that_of_before() -> None:
    """Values changed in place, under torch's counter of versions too, sizes, and names count; equal weights agree again."""
    model: Any = torch.nn.Sequential(
        torch.nn.Linear(5, 7), torch.nn.LayerNorm(7).half(), torch.nn.Linear(7, 0)
    )
    model.register_buffer("steps", torch.zeros((), dtype=torch.float64))
    model.register_buffer("nothing", torch.zeros(0, dtype=torch.int16))
    found = [shards.weights_checksum(model)]
    for change in (
        lambda: model[0].weight.data.add_(1),
        lambda: model[1].bias.data.neg_(),  # 0.0 and -0.0
        lambda: model.steps.add_(1),
        lambda: setattr(model[1], "bias", torch.nn.Parameter(model[1].bias.detach()[None])),
        lambda: setattr(model, "3", model._modules.pop("1")),
    ):
        change()
        found.append(shards.weights_checksum(model))
        assert found[-1] == shards.weights_checksum(copy.deepcopy(model))
    assert len(set(found)) == 6
    model.tp_size = 2
    with pytest.raises(ModelError, match="2 processes share"):
        shards.weights_checksum(model)
