"""Heads made to have a pattern: the estimate has to find it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mmaccel.core.layout import TEXT, VIDEO, TokenLayout
from mmaccel.policies.sparse import Grid, estimate

from .scenes import Scene, sequence

N = 640


def codes(n: int, seed: int) -> Tensor:
    """[n, 64] unit vectors of which no two are near."""
    return torch.nn.functional.normalize(
        torch.randn(n, 64, generator=torch.Generator().manual_seed(seed)), dim=1
    )


def grid_head(
    number: Tensor, stride: int, shift: int, line: int, strength: float = 14.0
) -> tuple[Tensor, Tensor]:
    """query, key [1, 1, n, 65] that attend along slashes of phase `shift` and along the columns of class `line`."""
    code = codes(stride, 5)
    key = torch.cat([code[number], (number == line).float()[:, None]], 1)
    query = torch.cat([code[(number - shift) % stride], torch.ones(len(number), 1)], 1)
    return strength * key.shape[1] ** 0.5 * query[None, None], key[None, None]


def grid_mask(number: Tensor, stride: int, shift: int, line: int) -> Tensor:
    n = len(number)
    seen = (number[:, None] - number) % stride == shift
    seen |= (number == line)[:, None] | (number == line)
    return seen & torch.ones(n, n, dtype=torch.bool).tril()


def test_heads_and_sequences_have_strides_of_their_own() -> None:
    grids = [[(16, 0, 3), (21, 5, 0)], [(33, 32, 32), (8, 2, 7)]]
    heads = [[grid_head(torch.arange(N) % s, s, *lines) for s, *lines in row] for row in grids]
    query, key = (torch.cat([torch.cat([h[i] for h in row], 1) for row in heads]) for i in (0, 1))
    layout = TokenLayout.text(2, N)
    plan = Grid(stride="free", max_stride=80, block=16).plan(query, key, layout, layout)
    assert plan is not None
    mask = plan.to_mask()
    for b, row in enumerate(grids):
        for h, (s, *lines) in enumerate(row):
            assert torch.equal(mask[b, h], grid_mask(torch.arange(N) % s, s, *lines))


@pytest.mark.parametrize(("shift", "line"), [(0, 5), (11, 0)])
def test_grid_of_frames_is_not_shifted_by_timestamps(shift: int, line: int) -> None:
    """Frames of 20 tokens with a timestamp of one to three tokens before each."""
    segments = []
    for frame in range(26):
        segments += [(TEXT, [1 + frame % 3]), (VIDEO, [20])]
    scene = Scene((sequence(segments),))
    number, since = [], -1
    for token in scene.sequences[0]:
        since = 0 if token.cell == 0 else since + 1
        number.append(since % 20)
    number = torch.tensor(number)
    plan = Grid(block=16).plan(*grid_head(number, 20, shift, line), scene.layout(), scene.layout())
    assert plan is not None
    assert torch.equal(plan.to_mask()[0, 0], grid_mask(number, 20, shift, line))


def test_a_sink_is_no_grid() -> None:
    """One column that draws nearly everything does not decide the stride of the faint lines behind it."""
    number = torch.arange(N) % 24
    query, key = grid_head(number, 24, 0, 6, strength=10.0)
    key[..., 0, -1] = 1.6
    layout = TokenLayout.text(1, N)
    plan = Grid(stride="free", max_stride=80, block=16).plan(query, key, layout, layout)
    assert plan is not None
    assert torch.equal(plan.to_mask()[0, 0], grid_mask(number, 24, 0, 6))


@pytest.mark.parametrize(("L", "n"), [(1, 1), (1, 9), (4, 4), (4, 5), (16, 70)])
def test_rows_that_line_up_have_the_diagonals_that_gathering_finds(L: int, n: int) -> None:
    rng = torch.Generator().manual_seed(L + n)
    weight = torch.rand(2, 3, L, n, generator=rng)
    want = torch.zeros(2, 3, n)
    for r in range(L):
        for j in range(n - L + r + 1):
            want[:, :, n - L + r - j] += weight[:, :, r, j]
        weight[:, :, r, n - L + r + 1 :] = 0
    torch.testing.assert_close(estimate._skewed(weight), want, rtol=0, atol=1e-5)
    torch.testing.assert_close(estimate._skewed(weight[:, 1:]), want[:, 1:], rtol=0, atol=1e-5)
