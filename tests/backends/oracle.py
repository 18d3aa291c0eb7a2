"""What attention is, written out over all pairs, and plans to try backends on: patterns on a prompt of many modalities,
plans drawn at random, lists that differ; and calls of the flat operator from a plan."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mmaccel.backends.ops.block_attend import FULL, BlockLists, KeySpan, Part
from mmaccel.core.layout import TEXT, VIDEO
from mmaccel.core.prefill.plan import FAR, AttentionPlan, pad_rows, span_by_range, span_from_table
from mmaccel.core.prefill.sparse import attend_plan
from mmaccel.policies.sparse import AShape, Boundary2D, Grid, KBoundary, QBoundary, VerticalSlash
from tests.policies.sparse.scenes import Scene, sequence


def drawn(
    batch: int, heads: tuple[int, int], rows: int, keys: int, size: int, seed: int = 0, value_size: int = 0
) -> list[Tensor]:
    """Query [B, heads[0], rows, size], key and value [B, heads[1], keys, size]."""
    rng = torch.Generator().manual_seed(seed)
    sizes = (heads[0], rows, size), (heads[1], keys, size), (heads[1], keys, value_size or size)
    return [torch.randn(batch, *s, generator=rng) for s in sizes]


def draw(plan: AttentionPlan, groups: int, size: int, seed: int, value_size: int = 0) -> list[Tensor]:
    """The same for a plan."""
    return drawn(plan.batch, (plan.heads, groups), plan.n_query, plan.n_key, size, seed, value_size)


def scores(query: Tensor, key: Tensor, scale: float, bias: Tensor | None) -> Tensor:
    """[B, H, Sq, Sk]: the logits of all pairs."""
    score = (query * scale) @ key.repeat_interleave(query.shape[1] // key.shape[1], 1).transpose(2, 3)
    return score + (0.0 if bias is None else bias.to(query.dtype))


def weighted(score: Tensor, mask: Tensor, value: Tensor, by: Tensor | float = 1.0) -> Tensor:
    """Values by the softmax of what `mask` leaves of `score`, times `by`."""
    weight = score.masked_fill(~mask, -torch.inf).softmax(-1).masked_fill(~mask, 0.0)
    return (weight * by) @ value.repeat_interleave(score.shape[1] // value.shape[1], 1)


def masked(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, bias: Tensor | None = None
) -> Tensor:
    """Attention under a bool mask [B, H or 1, Sq, Sk], in the type of the inputs; rows that see nothing are zero. `bias`, of
    that shape, is added to the logits."""
    return weighted(scores(query, key, scale, bias), mask, value)


def log_sum_exp(query: Tensor, key: Tensor, mask: Tensor, scale: float, bias: Tensor | None = None) -> Tensor:
    return scores(query, key, scale, bias).masked_fill(~mask, -torch.inf).logsumexp(-1)


def budget(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, bias: Tensor | None = None
) -> tuple[Tensor, float]:
    """The answer in float64, and the most a backend may be off it in the type of the inputs.

    That is twice what plain attention in that type is off, over a few orders of summation (a plan has an order of its
    own, and the error of one order of a single row is a matter of luck), one rounding of the largest value, and one
    fp32 rounding of each score: kernels turn scores to base 2 for the exponential, which plain attention does not. A
    relative error e of score s moves an output by e * p * |s| * |v| at most, summed over the keys.
    """
    wide = query.double(), key.double(), value.double()
    exact = masked(*wide, mask, scale, bias)
    score = scores(*wide[:2], scale, bias)
    moved = weighted(score, mask, wide[2].abs(), score.abs())
    turned = float(moved.max()) * torch.finfo(torch.float32).eps / 2
    generator = torch.Generator().manual_seed(0)
    orders = [torch.arange(key.shape[2])] + [
        torch.randperm(key.shape[2], generator=generator) for _ in range(4)
    ]
    error = 0.0
    for order in orders:
        order = order.to(key.device)
        some = None if bias is None else bias[..., order]
        plain = masked(query, key[:, :, order], value[:, :, order], mask[..., order], scale, some).double()
        error = max(error, float((plain - exact).abs().max()))
    return exact, 2 * error + torch.finfo(query.dtype).eps * float(exact.abs().max()) + turned


def check(
    plan: AttentionPlan, tensors: Sequence[Tensor], scale: float, kernel: Callable[..., tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    """Run `plan` by `kernel` and hold the answer and its log-sum-exp to float64 attention under its mask; gives both."""
    query, key, value = tensors
    biased = any(span.bias is not None or span.key is not None for part in plan.parts for span in part.spans)
    mask, bias = plan.to_mask(), plan.to_bias() if biased else None
    out, lse = attend_plan(plan, query, key, value, scale, kernel)
    for own in plan.own_keys:
        key, value = (
            torch.cat([t, o.to(t.dtype).expand(*t.shape[:2], -1, -1)], 2)
            for t, o in zip((key, value), own, strict=True)
        )
    exact, allowed = budget(query, key, value, mask, scale, bias)
    assert out.dtype == query.dtype and out.shape == exact.shape and lse.dtype == torch.float32
    assert float((out.double() - exact).abs().max()) <= allowed
    blind = ~mask.any(-1).expand(lse.shape)
    assert (out[blind] == 0).all() and torch.equal(lse == -torch.inf, blind)
    wide = log_sum_exp(query.double(), key.double(), mask, scale, bias)[~blind]
    if wide.numel():
        plain = float((log_sum_exp(query, key, mask, scale, bias)[~blind].double() - wide).abs().max())
        error = float((lse[~blind].double() - wide).abs().max())
        assert error <= 2 * plain + torch.finfo(torch.float32).eps * float(wide.abs().max())
    return out, lse


def flat(part: Part, plan: AttentionPlan) -> tuple:
    """The arguments of `block_attend` between the tensors and the scale."""
    return (*part.pack(), plan.block_q, plan.block_k)


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
