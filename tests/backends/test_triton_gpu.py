"""The Triton backend compiled, on a CUDA device: the cases of the interpreter, and what only a device can show."""

from functools import partial

import pytest
import torch

from mmaccel.backends import triton as backend
from mmaccel.core.layout import TEXT, VIDEO
from mmaccel.core.prefill.sparse import attend_plan
from mmaccel.policies.sparse import AShape
from tests.policies.sparse.scenes import Scene, sequence

from .interpreted import GPU
from .oracle import flat, random_plan
from .triton_cases import *  # noqa: F403 - every case runs here as well
from .triton_cases import block_attend, check, draw

pytestmark = GPU

TYPES = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize("heads", [(28, 4), (7, 7)], ids=str)
def test_the_usual_shape(heads: tuple[int, int], block: int, dtype: torch.dtype) -> None:
    scene = Scene((sequence([(TEXT, [50]), (VIDEO, [96] * 9), (TEXT, [40])]),), 0, *heads, 128)
    plan, tensors = scene.planned(AShape(sink=70, window=300, block=block), torch.float32)
    check(plan, list(tensors), dtype, scale=128**-0.5)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("name", ["a_shape", "vertical_slash", "grid"])
def test_patterns_in_the_types_of_models(name: str, dtype: torch.dtype) -> None:
    from tests.policies.sparse.test_contract import small

    from .triton_cases import SCENE

    plan, tensors = SCENE.planned(small(name), torch.float32)
    for chunk in (None, 1):
        check(plan, list(tensors), dtype, kernel=partial(block_attend, chunk=chunk))


def test_a_captured_graph_follows_its_tensors() -> None:
    """With an index that stays, a launch is captured and replayed on new queries and keys; split rows too."""
    plan = random_plan(12, n_query=200, n_key=900).to("cuda")
    arguments = flat(plan.parts[0], plan)
    first, second = ([t.cuda().bfloat16() for t in draw(plan, 2, 64, seed)] for seed in (1, 2))
    for chunk in (None, 2):
        attend = partial(block_attend, chunk=chunk)
        held = [t.clone() for t in first]
        attend(*held, *arguments, 0.125)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, lse = attend(*held, *arguments, 0.125)
        for tensors in (second, first):
            for mine, new in zip(held, tensors, strict=True):
                mine.copy_(new)
            graph.replay()
            want = attend(*tensors, *arguments, 0.125)
            assert torch.equal(out, want[0]) and torch.equal(lse, want[1])


def test_nothing_is_read_on_the_host() -> None:
    plan = random_plan(13, n_query=200, n_key=900).to("cuda")
    tensors = [t.cuda().bfloat16() for t in draw(plan, 2, 64, 1)]
    arguments = flat(plan.parts[0], plan)
    backend.op(*tensors, *arguments, 0.125)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchronizing"):
            tensors[0].sum().item()
        backend.op(*tensors, *arguments, 0.125)
        block_attend(*tensors, *arguments, 0.125, chunk=2)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_offsets_past_two_to_the_31() -> None:
    """Keys so far apart that the last rows lie beyond what 32 bits can address."""
    rows, apart = 600, 1 << 22
    if torch.cuda.mem_get_info()[0] < 12 * rows * apart:
        pytest.skip("needs 12 bytes for each of 2.5e9 elements")
    room = torch.empty(rows * apart, dtype=torch.bfloat16, device="cuda")
    plan = random_plan(14, batch=1, heads=2, n_query=100, n_key=rows, lead="").to("cuda")
    query, key, value = (t.cuda().bfloat16() for t in draw(plan, 1, 64, 1))
    far = [room[at:].as_strided((1, 1, rows, 64), (0, 0, apart, 1)) for at in (0, 64)]
    for view, tensor in zip(far, (key, value), strict=True):
        view.copy_(tensor)
    want = attend_plan(plan, query, key, value, 0.125, backend.op)
    got = attend_plan(plan, query, *far, 0.125, backend.op)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
