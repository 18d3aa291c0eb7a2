"""What every registered pattern promises; a new one is tested here by being registered."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

import mmaccel.policies.sparse  # noqa: F401 - registers the patterns
from mmaccel.backends import ops
from mmaccel.core.errors import RecipeError
from mmaccel.core.layout import TEXT, VIDEO
from mmaccel.core.lists import BlockRuns
from mmaccel.core.lower import attend_plan
from mmaccel.core.plan import ABSENT, FULL, TEST, AttentionPlan, Part
from mmaccel.core.registry import registry
from mmaccel.core.sparse import SparsePattern

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

VARIANTS = {"grid of a searched stride": ("grid", dict(stride="free"))}
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
    return cls(**given_fields, **NEEDED.get(name, {}), **more)


def plan_of(pattern: SparsePattern, scene: Scene) -> AttentionPlan | None:
    query, key, _ = scene.tensors()
    layout = scene.layout()
    return pattern.plan(query, key, layout.take(slice(scene.start, None)), layout)


def attend(pattern: SparsePattern, scene: Scene, tensors: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    query, key, value = tensors
    layout = scene.layout()
    scale = scene.size**-0.5
    plan = pattern.plan(query, key, layout.take(slice(scene.start, None)), layout)
    if plan is None:
        return ops.dense_attend(query, key, value, scale, start=scene.start, valid=layout.valid)
    return attend_plan(plan, query, key, value, scale, ops.block_attend)[0]


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


@pytest.mark.parametrize("name", CASES)
@given(scene=scenes())
def test_shapes_lists_and_kinds(name: str, scene: Scene) -> None:
    plan = plan_of(small(name), scene)
    if plan is None:
        return
    B, H = scene.batch, scene.heads
    assert (plan.batch, plan.heads) == (B, H)
    assert (plan.n_query, plan.n_key) == (scene.length - scene.start, scene.length)
    served = torch.zeros(B, H, plan.n_query + 1, dtype=torch.long)
    for part in plan.parts:
        P = part.q_row.shape[-1]
        assert P % plan.block_q == 0 and P > 0 and len(part.spans) > 0
        own = served[:, part.of(H)]
        h = own.shape[1]
        q_row = part.q_row.expand(B, h, P).long()
        assert q_row.max() < plan.n_query and q_row.min() >= -1
        own.scatter_add_(2, torch.where(q_row >= 0, q_row, plan.n_query), torch.ones_like(q_row))
        for span in part.spans:
            N = span.k_row.shape[-1]
            assert N % plan.block_k == 0 and N > 0
            assert span.k_row.max() < plan.n_key and span.k_row.min() >= -1
            for tensor, n in ((span.k_row, N), (span.k_place, N), (span.q_place, P)):
                assert tensor.shape[0] in (1, B) and tensor.shape[1] in (1, h) and tensor.shape[2] == n
            check_lists(plan, part, span, P // plan.block_q, N // plan.block_k)
    # Rows stand in one part, unless parts are declared to overlap; padding stands in none.
    valid = scene.layout().valid[:, None, scene.start :]
    assert (served[..., :-1] * ~valid == 0).all()
    if not plan.overlap:
        assert served[..., :-1].max() <= 1


def check_lists(plan: AttentionPlan, part: Part, span, M: int, n_blocks: int) -> None:
    lists = span.lists.lists() if isinstance(span.lists, BlockRuns) else span.lists
    b, h, m1 = lists.offset.shape
    heads = len(range(plan.heads)[part.of(plan.heads)])
    assert m1 == M + 1 and b in (1, plan.batch) and h in (1, heads)
    assert (lists.offset[..., 1:] >= lists.offset[..., :-1]).all()
    q_row, q_place, k_row, k_place = (
        t.expand(plan.batch, heads, -1) for t in (part.q_row, span.q_place, span.k_row, span.k_place)
    )
    bq, bk = plan.block_q, plan.block_k
    for i in range(b):
        for j in range(h):
            for m in range(M):
                entries = slice(int(lists.offset[i, j, m]), int(lists.offset[i, j, m + 1]))
                blocks = lists.index[entries].tolist()
                assert len(set(blocks)) == len(blocks)
                rows = q_row[i, j, m * bq : (m + 1) * bq] >= 0
                for n, kind in zip(blocks, lists.kind[entries].tolist(), strict=True):
                    assert 0 <= n < n_blocks and kind in (FULL, ABSENT, TEST)
                    keys = slice(n * bk, (n + 1) * bk)
                    gap = q_place[i, j, m * bq : (m + 1) * bq, None] - k_place[i, j, None, keys]
                    inside = ((gap >= span.lo) & (gap < span.hi))[rows]
                    there = k_row[i, j, keys] >= 0
                    if kind == FULL:
                        assert there.all() and inside.all()
                    elif kind == ABSENT:
                        assert inside[:, there].all()


@pytest.mark.parametrize("name", CASES)
@given(scene=scenes())
def test_pairs_are_causal_and_counted(name: str, scene: Scene) -> None:
    pattern = small(name)
    plan = plan_of(pattern, scene)
    if plan is None:
        return
    layout = scene.layout()
    queries = layout.take(slice(scene.start, None))
    mask, count = plan.to_mask(), plan.count_mask()
    ahead = layout.position[:, None] > queries.position[:, :, None]
    nothing = ~layout.valid[:, None] | ~queries.valid[:, :, None]
    assert not (mask & (ahead | nothing)[:, None]).any()
    assert count.max() <= 1
    listed = listed_by_hand(plan)
    assert torch.equal(plan.listed_pairs(), listed)
    assert (listed >= mask.sum((2, 3))).all()


def listed_by_hand(plan: AttentionPlan) -> Tensor:
    total = torch.zeros(plan.batch, plan.heads, dtype=torch.float64)
    for part in plan.parts:
        own = total[:, part.of(plan.heads)]
        for span in part.spans:
            table = span.lists.table(span.k_row.shape[-1] // plan.block_k).expand(*own.shape, -1, -1)
            rows, keys = (
                (row >= 0).expand(*own.shape, -1).unflatten(-1, (-1, block)).sum(-1)
                for row, block in ((part.q_row, plan.block_q), (span.k_row, plan.block_k))
            )
            for b, h, m, n in (table >= 0).nonzero().tolist():
                own[b, h] += int(rows[b, h, m]) * int(keys[b, h, n])
    return total


@pytest.mark.parametrize("name", CASES)
@given(scene=scenes())
def test_bound(name: str, scene: Scene) -> None:
    pattern = small(name)
    plan = plan_of(pattern, scene)
    if plan is None:
        return
    listed = torch.zeros(plan.batch, plan.heads, dtype=torch.long)
    for part in plan.parts:
        for span in part.spans:
            listed[:, part.of(plan.heads)] += span.lists.count.sum(-1)
    assert int(listed.max()) <= pattern.bound(plan.n_query, plan.n_key)


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=15)
@given(scene=scenes())
def test_a_batch_is_its_sequences_one_by_one(name: str, scene: Scene) -> None:
    pattern = small(name)
    tensors = scene.tensors()
    out = attend(pattern, scene, tensors)
    if plan_of(pattern, scene) is None and name != "dense":
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
        assert plan_of(registry("sparse")[name](), Scene((tokens_of(200),))) is None
        return
    scene = Scene((tokens_of(600),))
    plan = plan_of(small(name), scene)
    assert plan is not None
    listed = plan.listed_pairs() / (scene.length * (scene.length + 1) / 2)
    assert (listed < 0.95).all() and (listed > 0).all()


def tokens_of(n: int) -> tuple[Token, ...]:
    return sequence([(TEXT, [8]), (VIDEO, [8] * ((n - 16) // 8)), (TEXT, [8])])
