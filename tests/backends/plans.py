"""Plans to try backends on: patterns on a prompt of many modalities, plans drawn at random, lists that differ."""

from dataclasses import replace

import torch
from torch import Tensor

from mmaccel.backends.ops.block_attend import FULL, BlockLists, KeySpan, Part
from mmaccel.core.layout import TEXT, VIDEO
from mmaccel.core.prefill.plan import FAR, AttentionPlan, pad_rows, span_by_range, span_from_table
from mmaccel.policies.sparse import AShape, Boundary2D, Grid, KBoundary, QBoundary, VerticalSlash
from tests.policies.sparse.scenes import Scene, sequence

PATTERNS = {
    "a_shape": AShape(sink=9, window=30, block=16),
    "vertical_slash": VerticalSlash(vertical=12, slash=5, block=16),
    "grid": Grid(min_stride=2, block=16),
    "grid_free": Grid(stride="free", min_stride=3, max_stride=12, block=32),
    "boundary_2d": Boundary2D(
        default=AShape(sink=4, window=13),
        pairs={
            "text>video": None,
            "video>video": Grid(min_stride=2),
            "video>text": VerticalSlash(vertical=3, slash=2),
        },
        block=16,
    ),
    "q_boundary": QBoundary(
        text=VerticalSlash(vertical=12, slash=5), video=AShape(sink=4, window=13), block=16
    ),
    "k_boundary": KBoundary(text="dense", video=Grid(min_stride=2), block=16),
}

SCENE = Scene(
    (
        sequence([(TEXT, [9]), (VIDEO, [7, 7, 7, 5]), (TEXT, [1]), (VIDEO, [7] * 9), (TEXT, [40])]),
        sequence([(TEXT, [3]), (VIDEO, [6] * 10), (TEXT, [20])]),
    ),
    size=32,
    seed=11,
)


def pattern_plan(name: str, start: int = 0) -> tuple[AttentionPlan, Scene]:
    scene = replace(SCENE, start=start)
    return scene.planned(PATTERNS[name])[0], scene


def random_plan(
    seed: int,
    *,
    batch: int = 2,
    heads: int = 4,
    n_query: int = 50,
    n_key: int = 90,
    lead: str = "bh",
    blocks: tuple[int, int] = (16, 32),
) -> AttentionPlan:
    """Shuffled rows, holes, two spans over disjoint keys, random tables; `lead` names the dimensions that are not shared."""
    rng = torch.Generator().manual_seed(seed)
    shape = (batch if "b" in lead else 1, heads if "h" in lead else 1)

    def shuffled(n: int) -> Tensor:
        return torch.rand(*shape, n, generator=rng).argsort(-1).int()

    def holes(rows: Tensor) -> Tensor:
        return rows.masked_fill(torch.rand(rows.shape, generator=rng) < 0.2, -1)

    block_q, block_k = blocks
    q_row = pad_rows(holes(shuffled(n_query)), block_q)
    first, second = shuffled(n_key).split([n_key // 3, n_key - n_key // 3], -1)
    spans = []
    for k_row, lo, hi in ((first, -20, 35), (holes(second), 0, FAR)):
        k_row = pad_rows(k_row, block_k)
        q_pos = torch.randint(0, n_key, q_row.shape, generator=rng, dtype=torch.int32)
        k_pos = torch.randint(0, n_key, k_row.shape, generator=rng, dtype=torch.int32)
        table = (
            torch.rand(*shape, q_row.shape[-1] // block_q, k_row.shape[-1] // block_k, generator=rng) < 0.6
        )
        spans.append(span_from_table(q_row, k_row, q_pos, k_pos, lo, hi, table, block_q, block_k))
    return AttentionPlan((Part(q_row, tuple(spans)),), block_q, block_k, batch, heads, n_query, n_key)


def with_extras(plan: AttentionPlan, groups: int, size: int, seed: int) -> AttentionPlan:
    """`plan` with biases, and spans of keys of their own: one for each head, one that all heads and sequences share."""
    rng = torch.Generator().manual_seed(seed)
    part, (first, *rest) = plan.parts[0], plan.parts[0].spans
    spans = [replace(first, bias=torch.randn(first.k_row.shape, generator=rng)), *rest]
    b, h, P = part.q_row.shape
    for lead, shared in (((b, h), False), ((1, 1), True)):
        n = 40
        key, value = (
            torch.randn(1 if shared else plan.batch, 1 if shared else groups, n, size, generator=rng)
            for _ in range(2)
        )
        k_row = pad_rows(torch.rand(*lead, n - 3, generator=rng).argsort(-1).int(), plan.block_k)
        at, none = torch.zeros(*lead, P, dtype=torch.int32), torch.zeros_like(k_row)
        table = torch.rand(b, h, P // plan.block_q, k_row.shape[-1] // plan.block_k, generator=rng) < 0.8
        span = span_from_table(part.q_row, k_row, at, none, 0, 1, table, plan.block_q, plan.block_k)
        # Keys that stand for many: the logarithm of their number.
        count = torch.randint(1, 50, k_row.shape, generator=rng).float().log()
        spans.append(replace(span, key=key, value=value, bias=None if shared else count))
    return replace(plan, parts=(replace(part, spans=tuple(spans)),))


def full_plan() -> AttentionPlan:
    """Two blocks of keys that are called FULL, though the range test would hide them."""
    keys, queries = (torch.arange(n, dtype=torch.int32).view(1, 1, n) for n in (64, 16))
    lists = BlockLists(torch.tensor([[[[0, 2, 0, 2, 0]]]]), None, torch.full((1, 1, 2), FULL).char())
    span = KeySpan(keys, torch.full((1, 1, 16), -5).int(), keys, 0, 1, lists)
    return AttentionPlan((Part(queries, (span,)),), 16, 32, batch=2, heads=4, n_query=16, n_key=64)


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
