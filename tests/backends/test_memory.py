"""No tensor with an entry for every pair of a query and a key, at any stage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mmaccel.backends.ops.dense_attend import dense_attend
from mmaccel.backends.reference import block_attend
from mmaccel.core.layout import TokenLayout
from mmaccel.core.prefill.sparse import attend_plan
from mmaccel.policies.sparse import AShape, Grid

S = 4096


class Largest(TorchDispatchMode):
    """Remembers the most entries of any result; one that is expanded holds those of its memory."""

    def __init__(self) -> None:
        super().__init__()
        self.entries = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor):
                held = tensor.untyped_storage().size() // tensor.element_size()
                self.entries = max(self.entries, min(tensor.numel(), held))
        return result


def tensors(n_query: int = S) -> tuple[torch.Tensor, ...]:
    rng = torch.Generator().manual_seed(0)
    return tuple(torch.randn(1, h, n, 16, generator=rng) for h, n in ((2, n_query), (1, S), (1, S)))


def test_the_measure_sees_what_it_is_for() -> None:
    query, key, _ = tensors()
    with Largest() as seen:
        query @ key.transpose(2, 3)
    assert seen.entries >= S * S


@pytest.mark.parametrize(
    "pattern", [AShape(window=3000), Grid(stride="free", max_stride=32)], ids=lambda p: p.name
)
def test_reference(pattern) -> None:
    query, key, value = tensors()
    layout = TokenLayout.text(1, S)
    with Largest() as seen:
        plan = pattern.plan(query, key, layout, layout)
        attend_plan(plan, query, key, value, 0.25, block_attend)
    assert seen.entries < S * S


LEFT, MIDDLE = torch.ones(1, S, dtype=torch.bool), torch.ones(1, S, dtype=torch.bool)
LEFT[:, :100] = False
MIDDLE[:, 2000:2010] = False


@pytest.mark.parametrize(
    ("n_query", "named"),
    [
        (S, {}),
        (S - 500, dict(start=500)),
        (S, dict(window=700, sinks=9)),
        (S, dict(window=S + 1)),
        (S, dict(valid=LEFT)),
        (S, dict(valid=MIDDLE, window=900)),
        (S, dict(column=torch.arange(S).flip(0))),
    ],
    ids=["square", "late", "window", "wide window", "left padding", "holes", "columns"],
)
def test_dense(n_query: int, named: dict[str, Any]) -> None:
    query, key, value = tensors(n_query)
    with Largest() as seen:
        dense_attend.plain(query, key, value, 0.25, **named)
    assert seen.entries < n_query * S
