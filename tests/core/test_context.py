"""The shares of a plan: equal, disjoint and whole, and merged into what the plan gives."""

from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from mmaccel.backends import reference, select
from mmaccel.backends.ops.layer_ops import merge_parts
from mmaccel.core.errors import RecipeError
from mmaccel.core.layout import IMAGE, TEXT, VIDEO
from mmaccel.core.prefill.context import Context, shard_plan_for_rank
from mmaccel.core.prefill.plan import AttentionPlan
from mmaccel.core.prefill.sparse import attend_plan, window_plan
from mmaccel.core.recipe import Recipe
from mmaccel.core.registry import policy
from mmaccel.policies.kv import Full
from tests.backends.oracle import budget
from tests.policies.sparse.scenes import Scene, sequence
from tests.products import product

SHOWN = [(TEXT, [40]), (VIDEO, [49] * 8), (TEXT, [30]), (IMAGE, [36]), (VIDEO, [49] * 4), (TEXT, [50])]
SCENE = Scene((sequence(SHOWN),), size=16)
LONG = Scene((sequence([(TEXT, [100]), (VIDEO, [64] * 120), (TEXT, [200])]),), size=16)
PATTERNS = {
    "a_shape": dict(sink=20, window=90),
    "tri_shape": dict(sink=20, window=90, bottom=40),
    "sf_strided": {},
    "vertical_slash": dict(vertical=60, slash=12, last_q=32),
    "grid": dict(last_q=32),
    "block_topk": dict(budget=0.3),
    "boundary_2d": {},
    "per_head": dict(
        table={0: {0: dict(name="a_shape", window=64), 1: "grid", 3: dict(name="a_shape", window=200)}},
        default=dict(name="vertical_slash", vertical=40, slash=6),
    ),
}


def plan_of(name: str, start: int, scene: Scene = SCENE) -> AttentionPlan:
    query, key, value = scene.tensors(torch.float32)
    if name == "dense":
        return window_plan(query.shape[2] - start, key.shape[2], 0, key.shape[2], scene.heads, query.device)
    layout = scene.layout()
    pattern = policy("sparse", {"name": name, "block": 16, **PATTERNS[name]}, "").for_layer(0)
    plan = pattern.plan_layer(
        query[:, :, start:], key, value, layout.select_tokens(slice(start, None)), layout
    )
    assert plan is not None
    return plan


def blocks(plan: AttentionPlan) -> int:
    """How many a plan lists, over all heads."""
    counts = [
        s.lists.count.sum((0, 2)).expand(len(range(SCENE.heads)[p.for_heads(SCENE.heads)]))
        for p in plan.parts
        for s in p.spans
    ]
    return int(sum(count.sum() for count in counts))


@pytest.mark.parametrize(("name", "cut"), product(["dense", *PATTERNS], [(2, 0), (3, 300)]), ids=str)
def test_shares_are_equal_and_give_the_plan_s_attention(name: str, cut: tuple[int, int]) -> None:
    size, start = cut
    query, key, value = SCENE.tensors(torch.float32)
    query, plan = query[:, :, start:], plan_of(name, start)
    shares = [shard_plan_for_rank(plan, rank, size) for rank in range(size)]
    assert shard_plan_for_rank(plan, 0, size) is shares[0]
    assert torch.equal(sum(one.count_mask() for one in shares), plan.count_mask())
    assert sum(float(one.count_listed_pairs().sum()) for one in shares) == float(
        plan.count_listed_pairs().sum()
    )
    # Of lists that all heads share one block more is one more of each.
    assert max(map(blocks, shares)) - min(map(blocks, shares)) <= max(SCENE.heads, 0.05 * blocks(shares[0]))
    found = [attend_plan(one, query, key, value, 0.25, reference.op) for one in shares]
    merged = merge_parts(*(torch.stack(tensors) for tensors in zip(*found, strict=True)))
    exact, allowed = budget(query, key, value, plan.to_mask(), 0.25)
    assert float((merged - exact).abs().max()) <= allowed


@pytest.mark.parametrize("name", ["dense", "a_shape", "grid", "vertical_slash", "boundary_2d"])
def test_at_length_the_listed_blocks_of_all_processes_are_within_a_twentieth(name: str) -> None:
    plan = plan_of(name, 0, LONG)
    for size in (2, 4):
        counts = [blocks(shard_plan_for_rank(plan, rank, size)) for rank in range(size)]
        assert sum(counts) == blocks(plan) and max(counts) <= 1.05 * min(counts)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", sorted(select.BACKENDS))
@pytest.mark.parametrize("name", ["dense", *PATTERNS])
def test_every_kernel_computes_a_share_and_no_more(name: str, backend: str) -> None:
    """Cut lists are none of the runs that kernels take neighbouring blocks of queries together by."""
    device = torch.device("cuda")
    if (why := select.why_unusable(device)[backend]) is not None:
        pytest.skip(why)
    scene = replace(SCENE, size=64)
    query, key, value = (x.to(device, torch.bfloat16) for x in scene.tensors())
    plan = plan_of(name, 0, scene).to(device)
    shares = [shard_plan_for_rank(plan, rank, 2) for rank in range(2)]
    found = [attend_plan(one, query, key, value, 0.125, select.get(backend, device)) for one in shares]
    merged = merge_parts(*(torch.stack(tensors) for tensors in zip(*found, strict=True)))
    exact, allowed = budget(query, key, value, plan.to_mask(), 0.125)
    assert float((merged - exact).abs().max()) <= 2 * allowed  # each of two shares is rounded once


def test_who_shares_columns_is_asked_and_not_named() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Own(Full):
        """Somebody else's memory, of full's columns."""

        name = "own"

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        assert Context(mesh, Recipe(kv=Own()), {}).size == 1
        with pytest.raises(RecipeError, match=r"kv 'window'.*only kv 'full' without"):
            Context(mesh, Recipe(kv="window"), {})
    finally:
        dist.destroy_process_group()
