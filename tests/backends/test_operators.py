"""The operators as torch sees them; the plain forms against what they are the short way of; what goes to which kernel."""

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from mmaccel.backends import flex, reference
from mmaccel.backends.ops import clusters, layer_ops, lines, operator
from mmaccel.backends.ops.block_lists import FIELDS, assemble_slices, list_band, listed_pairs
from mmaccel.backends.ops.clusters import copy_units, slab_alignment
from mmaccel.backends.ops.dense_attend import dense_attend
from mmaccel.backends.ops.layer_ops import (
    decode_attend,
    project_rows,
    qkv_rope_rows,
    residual_linear,
    rope_rows,
)
from mmaccel.core.layout import TEXT, VIDEO
from mmaccel.core.prefill.merge_heads import TensorPacker
from mmaccel.core.prefill.sparse import attend_plan
from mmaccel.policies.sparse import Grid
from mmaccel.policies.sparse.grid import TokensByStrideClass
from mmaccel.policies.sparse.orders import LayerInputs
from tests.policies.sparse.scenes import Scene, sequence

from .oracle import flat, pattern_plan

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
Call = tuple[str, Any, tuple[Any, ...]]


def of_steps() -> Iterator[Call]:
    """Decode steps."""
    query = torch.randn(2, 3, 4, 8).transpose(1, 2)
    key, value = torch.randn(2, 2, 2, 20, 8).unbind(0)
    columns = torch.tensor([[3, 4, 5], [17, 18, 19]])
    weight, x, gain = list(torch.randn(2, 12, 16)), torch.randn(5, 16), torch.randn(16)
    yield "decode_attend", decode_attend, (query, key, value, columns, 0.3)
    yield "decode_attend of a tree", decode_attend, (query, key, value, columns, 0.3, torch.tensor([-1] * 3))
    yield "project_rows", project_rows, (x, weight, list(torch.randn(2, 12)))
    yield "project_rows, gated", project_rows, (x, weight, [], gain, 1e-6, None, True)
    yield "project_rows after", project_rows, (x, weight, [], None, 1e-6, None, True, torch.rand(5, 3))
    told = torch.randn(12, 16), [torch.randn(12)], torch.randn(5, 12), torch.randn(12)
    yield "residual_linear", residual_linear, (x, *told)
    turn, three = torch.randn(2, 2, 3, 8), [torch.randn(8 * h, 16) for h in (4, 2, 2)]
    told = torch.randn(6, 16), three, [], gain, None, 1e-6, turn, columns
    yield "qkv_rope_rows", qkv_rope_rows, (*told, key.clone(), value.clone())
    angles = torch.randn(2, 20, 8)
    told = torch.randn(2, 3, 8 * 8), angles, angles, columns - 2, columns
    yield "rope_rows", rope_rows, (*told, key, value.clone())


def of_prompts() -> Iterator[Call]:
    """Rows and lists of a prompt, and units from the host."""
    x = torch.randn(2, 3, 8)
    yield "rms_norm", layer_ops.rms_norm, (x, torch.randn(8), 1e-5)
    yield "silu_multiply_", layer_ops.silu_multiply_, (x.clone(), x)
    yield "rotate_", layer_ops.rotate_, (torch.randn(2, 4, 3, 8), x, x)
    yield "merge_parts", layer_ops.merge_parts, (torch.randn(2, 5, 3, 8), torch.randn(2, 5, 3))
    row = torch.arange(64, dtype=torch.int32).view(1, 1, 64)
    heads, none = row.expand(1, 3, 64).contiguous(), torch.empty(0, dtype=torch.int32)
    yield "list_band", list_band, (row, heads, row, row, 0, 20, 16, 16)
    lists, _ = list_band(row, heads, row, row, 0, 20, 16, 16)
    yield "listed_pairs", listed_pairs, (lists, none, row, heads, 16, 16)
    last, kept = torch.tensor([39, 7]), torch.rand(2, 3, 65)[..., :-1] < 0.2
    yield "strongest", lines.choose_lines, (torch.rand(2, 3, 40), torch.rand(2, 3, 40), last, 9, 5)
    yield "strongest, all", lines.choose_lines, (torch.rand(2, 3, 40), torch.rand(2, 3, 40), last, 90, 50)
    line = torch.tensor([3, 17, 61]).expand(2, 3, -1)
    yield "split_columns", lines.split_columns, (row[0].expand(2, -1), line, line + 1, 60, 16)
    shape = torch.tensor([[0, 1], [0, 3], [16, 9]], dtype=torch.int32)
    member = torch.tensor([[0, 0], [1, 0]], dtype=torch.int32)
    at = torch.tensor([[[0, 0], [0, 0]], [[2, 3], [4, 0]], [[2, 2], [2, 0]]], dtype=torch.int32)
    runs = torch.tensor([[[3, 9], [20, 30]], [[-1, -1]] * 2], dtype=torch.int32).expand(2, 2, 2, 2)
    for gaps in (0, 2):
        broken = torch.tensor([[1, 2], [0, 2]], dtype=torch.int32)[:, :gaps]
        more = broken, runs[:, :gaps], torch.ones(2, gaps, dtype=torch.int32)
        told = [shape, member, member, at, *more], 16
        yield f"list_slash_blocks, {gaps} gaps", lines.list_slash_blocks, (kept, *told)
    scene = Scene((sequence([(TEXT, [4]), (VIDEO, [6] * 9), (TEXT, [7])]),), size=16)
    query, key, _ = scene.tensors(torch.float32)
    region = LayerInputs(query, key, scene.layout(), scene.layout(), 16).region()
    for beyond in ({}, dict(window=9, sink=3)):
        grid = Grid(min_stride=2, max_stride=12, block=16, **beyond)
        classes = grid._classes(region)
        assert classes.frames is not None
        order = TokensByStrideClass.sort(region, classes.frames, *grid._uncovered(region))
        tokens = [order.queries, order.q_begin, order.keys, order.k_begin, classes.frames.stride[:, 0, 0]]
        made = [classes.line, classes.shift, classes.dense], classes.most_keys, False
        for sizes in ((48, 32), (0, 0)):
            yield f"sort_by_class {sizes} {beyond}", lines.sort_by_class, (tokens, *made, *sizes)
    sheet = TensorPacker()
    sheet.record_write(sheet.reserve((1, 2, 64), -1, torch.int32), (1,), torch.arange(5).view(1, 1, 5), 2)
    fills = len(sheet._fills) // len(FIELDS)
    put = [*sheet._fills, *sheet._puts]
    yield "assemble_slices", assemble_slices, (sheet._sources, put, fills, sheet._ends)
    slabs, base = [torch.randn(4, 2, 2, 5, 4) for _ in range(2)], torch.zeros(2, dtype=torch.long)
    out, slot = torch.empty(2, 2, 15, 4), torch.tensor([7, -1, 2])
    yield "copy_units", copy_units, (out, slabs, base, slot, slab_alignment(slabs))


@pytest.mark.parametrize("call", [*of_steps(), *of_prompts()], ids=lambda call: call[0])
def test_an_operator_keeps_its_contract(call: Call) -> None:
    _, op, arguments = call
    torch.library.opcheck(op.op, arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_block_attend_is_a_clean_operator(dtype: torch.dtype) -> None:
    plan, scene = pattern_plan("vertical_slash", 60)
    arguments = (*scene.tensors(dtype), *flat(plan.parts[0], plan), 0.2)
    torch.library.opcheck(reference.op, arguments)
    # The other checks run an operator inside modes in which eager FlexAttention, a vmap, does not work.
    torch.library.opcheck(flex.op, arguments, test_utils="test_autograd_registration")
    schemas = [str(op._opoverload._schema).split("(", 1)[1] for op in (reference.op, flex.op)]
    assert schemas[0] == schemas[1]


@pytest.mark.parametrize("named", [{}, dict(sinks=3, window=9), dict(start=5)], ids=str)
def test_dense_attend_is_a_clean_operator(named: dict[str, int]) -> None:
    _, scene = pattern_plan("a_shape")
    query, key, value = scene.tensors(torch.float32)
    for more in (dict(valid=scene.layout().valid), dict(column=torch.arange(key.shape[2]).flip(0))):
        torch.library.opcheck(dense_attend.op, (query, key, value, 0.2), dict(**more, **named))


@pytest.mark.parametrize("op", [reference.op, flex.op], ids=["reference", "flex"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_the_fake_tells_the_truth(dtype: torch.dtype, op) -> None:
    plan, scene = pattern_plan("grid")
    arguments = (*scene.tensors(dtype), *flat(plan.parts[0], plan), 0.2)
    found = op(*arguments)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        fakes = op(*arguments)
    for real, fake in zip(found, fakes, strict=True):
        assert (real.shape, real.dtype, real.stride()) == (fake.shape, fake.dtype, fake.stride())


@pytest.mark.parametrize(("op", "backend"), [(reference.op, "aot_eager"), (flex.op, "eager")])
def test_attention_of_a_plan_traces_whole(op, backend: str) -> None:
    plan, scene = pattern_plan("grid")
    query, key, value = scene.tensors(torch.float32)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attend_plan(plan, q, k, v, 0.2, op)[0] + dense_attend(q, k, v, 0.2)

    traced = torch.compile(attend, fullgraph=True, backend=backend)
    assert torch.equal(traced(query, key, value), attend(query, key, value))


def test_the_plain_forms() -> None:
    x, weight = torch.randn(2, 3, 8), torch.randn(8)
    torch.testing.assert_close(
        layer_ops.rms_norm(x, weight, 1e-5), torch.nn.functional.rms_norm(x, (8,), weight, 1e-5)
    )
    gate = x.clone()
    layer_ops.silu_multiply_(gate, 2 * x)
    torch.testing.assert_close(gate, 2 * x * x * x.sigmoid())
    q = torch.randn(2, 4, 3, 8)
    angle = torch.cat([x[..., :4]] * 2, -1)
    numbers = torch.view_as_complex(torch.stack([q[..., :4], q[..., 4:]], -1))
    wanted = torch.view_as_real(numbers * torch.polar(torch.ones(2, 1, 3, 4), x[:, None, :, :4]))
    layer_ops.rotate_(q, angle.cos(), angle.sin())
    torch.testing.assert_close(q, torch.cat([wanted[..., 0], wanted[..., 1]], -1))
    # A row of a tree that sees all before it is one of a chain, whatever is said of columns that are not there.
    query, columns = torch.randn(2, 3, 4, 8).transpose(1, 2), torch.tensor([[3, 4, 5], [17, 18, 19]])
    key, value = torch.randn(2, 2, 2, 20, 8).unbind(0)
    sees = ~torch.tensor([1 << 62, 0, 0]) & ~torch.tensor([-(1 << 63), -(1 << 63), 0])
    chain = decode_attend(query, key, value, columns, 0.3)
    torch.testing.assert_close(decode_attend(query, key, value, columns, 0.3, sees), chain)


def test_pieces_lie_where_they_are_put() -> None:
    sheet = TensorPacker()
    one, two = sheet.reserve((2, 3, 4), -1, torch.int32), sheet.reserve((1, 2, 2, 5), 0, torch.int64)
    first = torch.arange(12, dtype=torch.int32).view(2, 2, 3)
    sheet.record_write(one, (0, 2), first, 1, more=10)
    sheet.record_write(two, (1,), torch.ones(1, 1, 1, 5, dtype=torch.int64), 1, more=5, shift=2)
    sheet.write_recorded()
    want = torch.full((2, 3, 4), -1, dtype=torch.int32)
    want[:, [0, 2], 1:] = first + 10
    assert torch.equal(sheet.packed_tensor(one), want)
    rows = torch.zeros(1, 2, 2, 5, dtype=torch.int64)
    rows[0, 1, 1] = torch.tensor([6, 1, 1, 1, 3])
    assert torch.equal(sheet.packed_tensor(two), rows)


def test_very_many_clusters_are_sorted() -> None:
    """Comparing each with all is for some thousands."""
    launched = mock.Mock()
    with (
        mock.patch.object(operator, "why_triton_unusable", lambda device: None),
        mock.patch("mmaccel.backends.triton.stream.mark_clusters_beyond_budget", launched),
    ):
        for count in (clusters.MOST, clusters.MOST + 1):
            clusters.mark_clusters_beyond_budget(
                torch.zeros(1, count), torch.ones(count, dtype=torch.long), 3, 0
            )
    assert launched.call_count == 1 and launched.call_args[0][0].shape == (1, clusters.MOST)


def test_float64_goes_to_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device with kernels, too: they would not compile, or round it to float32."""
    pytest.importorskip("triton")
    from mmaccel.backends.triton import decode

    launched: list[torch.dtype] = []

    def launch(given: torch.Tensor, *_: object) -> torch.Tensor:
        launched.append(given.dtype)
        return given.clone()

    monkeypatch.setattr(operator, "why_triton_unusable", lambda device: None)
    monkeypatch.setattr(decode, "decode_attend", launch)
    monkeypatch.setattr(decode, "rope_rows", launch)
    for dtype in (torch.float64, torch.float32):
        query, key, value = torch.randn(3, 1, 2, 4, 8, dtype=dtype)
        columns = torch.arange(4)[None]
        decode_attend(query, key, value, columns, 0.3)
        angles = torch.randn(2, 1, 4, 8, dtype=dtype)
        rope_rows(torch.randn(1, 4, 48, dtype=dtype), angles[0], angles[1], columns, columns, key, value)
    assert launched == [torch.float32] * 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_rows_of_types_without_products_of_ours_are_turned_by_one_kernel(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of a model in float16 has no dozen launches a layer for what is one."""
    pytest.importorskip("triton")
    from mmaccel.backends.triton import decode as kernels

    launched: list[torch.dtype] = []

    def launch(given: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        launched.append(given.dtype)
        return rope_rows.plain(given, *rest)

    x, weight = torch.randn(3, 16).to(dtype), [torch.randn(8 * h, 16).to(dtype) for h in (4, 2, 2)]
    turn, columns = torch.randn(2, 1, 3, 8).to(dtype), torch.arange(3)[None]
    mine, theirs = ([torch.zeros(1, 2, 5, 8, dtype=dtype) for _ in range(2)] for _ in range(2))
    given = x, weight, [], torch.ones(16, dtype=dtype), None, 1e-6, turn, columns
    want = qkv_rope_rows.plain(*given, *theirs)
    monkeypatch.setattr(operator, "why_triton_unusable", lambda device: None)
    monkeypatch.setattr(kernels, "rope_rows", launch)
    assert torch.equal(qkv_rope_rows(*given, *mine), want)
    assert launched == [dtype]
    for one, other in zip(mine, theirs, strict=True):
        assert torch.equal(one, other)
