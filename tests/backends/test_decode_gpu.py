"""The kernels of a decode step compiled, on a CUDA device: the cases of the interpreter, and a captured graph."""

import pytest
import torch

from mmaccel.backends.ops.layer_ops import decode_attend

from .decode_cases import *  # noqa: F403 - every case runs here as well
from .decode_cases import check, drawn
from .interpreted import GPU

pytestmark = GPU


@pytest.mark.parametrize("n", [1, 6, 10])
@pytest.mark.parametrize("last", [100, 25_000])
def test_the_usual_shape(last: int, n: int) -> None:
    """Pieces and tiles as they are chosen where nobody chooses."""
    check(torch.arange(last, last + n)[None], last + 100, (28, 4), 128, torch.bfloat16)


def test_one_graph_serves_all_lengths() -> None:
    query = drawn(1, 28, 2, 128, dtype=torch.bfloat16)
    key, value = (drawn(1, 4, 5000, 128, dtype=torch.bfloat16, seed=i) for i in (1, 2))
    columns = torch.tensor([[4998, 4999]], device="cuda")
    decode_attend(query, key, value, columns, 0.1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode_attend(query, key, value, columns, 0.1)
    for last in (1, 63, 64, 300, 4999):
        columns.copy_(torch.tensor([[last - 1, last]]))
        graph.replay()
        assert torch.equal(out, decode_attend(query, key, value, columns, 0.1))
