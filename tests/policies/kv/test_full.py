"""The memory that keeps everything: slices, few copies, true bytes."""

from __future__ import annotations

import torch

from mmaccel.core.memory.buffers import ROOM_MAX
from mmaccel.policies.kv import Full
from tests.policies.kv.memory import open_state


def test_it_is_exact_and_reaches_back_to_the_start() -> None:
    assert Full().exact and Full().rollback_limit is None and Full().allows_sparse


def test_a_view_is_a_slice_of_the_buffer() -> None:
    state = open_state(Full(), layers=1)
    key = torch.randn(1, 2, 5, 4)
    state.append(0, key, key)
    first = state.view(0, key).key
    state.append(0, key, key)
    second = state.view(0, key).key
    assert first.data_ptr() == second.data_ptr() and second.shape[2] == 10
    assert torch.equal(first, key), "an older view is left alone"


def test_growing_copies_seldom_and_wastes_little() -> None:
    state = open_state(Full(), layers=1)
    key = torch.randn(1, 1, 20_000, 2)
    state.append(0, key, key)
    moves, at = 0, 0
    for _ in range(6000):
        state.append(0, key[:, :, :1], key[:, :, :1])
        here = state.view(0, key[:, :, :1]).key.data_ptr()
        moves, at = moves + (here != at), here
    assert moves <= 4
    used = 2 * 26_000 * 2 * 4
    assert used <= state.nbytes() <= used + 2 * ROOM_MAX * 2 * 4
    assert torch.equal(state.view(0, key).key[:, :, :20_000], key)


def test_keys_and_values_may_differ_in_size_and_layers_in_heads() -> None:
    state = open_state(Full(), layers=2)
    for layer, heads in enumerate((2, 3)):
        key, value = torch.randn(1, heads, 7, 6), torch.randn(1, heads, 7, 4)
        state.append(layer, key, value)
        view = state.view(layer, key)
        assert torch.equal(view.key, key) and torch.equal(view.value, value)


def test_the_batch_can_change_after_reset() -> None:
    state = open_state(Full(), layers=1)
    for batch in (1, 3):
        key = torch.randn(batch, 2, 4, 4)
        state.append(0, key, key)
        state.reset()
    assert state.nbytes() == 0
