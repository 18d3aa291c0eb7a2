"""Launching `hopper_joint`: what it serves, its tiles of neighbouring query blocks, and the splitting of their lists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from operator import add

import torch
from torch import Tensor

from mmaccel.backends.ops.block_attend import KeySpan
from mmaccel.backends.triton.launch_args import lead, lines
from mmaccel.backends.triton.prefill import hopper_launch
from mmaccel.backends.triton.prefill.kernel import merge_kernel
from mmaccel.backends.triton.prefill.split_k_schedule import LEAST_CHUNK, Work, places_on
from mmaccel.backends.triton.prefill.tma_staging import BOX


def suits(query: Tensor, key: Tensor, value: Tensor, block_q: int, block_k: int, places: torch.dtype) -> bool:
    """Whether the kernel serves lists of these blocks, each head's its own."""
    blocks = block_q == BOX and block_k == BOX
    return blocks and hopper_launch.suits(query, key, value, hopper_launch.ROWS, block_k, places)


def attend(
    tensors: tuple[Tensor, Tensor, Tensor],
    q_row: Tensor,
    spans: Sequence[KeySpan],
    scale: float,
    chunk: int | None,
    out: tuple[Tensor, Tensor],
) -> Tensor | None:
    """Into `out` the attention over lists that differ between neighbours, by `hopper_joint`; how many blocks have no home
    for it, if there may be any: then all is still to be computed.
    """
    query, key, value = tensors
    (B, H, _, D), joint = query.shape, hopper_launch.JOINT
    M, wide = q_row.shape[-1] // BOX, joint * BOX
    tiles = -(-M // joint)
    q_row, *q_pos = (
        torch.nn.functional.pad(t, (0, -t.shape[-1] % wide), value=-1)
        for t in (q_row, *(span.q_pos for span in spans))
    )
    list_rows, longest = B * H * tiles, sum(span.k_row.shape[-1] // BOX for span in spans)
    work = None
    if longest > (LEAST_CHUNK if chunk is None else chunk):
        # A piece of a tile is a window of each of its lists: the longest one tells how many there are.
        count = reduce(add, (span.lists.count for span in spans))
        count = torch.nn.functional.pad(count, (0, -M % joint)).view(*count.shape[:2], tiles, joint).amax(-1)
        if chunk is None:
            work = Work.even([count], B, H, tiles, 1, places_on(query.device), longest)
        else:
            work = Work.of([count], B, H, tiles, chunk, list_rows * longest // chunk, longest)
    pieces = work.slots * wide if work is not None else 0
    part_out = query.new_empty(pieces, D, dtype=torch.float32)
    part_lse = query.new_empty(pieces, dtype=torch.float32)
    tables = (work.item, work.pieces, work.slot, work.told) if work is not None else (out[1],) * 4
    ends, rows_of = (*lines(out[0]), *lead(out[1])), (q_row, *lead(q_row))
    layout = dict(GROUP=H // key.shape[1], LISTS=H, PLACED=True)
    homes = hopper_launch.copies(key, value, spans, H)
    padded = (replace(span, q_pos=at) for span, at in zip(spans, q_pos, strict=True))
    found = zip(padded, homes.place, homes.home, strict=True)
    hopper_launch.launch(
        (work.items if work is not None else list_rows, 1),
        tensors,
        homes,
        [hopper_launch.fields(*span, each=True) for span in found],
        (*out, part_out, part_lse, *tables, *rows_of),
        (*ends, M, tiles),
        scale,
        joint=joint,
        SPLIT=work is not None,
        **layout,
    )
    if work is not None:
        merge_kernel[(list_rows, joint)](
            *(part_out, part_lse, work.pieces, work.slot, *out, *rows_of, *ends, tiles),
            BLOCK_Q=wide,
            ROWS=BOX,
            PACK=1,
            DV=D,
            BLOCK_DV=D,
            **layout,
            num_warps=4,
        )
    return homes.short
