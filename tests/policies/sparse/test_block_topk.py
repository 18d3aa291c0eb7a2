"""The content baseline against its definition, block by block, and on heads whose blocks are planted."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

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


N, BLOCK = 512, 16


def planted(seed: int, found: int, strength: float) -> tuple[Tensor, Tensor, Tensor]:
    """query [1, 2, N, 64], key [1, 1, N, 64], and for each head and query block the earlier key blocks it looks at alike."""
    rng = torch.Generator().manual_seed(seed)
    blocks = N // BLOCK
    code = torch.linalg.qr(torch.randn(64, blocks, generator=rng)).Q.T
    key = code.repeat_interleave(BLOCK, 0) + 0.05 * torch.randn(N, 64, generator=rng)
    table = torch.zeros(2, blocks, blocks, dtype=torch.bool)
    for h in range(2):
        for m in range(found + 1, blocks):
            table[h, m, torch.randperm(m, generator=rng)[:found]] = True
    query = (table.float() @ code).repeat_interleave(BLOCK, 1) * strength * 8
    return query[None], key[None, None], table


@pytest.mark.parametrize("score", ["antidiagonal", "mean"])
@pytest.mark.parametrize("choice", [dict(budget=0.9), dict(budget=1.0, top=4)], ids=["mass", "top"])
def test_planted_blocks_are_found(score: str, choice: dict[str, Any]) -> None:
    query, key, table = planted(0, 3, strength=12.0)
    layout = TokenLayout.text(1, N)
    plan = BlockTopK(block=BLOCK, score=score, sink=0, **choice).plan(query, key, layout, layout)
    assert plan is not None
    blocks = N // BLOCK
    seen = plan.to_mask()[0].view(2, blocks, BLOCK, blocks, BLOCK).any(4).any(2)
    assert seen[table].all()
    rows = torch.arange(blocks) > 3
    extra = (seen & ~table & ~torch.eye(blocks, dtype=torch.bool))[:, rows]
    assert extra.sum() <= 0.1 * table.sum()


def test_a_larger_budget_keeps_more() -> None:
    scene = Scene((sequence([(VIDEO, [10] * 25)]),))
    masks = [scene.plan(BlockTopK(block=16, budget=b, sink=0)).to_mask() for b in (0, 0.2, 0.5, 0.8, 1)]
    assert all((less <= more).all() and (less != more).any() for less, more in pairwise(masks))
    assert torch.equal(masks[-1][0, 0], torch.ones(250, 250, dtype=torch.bool).tril())


@given(scene=scenes(), choice=st.sampled_from(CHOICES))
def test_bound_of_a_limit(scene: Scene, choice: dict[str, Any]) -> None:
    pattern = BlockTopK(block=16, **choice)
    plan = scene.plan(pattern)
    lists = plan.parts[0].spans[0].lists
    listed = lists.count.sum(-1).max()
    assert int(listed) <= pattern.max_blocks_total(plan.n_query, plan.n_key)


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
