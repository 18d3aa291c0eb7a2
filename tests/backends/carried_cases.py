"""The kernels of running states and of experts against their plain forms; `test_triton.py` runs them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mmaccel.backends.ops.delta import delta_rows
from mmaccel.backends.ops.experts import expert_rows
from mmaccel.backends.triton import delta, experts

from .triton_cases import DEVICE, DTYPES


def drawn(*size: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def close(made: Tensor, plain: Tensor, exact: Tensor) -> bool:
    """Whether `made` is as near to `exact` as the plain form is, or a rounding more."""
    far = (plain.double() - exact).abs().max() + torch.finfo(plain.dtype).eps * exact.abs().max()
    return bool((made.double() - exact).abs().max() <= 2 * far)


# Sequences, rows of each, key heads, value heads, K, V, taps, rows of a journal.
SIZES = [(1, 1, 2, 4, 16, 16, 4, 64), (2, 3, 1, 2, 24, 40, 3, 50), (3, 2, 2, 6, 16, 8, 4, 40)]


@pytest.mark.parametrize("size", [*SIZES, (1, 0, 2, 2, 16, 16, 4, 64)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lag", [0, 5])
def test_rows_through_a_running_state(size: tuple[int, ...], dtype: torch.dtype, lag: int) -> None:
    """Rows of the journal beside a sequence's own, and states of others, stay as they are."""
    count, n, groups, heads, K, V, taps, ring = size
    channels = 2 * groups * K + heads * V
    width, seats = channels + 2 * heads, count + 1
    rows, gate = (
        drawn(count * n, width, seed=0, dtype=dtype),
        drawn(count * n, heads * V, seed=1, dtype=dtype),
    )
    weights = [
        drawn(*shape, seed=2 + at, dtype=dtype) * 0.4
        for at, shape in enumerate([(channels, taps), (heads,), (heads,), (V,)])
    ]
    start = torch.tensor([33, 111, 70][:count])
    base = start - torch.tensor([7, 0, 11][:count])
    told = torch.stack([start, base, torch.maximum(base, start - lag), torch.arange(count, 0, -1)], 1)
    told = told.to(DEVICE)
    before = drawn(seats, ring, width, seed=6, dtype=dtype), drawn(seats, heads, K, V, seed=7) * 0.3
    wide = [x.double() for x in (rows, gate, *weights)]
    # In float64 but for the state, which is float32 in all of them.
    truth = before[0].double(), before[1].clone()
    exact = delta_rows.plain(*wide, 1e-6, told, *truth)
    found = []
    for run in (delta_rows.plain, delta.delta_rows):
        held = before[0].clone(), before[1].clone()
        found.append((run(rows, gate, *weights, 1e-6, told, *held), *held))
    (plain, journal, state), (made, same, moved) = found
    assert torch.equal(journal, same) and torch.equal(moved[0], before[1][0])
    assert (same == before[0]).all(-1).sum() == seats * ring - count * n
    assert n == 0 or close(made, plain, exact)
    far = (state.double() - truth[1].double()).abs().max() + 1e-5
    assert (moved.double() - truth[1].double()).abs().max() <= 2 * far


@pytest.mark.parametrize("size", [(1, 64, 32, 4, 2), (5, 40, 24, 6, 3)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_through_their_experts(size: tuple[int, ...], dtype: torch.dtype) -> None:
    count, wide, deep, number, most = size
    x, share = drawn(count, wide, seed=0, dtype=dtype), drawn(count, most, seed=1, dtype=dtype)
    chosen = torch.rand(count, number, generator=torch.Generator().manual_seed(2)).topk(most).indices
    weights = [
        drawn(*shape, seed=at, dtype=dtype) * 0.2
        for at, shape in ((3, (number, 2 * deep, wide)), (4, (number, wide, deep)))
    ]
    given = chosen.to(DEVICE), share, *weights
    exact = expert_rows.plain(x.double(), given[0], *(one.double() for one in given[1:]))
    assert close(experts.expert_rows(x, *given), expert_rows.plain(x, *given), exact)
