"""The kernels of a decode step compiled, on a CUDA device: the cases of the interpreter, and a captured graph."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mmaccel.backends import ops
from mmaccel.backends.triton import overlap

from .decode_cases import *  # noqa: F403 - every case runs here as well
from .decode_cases import check, drawn

Layer = tuple[Tensor, list[Tensor], Callable[[], list[Tensor]]]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("n", [1, 6, 10])
@pytest.mark.parametrize("last", [100, 25_000])
def test_the_usual_shape(last: int, n: int) -> None:
    """Pieces and tiles as they are chosen where nobody chooses."""
    check(torch.arange(last, last + n)[None], last + 100, (28, 4), 128, torch.bfloat16)


def test_one_graph_serves_all_lengths() -> None:
    query = drawn(1, 28, 2, 128, dtype=torch.bfloat16)
    key, value = (drawn(1, 4, 5000, 128, dtype=torch.bfloat16, seed=i) for i in (1, 2))
    columns = torch.tensor([[4998, 4999]], device="cuda")
    ops.decode_attend(query, key, value, columns, 0.1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ops.decode_attend(query, key, value, columns, 0.1)
    for last in (1, 63, 64, 300, 4999):
        columns.copy_(torch.tensor([[last - 1, last]]))
        graph.replay()
        assert torch.equal(out, ops.decode_attend(query, key, value, columns, 0.1))


def layer_of(
    B: int, n: int, heads: int, groups: int, size: int, wide: int, columns: Tensor, seed: int
) -> Layer:
    """The launches of a layer of random weights, after one another as in a step, and what they write to."""
    E, kind = heads * size, torch.bfloat16
    made = [
        drawn(*shape, dtype=kind, seed=seed + i) / 30
        for i, shape in enumerate(
            [(E, E), (groups * size, E), (groups * size, E), (E, E), (wide, E), (wide, E), (E, wide)]
        )
    ]
    bias = [drawn(w.shape[0], dtype=kind, seed=seed + 10 + i) for i, w in enumerate(made[:3])]
    gain = [drawn(E, dtype=kind, seed=seed + 20 + i) for i in range(2)]
    x = drawn(B * n, E, dtype=kind, seed=seed + 30)
    cos, sin = (drawn(B, 700, size, dtype=kind, seed=seed + 31 + i) for i in range(2))
    cache = [drawn(B, groups, 700, size, dtype=kind, seed=seed + 33 + i) for i in range(2)]

    def run() -> list[Tensor]:
        rows = x
        for _ in range(3):
            new = ops.project_rows(rows, made[:3], bias, gain[0], 1e-6)
            query = ops.turn_rows(new.view(B, n, -1), cos, sin, columns, columns, *cache)
            out = ops.decode_attend(query, *cache, columns, size**-0.5)
            rows = ops.project_rows(out.transpose(1, 2).reshape(B * n, -1), [made[3]], [], None, 0.0, rows)
            inner = ops.project_rows(rows, made[4:6], [], gain[1], 1e-6, None, True)
            rows = ops.project_rows(inner, [made[6]], [], None, 0.0, rows)
        return [rows, *cache]

    return x, cache, run


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0), reason="kernels do not overlap"
)
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_kernels_that_overlap_give_the_same_bits(
    seed: int, early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random shapes, as launched and captured: 100 replays over changing rows, columns and caches."""
    dice = random.Random(seed)
    B, n, groups, size = dice.choice([1, 1, 3]), dice.choice([1, 2, 7, 20]), dice.choice([1, 2, 4]), 64
    heads, wide = groups * dice.choice([1, 3, 7]), dice.choice([100, 1024, 18944])
    columns = torch.zeros(B, n, dtype=torch.long, device="cuda")
    x, cache, run = layer_of(B, n, heads, groups, size, wide, columns, seed)
    monkeypatch.setattr(overlap, "EARLY", early)
    assert overlap.overlaps(x.device)
    columns += torch.arange(n, device="cuda")
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    monkeypatch.setattr(overlap, "overlaps", lambda _: False)
    for turn in range(100):
        start = torch.tensor([dice.randrange(700 - n) for _ in range(B)], device="cuda")
        columns.copy_(start[:, None] + torch.arange(n, device="cuda"))
        for one in (x, *cache):
            one.normal_()
        before = [one.clone() for one in (x, *cache)]
        want = [one.clone() for one in run()]
        for one, other in zip((x, *cache), before, strict=True):
            one.copy_(other)
        graph.replay()
        assert all(map(torch.equal, found, want)), turn
        if turn % 20 == 0:
            for one, other in zip((x, *cache), before, strict=True):
                one.copy_(other)
            with monkeypatch.context() as on:
                on.setattr(overlap, "overlaps", lambda _: True)
                assert all(map(torch.equal, run(), want)), turn
