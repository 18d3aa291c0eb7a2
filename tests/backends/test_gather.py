"""The operator that gathers units from host memory: its plain form, its shapes, and its kernel on a device."""

from __future__ import annotations

import pytest
import torch

from mmaccel.backends.ops.clusters import gather_units

SLABS = [torch.randn(4, 2, 2, 5, 4) + i for i in range(2)]


def test_the_operator_keeps_its_contract() -> None:
    out = torch.empty(2, 2, 15, 4)
    arguments = out, SLABS, torch.zeros(2, dtype=torch.long), torch.tensor([7, -1, 2])
    torch.library.opcheck(gather_units.op, arguments)
    gather_units(*arguments)
    units = out.view(2, 2, 3, 5, 4)
    assert torch.equal(units[:, :, 0], SLABS[1][3]) and torch.equal(units[:, :, 2], SLABS[0][2])
    assert (units[:, :, 1] == 0).all()


@pytest.mark.gpu
def test_compiled() -> None:
    from . import gather_cases

    for dtype in (torch.bfloat16, torch.float32, torch.uint8):
        for sizes in ((196, 128, 2048), (49, 16, 64), (3, 1, 2048)):
            for programs in (3, 64, 1000):
                gather_cases.test_as_the_plain_way(dtype, sizes, programs)
    gather_cases.test_units_that_lie_apart_where_they_are_written()
