"""What every registered pattern promises; a new one is tested here by being registered."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

import mmaccel.policies.sparse  # noqa: F401 - registers the patterns
from mmaccel import check_policy
from mmaccel.backends import reference
from mmaccel.backends.ops.dense_attend import dense_attend
from mmaccel.contract.prefill import check_plan
from mmaccel.core.errors import RecipeError
from mmaccel.core.layout import TEXT, VIDEO
from mmaccel.core.prefill.plan import AttentionPlan
from mmaccel.core.prefill.sparse import SparsePattern, attend_plan
from mmaccel.core.registry import registry

from .scenes import Scene, Token, scenes, sequence

SMALL = dict(
    block=16,
    sink=5,
    window=11,
    vertical=9,
    slash=4,
    last_q=16,
    min_stride=2,
    max_stride=12,
    bottom=7,
    budget=0.3,
)
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
    plan = pattern.plan(query, key, layout.take(slice(scene.start, None)), layout)
    if plan is None:
        return dense_attend(query, key, value, scale, start=scene.start, valid=layout.valid)
    return attend_plan(plan, query, key, value, scale, reference.op)[0]


@pytest.mark.parametrize("name", NAMES)
def test_is_a_frozen_dataclass_with_defaults(name: str) -> None:
    pattern = registry("sparse")[name]()
    assert pattern.name == name
    assert isinstance(pattern, SparsePattern)
    with pytest.raises(dataclasses.FrozenInstanceError):
        pattern.block = 32
    assert len(pattern.per_head(7)) == 7
    for block in (0, 8, 48):
        with pytest.raises(RecipeError, match="block"):
            dataclasses.replace(pattern, block=block)
    check_policy(small(name), rounds=1)


@pytest.mark.parametrize("name", CASES)
@given(scene=scenes())
def test_plans_keep_the_contract(name: str, scene: Scene) -> None:
    query, key, _ = scene.tensors()
    layout = scene.layout()
    plan = check_plan(small(name), query, key, layout.take(slice(scene.start, None)), layout)
    if plan is not None:
        listed = listed_by_hand(plan)
        assert torch.equal(plan.count_listed_pairs(), listed)
        assert (listed >= plan.to_mask().sum((2, 3))).all()


def listed_by_hand(plan: AttentionPlan) -> Tensor:
    total = torch.zeros(plan.batch, plan.heads, dtype=torch.float64)
    for part in plan.parts:
        own = total[:, part.of(plan.heads)]
        for span in part.spans:
            table = span.lists.table().expand(*own.shape, -1, -1)
            rows, keys = (
                (row >= 0).expand(*own.shape, -1).unflatten(-1, (-1, block)).sum(-1)
                for row, block in ((part.q_row, plan.block_q), (span.k_row, plan.block_k))
            )
            for b, h, m, n in (table >= 0).nonzero().tolist():
                own[b, h] += int(rows[b, h, m]) * int(keys[b, h, n])
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


@pytest.mark.parametrize("name", CASES)
def test_long_enough_defaults_leave_something_out(name: str) -> None:
    if name == "dense":
        assert Scene((tokens_of(200),)).plan(registry("sparse")[name]()) is None
        return
    scene = Scene((tokens_of(600),))
    plan = scene.plan(small(name))
    assert plan is not None
    listed = plan.count_listed_pairs() / (scene.length * (scene.length + 1) / 2)
    assert (listed < 0.95).all() and (listed > 0).all()


def tokens_of(n: int) -> tuple[Token, ...]:
    return sequence([(TEXT, [8]), (VIDEO, [8] * ((n - 16) // 8)), (TEXT, [8])])
