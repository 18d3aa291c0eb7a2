"""What every registered pattern promises and refuses, and how much it lists; a new one is tested by being registered."""

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from mmaccel import check_policy
from mmaccel.backends import reference, select
from mmaccel.backends.measure import Costs, LinearCost
from mmaccel.backends.ops.dense_attend import dense_attend
from mmaccel.contract.prefill import check_plan
from mmaccel.core.errors import RecipeError
from mmaccel.core.layout import IMAGE, TEXT, VIDEO, TokenLayout
from mmaccel.core.prefill.attention import AttentionConfig, ForwardPass
from mmaccel.core.prefill.plan import AttentionPlan
from mmaccel.core.prefill.sparse import SparsePattern, attend_plan
from mmaccel.core.recipe import Recipe
from mmaccel.core.registry import registry
from mmaccel.policies.sparse import AShape, Boundary2D, Dense, Grid, QBoundary, VerticalSlash

from .scenes import Scene, scenes

SMALL = dict(
    block=16, sink=5, window=11, vertical=9, slash=4, last_q=16, min_stride=2, max_stride=12, bottom=7, budget=0.3
)  # fmt: skip
"""Values for fields of these names that let a pattern leave something out of a prompt of a hundred tokens."""

NAMES = sorted(registry("sparse"))

VARIANTS = {
    "grid of a searched stride": ("grid", dict(stride="free")),
    "grid with a window and a sink": ("grid", dict(window=100, sink=30)),
    "static patterns of queries": (
        "q_boundary",
        dict(text=dict(name="tri_shape", sink=5, window=11, bottom=7), image="sf_strided", video="sf_fixed"),
    ),
    "a static pattern of pairs": (
        "boundary_2d",
        dict(default="sf_strided", pairs={"text>image": "dense", "video>text": None}),
    ),
}
"""Further settings of a pattern, tested like a pattern of their own."""

CASES = [*NAMES, *VARIANTS]

HEADS = {
    0: dict(name="grid", min_stride=2, max_stride=12, last_q=16),
    1: dict(name="a_shape", sink=5, window=11),
    3: dict(name="vertical_slash", vertical=9, slash=4, last_q=16),
}
SIDES = dict(
    text=dict(name="vertical_slash", vertical=9, slash=2, last_q=16),
    image=dict(name="a_shape", sink=2, window=5),
    video=dict(name="grid", min_stride=2, max_stride=12, last_q=16),
)
NEEDED = {
    "q_boundary": SIDES,
    "k_boundary": SIDES,
    "boundary_2d": dict(
        default=SIDES["image"],
        pairs={"text>video": SIDES["text"], "video>video": SIDES["video"], "image>text": None},
    ),
    "per_head": dict(table={0: HEADS}, default=dict(name="a_shape", sink=3, window=21)),
}
"""What a pattern must be told to be anything."""


def small(case: str) -> SparsePattern:
    name, more = VARIANTS.get(case, (case, {}))
    cls = registry("sparse")[name]
    fields = {f.name: f.type for f in dataclasses.fields(cls)}
    given_fields = {n: v for n, v in SMALL.items() if n in fields and fields[n] == type(v).__name__}
    return cls(**{**given_fields, **NEEDED.get(name, {}), **more})


def attend(pattern: SparsePattern, scene: Scene, tensors: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    query, key, value = tensors
    layout, scale = scene.layout(), scene.size**-0.5
    plan = pattern.plan(query, key, layout.select_tokens(slice(scene.start, None)), layout)
    if plan is None:
        return dense_attend(query, key, value, scale, start=scene.start, valid=layout.valid)
    return attend_plan(plan, query, key, value, scale, reference.op)[0]


@pytest.mark.parametrize("name", NAMES)
def test_it_names_each_head_and_its_blocks_are_powers_of_two(name: str) -> None:
    pattern = registry("sparse")[name]()
    assert len(pattern.head_pattern_names(7)) == 7
    for block in (0, 8, 48):
        with pytest.raises(RecipeError, match="block"):
            dataclasses.replace(pattern, block=block)
    check_policy(small(name), rounds=1)


@pytest.mark.parametrize("name", CASES)
@given(scene=scenes())
def test_plans_keep_the_contract(name: str, scene: Scene) -> None:
    query, key, _ = scene.tensors()
    layout = scene.layout()
    plan = check_plan(small(name), query, key, layout.select_tokens(slice(scene.start, None)), layout)
    if plan is not None:
        listed = listed_by_hand(plan)
        assert torch.equal(plan.count_listed_pairs(), listed)
        assert (listed >= plan.to_mask().sum((2, 3))).all()


def listed_by_hand(plan: AttentionPlan) -> Tensor:
    total = torch.zeros(plan.batch, plan.heads, dtype=torch.float64)
    for part in plan.parts:
        own = total[:, part.for_heads(plan.heads)]
        for span in part.spans:
            table = span.lists.to_dense_table().expand(*own.shape, -1, -1)
            rows, keys = (
                (row >= 0).expand(*own.shape, -1).unflatten(-1, (-1, block)).sum(-1)
                for row, block in ((part.q_row, plan.block_q), (span.k_row, plan.block_k))
            )
            own += ((table >= 0) * rows[..., None] * keys[..., None, :]).sum((-2, -1))
    return total


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=10)
@given(scene=scenes())
def test_a_batch_is_its_sequences_one_by_one(name: str, scene: Scene) -> None:
    pattern = small(name)
    tensors = scene.tensors()
    out = attend(pattern, scene, tensors)
    if scene.plan(pattern) is None and name != "dense":
        return
    for b in range(scene.batch):
        lone, (rows, keys) = scene.alone(b)
        query, key, value = (t[b : b + 1] for t in tensors)
        alone = attend(pattern, lone, (query[:, :, rows], key[:, :, keys], value[:, :, keys]))
        torch.testing.assert_close(out[b : b + 1, :, rows], alone, rtol=0, atol=1e-12)
        assert (out[b, :, : rows.start] == 0).all()


NEAR = {"name": "a_shape", "sink": 128, "window": 512}
N, FRAME = 1 << 13, 49
LISTED: dict[str, tuple[dict[str, Any], int]] = {
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
@pytest.mark.parametrize("name", list(LISTED))
def test_expected_is_about_what_is_listed(name: str, start: int) -> None:
    sparse, islands = LISTED[name]
    pattern = Recipe.load(sparse=sparse).sparse
    layout = prompt(N, islands)
    queries = layout.select_tokens(slice(start, None))
    query, key = tensors(N)
    plan = pattern.plan(query[:, :, start:], key, queries, layout)
    listed = sum(float(s.lists.list_lengths.double().sum((0, 2)).mean()) for p in plan.parts for s in p.spans)
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
    costs = Costs(LinearCost(0.0, 1.0), {"reference": LinearCost(0.0, 3.0)})
    choice = select.BackendChoice("reference", "told", costs)
    n = 4096
    recipe = Recipe.load(sparse="a_shape", dense_tail=0)
    object.__setattr__(recipe, "sparse", pattern)
    road = AttentionConfig(recipe, "reference", reference.op, choice=choice)
    query, key = tensors(n)
    run = ForwardPass(road, layout=TokenLayout.text(1, n))
    for layer in range(3):
        run.attend(layer, query, key, key, 0.25)
    assert [road.meter.names[layer][0] for layer in range(3)] == ran


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("dense", dict(block=48), "block is 48"),
    ("a_shape", dict(sink=-1), "sink is -1"),
    ("a_shape", dict(window=0), "window is 0; give at least 1, the token itself"),
    ("a_shape", dict(windows=5), "did you mean 'window'"),
    ("vertical_slash", dict(vertical=-1), "vertical is -1"),
    ("vertical_slash", dict(slash=0), "slash is 0"),
    ("vertical_slash", dict(sink=-1), "sink is -1"),
    ("vertical_slash", dict(last_q=0), "last_q is 0"),
    ("vertical_slash", dict(nearest=0), "nearest is 0; give at least 1, the main diagonal"),
    ("grid", dict(stride="frames"), "'frame' or 'free'"),
    ("grid", dict(min_stride=1), "min_stride 1"),
    ("grid", dict(min_stride=9, max_stride=8), "no range"),
    ("grid", dict(horizontal=False, vertical=False, slash=False), "turn one on"),
    ("grid", dict(last_q=0), "last_q is 0; give at least 1 query"),
    ("grid", dict(window=-1), "window is -1; give at least 0 tokens"),
    ("grid", dict(sink=-1), "sink is -1; give at least 0 tokens"),
    ("grid", dict(slack=1.0), "slack is 1.0"),
    ("grid", dict(score="median"), "score is 'median'; give 'contrast', 'mean' or 'sum'"),
    ("grid", dict(horizontal_phase="rows"), "give 'keys' or 'queries'"),
    ("grid", dict(estimate="heads"), "give 'head' or 'group'"),
    ("vertical_slash", dict(estimate="heads"), "give 'head' or 'group'"),
    ("q_boundary", dict(text="a_shap"), "did you mean 'a_shape'"),
    ("q_boundary", dict(vidio="grid"), "did you mean 'video'"),
    ("q_boundary", dict(video={"name": "grid", "strid": "free"}), "did you mean 'stride'"),
    ("q_boundary", dict(video={"stride": "free"}), "q_boundary: video: a mapping needs the policy's name"),
    ("q_boundary", dict(video={"name": "a_shape", "window": 0}), "window is 0"),
    ("k_boundary", dict(text=5), "k_boundary: text is 5; give one of a_shape, "),
    ("k_boundary", dict(text="boundary_2d"), "k_boundary: text is 'boundary_2d'; give one of a_shape, "),
    ("k_boundary", dict(text=None, image=None, video=None), "all null"),
    ("boundary_2d", dict(pairs={"video>txt": "grid"}), "did you mean 'video>text'"),
    ("boundary_2d", dict(pairs={"video>text": (4, 8)}), r"pairs\['video>text'\] is \(4, 8\); give one of"),
    ("boundary_2d", dict(pairs=["video>text"]), "give a mapping"),
    ("boundary_2d", dict(default=None), "every pair is left out"),
    ("tri_shape", dict(sink=-1), "sink is -1"),
    ("tri_shape", dict(window=0), "window is 0"),
    ("tri_shape", dict(bottom=-1), "bottom is -1"),
    ("sf_fixed", dict(stride=0), "stride is 0"),
    ("sf_fixed", dict(stride="frames"), "'frame' or a number"),
    ("sf_fixed", dict(summary=-1), "summary is -1"),
    ("sf_fixed", dict(side="end"), "'last' or 'first'"),
    ("sf_strided", dict(stride=True), "stride is True"),
    ("sf_strided", dict(min_stride=9, max_stride=8), "no range"),
    ("block_topk", dict(score="max"), "'antidiagonal' or 'mean'"),
    ("block_topk", dict(stride=0), "stride is 0"),
    ("block_topk", dict(stride=24), "divisor of block"),
    ("block_topk", dict(budget=1.5), "budget is 1.5"),
    ("block_topk", dict(top=0), "top is 0"),
    ("block_topk", dict(sink=-1), "sink is -1"),
]


@pytest.mark.parametrize(("name", "fields", "message"), WRONG, ids=[f"{n} {f}" for n, f, _ in WRONG])
def test_a_wrong_field_is_told(name: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        registry("sparse").build(name, fields)


@pytest.mark.parametrize(("kind", "field"), [(AShape, "sink"), (AShape, "window"), (Grid, "window")])
def test_a_number_may_not_be_left_out(kind: Any, field: str) -> None:
    with pytest.raises(RecipeError, match=f"{field} is None; give a whole number"):
        kind(**{field: None})


def test_patterns_of_a_boundary_as_a_recipe_writes_them() -> None:
    fields = dict(
        block=32, default="grid", pairs={"video>text": {"name": "a_shape", "sink": 0}, "text>video": None}
    )
    pattern = registry("sparse").build("boundary_2d", fields)
    assert isinstance(pattern, Boundary2D)
    assert pattern.modality_groups[VIDEO][TEXT] == AShape(sink=0, block=32)
    assert pattern.modality_groups[TEXT] == {TEXT: Grid(block=32), IMAGE: Grid(block=32), VIDEO: None}
    again = Recipe.load(sparse=pattern).to_dict()["sparse"]
    assert again["pairs"]["video>text"]["sink"] == 0 and again["default"]["name"] == "grid"
    assert Recipe.load({"sparse": again}).sparse == pattern


def test_sides_of_a_boundary_as_a_recipe_writes_them() -> None:
    video = {"name": "grid", "stride": "free"}
    fields = {"name": "q_boundary", "text": "dense", "video": video, "image": None}
    pattern = Recipe.load({"sparse": fields}).sparse
    assert pattern == QBoundary(text=Dense(), video=Grid(stride="free"), image=None)
    assert Recipe.load(Recipe.load(sparse=pattern).to_dict()).sparse == pattern


@pytest.mark.parametrize("within", [False, True])
def test_rows_on_no_line_of_a_grid_are_in_a_part(within: bool) -> None:
    """They see nothing, and their output is zero: `mmaccel search` proposes such grids."""
    grid = dict(name="grid", block=16, min_stride=3, max_stride=9, last_q=16, vertical=False, slash=False)
    bounded = dict(name="q_boundary", block=16, text=grid, image=None, video=grid)
    check_policy(Recipe.load(sparse=bounded if within else grid).sparse)
