"""The operators that make indices: their contracts."""

from __future__ import annotations

import pytest
import torch

from mmaccel.backends.ops import lines
from mmaccel.backends.ops.lines import turned_classes
from mmaccel.core.layout import TEXT, VIDEO
from mmaccel.policies.sparse import Grid
from mmaccel.policies.sparse.grid import ClassOrder
from mmaccel.policies.sparse.orders import LayerInputs
from tests.policies.sparse.scenes import Scene, sequence


def test_the_operators_keep_their_contracts() -> None:
    last, kept = torch.tensor([39, 7]), torch.rand(2, 3, 65)[..., :-1] < 0.2
    torch.library.opcheck(lines.strongest.op, (torch.rand(2, 3, 40), torch.rand(2, 3, 40), last, 9, 5))
    row, line = torch.arange(64, dtype=torch.int32).expand(2, -1), torch.tensor([3, 17, 61]).expand(2, 3, -1)
    torch.library.opcheck(lines.split_line_keys.op, (row, line, line + 1, 60, 16))
    shape = torch.tensor([[0, 1], [0, 3], [16, 9]], dtype=torch.int32)
    member = torch.tensor([[0, 0], [1, 0]], dtype=torch.int32)
    reach = torch.tensor([[[0, 0], [0, 0]], [[2, 3], [4, 0]], [[2, 2], [2, 0]]], dtype=torch.int32)
    for gaps in (0, 2):
        broken = torch.tensor([[1, 2], [0, 2]], dtype=torch.int32)[:, :gaps]
        runs = torch.tensor([[[3, 9], [20, 30]], [[-1, -1]] * 2], dtype=torch.int32).expand(2, 2, 2, 2)[
            :, :gaps
        ]
        more = broken, runs, torch.ones(2, gaps, dtype=torch.int32)
        torch.library.opcheck(lines.slash_runs.op, (kept, [shape, member, member, reach, *more], 16))


@pytest.mark.parametrize("beyond", [{}, dict(window=9, sink=3)], ids=["lines", "lines beyond a window"])
@pytest.mark.parametrize(("columns", "rows"), [(48, 32), (0, 0)])
def test_turned_classes_keep_their_contract(columns: int, rows: int, beyond: dict[str, int]) -> None:
    scene = Scene((sequence([(TEXT, [4]), (VIDEO, [6] * 9), (TEXT, [7])]),), size=16)
    query, key, _ = scene.tensors(torch.float32)
    region = LayerInputs(query, key, scene.layout(), scene.layout(), 16).region()
    grid = Grid(min_stride=2, max_stride=12, block=16, **beyond)
    classes = grid._classes(region)
    assert classes.frames is not None
    order = ClassOrder.of(region, classes.frames, *grid._uncovered(region))
    tokens = [order.queries, order.q_begin, order.keys, order.k_begin, classes.frames.stride[:, 0, 0]]
    told = ([classes.line, classes.shift, classes.dense], classes.most_keys, False, columns, rows)
    torch.library.opcheck(turned_classes.op, (tokens, *told))
