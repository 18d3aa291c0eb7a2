"""The operator `block_attend` by Triton: tile sizes, spans, splitting of long lists, and kernel launches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import triton
from torch import Tensor

from mmaccel.backends.ops import operator as operators
from mmaccel.backends.ops.block_attend import (
    BlockAttendCall,
    BlockLists,
    KeySpan,
    empty_output,
    with_unpacked_args,
)
from mmaccel.backends.triton.launch_args import encode_int_args, leading_strides, row_strides
from mmaccel.backends.triton.prefill import hopper_launch
from mmaccel.backends.triton.prefill.kernel import (
    LEAST_CHUNK,
    SplitListPieces,
    attend_kernel,
    count_resident_programs,
    merge_kernel,
    split_kernel_args,
)
from mmaccel.backends.triton.prefill.lists import get_cached_on_plan, merge_adjacent_query_blocks
from mmaccel.core.errors import RecipeError

PAIRS = 200 << 10
"""Bytes of shared memory from which two blocks of queries go together: earlier devices run out of registers."""


def _config_for(
    rows: int, size: int, value_size: int, block_k: int, dtype: torch.dtype, shared: int
) -> tuple[int, int, int]:
    """Keys per tile, warps and pipeline stages for tiles of `rows` rows, with heads padded to `size`, in `shared` bytes of
    shared memory."""
    wide = dtype.itemsize == 4
    keys, stages = min(block_k, 32 if wide else 64), 2 if wide else 3
    # Sums of larger heads go through shared memory too.
    held = rows * (size + value_size * (size > 256))
    while (held + stages * keys * (size + value_size)) * dtype.itemsize > shared:
        if stages == 1 and keys <= 16:
            break
        stages, keys = (stages - 1, keys) if stages > 1 else (stages, keys // 2)
    return keys, 8 if rows > 64 else 4, stages


@with_unpacked_args
def block_attend(call: BlockAttendCall, *, chunk: int | None = None) -> tuple[Tensor, Tensor]:
    """The operator of `ops.block_attend` by Triton. No host synchronization; all sizes come from shapes.

    chunk   the most listed blocks that one program processes; longer lists are split and merged by a second kernel. By
            default it follows from the numbers of lists and blocks, so that no program runs long after the others
    """
    query, key, value, part, block_q, block_k, scale, rows, _ = call
    if query.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise RecipeError(
            f"backend: 'triton' computes in float16, bfloat16 or float32, not in {query.dtype}; choose 'reference'."
        )
    B, H, _, D = query.shape
    G, DV, P = key.shape[1], value.shape[-1], part.q_row.shape[-1]
    out, lse = empty_output(query, value, P, rows, whole=rows > 0 and part.all_rows == rows)
    extra = any(s.bias is not None or s.key is not None for s in part.spans)
    if extra:
        key, value = _lined(key), _lined(value)
    if out.numel() == 0 or query.shape[2] == 0 or (key.shape[2] == 0 and not extra):
        return out.zero_(), lse.fill_(-torch.inf)
    if scale <= 0:
        # The kernel takes the largest score before it scales, which a positive scale alone allows.
        query, scale = query * scale, 1.0

    q_row, spans = part.q_row, part.spans
    q_pos, row = [s.q_pos for s in spans], [s.lists.row for s in spans]
    plain = tuple(int(s.lists.index is None) for s in spans)
    own = [t for s in spans for t in (s.k_row, s.q_pos, s.k_pos, s.lists.row, s.bias) if t is not None]
    lists = H if any(t.shape[1] > 1 for t in (q_row, *own)) else 1
    alone = lists > 1 or (H // G) % 2
    shared = operators.find_device_limits(query.device).shared
    if rows and alone and block_q <= 64 and all(plain) and shared >= PAIRS:
        # Lists that are runs of blocks in their order differ little between neighbours: two share what they load, if they
        # cannot share it with another head.
        places, odd = (q_row, *q_pos), q_row.shape[-1] // block_q % 2

        def pairs() -> tuple[list[Tensor], list[Tensor]]:
            padded = [torch.nn.functional.pad(t, (0, block_q), value=-1) for t in places] if odd else []
            return padded, [merge_adjacent_query_blocks(r) for r in row]

        padded, row = get_cached_on_plan([*places, *row], ("pairs", block_q), pairs)
        q_row, *q_pos = padded or places
        block_q, P = 2 * block_q, q_row.shape[-1]
    size, value_size = max(16, triton.next_power_of_2(D)), max(16, triton.next_power_of_2(DV))
    # Queries and sums of 128 rows of larger heads exceed shared memory.
    most = 64 if value_size > 256 else 128
    group, tall = H // G, min(block_q, most)
    pack = 1
    while lists == 1 and pack < group and 2 * pack * tall <= most:
        pack *= 2
    tiles = block_q // tall * (G * -(-group // pack) if lists == 1 else 1)
    M = P // block_q
    list_rows = B * lists * M

    q_row = _lined(q_row)
    wide = any(t.dtype == torch.int64 for s in spans for t in (s.q_pos, s.k_pos))
    positions = torch.int64 if wide else torch.int32
    spans = tuple(
        replace(
            span,
            k_row=_lined(span.k_row),
            q_pos=_lined(at.to(positions)),
            k_pos=_lined(span.k_pos.to(positions)),
            lists=BlockLists(
                runs if runs.stride()[2:] == (5, 1) else runs.contiguous(),
                span.lists.index,
                _lined(span.lists.kind),
            ),
        )
        for span, at, runs in zip(spans, q_pos, row, strict=True)
    )
    scale *= math.log2(math.e)
    short: Tensor | None = None
    if (
        not part.needs_extensions
        and rows
        and lists == H
        and not all(plain)
        and block_q == block_k == hopper_launch.BOX
        and hopper_launch.supports_inputs(query, key, value, hopper_launch.ROWS, block_k, positions)
    ):
        short = hopper_launch.attend_shared_key_blocks(
            (query, key, value), q_row, spans, scale, chunk, (out, lse)
        )
        if short is None:
            return out, lse
    # Rows and places are whole blocks, and loaded as such; where lists lie depends on the length in any way.
    strides = tuple(
        (
            *(stride for t in (s.k_row, s.q_pos, s.k_pos) for stride in leading_strides(t)),
            *encode_int_args(stride for t in (s.lists.row, s.lists.kind) for stride in leading_strides(t)),
        )
        for s in spans
    )
    longest = sum(s.k_row.shape[-1] // block_k for s in spans)
    # What is computed here only if another kernel could not is computed whole.
    split = short is None and longest > (LEAST_CHUNK if chunk is None else chunk)
    work = None
    if split:
        sizes_of = B, lists, M, tiles, longest, count_resident_programs(query.device), chunk
        plan = [s.lists.row for s in spans]
        work = get_cached_on_plan(
            plan, sizes_of, lambda: SplitListPieces.split([s.lists.list_lengths for s in spans], *sizes_of)
        )
    outputs = split_kernel_args(work, tiles * tall * pack, DV, lse)
    items = work.max_programs if work is not None else list_rows
    layout = dict(GROUP=group, LISTS=lists, BLOCK_Q=block_q, ROWS=tall, PACK=pack, PLACED=bool(rows))
    sizes = dict(DV=DV, BLOCK_DV=value_size)
    ends = (*row_strides(out), *leading_strides(lse))
    given = (out, lse, *outputs, q_row, *leading_strides(q_row))
    engine = (
        not part.needs_extensions
        and short is None
        and hopper_launch.supports_inputs(query, key, value, tall * pack, block_k, positions)
    )
    if engine:
        short = hopper_launch.launch_on_hopper(
            (items, tiles), (query, key, value), spans, given, (*ends, M), scale,
            SPLIT=split, BLOCK_K=block_k, **layout,
        )  # fmt: skip
    if not engine or short is not None:
        more = _extra(spans, key, value) if extra else None
        loaded = (key, value) if more is None else (*more[0], *more[1], key, value)
        keys, warps, stages = _config_for(tall * pack, size, value_size, block_k, query.dtype, shared)
        attend_kernel[(items, tiles)](
            query, key, value, lse if short is None else short, *given, tuple(s.k_row for s in spans),
            tuple(s.q_pos for s in spans), tuple(s.k_pos for s in spans), tuple(s.lists.row for s in spans),
            tuple(s.lists.index_or_empty for s in spans), tuple(s.lists.kind for s in spans),
            tuple(s.lo for s in spans), encode_int_args(min(s.hi, torch.iinfo(positions).max) for s in spans),
            plain, strides, more,
            *(stride for t in (query, key, value) for stride in (*row_strides(t), t.stride(3))), *ends, M, scale,
            part.sinks, part.edge or 0, D=D, BLOCK_K=block_k, BLOCK_D=size, SPLIT=split, GATED=short is not None,
            NARROW=part.edge is not None, EXTRA=int(extra) * (2 if all(map(_aligned, loaded)) else 1),
            WIDE=max(map(_reach, loaded)) >= 2**31,
            PRECISION="ieee" if query.dtype == torch.float32 else "tf32", **layout, **sizes,
            BLOCK_N=min(keys, block_k), num_warps=warps, num_stages=stages,
        )  # fmt: skip
    if work is not None:
        merge_kernel[(list_rows, tiles)](
            *outputs[:2], work.pieces, work.slot, out, lse, q_row, *leading_strides(q_row), *ends, M,
            **layout, **sizes, num_warps=8 if tall * pack > 64 else 4,
        )  # fmt: skip
    return out, lse


def _extra(spans: Sequence[KeySpan], key: Tensor, value: Tensor) -> tuple[Any, ...]:
    """What the kernel takes of the keys, values and biases of each span: those of the sequence, and 0, where it has none."""
    none = torch.zeros(1, 1, 1, dtype=torch.float32, device=key.device)
    keys, values, biases, steps = [], [], [], []
    for s in spans:
        k = key if s.key is None else _lined(s.key.to(key.dtype))
        v = value if s.value is None else _lined(s.value.to(value.dtype))
        bias = none if s.bias is None else _lined(s.bias)
        keys.append(k)
        values.append(v)
        biases.append(bias)
        strides = *row_strides(k), *row_strides(v), *leading_strides(bias)
        steps.append(encode_int_args((*strides, 0 if s.bias is None else 1)))
    return tuple(keys), tuple(values), tuple(biases), tuple(steps)


def _lined(t: Tensor) -> Tensor:
    return t if t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous()


def _aligned(t: Tensor) -> bool:
    """Whether each row begins at 16 bytes."""
    return t.data_ptr() % 16 == 0 and all(s % 8 == 0 for s in t.stride()[:3])


def _reach(t: Tensor) -> int:
    """The largest offset inside one head of one sequence."""
    return (t.shape[2] - 1) * t.stride(2) + (t.shape[3] - 1) * t.stride(3)
