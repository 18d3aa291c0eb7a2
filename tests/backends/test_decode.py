"""The operators of a decode step: their contract, and what goes to which kernel."""

from __future__ import annotations

import pytest
import torch

from mmaccel.backends.ops import operator
from mmaccel.backends.ops.layer_ops import decode_attend, enter_rows, pass_rows, project_rows, rope_rows


def test_the_operators_keep_their_contract() -> None:
    query = torch.randn(2, 3, 4, 8).transpose(1, 2)
    key, value = torch.randn(2, 2, 2, 20, 8).unbind(0)
    columns = torch.tensor([[3, 4, 5], [17, 18, 19]])
    sees = (
        torch.tensor([-1, -1, -1])
        & ~torch.tensor([1 << 62, 0, 0])
        & ~torch.tensor([-(1 << 63), -(1 << 63), 0])
    )
    torch.library.opcheck(decode_attend.op, (query, key, value, columns, 0.3))
    torch.library.opcheck(decode_attend.op, (query, key, value, columns, 0.3, sees))
    chain = decode_attend(query, key, value, columns, 0.3)
    torch.testing.assert_close(decode_attend(query, key, value, columns, 0.3, sees), chain)
    weight = list(torch.randn(2, 12, 16))
    x, gain = torch.randn(5, 16), torch.randn(16)
    torch.library.opcheck(project_rows.op, (x, weight, [], gain, 1e-6, None, True))
    torch.library.opcheck(project_rows.op, (x, weight, list(torch.randn(2, 12))))
    check = torch.library.opcheck
    check(pass_rows.op, (x, torch.randn(12, 16), [torch.randn(12)], torch.randn(5, 12), torch.randn(12)))
    check(project_rows.op, (x, weight, [], None, 1e-6, None, True, torch.rand(5, 3)))
    turn, three = torch.randn(2, 2, 3, 8), [torch.randn(8 * h, 16) for h in (4, 2, 2)]
    entered = (torch.randn(6, 16), three, [], gain, None, 1e-6, turn, columns, key.clone(), value.clone())
    check(enter_rows.op, entered)
    angles = torch.randn(2, 20, 8)
    new = torch.randn(2, 3, 8 * 8)
    torch.library.opcheck(rope_rows.op, (new, angles, angles, columns - 2, columns, key, value.clone()))


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
