"""From the flat operator to launches of the Triton kernels: tiles, spans, and the splitting of long rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from mmaccel.backends.triton.kernel import attend_kernel, merge_kernel
from mmaccel.core.errors import RecipeError

LEAST_CHUNK = 32
"""Listed blocks under which splitting a row costs more than it evens out."""

WAVES = 4
"""A row is split where one of its tiles is more than 1 / WAVES of what a place on the device computes in all."""


@dataclass(frozen=True)
class Config:
    """What a kernel is compiled for: keys of a tile, warps of a program, depth of the pipeline of loads."""

    keys: int
    warps: int
    stages: int


def config_for(
    rows: int, size: int, value_size: int, block_k: int, dtype: torch.dtype, shared: int
) -> Config:
    """The configuration for tiles of `rows` rows, with heads padded to `size`, in `shared` bytes of shared memory."""
    wide = dtype.itemsize == 4
    keys = min(block_k, 32 if wide else 64)
    stages = 2 if wide else 3
    while stages > 1 and (rows * size + stages * keys * (size + value_size)) * dtype.itemsize > shared:
        stages -= 1
    return Config(keys, 8 if rows > 64 else 4, stages)


def block_attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    q_row: Tensor,
    k_row: Sequence[Tensor],
    q_place: Sequence[Tensor],
    k_place: Sequence[Tensor],
    lo: Sequence[int],
    hi: Sequence[int],
    offset: Sequence[Tensor],
    index: Sequence[Tensor],
    kind: Sequence[Tensor],
    block_q: int,
    block_k: int,
    scale: float,
    *,
    chunk: int | None = None,
    config: Config | None = None,
    kernel: Any = attend_kernel,
) -> tuple[Tensor, Tensor]:
    """See `mmaccel.backends.ops.block_attend`. Reads nothing on the host; every size comes from shapes.

    chunk   the most listed blocks that one program walks; rows with more are split, and merged by a second kernel. By
            default it follows from the number of lists and listed blocks, so that no program is the tail of the launch
    config  how the kernel is compiled, instead of `config_for`
    kernel  `attend_kernel`, or a tuned one, which brings its own configuration
    """
    if query.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise RecipeError(
            f"backend: 'triton' computes in float16, bfloat16 or float32, not in {query.dtype}; choose 'reference'."
        )
    B, H, _, D = query.shape
    G, DV, P = key.shape[1], value.shape[-1], q_row.shape[-1]
    out = query.new_empty(B, H, P, DV)
    lse = query.new_empty(B, H, P, dtype=torch.float32)
    if out.numel() == 0 or query.shape[2] == 0 or key.shape[2] == 0:
        return out.zero_(), lse.fill_(-torch.inf)
    if scale <= 0:
        # The kernel takes the largest score before it scales, which a positive scale alone allows.
        query, scale = query * scale, 1.0

    lists = H if any(t.shape[1] > 1 for t in (q_row, *k_row, *q_place, *k_place, *offset)) else 1
    group, rows = H // G, min(block_q, 128)
    pack = 1
    while lists == 1 and pack < group and 2 * pack * rows <= 128:
        pack *= 2
    tiles = block_q // rows * (G * -(-group // pack) if lists == 1 else 1)
    size, value_size = max(16, triton.next_power_of_2(D)), max(16, triton.next_power_of_2(DV))
    M = P // block_q
    list_rows = B * lists * M

    q_row, *k_row = (_lined(t) for t in (q_row, *k_row))
    places = torch.int64 if any(t.dtype == torch.int64 for t in (*q_place, *k_place)) else torch.int32
    q_place, k_place = ([_lined(t.to(places)) for t in ts] for ts in (q_place, k_place))
    offset = [_lined(t) for t in offset]
    strides = tuple(
        tuple(stride for t in span for stride in _lead(t))
        for span in zip(k_row, q_place, k_place, offset, strict=True)
    )
    entries = sum(
        i.shape[0] * (B * lists // (o.shape[0] * o.shape[1])) for i, o in zip(index, offset, strict=True)
    )
    longest = sum(t.shape[-1] // block_k for t in k_row)
    if chunk is None:
        chunk = max(LEAST_CHUNK, -(-entries * tiles // (WAVES * _places(query.device))))
    split = longest > chunk
    work = Work.of(offset, B, lists, M, entries, chunk) if split else None
    pieces = work.slots * tiles * rows * pack if work is not None else 0
    part_out = query.new_empty(pieces, DV, dtype=torch.float32)
    part_lse = query.new_empty(pieces, dtype=torch.float32)
    first, slot, item = (work.first, work.slot, work.item) if work is not None else (lse, lse, lse)

    shape = dict(
        HEADS=H, GROUP=group, LISTS=lists, BLOCK_Q=block_q, ROWS=rows, PACK=pack, DV=DV, BLOCK_DV=value_size
    )
    compiled: dict[str, Any] = {}
    if not isinstance(kernel, triton.runtime.Autotuner):
        config = config or config_for(
            rows * pack, size, value_size, block_k, query.dtype, _shared(query.device)
        )
        compiled = dict(BLOCK_N=min(config.keys, block_k), num_warps=config.warps, num_stages=config.stages)
    with torch.cuda.device_of(query):  # type: ignore[no-untyped-call]
        kernel[(work.items if work is not None else list_rows, tiles)](
            query,
            key,
            value,
            out,
            lse,
            part_out,
            part_lse,
            item,
            first,
            slot,
            q_row,
            tuple(k_row),
            tuple(q_place),
            tuple(k_place),
            tuple(offset),
            tuple(index),
            tuple(kind),
            tuple(lo),
            tuple(hi),
            strides,
            *_lead(q_row),
            *query.stride(),
            *key.stride(),
            *value.stride(),
            P,
            M,
            list_rows,
            chunk,
            scale * math.log2(math.e),
            D=D,
            BLOCK_K=block_k,
            BLOCK_D=size,
            SPLIT=split,
            WIDE=max(_reach(key), _reach(value)) >= 2**31,
            PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
            **shape,
            **compiled,
        )
        if work is not None:
            merge_kernel[(list_rows, tiles)](
                part_out, part_lse, first, slot, out, lse, q_row, *_lead(q_row), P, M, **shape
            )
    return out, lse


@dataclass(frozen=True)
class Work:
    """The pieces of split rows, in tables made on the device.

    item [items] the list row of each program, past the last row where there is none; first [rows + 1] the first program
    of each row; slot [rows] where the pieces of a split row begin. items and slots bound both from host numbers: a row
    of n blocks makes ceil(n / chunk) pieces, at least one, and a split one fewer than 2 n / chunk.
    """

    item: Tensor
    first: Tensor
    slot: Tensor
    items: int
    slots: int

    @classmethod
    def of(cls, offset: Sequence[Tensor], B: int, lists: int, M: int, entries: int, chunk: int) -> Work:
        length = offset[0].new_zeros(B, lists, M)
        for o in offset:
            length += o[..., 1:] - o[..., :-1]
        pieces = ((length.reshape(-1) + (chunk - 1)) // chunk).clamp_(min=1)
        first = torch.nn.functional.pad(pieces.cumsum(0), (1, 0))
        held = torch.where(pieces > 1, pieces, 0)
        items = pieces.shape[0] + entries // chunk
        item = torch.searchsorted(
            first[1:], torch.arange(items, device=first.device), right=True, out_int32=True
        )
        return cls(item, first, held.cumsum(0) - held, items, 2 * entries // chunk)


def _lined(t: Tensor) -> Tensor:
    return t if t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous()


def _lead(t: Tensor) -> tuple[int, int]:
    """Strides of the sequence and the head; 0 where all share one."""
    return (t.stride(0) if t.shape[0] > 1 else 0, t.stride(1) if t.shape[1] > 1 else 0)


def _reach(t: Tensor) -> int:
    """The largest offset inside one head of one sequence."""
    return (t.shape[2] - 1) * t.stride(2) + (t.shape[3] - 1) * t.stride(3)


@cache
def _places(device: torch.device) -> int:
    """Programs that run at a time, about."""
    return 2 * torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8


@cache
def _shared(device: torch.device) -> int:
    if device.type != "cuda":
        return 1 << 16
    return int(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 99 << 10))
