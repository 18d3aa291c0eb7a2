"""Images whose tokens see each other whole, beside a plan, a window, padding and other heads: against a mask written out.
The shares of a plan: equal, disjoint and whole, and merged into what the plan gives."""

import os
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from mmaccel.backends import reference, select, triton
from mmaccel.backends.ops.layer_ops import merge_parts
from mmaccel.core.errors import RecipeError
from mmaccel.core.layout import IMAGE, TEXT, VIDEO, TokenLayout
from mmaccel.core.memory.kv import KVView
from mmaccel.core.prefill.context import ContextGroup, shard_plan_for_rank
from mmaccel.core.prefill.masked import BidirectionalImages
from mmaccel.core.prefill.plan import AttentionPlan
from mmaccel.core.prefill.sparse import attend_plan, window_plan
from mmaccel.core.recipe import Recipe
from mmaccel.core.registry import policy
from mmaccel.policies.kv import Full
from tests.backends.oracle import budget, drawn, masked
from tests.policies.sparse.scenes import Scene, sequence
from tests.spies import product

B, H, G, N, D, START = 2, 4, 2, 300, 16, 70
SPANS = ((0, 80, 100), (0, 100, 230), (0, 240, 241), (1, 90, 155), (1, 20, 60), (1, 280, 300))


def tensors(seed: int = 0, keys: int = N) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = drawn(B, (H, G), N - START, keys, D, seed)
    return query, key, value


def behind(columns: Tensor) -> Tensor:
    """[B, n, N]: the pairs of a token and one behind it in its image, of those that are new."""
    rows, seen = torch.arange(START, N)[:, None], torch.zeros(B, N - START, len(columns), dtype=torch.bool)
    for b, begin, past in SPANS:
        if begin >= START:
            seen[b] |= (begin <= rows) & (rows < columns) & (columns < past)
    return seen


def layout(pad: int = 0) -> TokenLayout:
    valid = torch.ones(B, N, dtype=torch.bool)
    valid[0, :pad] = False
    return TokenLayout.build(torch.full((B, N), IMAGE), valid=valid)


@pytest.mark.parametrize("pad", [0, 33])
@pytest.mark.parametrize(("sinks", "window"), [(0, None), (0, 24), (5, 24), (0, 290)])
def test_a_dense_layer(pad: int, sinks: int, window: int | None) -> None:
    query, key, value = tensors()
    told = layout(pad)
    images = BidirectionalImages(SPANS, frozenset({3})).find_new_images(3, START, told)
    assert images is not None
    assert BidirectionalImages(SPANS, frozenset({3})).find_new_images(2, START, told) is None
    valid = told.valid if pad else None
    out = images.attend(
        None, (), KVView(key, value, None, sinks, window), valid, query, key, value, D**-0.5, None
    )
    rows, columns = torch.arange(START, N)[:, None], torch.arange(N)
    near = torch.ones(N - START, N, dtype=torch.bool) if window is None else rows - columns < window
    mask = ((rows >= columns) & near)[None] | behind(columns)
    if sinks:  # which count from the first token
        first = torch.tensor([pad, 0])[:, None, None]
        mask |= (rows >= columns) & (columns < first + sinks)
    want = masked(query, key, value, (mask & told.valid[:, None])[:, None], D**-0.5)
    assert (out - want).abs().max() < 1e-5


# Interpreted, this test runs among the cases of Triton's kernels (`tests/backends/test_triton.py`).
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.mark.parametrize("dense", [(), (1, 2)])
def test_a_planned_layer(dense: tuple[int, ...]) -> None:
    """The pairs of the pattern, those behind each row in its image, heads that a table leaves dense, and a dense tail that
    begins within an image."""
    kernel = (triton if INTERPRETED else reference).op
    query, key, value = tensors(1)
    told = layout()
    own = {"name": "a_shape", "sink": 8, "window": 20, "block": 16}
    heads = {head: own for head in range(H) if head not in dense}
    pattern = policy(
        "sparse", {"name": "per_head", "block": 16, "table": {0: heads}} if dense else own
    ).for_layer(0)
    plan = pattern.plan(query, key, told.select_tokens(slice(START, None)), told)
    assert bool(plan.dense) == bool(dense)
    images = BidirectionalImages(SPANS, frozenset({0})).find_new_images(0, START, told)
    tails, view = [(slice(None), 180, 230)], KVView(key, value)
    out = images.attend(plan, tails, view, None, query, key, value, D**-0.5, kernel)
    places, columns = torch.arange(START, N)[:, None], torch.arange(N)
    near = (places - columns < 20) | (columns < 8) | (places >= START + 180)
    near = torch.stack([near if head in heads else torch.ones_like(near) for head in range(H)])
    want = masked(query, key, value, ((places >= columns) & near)[None] | behind(columns)[:, None], D**-0.5)
    assert (out - want).abs().max() < 1e-5
    assert images.count_pairs(B).tolist() == [[190 + 130 * 129 / 2], [65 * 32 + 190]]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("size", [128, 256, 512])
def test_on_a_device(size: int) -> None:
    """Heads as large as those of Gemma 3 and 4, images of 256 tokens, within the error of the type."""
    device, keys, start = torch.device("cuda"), 2048, 512
    generator = torch.Generator().manual_seed(0)
    shapes = (1, 8, keys - start, size), (1, 2, keys, size), (1, 2, keys, size)
    query, key, value = (torch.randn(*s, generator=generator).to(device, torch.bfloat16) for s in shapes)
    told = TokenLayout.build(torch.full((1, keys), IMAGE, device=device))
    spans = tuple((0, begin, begin + 256) for begin in range(start, keys - 256, 264))
    images = BidirectionalImages(spans, frozenset({0})).find_new_images(0, start, told)
    pattern = policy("sparse", {"name": "a_shape", "sink": 64, "window": 256})
    plan = pattern.plan(query, key, told.select_tokens(slice(start, None)), told)
    out = images.attend(plan, (), KVView(key, value), None, query, key, value, size**-0.5, triton.op)
    rows, columns = torch.arange(start, keys, device=device)[:, None], torch.arange(keys, device=device)
    mask = (rows >= columns) & ((rows - columns < 256) | (columns < 64))
    for _, begin, past in spans:
        mask |= (begin <= rows) & (rows < columns) & (columns < past)
    exact, most = budget(query, key, value, mask[None, None], size**-0.5)
    assert float((out.double() - exact).abs().max()) <= most


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
        s.lists.list_lengths.sum((0, 2)).expand(len(range(SCENE.heads)[p.for_heads(SCENE.heads)]))
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
    assert torch.equal(sum(one.spans_per_pair() for one in shares), plan.spans_per_pair())
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
    found = [attend_plan(one, query, key, value, 0.125, select.get_op(backend, device)) for one in shares]
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
        assert ContextGroup(mesh, Recipe(kv=Own()), {}).size == 1
        with pytest.raises(RecipeError, match=r"kv 'window'.*only kv 'full' without"):
            ContextGroup(mesh, Recipe(kv="window"), {})
    finally:
        dist.destroy_process_group()
