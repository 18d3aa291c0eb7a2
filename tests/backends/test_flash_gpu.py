"""flash-attn 4 against exact attention: every pattern, orders of every kind, the heads it serves."""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from mmaccel.backends import flash, select
from mmaccel.backends.flash import attend, tiles
from mmaccel.backends.flash.attend import block_attend
from mmaccel.backends.ops import dense_attend as dense
from mmaccel.core.layout import TokenLayout
from mmaccel.policies.sparse import AShape
from tests.policies.sparse.scenes import Scene

from .oracle import PATTERNS, SCENE, budget, check, draw, drawn, random_plan

WHY = flash.why_unusable(torch.device("cuda"))
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(WHY is not None, reason=WHY or "it runs here")]


@pytest.mark.parametrize("start", [0, 70])
@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize("name", list(PATTERNS))
def test_patterns(name: str, block: int, start: int) -> None:
    scene = replace(SCENE, start=start, size=128)
    plan, tensors = scene.planned(replace(PATTERNS[name], block=block), torch.bfloat16, "cuda")
    check(plan, tensors, 128**-0.5, select.get_op("flash", "cuda"))


@pytest.mark.parametrize("start", [0, 70])
@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize("sink", [0, 9])
def test_keys_in_their_order(sink: int, block: int, start: int) -> None:
    """One sequence of its own length, the keys of both spans where they lie."""
    scene = replace(SCENE, sequences=SCENE.sequences[:1], start=start, size=128)
    plan, tensors = scene.planned(AShape(sink=sink, window=30, block=block), torch.bfloat16, "cuda")
    assert all(span.ranks for span in plan.parts[0].spans)
    check(plan, tensors, 128**-0.5, select.get_op("flash", "cuda"))


@pytest.mark.parametrize("window", [1, 127, 129, 300])
@pytest.mark.parametrize("sink", [0, 100, 128])
@pytest.mark.parametrize(
    ("batch", "start", "block"), [(1, 0, 64), (2, 267, 64), (2, 300, 128), (1, 599, 128)]
)
def test_last_queries_of_sequences_of_one_length(
    batch: int, start: int, block: int, sink: int, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a query sees is computed from its number: chunks of queries, edges in tiles and at their edges."""
    told: list[tuple[int, ...] | None] = []

    def bounds(*args: Any) -> tuple[int, ...] | None:
        told.append(tiles.key_bounds(*args))
        return told[-1]

    monkeypatch.setattr(attend, "key_bounds", bounds)
    made = drawn(batch, (4, 2), 600 - start, 600, 128, sink + window)
    tensors = [t.to("cuda", torch.bfloat16) for t in made]
    layout = TokenLayout.text(batch, 600, "cuda")
    pattern = AShape(sink=sink, window=window, block=block)
    plan = pattern.plan(*tensors[:2], layout.select_tokens(slice(start, None)), layout)
    assert plan is not None
    check(plan, tensors, 128**-0.5, block_attend)
    assert len(told) == 1 and None not in told


@pytest.mark.parametrize(
    ("size", "dtype"), [(64, torch.float16), (80, torch.bfloat16), (96, torch.bfloat16)], ids=str
)
@pytest.mark.parametrize("lead", ["", "bh"])
def test_random_plans(lead: str, size: int, dtype: torch.dtype) -> None:
    plan = random_plan(size, lead=lead, n_query=300, n_key=700, blocks=(64, 64))
    tensors = [t.to("cuda", dtype) for t in draw(plan, 2, size, size)]
    check(plan.to("cuda"), tensors, size**-0.5, block_attend)


def test_many_heads_of_a_group() -> None:
    scene = Scene(SCENE.sequences, 0, 14, 2, 128, 3)
    plan, tensors = scene.planned(AShape(sink=9, window=30, block=64), torch.bfloat16, "cuda")
    check(plan, tensors, 0.1, block_attend)


@pytest.mark.parametrize("start", [0, 300])
@pytest.mark.parametrize("size", dense.FLASH_SIZES)
def test_dense(size: int, start: int) -> None:
    """What dense heads take from a length on: queries at the end of the keys, heads of a group."""
    n = 700
    query, key, value = (t.to("cuda", torch.bfloat16) for t in drawn(2, (4, 2), n, start + n, size, size))
    assert dense.find_flash_attn(query, key, value, None)
    mask = torch.ones(n, start + n, dtype=torch.bool, device="cuda").tril(start)[None, None]
    exact, allowed = budget(query, key, value, mask, 0.1)
    with patch.object(dense, "FLASH_FROM", 1), patch.object(dense, "_sdpa", None):
        out = dense.dense_attend(query, key, value, 0.1, start=start)
    assert float((out.double() - exact).abs().max()) <= allowed
