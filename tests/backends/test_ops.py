"""The operators as torch sees them: schemas, fakes, tracing."""

from __future__ import annotations

import pytest
import torch

from mmaccel.backends import flex, reference
from mmaccel.backends.ops.dense_attend import dense_attend
from mmaccel.core.prefill.sparse import attend_plan

from .oracle import flat
from .plans import pattern_plan

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_block_attend_is_a_clean_operator(dtype: torch.dtype) -> None:
    plan, scene = pattern_plan("vertical_slash", 60)
    torch.library.opcheck(reference.op, (*scene.tensors(dtype), *flat(plan.parts[0], plan), 0.2))


def test_flex_is_registered_alike() -> None:
    """The other checks run an operator inside modes in which eager FlexAttention, a vmap, does not work."""
    plan, scene = pattern_plan("vertical_slash", 60)
    arguments = (*scene.tensors(torch.float32), *flat(plan.parts[0], plan), 0.2)
    torch.library.opcheck(flex.op, arguments, test_utils="test_autograd_registration")
    schemas = [str(op._opoverload._schema).split("(", 1)[1] for op in (reference.op, flex.op)]
    assert schemas[0] == schemas[1]


@pytest.mark.parametrize("named", [{}, dict(sinks=3, window=9), dict(start=5)], ids=str)
def test_dense_attend_is_a_clean_operator(named: dict[str, int]) -> None:
    _, scene = pattern_plan("a_shape")
    query, key, value = scene.tensors(torch.float32)
    torch.library.opcheck(
        dense_attend.op, (query, key, value, 0.2), dict(valid=scene.layout().valid, **named)
    )
    column = torch.arange(key.shape[2]).flip(0)
    torch.library.opcheck(dense_attend.op, (query, key, value, 0.2), dict(column=column, **named))


@pytest.mark.parametrize("op", [reference.op, flex.op], ids=["reference", "flex"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_the_fake_tells_the_truth(dtype: torch.dtype, op) -> None:
    plan, scene = pattern_plan("grid")
    arguments = (*scene.tensors(dtype), *flat(plan.parts[0], plan), 0.2)
    out, lse = op(*arguments)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        fake_out, fake_lse = op(*arguments)
    for real, fake in ((out, fake_out), (lse, fake_lse)):
        assert (real.shape, real.dtype, real.stride()) == (fake.shape, fake.dtype, fake.stride())


@pytest.mark.parametrize(("op", "backend"), [(reference.op, "aot_eager"), (flex.op, "eager")])
def test_attention_of_a_plan_traces_whole(op, backend: str) -> None:
    plan, scene = pattern_plan("grid")
    query, key, value = scene.tensors(torch.float32)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attend_plan(plan, q, k, v, 0.2, op)[0] + dense_attend(q, k, v, 0.2)

    traced = torch.compile(attend, fullgraph=True, backend=backend)
    assert torch.equal(traced(query, key, value), attend(query, key, value))
