"""What attention is, written out over all pairs; and calls of the flat operator from a plan."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mmaccel.backends.ops.block_attend import Part
from mmaccel.core.prefill.plan import AttentionPlan
from mmaccel.core.prefill.sparse import attend_plan


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
