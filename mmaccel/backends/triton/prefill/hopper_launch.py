"""Launches the Hopper kernels (`hopper`, `hopper_joint`): supported inputs, where TMA reads the keys of each block, the
table of spans; for `hopper_joint` also tiles of neighbouring query blocks and the splitting of lists.

A block whose keys are adjacent in the tensor is read in place; others (in a permuted order, at the edges of a segment, or
beyond the tensor's end) are copied once, block by block, to a pool. Both are decided on the device, as is a block's slot. An
absent key must read finite values, since its weight of zero multiplies them: rows of the tensor are finite, rows behind its
end in a larger buffer need not be.
"""

# mypy: disable-error-code="no-untyped-call, no-untyped-def, untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, reduce
from math import prod
from operator import add
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmaccel.backends.ops import operator as operators
from mmaccel.backends.ops.block_attend import KeySpan
from mmaccel.backends.triton.launch_args import leading_strides, row_strides
from mmaccel.backends.triton.prefill.kernel import (
    LEAST_CHUNK,
    SplitListPieces,
    count_resident_programs,
    merge_kernel,
    split_kernel_args,
)
from mmaccel.backends.triton.prefill.lists import get_cached_on_plan, prefix_count_masked_blocks

BOX = 64  # keys of a block of the copy engine
FAR = 2**31 - 1  # the place of what is not there
ROWS = 128  # rows of a tile

STAGES = 2

JOINT = 3  # neighbouring query blocks of a tile of `hopper_joint`
PLACES = {2: 6, 3: 5}  # places of its ring of key blocks, as many as fit shared memory
LAG = 3  # steps for which its groups go on without giving free the values of their last block
SHARE = 8  # copies of keys and values take 1 / SHARE of the device's memory at the most
HALF = 29  # bits of each of the two numbers in which one is told to the kernel


@triton.jit(do_not_specialize=["home", "blocks", "heads", "keys"])
def find_adjacent_rows_kernel(
    row, row_b, row_h, home, blocks, heads, keys,
    SHARED: tl.constexpr, BOX: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Write to `home`, for each of BLOCKS key blocks, the row of its first key in the key tensor (of `keys` rows) if its BOX
    keys are adjacent there, else -1."""
    b, x = tl.program_id(2), tl.program_id(1)
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    n = tl.arange(0, BOX)
    head = x
    if SHARED:
        head = 0
    at = block[:, None] * BOX + n[None, :]
    own = tl.load(row + b * row_b + head.to(tl.int64) * row_h + at, mask=block[:, None] < blocks, other=-1)
    there = own >= 0
    begin = own - n[None, :]
    low = tl.min(tl.where(there, begin, 2147483647), 1)
    high = tl.max(tl.where(there, begin, -2147483648), 1)
    # A block without a key may be any rows, and where there are two beginnings it is none.
    begin = tl.where(low > high, 0, low)
    told = tl.where((low >= high) & (begin >= 0) & (begin + BOX <= keys), begin, -1)
    tl.store(home + (b * heads + x).to(tl.int64) * blocks + block, told, mask=block < blocks)


@triton.jit(do_not_specialize=["home", "upto", "capacity", "blocks", "heads"])
def _copy_kernel(
    key, value, key_b, key_g, key_s, value_b, value_g, value_s, row, row_b, row_h, home, upto, k_copies,
    v_copies, capacity, blocks, heads,
    GROUP: tl.constexpr, SHARED: tl.constexpr, BOX: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Copy a key block whose keys are not consecutive rows of the tensor to a slot; its `home` becomes -2 - slot, for every
    layer that shares it."""
    block, x, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    at = (b * heads + x).to(tl.int64) * blocks + block
    slot = tl.load(upto + at) - 1
    if (tl.load(home + at) < 0) & (slot < capacity):
        n, d = tl.arange(0, BOX), tl.arange(0, D)
        group, head = x // GROUP, x
        if SHARED:
            group, head = x, 0
        group, batch = group.to(tl.int64), b.to(tl.int64)
        own = tl.load(row + batch * row_b + head * row_h + block * BOX + n)
        there = (own >= 0)[:, None]
        own = tl.maximum(own, 0).to(tl.int64)[:, None]
        target = (slot.to(tl.int64) * BOX + n)[:, None] * D + d[None, :]
        some = tl.load(key + batch * key_b + group * key_g + own * key_s + d[None, :], mask=there, other=0.0)
        tl.store(k_copies + target, some)
        some = tl.load(
            value + batch * value_b + group * value_g + own * value_s + d[None, :], mask=there, other=0.0
        )
        tl.store(v_copies + target, some)
        tl.store(home + at, -2 - slot)


@dataclass(frozen=True)
class KeyLocations:
    """Where TMA reads the keys and values of each key block of the spans.

    home    for each span int32 [b, x, key blocks of 64]: the block's first row in the tensor, or -2 - slot in the pool of
            copies, or -1 for none; x: 1 if in the tensor's order, else key/value heads if all heads share its keys, else
            heads
    k_pos   positions of its keys, FAR for absent ones
    keys, values    the pool of copies [slots, 64, D]
    short   scalar int32, number of blocks without a slot; None if the pool has a slot for every block that is copied
    """

    home: Sequence[Tensor]
    k_pos: Sequence[Tensor]
    keys: Tensor
    values: Tensor
    short: Tensor | None

    @classmethod
    def find(
        cls, key: Tensor, value: Tensor, spans: Sequence[KeySpan], heads: int, most: int | None = None
    ) -> KeyLocations:
        """Find or copy the blocks of `spans` in keys and values [B, G, S, D]; copies take at most `most` bytes, by default a
        share of the device's memory."""
        most = operators.find_device_limits(key.device).memory // SHARE if most is None else most
        (B, G, S, D), device = key.shape, key.device
        # What is in the order of the tensor is where it is.
        natural = [s.k_row.shape[2] <= S and s.ordered == s.k_row.shape[2] for s in spans]
        aside = [s for s, there in zip(spans, natural, strict=True) if not there]
        apart = [s.k_row for s in aside]
        shapes = [(B, G if r.shape[1] == 1 else heads, r.shape[2] // BOX) for r in apart]
        sizes = [prod(shape) for shape in shapes]
        copied = sum(map(_most_copies, aside, shapes)) if S >= BOX else sum(sizes)

        def tables() -> tuple[list[Tensor], list[Tensor], list[Tensor], Tensor]:
            flat = torch.empty(sum(sizes), dtype=torch.int32, device=device)
            home = [t.view(s) for t, s in zip(flat.split(sizes), shapes, strict=True)] if apart else []
            for r, t in zip(apart, home, strict=True):
                grid, shared = (triton.cdiv(t.shape[2], 16), t.shape[1], B), r.shape[1] == 1
                sides = t.shape[2], t.shape[1], S
                find_adjacent_rows_kernel[grid](
                    r, *leading_strides(r), t, *sides, SHARED=shared, BOX=BOX, BLOCKS=16
                )
            upto, found, homes = (flat == -1).cumsum(0, dtype=torch.int32), iter(home), list[Tensor]()
            for s, there in zip(spans, natural, strict=True):
                begin = torch.arange(0, s.k_row.shape[2], BOX, dtype=torch.int32, device=device)
                homes.append(begin[None, None] if there else next(found))
            k_pos = [torch.where(s.k_row >= 0, s.k_pos, FAR) for s in spans]
            return home, homes, k_pos, upto

        plan = [t for s in spans for t in (s.k_row, s.k_pos)]
        home, homes, k_pos, upto = get_cached_on_plan(plan, ("homes", key.shape, heads, *natural), tables)
        slot_bytes = 2 * BOX * D * key.element_size()
        keys, values = _pool(min(copied, most // slot_bytes), key)
        capacity = len(keys)
        for r, t, u in zip(apart, home, upto.split(sizes) if apart else (), strict=True):
            _copy_kernel[(t.shape[2], t.shape[1], B)](
                key, value, *row_strides(key), *row_strides(value), r, *leading_strides(r), t, u, keys, values, capacity,
                t.shape[2], t.shape[1],
                GROUP=heads // G, SHARED=r.shape[1] == 1, BOX=BOX, D=D, num_warps=8,
            )  # fmt: skip
        short = (upto[-1] - capacity).clamp(min=0) if capacity < copied else None
        return cls(homes, k_pos, keys, values, short)


def _most_copies(span: KeySpan, shape: tuple[int, int, int]) -> int:
    """How many of a span's blocks of 64 keys, [b, x, blocks], may need a copy."""
    blocks: int = prod(shape)
    if span.ordered is not None:  # the last alone, which is not whole
        return shape[0] * shape[1]
    return blocks if span.scattered is None else min(blocks, span.scattered // BOX)


def _pool(capacity: int, like: Tensor) -> tuple[Tensor, ...]:
    """Room for copies of `capacity` blocks of keys, and of values, or of fewer where the device is short of memory."""
    while True:
        try:
            return like.new_empty(2, capacity, BOX, like.shape[3]).unbind()
        except torch.OutOfMemoryError:
            if not capacity:
                raise
            capacity //= 2


class TMAMatrix(NamedTuple):
    """A tensor [B, G, S, D] seen as a matrix, which TMA can address: its shape (rows, columns), the row stride in elements,
    and how far sequences (`batch` rows) and groups (`group` rows and `column` columns) are apart."""

    shape: tuple[int, int]
    stride: int
    batch: int
    group: int
    column: int


def as_tma_matrix(t: Tensor) -> TMAMatrix | None:
    """Describe tensor `t` [B, G, S, D] as a `TMAMatrix`; return None if its strides or alignment do not allow it."""
    B, G, S, D = t.shape
    b, g, s, d = t.stride()
    if d != 1 or s < D or (s * t.element_size()) % 16 or t.data_ptr() % 16 or (B > 1 and b % s):
        return None
    batch = b // s if B > 1 else 0
    if G > 1 and g == D and s >= G * D:
        return TMAMatrix(((B - 1) * batch + S, G * D), s, batch, 0, D)
    if G == 1 or g % s == 0:
        group = g // s if G > 1 else 0
        return TMAMatrix(((B - 1) * batch + (G - 1) * group + S, D), s, batch, group, 0)
    return None


def supports_inputs(
    query: Tensor, key: Tensor, value: Tensor, rows: int, block_k: int, pos: torch.dtype
) -> bool:
    """Return whether the Hopper kernel supports query tiles of `rows` rows of these tensors, on their device."""
    D = key.shape[3]
    return (
        rows == ROWS
        and block_k in (BOX, 2 * BOX)
        and query.dtype in (torch.float16, torch.bfloat16)
        and D in (64, 128)
        and value.shape[3] == D
        and query.stride(3) == 1
        and pos == torch.int32
        and _there(query.device)
    )


@cache
def _there(device: torch.device) -> bool:
    if operators.why_kernels_unusable("hopper", device) is not None:
        return False
    try:
        import mmaccel.backends.triton.prefill.hopper  # noqa: F401
    except ImportError:
        return False
    return True


def launch_on_hopper(
    grid: tuple[int, int],
    tensors: tuple[Tensor, Tensor, Tensor],
    spans: Sequence[KeySpan],
    given: Sequence[Any],
    sizes: Sequence[int],
    scale: float,
    *,
    joint: int = 0,
    **shape: Any,
) -> Tensor | None:
    """Compute attention by `hopper_kernel` or, if `joint` is not 0, by `shared_key_blocks_kernel` in tiles of so many query
    blocks. Key blocks whose rows are adjacent are read in place, others from copies. Returns the number of blocks whose copy
    had no room, as a device tensor, or None if all have room; if it is not 0, the kernel computes nothing.

    grid: list rows (or work items), and tiles of each; tensors: query, key, value; given: outputs, results of
    `split_kernel_args`, and the query rows with strides, as in `kernel.attend_kernel`; sizes: output strides and the number
    of query blocks, for `shared_key_blocks_kernel` also tiles per head.
    """
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from mmaccel.backends.triton.prefill import hopper, hopper_joint

    query, key, value = tensors
    homes = KeyLocations.find(key, value, spans, query.shape[1])
    found = (
        build_span_table_row(*one, each=joint > 0) for one in zip(spans, homes.k_pos, homes.home, strict=True)
    )
    table = [span[name] for span in found for name in hopper.FIELDS]
    numbers = [x.data_ptr() if isinstance(x, Tensor) else x for x in table]
    plan = [t for s in spans for t in (s.lists.row, s.q_pos)]
    told = get_cached_on_plan(plan, ("told", *numbers), lambda: write_device_integers(numbers, query.device))
    seen, beside = as_tma_matrix(key), as_tma_matrix(value)
    if seen is None or seen != beside:
        key, value = key.contiguous(), value.contiguous()
        seen = as_tma_matrix(key)
    assert seen is not None
    layout = gl.NVMMASharedLayout(128, 16, rank=2)

    def engine(t: Tensor, view: tuple[int, int], stride: int) -> Any:
        return TensorDescriptor(t, list(view), [stride, 1], [BOX, 64], layout)

    D = key.shape[3]
    own = [engine(t, seen.shape, seen.stride) for t in (key, value)]
    # Where nothing may be copied there is nothing to see, and nothing looks.
    apart = [engine(t, (len(t) * BOX, D), D) for t in (homes.keys, homes.values)] if len(homes.keys) else own
    kernel, of_tiles = hopper.hopper_kernel, [torch.zeros(1, dtype=torch.int32, device=query.device), *grid]
    # One program at a time on each multiprocessor.
    programs: tuple[int, ...] = (
        min(grid[0] * grid[1], operators.find_device_limits(query.device).processors),
    )
    how: dict[str, Any] = dict(STAGES=STAGES)
    if joint:
        kernel, of_tiles, programs = hopper_joint.shared_key_blocks_kernel, [], grid
        how = dict(GROUPS=joint, STAGES=PLACES[joint], LAG=LAG)
    kernel[programs](
        *own, *apart, told,
        given[1] if homes.short is None else homes.short, query, *given, *of_tiles, *row_strides(query),
        seen.batch, seen.group, seen.column, *sizes, len(spans), scale,
        D=D, GATED=homes.short is not None, **how, **shape, num_warps=4,
    )  # fmt: skip
    return homes.short


def build_span_table_row(span: KeySpan, k_pos: Tensor, home: Tensor, *, each: bool = False) -> dict[str, Any]:
    """Return one key span's row of the table by which the Hopper kernel finds tensors: field (`hopper.FIELDS`) -> tensor or
    number. `each`: if lists have an index too, count the blocks that are not FULL up to each block, not just in all."""
    lists = span.lists
    # The table holds addresses alone, which the kernel takes for those of numbers of these types.
    row, index = lists.row.to(torch.int64), lists.index_or_empty.to(torch.int32)
    # How many blocks are not FULL: before each block in order, or, of an index of blocks, in all.
    whole = len(index) > 0 and not each
    counts = get_cached_on_plan([lists.kind], "masked", lambda: prefix_count_masked_blocks(lists.kind))
    counts = counts[..., -1:] if whole else counts
    found: dict[str, Any] = dict(index=index if len(index) else 0, form=int(whole))
    found |= dict(lo=span.lo, hi=span.hi, home=home)
    named = dict(list=row, unsure=counts, q_pos=span.q_pos, k_pos=k_pos)
    for name, t in named.items():
        found |= {name: t, f"{name}_b": leading_strides(t)[0], f"{name}_h": leading_strides(t)[1]}
    # The homes of an order that all heads share are those of each group; others are of each head.
    shared = span.k_row.shape[1] == 1
    b, h = leading_strides(home)
    return found | dict(home_b=b, home_h=0 if shared else h, home_g=h if shared else 0)


@triton.jit(do_not_specialize=["begin"])
def _number_kernel(out, numbers, begin):
    for i in tl.static_range(len(numbers) // 2):
        low = (numbers[2 * i] // 2 - 1).to(tl.int64)
        high = (numbers[2 * i + 1] // 2 - 1).to(tl.int64)
        tl.store(out + begin + i, (high << 29) + low - (1 << 40))


def write_device_integers(numbers: Sequence[int], device: torch.device, each: int = 20) -> Tensor:
    """Write host integers to a device tensor by kernel arguments: without synchronization, and capturable in a CUDA graph.

    Each integer is passed as two halves, both encoded as odd numbers, as Triton would otherwise compile a kernel for every
    mixture of ones, multiples of 16 and large numbers.
    """
    out = torch.empty(len(numbers) + each, dtype=torch.int64, device=device)
    for begin in range(0, len(numbers), each):
        some = [x + (1 << 40) for x in numbers[begin : begin + each]]
        some += [1 << 40] * (each - len(some))
        halves = [2 * (part + 1) + 1 for x in some for part in (x & ((1 << HALF) - 1), x >> HALF)]
        _number_kernel[(1,)](out, tuple(halves), begin, num_warps=1)
    return out


def attend_shared_key_blocks(
    tensors: tuple[Tensor, Tensor, Tensor],
    q_row: Tensor,
    spans: Sequence[KeySpan],
    scale: float,
    chunk: int | None,
    out: tuple[Tensor, Tensor],
) -> Tensor | None:
    """Write to `out` the attention over lists that differ between neighbouring query blocks, by `hopper_joint`. Returns
    None, or as a device tensor the number of key blocks whose copies had no room; if it is not 0, nothing was computed."""
    query, key, _ = tensors
    (B, H, _, D), joint = query.shape, JOINT
    M, wide = q_row.shape[-1] // BOX, joint * BOX
    tiles = -(-M // joint)
    q_row, *q_pos = (
        torch.nn.functional.pad(t, (0, -t.shape[-1] % wide), value=-1)
        for t in (q_row, *(span.q_pos for span in spans))
    )
    list_rows, longest = B * H * tiles, sum(span.k_row.shape[-1] // BOX for span in spans)
    work = None
    if longest > (LEAST_CHUNK if chunk is None else chunk):
        # A piece of a tile is a range of each of its lists: the longest one tells how many there are.
        count = reduce(add, (span.lists.list_lengths for span in spans))
        count = torch.nn.functional.pad(count, (0, -M % joint)).view(*count.shape[:2], tiles, joint).amax(-1)
        work = SplitListPieces.split(
            [count], B, H, tiles, 1, longest, count_resident_programs(query.device), chunk
        )
    outputs = split_kernel_args(work, wide, D, out[1])
    ends, rows_of = (*row_strides(out[0]), *leading_strides(out[1])), (q_row, *leading_strides(q_row))
    layout = dict(GROUP=H // key.shape[1], LISTS=H, PLACED=True)
    short = launch_on_hopper(
        (work.max_programs if work is not None else list_rows, 1), tensors,
        [replace(span, q_pos=at) for span, at in zip(spans, q_pos, strict=True)],
        (*out, *outputs, *rows_of), (*ends, M, tiles), scale, joint=joint, SPLIT=work is not None, **layout,
    )  # fmt: skip
    if work is not None:
        merge_kernel[(list_rows, joint)](
            *outputs[:2], work.pieces, work.slot, *out, *rows_of, *ends, tiles,
            BLOCK_Q=wide, ROWS=BOX, PACK=1, DV=D, BLOCK_DV=D, **layout, num_warps=4,
        )  # fmt: skip
    return short
