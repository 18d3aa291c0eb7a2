"""Backend "flex": one part of an attention plan by FlexAttention; spans are concatenated, block lists become a BlockMask.

Compiled, on CUDA, it visits listed blocks only. Eager it ignores them and computes all scores, so the mask function also
reads the lists, as a table of block kinds [B, H, query blocks, key blocks]: exact, but meant for short inputs and tests. The
table is dense, which limits this backend to about 128k tokens.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from mmaccel.backends.ops.block_attend import (
    ABSENT,
    FULL,
    BlockAttendCall,
    Part,
    append_span_keys,
    lse_dtype,
    register_block_attend,
    scatter_to_query_order,
    with_unpacked_args,
)


def why_unusable(device: torch.device) -> str | None:
    """Why this backend cannot run on `device`, or None if it can."""
    if device.type not in ("cpu", "cuda"):
        return "FlexAttention runs on cpu and cuda"
    if device.type == "cuda" and not torch.cuda.is_available():
        return "no CUDA device is visible"
    return None


@with_unpacked_args
def block_attend(call: BlockAttendCall) -> tuple[Tensor, Tensor]:
    """The operator of `ops.block_attend` by FlexAttention; compiled on CUDA, eager on CPU."""
    query, key, value, part, block_q, block_k, scale, rows, _ = call
    (B, H), q_row = query.shape[:2], part.q_row
    mask, _ = make_block_mask(part, block_q, block_k, (B, H))
    key, value, rows_of = append_span_keys(key, value, part.spans)
    k_rows = _concat_broadcast(rows_of, B, H)
    score = None
    if any(s.bias is not None for s in part.spans):
        none = torch.zeros((), device=query.device)
        bias = _concat_broadcast(
            [none.expand_as(s.k_row) if s.bias is None else s.bias for s in part.spans], B, H
        )
        own = bias.shape[1] > 1

        def score(x: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return x + bias[b, h if own else 0, k].to(x.dtype)

    flex = _compiled() if query.is_cuda else flex_attention
    out, aux = flex(
        gather_head_rows(query, q_row.expand(B, -1, -1)),
        gather_head_rows(key, k_rows, H),
        gather_head_rows(value, k_rows, H),
        score_mod=score,
        block_mask=mask,
        scale=scale,
        enable_gqa=k_rows.shape[1] == 1 and key.shape[1] != H,
        return_aux=AuxRequest(lse=True),
        kernel_options={"BLOCK_M": min(block_q, 128), "BLOCK_N": min(block_k, 64)} if query.is_cuda else None,
    )
    blind = (q_row.expand(B, H, -1) < 0) | (aux.lse == -torch.inf)
    lse = aux.lse.to(lse_dtype(query.dtype)).masked_fill(blind, -torch.inf)
    return scatter_to_query_order(out.masked_fill(blind[..., None], 0.0), lse, q_row, rows)


op = register_block_attend("block_attend_flex", block_attend)


@cache
def _compiled() -> Any:
    return torch.compile(flex_attention, dynamic=None)


def gather_head_rows(x: Tensor, row: Tensor, heads: int = 0) -> Tensor:
    """Gather the rows `row` [B, h, n] of x [B, X, S, D]. If all heads share their rows (h = 1), return [B, X, n, D]; if each
    head has its own (h = heads), return [B, heads, n, D]."""
    B, X, S, D = x.shape
    count = heads if heads and row.shape[1] > 1 else X
    source = torch.arange(count, device=x.device) // (count // X)
    first = (torch.arange(B, device=x.device)[:, None] * X + source) * S
    address = first[..., None] + row.clamp(min=0).long()
    return x.reshape(B * X * S, D).index_select(0, address.reshape(-1)).view(B, count, -1, D)


def _concat_broadcast(tensors: list[Tensor], batch: int, heads: int) -> Tensor:
    """Concatenate tensors [b, h, n] of all spans to [B, 1 or H, n]."""
    h = heads if any(t.shape[1] > 1 for t in tensors) else 1
    return torch.cat([t.expand(batch, h, -1) for t in tensors], -1)


def make_block_mask(
    part: Part, block_q: int, block_k: int, lead: tuple[int, int]
) -> tuple[BlockMask, Tensor]:
    """Build the BlockMask of a part for `lead` = (batch, heads), and the rows of its concatenated keys [B, 1 or H, keys]."""
    (B, H), spans, q_row = lead, part.spans, part.q_row
    device = q_row.device
    k_rows = _concat_broadcast([s.k_row for s in spans], B, H)
    table = torch.cat([s.lists.to_dense_table().expand(B, H, -1, -1) for s in spans], -1)
    lengths = torch.tensor([s.k_row.shape[-1] for s in spans], device=device)
    owner = torch.repeat_interleave(torch.arange(len(spans), device=device), lengths)
    ends = zip(*((s.lo, s.hi) for s in spans), strict=True)
    least, most = (torch.tensor(end, device=device)[owner] for end in ends)
    q_at = torch.stack([s.q_pos.expand(B, H, -1) for s in spans], 2).contiguous()
    k_at = torch.cat([s.k_pos.expand(B, H, -1) for s in spans], -1)
    q_rows, own = q_row.expand(B, H, -1).contiguous(), k_rows.shape[1] > 1
    q_has = q_rows >= 0
    k_has = (k_rows >= 0).expand(B, H, -1).contiguous()

    def see(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        flag = table[b, h, q // block_q, k // block_k]
        gap = q_at[b, h, owner[k], q] - k_at[b, h, k]
        inside = (gap >= least[k]) & (gap < most[k])
        if part.edge is not None:
            row = k_rows[b, h if own else 0, k]
            inside = inside & ((row < part.sinks) | (row > q_rows[b, h, q] + part.edge))
        tested = k_has[b, h, k] & ((flag == ABSENT) | inside)
        return (flag >= 0) & ((flag == FULL) | tested) & q_has[b, h, q]

    some, full = (
        (t.sum(-1, dtype=torch.int32), (~t).to(torch.int8).argsort(dim=-1, stable=True).to(torch.int32))
        for t in (table > FULL, table == FULL)
    )
    mask: BlockMask = BlockMask.from_kv_blocks(
        *some,
        *full,
        BLOCK_SIZE=(block_q, block_k),
        mask_mod=see,
        seq_lengths=(table.shape[2] * block_q, table.shape[3] * block_k),
        compute_q_blocks=False,
    )
    return mask, k_rows
