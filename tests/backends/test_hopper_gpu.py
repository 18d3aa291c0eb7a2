"""The kernel for Hopper against exact attention: orders of every kind, split rows, and too little room for copies."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mmaccel.backends.ops import operator as operators
from mmaccel.backends.triton.prefill import hopper_launch
from mmaccel.core.layout import TEXT, VIDEO
from mmaccel.core.prefill.sparse import SparsePattern, attend_plan
from mmaccel.policies.sparse import AShape, BlockTopK, Boundary2D, Grid, QBoundary, VerticalSlash
from tests.policies.sparse.scenes import Scene, sequence

from .oracle import TABLES, joint_plan, random_plan
from .triton_cases import block_attend, check, draw

HOPPER = operators.why_kernels_unusable("hopper", torch.device("cuda")) is None
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper device")]


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What was launched; a test in which nothing was has not looked at this kernel."""
    found: list[Any] = []
    plain = hopper_launch.launch_on_hopper

    def told(*args: Any, **named: Any) -> torch.Tensor | None:
        found.append(named)
        return plain(*args, **named)

    monkeypatch.setattr(hopper_launch, "launch_on_hopper", told)
    yield found
    assert found


@pytest.mark.parametrize("chunk", [None, 1, 3])
@pytest.mark.parametrize("lead", ["", "b", "h", "bh"])
@pytest.mark.parametrize(("blocks", "size"), [((128, 64), 128), ((128, 128), 128), ((128, 64), 64)])
def test_random_plans(blocks: tuple[int, int], size: int, lead: str, chunk: int | None) -> None:
    for seed, dtype in ((1, torch.bfloat16), (2, torch.float16)):
        plan = random_plan(seed, lead=lead, n_query=300, n_key=700, blocks=blocks)
        tensors = draw(plan, 2, size, seed)
        check(plan, tensors, dtype, scale=size**-0.5, kernel=partial(block_attend, chunk=chunk))


def on_processors(count: int, patch: pytest.MonkeyPatch) -> None:
    """Launches of this kernel, and of no other part, see a device of so many processors."""
    here = replace(operators.find_device_limits(torch.device("cuda")), processors=count)
    seen = SimpleNamespace(
        find_device_limits=lambda device: here, why_kernels_unusable=operators.why_kernels_unusable
    )
    patch.setattr(hopper_launch, "operators", seen)


@pytest.mark.parametrize("chunk", [None, 1])
@pytest.mark.parametrize("programs", [1, 3])
def test_a_program_computes_tile_after_tile(programs: int, chunk: int | None, monkeypatch) -> None:
    """On a whole device plans as small as these are about a tile a program: here rings and words go round many times."""
    kernel = partial(block_attend, chunk=chunk)
    for lead, size, keys in (("bh", 128, 300), ("bh", 64, 60), ("", 128, 60)):
        plan = random_plan(5, lead=lead, n_query=900, n_key=keys, blocks=(128, 64))
        # Tiles that list nothing, between others, are among them.
        assert keys > 60 or bool((sum(span.lists.list_lengths for span in plan.parts[0].spans) == 0).any())
        tensors = draw(plan, 2, size, 5)
        wanted = check(plan, tensors, torch.bfloat16, scale=size**-0.5, kernel=kernel)
        with monkeypatch.context() as few:
            on_processors(programs, few)
            found = check(plan, tensors, torch.bfloat16, scale=size**-0.5, kernel=kernel)
        # Who computes a tile, and after which, makes no difference.
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def test_what_is_no_number_stays_with_those_who_see_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The values that a tile leaves behind are those that the next one begins with."""
    on_processors(1, monkeypatch)
    plan = random_plan(5, n_query=900, n_key=300, blocks=(128, 64)).to("cuda")
    query, key, value = (t.to("cuda", torch.bfloat16) for t in draw(plan, 2, 128, 5))
    wanted, _ = attend_plan(plan, query, key, value, 128**-0.5, block_attend)
    for b in range(2):
        broken = value.clone()
        broken[b] = torch.nan
        found, _ = attend_plan(plan, query, key, broken, 128**-0.5, block_attend)
        assert torch.equal(found[1 - b], wanted[1 - b]) and bool(found[b].isnan().any())


@pytest.mark.parametrize("heads", [(4, 2), (6, 2)], ids=str)
def test_heads_that_share_lists_share_tiles(heads: tuple[int, int]) -> None:
    plan = random_plan(3, heads=heads[0], n_query=200, n_key=500, lead="", blocks=(64, 64))
    check(plan, draw(plan, heads[1], 128, 3), torch.bfloat16, scale=128**-0.5)


@pytest.mark.parametrize("chunk", [None, 1, 3])
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("second", TABLES)
@pytest.mark.parametrize("first", TABLES)
def test_lists_that_differ_between_neighbours(
    first: str, second: str, size: int, chunk: int | None, launched: list[Any]
) -> None:
    """Equal, disjoint and empty ones, of odd numbers of query blocks, keys absent, in several spans."""
    for names, n_query in (((first,), 300), ((first, second), 640), ((first, second, "random"), 300)):
        plan = joint_plan(len(names), names, n_query=n_query)
        kernel = partial(block_attend, chunk=chunk)
        check(plan, draw(plan, 2, size, 1), torch.bfloat16, scale=size**-0.5, kernel=kernel)
    assert all(named["joint"] for named in launched)


LINE = sequence([(TEXT, [50]), (VIDEO, [96] * 9), (TEXT, [1]), (VIDEO, [96] * 3), (TEXT, [140])])
SCENE = Scene((LINE,), 0, 8, 2, 128)


@pytest.mark.parametrize(
    "pattern",
    [
        AShape(sink=70, window=300, block=64),
        Grid(block=64),
        Grid(stride="free", block=64),
        VerticalSlash(vertical=100, slash=300, block=128),
        VerticalSlash(vertical=100, slash=6, block=64),
        BlockTopK(budget=0.3, sink=0, block=64),
        QBoundary(text=VerticalSlash(slash=6), video=VerticalSlash(slash=6), block=64),
        Boundary2D(default=AShape(sink=70, window=300), pairs={"video>video": Grid()}, block=64),
    ],
    ids=lambda p: type(p).__name__,
)
@pytest.mark.parametrize("interleaved", [False, True])
def test_patterns(pattern: SparsePattern, interleaved: bool) -> None:
    """Tensors as caches hold them, and as projections leave them."""
    plan, tensors = SCENE.planned(pattern, torch.float32)
    if interleaved:
        tensors = tuple(t.transpose(1, 2).contiguous().transpose(1, 2) for t in tensors)
    check(plan, list(tensors), torch.bfloat16, scale=128**-0.5)


@pytest.mark.parametrize("keys", [1343, 1290, 40])
def test_what_lies_behind_the_last_key_is_anything(keys: int) -> None:
    """Keys in their order, as a memory with room shows them: the engine reads whole blocks where they are."""
    scene = Scene((sequence([(TEXT, [keys])]),), 0, 8, 2, 128)
    pattern = AShape(sink=70, window=300, block=64)
    plan, (query, key, value) = scene.planned(pattern, torch.bfloat16, "cuda")
    wanted, sums = attend_plan(plan, query, key, value, 128**-0.5, block_attend)
    assert bool(wanted.isfinite().all())
    key, value = (
        torch.nn.functional.pad(t, (0, 0, 0, 300), value=torch.nan)[:, :, :keys] for t in (key, value)
    )
    found, others = attend_plan(plan, query, key, value, 128**-0.5, block_attend)
    assert torch.equal(found, wanted) and torch.equal(others, sums)


@pytest.mark.parametrize("chunk", [None, 2])
def test_short_of_room_for_copies_the_portable_kernel_computes(monkeypatch, chunk: int | None) -> None:
    monkeypatch.setattr(hopper_launch, "SHARE", torch.cuda.get_device_properties(0).total_memory // (1 << 17))
    for block in (128, 64):
        plan = random_plan(4, n_query=300, n_key=700, blocks=(block, 64))
        kernel = partial(block_attend, chunk=chunk)
        check(plan, draw(plan, 2, 128, 4), torch.bfloat16, scale=128**-0.5, kernel=kernel)
