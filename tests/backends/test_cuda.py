"""On a CUDA device: the same answers as on the CPU, from the kernels that serve there, without holding every pair."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from mmaccel.backends import select
from mmaccel.backends.measure import measure_seconds
from mmaccel.backends.ops.dense_attend import dense_attend
from mmaccel.core.prefill.sparse import attend_plan

from .oracle import PATTERNS, SCENE, budget, drawn, pattern_plan
from .test_block_attend import rules

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("start", [0, 70])
@pytest.mark.parametrize("name", list(PATTERNS))
def test_plans_are_those_of_the_cpu(name: str, start: int) -> None:
    plan, scene = pattern_plan(name, start)
    found, _ = scene.planned(PATTERNS[name], device="cuda")
    assert torch.equal(found.to_mask().cpu(), plan.to_mask())
    assert torch.equal(found.count_listed_pairs().cpu(), plan.count_listed_pairs())


LEFT, HOLES = torch.ones(2, 2000, dtype=torch.bool), torch.ones(2, 2000, dtype=torch.bool)
LEFT[1, :300] = False
HOLES[1, 700:720] = False


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (7, 1)], ids=str)
@pytest.mark.parametrize(
    ("n_query", "named"),
    [
        (2000, {}),
        (700, dict(start=1300)),
        (1, dict(start=1999)),
        (5, dict(start=1995)),
        (2000, dict(window=300, sinks=5)),
        (2000, dict(valid=LEFT)),
        (700, dict(start=1300, valid=LEFT)),
        (2000, dict(valid=HOLES, window=900)),
        (1200, dict(start=800, column=torch.arange(2000).flip(0))),
    ],
    ids=["square", "late", "one", "few", "window", "padded", "late and padded", "holes", "columns"],
)
def test_dense(n_query: int, named: dict[str, Any], heads: tuple[int, int], dtype: torch.dtype) -> None:
    query, key, value = (t.to("cuda", dtype) for t in drawn(2, heads, n_query, 2000, 64))
    mask = quick_rules(n_query, **named).cuda()
    exact, allowed = budget(query, key, value, mask, 0.125)
    named = {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in named.items()}
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    got = dense_attend(query, key, value, 0.125, **named)
    assert (
        torch.cuda.max_memory_allocated() - before < 2 * heads[0] * n_query * 2000 * got.element_size()
        or n_query < 16
    )
    assert float((got.double() - exact).abs().max()) <= allowed


def quick_rules(
    n_query: int, start: int = 0, valid=None, window=None, sinks: int = 0, column=None
) -> torch.Tensor:
    """`rules` for 2 x 2000 keys, in tensors; checked against it below."""
    there = torch.ones(2, 2000, dtype=torch.bool) if valid is None else valid
    at = (torch.arange(2000) if column is None else column).expand(2, 2000)
    rank = at if column is not None else there.long().cumsum(1) - 1
    own = start + torch.arange(n_query)
    place = own.expand(2, -1) if column is not None else rank[:, own]
    mask = (at[:, None] <= own[:, None]) & there[:, None]
    if window is not None:
        mask &= (place[:, :, None] - rank[:, None] < window) | (rank[:, None] < sinks)
    padding = ((at[:, None] == own[:, None]) & ~there[:, None]).any(-1, keepdim=True)
    return (mask & ~padding)[:, None]


def test_the_quick_rules_are_the_rules() -> None:
    want = rules(30, 2000, 600, HOLES.tolist(), 3, 90, None, 2)
    assert torch.equal(quick_rules(30, 600, HOLES, 90, 3), want)


def test_auto_is_one_that_runs() -> None:
    assert select.why_unusable("cuda")[select.default_backend("cuda")] is None


def test_flex_serves_the_usual_block_and_size() -> None:
    scene = replace(SCENE, size=128)
    pattern = replace(PATTERNS["a_shape"], block=64)
    plan, (query, key, value) = scene.planned(pattern, torch.bfloat16, "cuda")
    exact, allowed = budget(query, key, value, plan.to_mask(), 0.1)
    out, _ = attend_plan(plan, query, key, value, 0.1, select.get_op("flex", "cuda"))
    assert float((out.double() - exact).abs().max()) <= allowed


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one device")
def test_costs_are_timed_on_the_device_that_they_are_of() -> None:
    """Events of another device's stream would tell of its work."""
    other, busy = torch.device("cuda:1"), torch.randn(8192, 8192, device="cuda:1")
    taken = measure_seconds(lambda: [busy @ busy for _ in range(20)], other)
    assert torch.cuda.current_device() == 0 and taken > 20 * 2 * 8192**3 / 1e15
