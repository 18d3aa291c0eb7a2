"""Plans whose lists differ between neighbouring blocks of queries, for the kernel that walks them as a merge."""

from __future__ import annotations

import torch
from torch import Tensor

from mmaccel.core.prefill.plan import FAR, AttentionPlan, Part, pad_rows, span_by_range, span_from_table

TABLES = ("equal", "disjoint", "alternate", "shifted", "random", "none")


def table(name: str, shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    """[b, h, M, N] bool: which key blocks each block of queries lists."""
    m, n = torch.arange(shape[2])[:, None], torch.arange(shape[3])
    if name == "random":
        return torch.rand(shape, generator=rng) < 0.5
    made = {
        "equal": (m >= 0) & (n % 5 != 1),
        "disjoint": n % 4 == m % 4,
        "alternate": (m % 2 == 0) & (n >= 0),
        "shifted": (m - n) % 3 != 0,
        "none": (m < 1) & (n < 2),
    }[name]
    return made.expand(shape)


def joint_plan(
    seed: int,
    names: tuple[str, ...],
    *,
    batch: int = 2,
    heads: int = 4,
    n_query: int = 300,
    n_key: int = 2500,
    block: int = 64,
) -> AttentionPlan:
    """Each head's own lists: a span a table, over disjoint keys, some absent. Places ascend, queries behind all keys but the
    last ones, in the first span; they are of any order, within a range, in the others."""
    rng = torch.Generator().manual_seed(seed)
    q_row = pad_rows(torch.arange(n_query, dtype=torch.int32).expand(batch, heads, -1).contiguous(), block)
    rows = torch.arange(n_key, dtype=torch.int32).expand(batch, heads, -1).contiguous()
    rows.masked_fill_(torch.rand(rows.shape, generator=rng) < 0.02, -1)
    rows[:, :, 64:200] = torch.arange(64, 200, dtype=torch.int32)
    spans = []
    for s, (name, own) in enumerate(zip(names, rows.tensor_split(len(names), -1), strict=True)):
        k_row = pad_rows(own.contiguous(), block)
        shape = (batch, heads, q_row.shape[-1] // block, k_row.shape[-1] // block)
        listed = table(name, shape, rng)
        if s == 0:
            k_pos = torch.arange(k_row.shape[-1], dtype=torch.int32).expand_as(k_row)
            q_pos = torch.arange(q_row.shape[-1], dtype=torch.int32) + k_row.shape[-1] - n_query // 2
            q_pos = q_pos.expand_as(q_row)
            spans.append(span_by_range(q_row, k_row, q_pos, k_pos, 0, FAR, block, block, table=listed))
        else:
            q_pos, k_pos = (
                torch.randint(0, n_key, t.shape, generator=rng, dtype=torch.int32) for t in (q_row, k_row)
            )
            spans.append(span_from_table(q_row, k_row, q_pos, k_pos, -500, 700, listed, block, block))
    return AttentionPlan((Part(q_row, tuple(spans)),), block, block, batch, heads, n_query, n_key)
