"""The content baseline against its definition, block by block."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmaccel.core.layout import TEXT, VIDEO, TokenLayout
from mmaccel.policies.sparse import BlockTopK, block_topk

from ...backends.test_memory import Largest
from . import static_masks
from .scenes import Scene, scenes, sequence

CHOICES: list[dict[str, Any]] = [
    dict(sink=0, budget=0.3),
    dict(sink=5, budget=0.6),
    dict(sink=20, budget=0.0),
    dict(sink=16, budget=0.95, top=3),
    dict(sink=0, budget=1.0, top=1),
    dict(sink=40, budget=1.0, top=4),
    dict(sink=0, budget=1.0),
]


@pytest.mark.parametrize("stride", [None, 16, 4, 1], ids=["mean", "16", "4", "1"])
@given(scene=scenes(), choice=st.sampled_from(CHOICES))
def test_the_heaviest_blocks_are_kept(stride: int | None, scene: Scene, choice: dict[str, Any]) -> None:
    how = dict(score="mean") if stride is None else dict(score="antidiagonal", stride=stride)
    pattern = BlockTopK(block=16, **how, **choice)
    plan = scene.plan(pattern)
    listed = plan.parts[0].spans[0].lists.count.sum(-1).max()
    assert int(listed) <= pattern.max_blocks_total(plan.n_query, plan.n_key)
    query, key, _ = scene.tensors()
    got = plan.to_mask().numpy()
    for b, tokens in enumerate(scene.sequences):
        pad, n = scene.pad(b), len(tokens)
        first = max(0, scene.start - pad)
        for h in range(scene.heads):
            q = query[b, h, max(0, pad - scene.start) :].numpy()
            k = key[b, h // (scene.heads // scene.groups), pad:].numpy()
            share = static_masks.block_shares(q, k, first, 16, stride)
            assert np.allclose(share.sum(1), 1)
            mask = static_masks.block_topk(share, n, first, block=16, **{"top": None, **choice})
            assert (got[b, h, max(0, pad - scene.start) :, pad:] == mask[first:]).all()
            assert not got[b, h, :, :pad].any() and not got[b, h, : max(0, pad - scene.start)].any()


def test_a_run_of_queries_at_a_time_is_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene((sequence([(VIDEO, [10] * 20)]), sequence([(TEXT, [150])])), start=21)
    whole = scene.plan(BlockTopK(block=16, budget=0.5, sink=0)).to_mask()
    monkeypatch.setattr(block_topk, "ENTRIES", 1)
    assert torch.equal(scene.plan(BlockTopK(block=16, budget=0.5, sink=0)).to_mask(), whole)


def test_a_limit_makes_the_bound_linear() -> None:
    assert BlockTopK(top=32, sink=128).max_blocks_total(131072, 131072) <= 2048 * 32
    assert BlockTopK().max_blocks_total(128, 131072) == 2047 + 2048


@pytest.mark.parametrize("score", ["antidiagonal", "mean"])
def test_no_tensor_holds_every_pair(score: str) -> None:
    S = 4096
    query, key = torch.randn(1, 2, S, 16), torch.randn(1, 1, S, 16)
    layout = TokenLayout.text(1, S)
    with Largest() as seen:
        BlockTopK(score=score, budget=0.5).plan(query, key, layout, layout)
    assert seen.entries < S * S / 8
