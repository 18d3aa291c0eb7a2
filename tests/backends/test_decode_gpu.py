"""The kernels of a decode step compiled, on a CUDA device: the cases of the interpreter, and a captured graph."""

from __future__ import annotations

import pytest
import torch

from mmaccel.backends import fused, ops
from mmaccel.backends.triton import chain, decode, enter, rows

from .decode_cases import *  # noqa: F403 - every case runs here as well
from .decode_cases import check, drawn

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


@pytest.mark.parametrize("n", [1, 5, 40])
def test_a_captured_chain_gives_the_same_bits_every_time(n: int) -> None:
    """The shape of a 7B model, replayed with other rows: no program goes on before what it reads is written."""
    E, wide = 3584, 18944
    widths = ((E, E), (wide, E), (wide, E), (E, wide), (E, E), (512, E), (512, E))
    *weight, q, k, v = (drawn(*w, dtype=torch.bfloat16, seed=i) / 50 for i, w in enumerate(widths))
    gain, after = drawn(2, E, dtype=torch.bfloat16, seed=10)
    turn, columns = (
        drawn(2, 1, n, 128, dtype=torch.bfloat16, seed=11),
        torch.arange(n, device="cuda")[None] + 7,
    )
    mine, theirs = (
        list(torch.zeros(2, 1, 4, 3000, 128, dtype=torch.bfloat16, device="cuda")) for _ in range(2)
    )
    x, kept = (
        drawn(n, E, dtype=torch.bfloat16, seed=12),
        drawn(2, 1, 4, 3000, 128, dtype=torch.bfloat16, seed=13),
    )
    query = drawn(1, n, 28, 128, dtype=torch.bfloat16).transpose(1, 2)
    run = query, *kept, columns + 2900, 0.1
    counts = torch.zeros(fused.PHASES, dtype=torch.int32, device="cuda")
    given = (x, weight, gain, 1e-6, after, 1e-5, counts, [q, k, v], [], turn, columns + 2900, *mine)

    def chained() -> tuple[torch.Tensor, ...]:
        part, lse = decode.decode_pieces(*run)
        return chain.chain_rows(part, *given, lse)

    chained()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = chained()
    for seed in range(50):
        query.copy_(drawn(1, n, 28, 128, dtype=torch.bfloat16, seed=seed).transpose(1, 2))
        graph.replay()
        attended = decode.decode_attend(*run).transpose(1, 2).reshape(n, E)
        mid, mid_gained, parts = rows.pass_rows(attended, weight[0], [], x, gain)
        gated = rows.project_rows(mid_gained, weight[1:3], [], None, 1e-6, None, True, parts)
        left = rows.pass_rows(gated, weight[3], [], mid, after)
        want = (
            *left,
            enter.enter_rows(left[1], [q, k, v], [], None, left[2], 1e-5, turn, columns + 2900, *theirs),
        )
        for one, other in zip((*got, *mine), (*want, *theirs), strict=True):
            assert torch.equal(one, other)
        assert not counts.any()
