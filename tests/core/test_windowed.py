"""A window as a plan: the pairs that the dense operator computes, and no pair twice."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mmaccel.backends import reference
from mmaccel.core.memory.kv import KVView
from mmaccel.core.prefill import attention
from mmaccel.core.prefill.sparse import kernel_for, window_plan
from tests.core.test_attention import stream_pass

CPU = torch.device("cpu")
SHAPES = [
    # rows, keys, sinks, window: a full window, one that has yet to fill, sinks in reach, none, one block and less.
    (300, 900, 14, 500),
    (300, 300, 14, 200),
    (130, 700, 40, 690),
    (128, 512, 0, 256),
    (64, 70, 3, 5),
    (257, 1030, 129, 1),
]


@pytest.mark.parametrize(("rows", "keys", "sinks", "window"), SHAPES, ids=str)
def test_its_pairs_are_those_of_the_window(rows: int, keys: int, sinks: int, window: int) -> None:
    plan = window_plan(rows, keys, sinks, window, 2, CPU)
    gap = torch.arange(keys - rows, keys)[:, None] - torch.arange(keys)
    seen = (gap >= 0) & ((gap < window) | (torch.arange(keys) < sinks))
    count = plan.count_mask()
    assert count.max() == 1
    assert torch.equal(count[0, 0] > 0, seen) and torch.equal(count[0, 1] > 0, seen)
    # Blocks, of which two at either end of a window are not whole, are all that is computed beside it.
    assert plan.count_listed_pairs()[0, 0] <= seen.sum() + rows * 4 * 128


def shown(view: KVView) -> Any:
    return SimpleNamespace(view=lambda *_: view)


@pytest.mark.parametrize(("rows", "keys", "sinks", "window"), SHAPES, ids=str)
def test_a_kernel_gives_what_the_dense_operator_gives(rows: int, keys: int, sinks: int, window: int) -> None:
    g = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, heads, n, 16, generator=g, dtype=torch.float64)
        for heads, n in ((4, rows), (2, keys), (2, keys))
    )
    state = shown(KVView(key, value, sinks=sinks, window=window))
    expected = stream_pass(state).attend(0, query, key, value, 0.25)
    calls: list[int] = []

    def kernel(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(args[0].shape[2])
        return reference.op(*args)

    found = stream_pass(state, kernel).attend(0, query, key, value, 0.25)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
    assert calls == [rows]
    # Few rows, and no window, are the dense operator's.
    calls.clear()
    stream_pass(state, kernel).attend(0, query[:, :, -30:], key, value, 0.25)
    stream_pass(shown(KVView(key, value)), kernel).attend(0, query, key, value, 0.25)
    assert not calls and attention.MIN_ROWS > 30


@pytest.mark.gpu
def test_on_a_device_it_is_as_exact_as_masks() -> None:
    """A clip of 16 frames of 196 tokens under a window of 76, 7 heads a group: nearest to float64 as masks are."""
    g = torch.Generator("cuda").manual_seed(0)
    rows, keys, sinks, window = 16 * 196, 14 + 92 * 196, 14, 76 * 196
    query, key, value = (
        torch.randn(1, heads, n, 128, generator=g, device="cuda", dtype=torch.bfloat16)
        for heads, n in ((14, rows), (2, keys), (2, keys))
    )
    state = shown(KVView(key, value, sinks=sinks, window=window))
    kernel = kernel_for(query.device, query.dtype)
    assert kernel is not None
    found, masks = (stream_pass(state, how).attend(0, query, key, value, 128**-0.5) for how in (kernel, None))
    one = KVView(key[:, :1].double(), value[:, :1].double(), sinks=sinks, window=window)
    exact = stream_pass(shown(one)).attend(0, query[:, :7].double(), key[:, :1], value[:, :1], 128**-0.5)
    errors = [(out[:, :7].double() - exact).norm() for out in (found, masks)]
    assert errors[0] <= 1.5 * errors[1]
