"""Planning reads nothing back from the device, once the layouts of a prompt have been looked at."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

from mmaccel.backends import select
from mmaccel.backends.ops import operator
from mmaccel.core.layout import IMAGE, TEXT, VIDEO
from mmaccel.core.merge_heads import merge_plans
from mmaccel.core.registry import registry
from mmaccel.core.sparse import attend_plan, launches

from .scenes import Scene, sequence
from .test_contract import CASES, NAMES, small

READS = {
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "bincount",
    "equal",
    "is_nonzero",
    "item",
    "lift_fresh",  # a tensor made of Python numbers, or an index given as a list: its way to a device is waited for
}
SCENE = Scene(
    (
        sequence(
            [(TEXT, [5]), (VIDEO, [6, 6, 6, 5]), (TEXT, [1]), (VIDEO, [6] * 9), (IMAGE, [7]), (TEXT, [30])]
        ),
        sequence([(TEXT, [3]), (VIDEO, [6] * 10), (TEXT, [20])]),
    )
)


class NoReads(TorchDispatchMode):
    """Refuses what would wait for a device: values of tensors, results whose sizes depend on values, lists sent there."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        sized = (kwargs or {}).get("output_size") is not None
        masks = name in ("index", "index_put", "index_put_", "_index_put_impl_") and any(
            t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1]
        )
        if name in READS or masks or (name == "repeat_interleave" and not sized):
            raise AssertionError(f"{func} reads from the device")
        return func(*args, **(kwargs or {}))


def no_lists(self: torch.Tensor) -> list[Any]:
    raise AssertionError("tolist reads from the device")


@pytest.mark.parametrize(
    "read", [lambda t: int(t.sum()), lambda t: t[t > 0], lambda t: t.nonzero(), lambda t: t[[0, 2]]]
)
def test_the_guard_sees_reads(read: Any) -> None:
    with NoReads(), pytest.raises(AssertionError, match="reads from the device"):
        read(torch.arange(4))


@pytest.mark.parametrize("start", [0, 37])
@pytest.mark.parametrize("name", [*CASES, *(f"plain {name}" for name in NAMES)])
def test_a_plan_reads_nothing(name: str, start: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first layer looks at the layouts; every further one, on tensors of its own, at nothing."""
    pattern = registry("sparse")[name[6:]]() if name.startswith("plain ") else small(name)
    scene = Scene(SCENE.sequences, start)
    query, key, _ = scene.tensors()
    layout = scene.layout()
    queries = layout.take(slice(start, None))
    first = pattern.plan(query, key, queries, layout)
    other, _, _ = Scene(SCENE.sequences, start, seed=5).tensors()
    monkeypatch.setattr(torch.Tensor, "tolist", no_lists)
    monkeypatch.setattr(operator, "traced", lambda: False)  # the plain forms are looked into
    with NoReads():
        plan = pattern.plan(other, key, queries, layout)
        if plan is not None:
            plan.listed_pairs()
            launches(plan)
    assert (plan is None) == (first is None)


def test_heads_that_lie_apart_are_put_together_without_reads() -> None:
    """The first layer sends the numbers of the heads to the device; further ones find them there."""
    query, key, _ = SCENE.tensors()
    layout, heads = SCENE.layout(), query.shape[1]
    one, two = (small(name).plan(query, key, layout, layout) for name in ("a_shape", "tri_shape"))
    assert heads == 4 and one is not None and two is not None

    def whole() -> None:
        plan = merge_plans([((0, 2), one), ((1,), two), ((3,), None)], heads, 2, layout, layout)
        assert plan is not None and plan.dense is not None
        plan.listed_pairs()

    whole()
    with NoReads():
        whole()


TRACED = ("a_shape", "vertical_slash", "block_topk", "grid", "boundary_2d", "per_head")
"""Of each way of planning one, in the fast tests; all go through inductor in the slow ones."""


@pytest.mark.parametrize(
    "backend, name",
    [
        *(("eager", name) for name in TRACED),
        *(pytest.param("inductor", name, marks=pytest.mark.slow) for name in CASES if name != "dense"),
    ],
)
def test_planning_and_attention_are_one_graph(backend: str, name: str) -> None:
    """Once the host knows the layout: nothing of a plan, nor the packing of its parts, breaks the graph."""
    torch._dynamo.reset()
    pattern, layout, kernel = small(name), SCENE.layout(), select.get("reference", "cpu")
    tensors = SCENE.tensors(torch.float32)

    def layer(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        plan = pattern.plan(query, key, layout, layout)
        assert plan is not None
        return attend_plan(plan, query, key, value, 0.25, kernel)[0]

    want, counter = layer(*tensors), CompileCounterWithBackend(backend)
    got = torch.compile(layer, backend=counter, fullgraph=True)(*tensors)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-6)
    assert counter.frame_count == 1
    torch._dynamo.reset()
