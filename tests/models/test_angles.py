"""The angles of a model's positions are those that its own module makes, with and without a kernel for them."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from mmaccel.backends.ops import layer_ops
from mmaccel.core.attach import adapter_for
from tests.models.streams import pair


@pytest.mark.parametrize("name", ["random-ov", "random-qwen"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_as_the_module_makes_them(name: str, dtype: torch.dtype) -> None:
    model = pair(name)[0]
    family: Any = adapter_for(model)
    places = torch.tensor([0, 1, 7, 900, 352_800])
    positions = places.expand(3, -1) if family.mrope else places
    with mock.patch.object(layer_ops, "angles", wraps=layer_ops.angles) as made:
        found = family.angles(model, positions, dtype)
    assert made.called != family.mrope
    cos, sin = family.rotary(model)(torch.empty(0, dtype=dtype), positions[..., None, :])
    for one, turned in zip(found, (cos, sin), strict=True):
        assert torch.equal(one, turned[:, None])


def test_stretched_angles_are_the_module_s_own() -> None:
    model = pair("random-ov")[0]
    family: Any = adapter_for(model)
    rotary = family.rotary(model)
    with (
        mock.patch.object(rotary, "rope_type", "dynamic"),
        mock.patch.object(layer_ops, "angles", side_effect=AssertionError),
        mock.patch.object(rotary, "forward", side_effect=lambda x, at: (at.float(), -at.float())) as own,
    ):
        family.angles(model, torch.arange(4), torch.float32)
    assert own.called
