"""The operators of a decode step: what goes to which kernel."""

from __future__ import annotations

import pytest
import torch

from mmaccel.backends.ops import operator
from mmaccel.backends.ops.layer_ops import decode_attend, enter_rows, rope_rows


def test_float64_goes_to_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device with kernels, too: they would not compile, or round it to float32."""
    pytest.importorskip("triton")
    from mmaccel.backends.triton import decode

    launched: list[torch.dtype] = []

    def launch(given: torch.Tensor, *_: object) -> torch.Tensor:
        launched.append(given.dtype)
        return given.clone()

    monkeypatch.setattr(operator, "usable", lambda device: None)
    monkeypatch.setattr(decode, "decode_attend", launch)
    monkeypatch.setattr(decode, "rope_rows", launch)
    for dtype in (torch.float64, torch.float32):
        query, key, value = torch.randn(3, 1, 2, 4, 8, dtype=dtype)
        columns = torch.arange(4)[None]
        decode_attend(query, key, value, columns, 0.3)
        angles = torch.randn(2, 1, 4, 8, dtype=dtype)
        rope_rows(torch.randn(1, 4, 48, dtype=dtype), angles[0], angles[1], columns, columns, key, value)
    assert launched == [torch.float32] * 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_rows_of_types_without_products_of_ours_are_turned_by_one_kernel(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of a model in float16 has no dozen launches a layer for what is one."""
    pytest.importorskip("triton")
    from mmaccel.backends.triton import decode as kernels

    launched: list[torch.dtype] = []

    def launch(given: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        launched.append(given.dtype)
        return rope_rows.plain(given, *rest)

    x, weight = torch.randn(3, 16).to(dtype), [torch.randn(8 * h, 16).to(dtype) for h in (4, 2, 2)]
    turn, columns = torch.randn(2, 1, 3, 8).to(dtype), torch.arange(3)[None]
    mine, theirs = ([torch.zeros(1, 2, 5, 8, dtype=dtype) for _ in range(2)] for _ in range(2))
    given = x, weight, [], torch.ones(16, dtype=dtype), None, 1e-6, turn, columns
    want = enter_rows.plain(*given, *theirs)
    monkeypatch.setattr(operator, "usable", lambda device: None)
    monkeypatch.setattr(kernels, "rope_rows", launch)
    assert torch.equal(enter_rows(*given, *mine), want)
    assert launched == [dtype]
    for one, other in zip(mine, theirs, strict=True):
        assert torch.equal(one, other)
