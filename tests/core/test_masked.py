"""Images whose tokens see each other whole, beside a plan, a window, padding and other heads: against a mask written out.
The shares of a plan: equal, disjoint and whole, and merged into what the plan gives. Dense or sparse, told from sizes and
measured costs before anything is planned."""

import os
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from mmaccel.backends import reference, select, triton
from mmaccel.backends.measure import Costs, LinearCost
from mmaccel.backends.ops.dense_attend import dense_attend
from mmaccel.backends.ops.layer_ops import merge_parts
from mmaccel.core.errors import RecipeError
from mmaccel.core.layout import IMAGE, TEXT, VIDEO, TokenLayout
from mmaccel.core.memory.kv import KVView
from mmaccel.core.prefill.attention import AttentionConfig, ForwardPass
from mmaccel.core.prefill.context import ContextGroup, shard_plan_for_rank
from mmaccel.core.prefill.masked import BidirectionalImages
from mmaccel.core.prefill.plan import AttentionPlan
from mmaccel.core.prefill.sparse import attend_plan, window_plan
from mmaccel.core.recipe import Recipe
from mmaccel.core.registry import policy
from mmaccel.core.report import Meter
from mmaccel.policies.kv import Full
from tests.backends.oracle import budget, drawn, masked
from tests.policies.sparse.scenes import Scene, sequence
from tests.spies import broken, product

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
    """The pattern's pairs, those behind each row in its image, dense heads of a table, and a tail begun within an image."""
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
    rows = layout.select_tokens(slice(start, None))
    plan = pattern.plan_layer(query[:, :, start:], key, value, rows, layout)
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


RECIPE = Recipe.load(sparse={"name": "a_shape", "sink": 128, "window": 1024}, dense_tail=0)


@pytest.mark.parametrize("why", ["measured: blocks by reference", "asked for by name"])
@pytest.mark.parametrize("rounds", [0, 3])
def test_a_draft_that_failed_is_told_once_whatever_the_choice(why: str, rounds: int) -> None:
    meter = Meter()
    for _ in range(rounds):
        meter.count_round(4, 2)
    meter.record_draft_failure("out of cheese")
    told = str(meter.report({}, "reference", {}, torch.device("cpu"), why))
    assert told.count("out of cheese") == 1 and ("draft: nothing" in told) == (rounds == 0)


@pytest.mark.parametrize(
    ("rounds", "tokens", "line"),
    [
        ([], 1, "draft: tree was asked for and did nothing: the first token needs no draft"),
        ([0, 0], 3, "draft: tree was asked for and did nothing: it proposed nothing in 2 target steps"),
        (
            [0, 4],
            3,
            "draft: 2 of 4 accepted in 1 round, 2.00 a round; the answer waited 0.500 s for it to read the",
        ),
    ],
)
def test_an_idle_draft_is_told_and_its_reading_is_not_decoding(monkeypatch, rounds, tokens, line) -> None:
    clock = iter([0.0, 1.0, 2.0, 3.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    (one := (whole := Meter()).new_sequence()).count_tokens(1)
    for proposed in rounds:
        one.count_round(proposed, proposed // 2)
    for _ in range(tokens - 1):
        one.count_tokens(1)
    one.record_draft_end({"draft_wait_seconds": 0.5 * bool(any(rounds))}, [])
    report = whole.report({"draft": {"name": "tree"}}, "reference", {}, torch.device("cpu"))
    assert line in str(report) and "\ndraft: nothing" not in str(report)
    assert report.tokens_per_s == (None if tokens == 1 else 2 / 1.5 if any(rounds) else 1.0)


def test_a_question_that_stays_dense_says_why_beside_the_note_of_live_frames() -> None:
    meter, recipe = Meter(), {"sparse": {"name": "grid"}}
    meter.add_note("sparse: frames given to watch see all")
    assert len(meter.report(recipe, "reference", {}, torch.device("cpu")).notes) == 1
    meter.idle["it saves nothing"] = None
    assert meter.report(recipe, "reference", {}, torch.device("cpu")).notes[1].endswith(": it saves nothing")


def priced(each: float, fixed: float = 0.0, **more: LinearCost) -> Costs:
    """A pair of dense attention costs 1, one of listed blocks `each`, and `fixed` once."""
    return Costs(LinearCost(0.0, 1.0), {"reference": LinearCost(fixed, each)}, **more)


def road(costs: Costs | None, recipe: Recipe = RECIPE) -> AttentionConfig:
    return AttentionConfig(
        recipe, "reference", reference.op, choice=select.BackendChoice("reference", "told", costs)
    )


def going(costs: Costs | None, recipe: Recipe = RECIPE) -> ForwardPass:
    return ForwardPass(road(costs, recipe))


def query(rows: int, batch: int = 1) -> torch.Tensor:
    return torch.empty(batch, 4, rows, 16, device="meta")


@pytest.mark.parametrize("batch", [1, 3])
def test_the_bound_is_what_sparse_may_cost(batch: int) -> None:
    """Blocks three times as dear as dense: a window of 1024 wins in a long prompt, whose late rows pay sooner."""
    costs = priced(3.0)
    for n in (1 << 10, 1 << 11, 1 << 12, 1 << 13, 1 << 14, 1 << 16):
        listed = RECIPE.sparse.max_blocks_total(n, n) * 64**2
        assert going(costs).beats_dense(0, query(n, batch), n) == (3 * listed < n * (n + 1) / 2)
    for rows, keys, pays in ((1 << 16, 1 << 16, True), (1 << 10, 1 << 10, False), (2048, 2048, False)):
        assert going(costs).beats_dense(0, query(rows), keys) == pays
    assert going(costs).beats_dense(0, query(2048), 1 << 16)


def test_dense_attention_within_a_window_is_cheaper() -> None:
    """A row of dense attention sees the sinks and the window, or what there is; the pattern must beat that."""
    nothing = torch.empty(0)
    cases = (300, 300, 4, 100), (200, 300, 30, 120), (50, 300, 0, 100), (64, 300, 9, 400)
    for rows, keys, sinks, window in cases:
        seen = sum(min(column + 1, sinks + window) for column in range(keys - rows, keys))
        view = KVView(nothing, nothing, None, sinks, window)
        for price, pays in ((seen - 1, True), (seen + 1, False)):
            assert going(priced(0.0, price * 4.0)).beats_dense(0, query(rows), keys, view) == pays


def test_planning_is_part_of_the_price_and_of_a_short_prompt_nothing_is_looked_at(monkeypatch) -> None:
    """Where making a plan costs more than dense attention, the pattern is not asked what it would list."""
    dear = priced(1.0, planning=LinearCost(1e12, 0.0))
    assert not going(dear).beats_dense(0, query(1 << 16), 1 << 16)
    broken(monkeypatch, type(RECIPE.sparse), "max_blocks_total", AssertionError("a bound was asked for"))
    costs = priced(1.0, planning=LinearCost(4 * 2000**2 / 2, 0.0))
    run = ForwardPass(road(costs), layout=TokenLayout.text(1, 1900))
    assert not run.beats_dense(0, query(1900), 1900)
    with pytest.raises(AssertionError, match="asked for"):
        run.beats_dense(0, query(2100), 2100)


def test_a_loose_bound_counts_no_more_than_causality_admits() -> None:
    """1024 diagonals may touch every block of 8192 keys: then the pattern costs what dense costs, not twice that."""
    recipe = Recipe.load(sparse={"name": "vertical_slash"})
    n = 8192
    assert recipe.sparse.max_blocks_total(n, n) * 64**2 > 1.5 * n * (n + 1) / 2
    assert going(priced(0.9), recipe).beats_dense(0, query(n), n)


@pytest.mark.parametrize(("each", "name"), [(1e-9, "a_shape"), (1e9, "dense")])
def test_a_layer_runs_what_pays(each: float, name: str) -> None:
    way = road(priced(each))
    q, k = torch.randn(1, 4, 100, 16), torch.randn(1, 2, 100, 16)
    out = ForwardPass(way, layout=TokenLayout.text(1, 100)).attend(0, q, k, k, 0.25)
    assert way.meter.names[0] == (name,) * 4
    torch.testing.assert_close(out, dense_attend(q, k, k, 0.25))


def test_without_costs_a_pattern_runs() -> None:
    assert going(None).beats_dense(0, query(64), 64)
    assert ForwardPass(AttentionConfig(RECIPE, "reference", reference.op)).beats_dense(0, query(64), 64)


SAVING = [("a_shape", 140, 1024, "dense"), ("a_shape", 140, 32, "a_shape"), ("a_shape", 66, 32, "dense")]


@pytest.mark.parametrize(("name", "rows", "window", "ran"), [*SAVING, ("block_topk", 140, 0, "dense")])
def test_without_costs_a_later_turn_that_saves_nothing_is_dense(name, rows, window, ran) -> None:
    """A pattern by content lists what it lists at its first layer, and the next ones go by that."""
    sizes = {"sink": 64, "window": window} if window else {"budget": 1.0}
    recipe, keys = Recipe.load(sparse={"name": name, "block": 16, **sizes}), 400
    way, q, k = road(None, recipe), torch.randn(1, 4, rows, 16), torch.randn(1, 2, keys, 16)
    turn = ForwardPass(way, layout=TokenLayout.text(1, keys), start=keys - rows, later=True)
    for layer in (0, 1):
        turn.attend(layer, q, k, k, 0.25)
    assert way.meter.names[1] == (ran,) * 4
    assert (ran == "dense") == any(one.startswith(("the pattern is", "fewer")) for one in way.meter.idle)
    replace(turn, later=False, config=(first := road(None, recipe))).attend(0, q, k, k, 0.25)
    assert first.meter.names[0] == (name,) * 4
