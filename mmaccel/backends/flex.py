"""One part of an attention plan through FlexAttention: the spans side by side, the block lists as a block mask.

Compiled (on CUDA) it walks the lists. Eager it ignores them and holds every score, so the lists are in the mask function
as well, as a table of kinds [B, H, query blocks, key blocks]: right everywhere, meant for short inputs and for checking.
The table is dense, which ends this backend's usefulness near 128k tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from mmaccel.backends.ops import ABSENT, FULL, define, lse_dtype, placed
from mmaccel.backends.tables import table as table_of


def usable(device: torch.device) -> str | None:
    """Why this backend cannot run on `device`; None when it can."""
    if device.type not in ("cpu", "cuda"):
        return "FlexAttention runs on cpu and cuda"
    if device.type == "cuda" and not torch.cuda.is_available():
        return "no CUDA device is visible"
    return None


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
    rows: int = 0,
) -> tuple[Tensor, Tensor]:
    """See `mmaccel.backends.ops.block_attend`. Compiled on CUDA; eager on CPU, where compiled flex gives no lse."""
    B, H = query.shape[:2]
    lists = offset, index, kind
    mask, k_rows = block_mask(q_row, k_row, q_place, k_place, lo, hi, *lists, block_q, block_k, (B, H))
    flex = _compiled() if query.is_cuda else flex_attention
    out, aux = flex(
        gather(query, q_row.expand(B, -1, -1)),
        gather(key, k_rows, H),
        gather(value, k_rows, H),
        block_mask=mask,
        scale=scale,
        enable_gqa=k_rows.shape[1] == 1 and key.shape[1] != H,
        return_aux=AuxRequest(lse=True),
        kernel_options={"BLOCK_M": min(block_q, 128), "BLOCK_N": min(block_k, 64)} if query.is_cuda else None,
    )
    blind = (q_row.expand(B, H, -1) < 0) | (aux.lse == -torch.inf)
    lse = aux.lse.to(lse_dtype(query.dtype)).masked_fill(blind, -torch.inf)
    return placed(out.masked_fill(blind[..., None], 0.0), lse, q_row, rows)


op = define("block_attend_flex", block_attend)


@cache
def _compiled() -> Any:
    return torch.compile(flex_attention, dynamic=None)


def gather(x: Tensor, row: Tensor, heads: int = 0) -> Tensor:
    """Rows `row` [B, h, n] of x [B, X, S, D]: [B, X, n, D], or [B, heads, n, D] where each head has rows of its own."""
    B, X, S, D = x.shape
    count = heads if heads and row.shape[1] > 1 else X
    source = torch.arange(count, device=x.device) // (count // X)
    first = (torch.arange(B, device=x.device)[:, None] * X + source) * S
    address = first[..., None] + row.clamp(min=0).long()
    return x.reshape(B * X * S, D).index_select(0, address.reshape(-1)).view(B, count, -1, D)


def block_mask(
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
    lead: tuple[int, int],
) -> tuple[BlockMask, Tensor]:
    """The mask of a part for `lead` (batch, heads), and its key rows, all spans side by side, [B, 1 or H, keys]."""
    B, H = lead
    device = q_row.device
    own = any(t.shape[1] > 1 for t in k_row)
    k_rows = torch.cat([t.expand(B, H if own else 1, -1) for t in k_row], -1)
    lists = zip(offset, index, kind, k_row, strict=True)
    table = torch.cat(
        [table_of(o, i, f, r.shape[-1] // block_k).expand(B, H, -1, -1) for o, i, f, r in lists], -1
    )
    lengths = torch.tensor([t.shape[-1] for t in k_place], device=device)
    owner = torch.repeat_interleave(torch.arange(len(lo), device=device), lengths)
    least, most = torch.tensor(list(lo), device=device)[owner], torch.tensor(list(hi), device=device)[owner]
    q_at = torch.stack([t.expand(B, H, -1) for t in q_place], 2).contiguous()
    k_at = torch.cat([t.expand(B, H, -1) for t in k_place], -1)
    q_has = (q_row >= 0).expand(B, H, -1).contiguous()
    k_has = (k_rows >= 0).expand(B, H, -1).contiguous()

    def see(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        flag = table[b, h, q // block_q, k // block_k]
        gap = q_at[b, h, owner[k], q] - k_at[b, h, k]
        inside = (gap >= least[k]) & (gap < most[k])
        tested = k_has[b, h, k] & ((flag == ABSENT) | inside)
        return (flag >= 0) & ((flag == FULL) | tested) & q_has[b, h, q]

    some, full = table > FULL, table == FULL
    mask: BlockMask = BlockMask.from_kv_blocks(
        some.sum(-1, dtype=torch.int32),
        (~some).to(torch.int8).argsort(dim=-1, stable=True).to(torch.int32),
        full.sum(-1, dtype=torch.int32),
        (~full).to(torch.int8).argsort(dim=-1, stable=True).to(torch.int32),
        BLOCK_SIZE=(block_q, block_k),
        mask_mod=see,
        seq_lengths=(table.shape[2] * block_q, table.shape[3] * block_k),
        compute_q_blocks=False,
    )
    return mask, k_rows
