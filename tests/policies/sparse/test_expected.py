"""What a pattern is expected to list is about what it lists, and the bound of what it may list is no wild guess."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mmaccel.backends import reference, select
from mmaccel.backends.measure import Costs, Line
from mmaccel.core.layout import TEXT, VIDEO, TokenLayout
from mmaccel.core.prefill.attention import AttentionConfig, ForwardPass
from mmaccel.core.recipe import Recipe
from mmaccel.policies.sparse import VerticalSlash

NEAR = {"name": "a_shape", "sink": 128, "window": 512}
N, FRAME = 1 << 13, 49
CASES: dict[str, tuple[dict[str, Any], int]] = {
    "a_shape": (NEAR, 0),
    "grid": ({"name": "grid"}, 0),
    "grid with a window and a sink": ({"name": "grid", "window": 1024, "sink": 128}, 0),
    "sf_fixed": ({"name": "sf_fixed"}, 0),
    "sf_strided": ({"name": "sf_strided"}, 0),
    "tri_shape": ({"name": "tri_shape", "window": 512}, 0),
    "q_boundary": ({"name": "q_boundary", "text": NEAR, "video": NEAR}, 8),
    "boundary_2d": ({"name": "boundary_2d", "default": NEAR}, 8),
    "grid in a boundary": ({"name": "boundary_2d", "default": NEAR, "pairs": {"video>video": "grid"}}, 8),
}


def prompt(n: int, islands: int) -> TokenLayout:
    place = torch.arange(n)
    each = n // max(islands, 1)
    text = (place % each >= each - each // 4) & (islands > 0)
    number = (~text).long().cumsum(0) - 1
    modality = torch.where(text, TEXT, VIDEO)[None]
    return TokenLayout.build(modality, frame=torch.where(text, -1, number // FRAME)[None])


def tensors(n: int, heads: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(0)
    return tuple(torch.randn(1, h, n, 16, generator=rng) for h in (heads, 1))


@pytest.mark.parametrize("start", [0, N // 2])
@pytest.mark.parametrize("name", list(CASES))
def test_expected_is_about_what_is_listed(name: str, start: int) -> None:
    sparse, islands = CASES[name]
    pattern = Recipe.load(sparse=sparse).sparse
    layout = prompt(N, islands)
    queries = layout.take(slice(start, None))
    query, key = tensors(N)
    plan = pattern.plan(query[:, :, start:], key, queries, layout)
    listed = sum(float(s.lists.count.double().sum((0, 2)).mean()) for p in plan.parts for s in p.spans)
    expected = pattern.expected_blocks(N - start, N, (queries, layout))
    assert 0.75 * listed <= expected <= 1.4 * listed


class Given(VerticalSlash):
    """Keeps the diagonals it is told, whatever the estimate says."""

    pitch = 1

    def _strongest(
        self, columns: torch.Tensor, diagonals: torch.Tensor, at: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        chosen, found = super()._strongest(columns, diagonals, at)
        given = (torch.arange(self.slash) * self.pitch).clamp(max=columns.shape[2] - 1)
        return chosen, given.expand_as(found)


@pytest.mark.parametrize(
    ("pitch", "ran"), [(1, ["vertical_slash"] * 3), (70, ["vertical_slash", "dense", "dense"])]
)
def test_after_the_first_layer_the_data_decide(pitch: int, ran: list[str]) -> None:
    """Side by side, 100 diagonals touch three blocks; apart, every block: then the layers after the first are dense."""
    pattern = Given(vertical=0, slash=100)
    object.__setattr__(pattern, "pitch", pitch)
    costs = Costs(Line(0.0, 1.0), {"reference": Line(0.0, 3.0)})
    choice = select.Choice("reference", "told", costs)
    n = 4096
    recipe = Recipe.load(sparse="a_shape", dense_tail=0)
    object.__setattr__(recipe, "sparse", pattern)
    road = AttentionConfig(recipe, "reference", reference.op, choice=choice)
    query, key = tensors(n)
    run = ForwardPass(road, layout=TokenLayout.text(1, n))
    for layer in range(3):
        run.attend(layer, query, key, key, 0.25)
    assert [road.meter.names[layer][0] for layer in range(3)] == ran
