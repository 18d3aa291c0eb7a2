"""Quick timings of one attention layer on the CPU: dense, and the reference backend under each pattern."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mmaccel.backends import select
from mmaccel.backends.ops.dense_attend import dense_attend
from mmaccel.core.execute import attend_plan
from mmaccel.core.layout import VIDEO, TokenLayout
from mmaccel.core.recipe import Recipe

TOKENS, PER_FRAME = 8192, 16
RECIPES: dict[str, dict[str, Any]] = {
    "a_shape": {"name": "a_shape", "sink": 128, "window": 1024},
    "vertical_slash": {"name": "vertical_slash", "vertical": 64, "slash": 16},
    "grid": {"name": "grid", "stride": "frame"},
}


@pytest.fixture(scope="module")
def layer() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, TokenLayout]:
    """Queries, keys and values of a layer with 4 heads over 8192 tokens of video."""
    torch.manual_seed(0)
    query = torch.randn(1, 4, TOKENS, 64)
    key, value = torch.randn(2, 1, 2, TOKENS, 64)
    place = torch.arange(TOKENS)[None]
    layout = TokenLayout.build(torch.full_like(place, VIDEO), frame=place // PER_FRAME)
    return query, key, value, layout


def test_dense(benchmark: Any, layer: Any) -> None:
    query, key, value, _ = layer
    benchmark.pedantic(dense_attend, (query, key, value, 0.125), rounds=3, warmup_rounds=1)


@pytest.mark.parametrize("name", RECIPES)
def test_reference(name: str, benchmark: Any, layer: Any) -> None:
    query, key, value, layout = layer
    pattern = Recipe.load(sparse=RECIPES[name]).sparse
    kernel = select.get("reference", "cpu")

    def run() -> float:
        plan = pattern.plan(query, key, layout, layout)
        assert plan is not None
        attend_plan(plan, query, key, value, 0.125, kernel)
        return float(plan.listed_pairs().sum())

    listed = benchmark.pedantic(run, rounds=3, warmup_rounds=1)
    benchmark.extra_info["kept"] = listed / (4 * TOKENS * (TOKENS + 1) / 2)
    assert benchmark.extra_info["kept"] < 0.8
