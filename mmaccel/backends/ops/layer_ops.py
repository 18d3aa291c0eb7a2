"""Fused operators of a transformer layer other than prompt attention: on rows, and for decode steps over a static cache.

In PyTorch an RMSNorm reads and writes its rows about seven times in full precision; here each row is read and written once.
Results round where transformers' modules round, so they are equal. Products of few rows are bound by reading the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from mmaccel.backends.ops.operator import operator, runs_triton, runs_triton_in_float32

HALVES = (torch.float16, torch.bfloat16)

WINDOW = 64
"""Columns at the end of a sequence of which a row of a tree may see some and not others: the bits of a word."""

MOST = 64
"""Rows beyond which products are a matter of computing."""

MERGED = 1 << 26
"""Elements that `merge_parts` merges at a time in PyTorch."""


def can_fuse(x: Tensor, *rest: object) -> bool:
    """Whether row operators (RMSNorm, gates, RoPE, `merge_parts`) run as one Triton kernel on `x`: 16-bit floats, a usable
    device. Else they run in plain PyTorch, as transformers' modules do."""
    return x.dtype in HALVES and runs_triton(x)


@operator(
    "pointwise", serves=can_fuse, fake=lambda x: torch.empty_like(x, memory_format=torch.contiguous_format)
)
def rms_norm(x: Tensor, weight: Tensor, eps: float, centred: bool = False) -> Tensor:
    """RMSNorm of x [..., E] in float32, rounded, then times weight [E] (which may be float32). `centred`: times 1 + weight
    before it is rounded, as Qwen3.5 and Gemma compute it."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if centred:
        return (normed * (1.0 + weight.float())).to(x.dtype)
    return (weight * normed.to(x.dtype)).to(x.dtype)


@operator("pointwise", serves=can_fuse, mutates=("gate",), fake=lambda: None)
def silu_multiply_(gate: Tensor, up: Tensor) -> None:
    """In place: gate [..., I] becomes silu(gate), rounded, times up [..., I]; both contiguous."""
    gate.copy_(functional.silu(gate) * up)


@operator("pointwise", serves=can_fuse, mutates=("x",), fake=lambda: None)
def rotate_(x: Tensor, cos: Tensor, sin: Tensor, adjacent: bool = False) -> None:
    """Apply RoPE (arXiv 2104.09864) to x [B, H, n, D] in place, by cos and sin [B or 1, n, D]. It rotates pairs of
    numbers of a head: i and i + D / 2 or, if `adjacent`, 2 i and 2 i + 1.

    In the dtype of x cos and sin round each product, as in decoder layers; in float32 only the result, as in vision towers.
    """
    x.copy_(x * cos[:, None] + _paired(x, adjacent) * sin[:, None])


def _paired(x: Tensor, adjacent: bool) -> Tensor:
    """For each number of x [..., D] the other one of its pair, negated for the first."""
    if adjacent:
        return torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    return torch.cat([-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]], -1)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, adjacent: bool = False) -> Tensor:
    """Apply RoPE to a copy of `x` [..., D] by cos and sin [..., D], with pairs as in `rotate_`; by one kernel if there is
    one for x [B, H, n, D] and angles [B or 1, 1, n, D]."""
    shapes = x.ndim == cos.ndim == 4 and cos.shape[1] == 1
    if shapes and x.dtype == cos.dtype and can_fuse(x) and not torch.is_grad_enabled():
        rotate_(x := x.clone(), cos[:, 0], sin[:, 0], adjacent)
        return x
    return x * cos + _paired(x, adjacent) * sin


@operator("pointwise", serves=lambda x, inv_freq, scale, dtype: dtype in HALVES and runs_triton(x))
def rope_angles(
    positions: Tensor, inv_freq: Tensor, scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """RoPE cosines and sines [n, D], times `scale`, of `positions` [n] long and inverse frequencies `inv_freq` [D / 2]
    float32, as transformers' rotary embeddings compute them; one kernel."""
    angle = (positions[:, None].float() * inv_freq).repeat(1, 2)
    return (angle.cos() * scale).to(dtype), (angle.sin() * scale).to(dtype)


@operator("pointwise", serves=can_fuse, fake=lambda out, lse: torch.empty_like(out[0]))
def merge_parts(out: Tensor, lse: Tensor) -> Tensor:
    """Merge attention over R disjoint sets of keys exactly, by log-sum-exp: out [R, n, ..., D] and lse [R, n, ...] of each,
    both contiguous. Returns [n, ..., D] in the dtype of `out`; 0 where no set has a key."""
    found = torch.empty_like(out[0])
    # In full precision all rows would take twice what they take.
    few = max(1, MERGED // max(1, out[:, :1].numel()))
    for begin in range(0, out.shape[1], few):
        some = slice(begin, begin + few)
        total = lse[:, some].logsumexp(0)
        weight = (lse[:, some] - total.masked_fill(total == -torch.inf, 0.0)).exp()
        found[some] = (out[:, some].to(lse.dtype) * weight[..., None]).sum(0)
    return found


def _attend_shape(query: Tensor) -> Tensor:
    B, H, n, D = query.shape
    return query.new_empty(B, n, H, D).transpose(1, 2)


@operator("decode", serves=runs_triton_in_float32, fake=_attend_shape)
def decode_attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    columns: Tensor,
    scale: float,
    sees: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Exact attention of a few new rows over a static cache that already contains them.

    query [B, H, n, D], key and value [B, G, capacity, D], H a multiple of G. columns [B, n] long, on the device: the
    ascending cache slots of the new rows; row i sees slots 0 .. columns[b, i]. With sees [n] long (tree attention) row i
    sees, of the last `WINDOW` slots up to columns[b, n - 1], those whose bits are set (oldest first), and all earlier ones.
    bias [m] float32 is added to the scores of slots 0 .. m - 1. Returns [B, H, n, D], in memory [B, n, H, D].
    """
    column = torch.arange(key.shape[2], device=key.device)
    if sees is None:
        mask = column <= columns[..., None]
    else:
        late = column - (columns[:, -1:] + 1 - WINDOW)
        seen = (sees[None, :, None] >> late.clamp(0, WINDOW - 1)[:, None]) & 1
        mask = (late < 0)[:, None] | ((seen != 0) & (late < WINDOW)[:, None])
    cached = (column <= columns[:, -1:])[:, None, :, None]
    key, value = (torch.where(cached, x, 0) for x in (key, value))  # what lies behind may be anything
    grouped = query.shape[1] != key.shape[1]
    if bias is not None:
        added = functional.pad(bias, (0, key.shape[2] - len(bias)))
        mask = added.masked_fill(~mask, -torch.inf).to(query.dtype)
    out = functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask[:, None], scale=scale, enable_gqa=grouped
    )
    return out.transpose(1, 2).contiguous().transpose(1, 2)


def _turn_shape(rows: Tensor, key: Tensor) -> Tensor:
    B, n, width = rows.shape
    G, D = key.shape[1], key.shape[-1]
    return rows.new_empty(B, n, width // D - 2 * G, D).transpose(1, 2)


@operator("decode", serves=runs_triton_in_float32, mutates=("key", "value"), fake=_turn_shape)
def rope_rows(
    rows: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, columns: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    """Apply RoPE to new queries and keys, and write keys and values to the cache; returns queries [B, H, n, D].

    rows [B, n, (H + 2 G) * D]: queries, keys, values, head by head. cos and sin [B, S, D] by position. positions and
    columns [B, n] long: the position of each row and the cache slot it is written to. key and value [B, G, capacity, D], the
    last dimension dense.
    """
    B, n, width = rows.shape
    G, D = key.shape[1], key.shape[-1]
    batch = torch.arange(B, device=rows.device)[:, None]
    heads = rows.view(B, n, width // D, D)
    angles = [table[batch, positions][:, :, None] for table in (cos, sin)]
    turned = heads[:, :, : width // D - G]
    half = D // 2
    turned = turned * angles[0] + torch.cat([-turned[..., half:], turned[..., :half]], -1) * angles[1]
    query, new = turned[:, :, : width // D - 2 * G], turned[:, :, width // D - 2 * G :]
    key.transpose(1, 2)[batch, columns] = new
    value.transpose(1, 2)[batch, columns] = heads[:, :, width // D - G :]
    return query.contiguous().transpose(1, 2)


def has_linear_kernels(x: Tensor, *rest: object) -> bool:
    """Whether fused kernels exist for linear layers on rows `x` [R, K]: few bfloat16 rows on a Triton device."""
    return x.dtype == torch.bfloat16 and x.shape[0] <= MOST and runs_triton(x)


def _project_shape(x: Tensor, weight: Sequence[Tensor], gated: bool) -> Tensor:
    return x.new_empty(x.shape[0], weight[0].shape[0] if gated else sum(w.shape[0] for w in weight))


@operator("decode", serves=has_linear_kernels, fake=_project_shape)
def project_rows(
    x: Tensor,
    weight: Sequence[Tensor],
    bias: Sequence[Tensor],
    gain: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    gated: bool = False,
    squares: Tensor | None = None,
) -> Tensor:
    """Fused linear layers on a few rows, with optional RMSNorm before, and gate and residual after.

    x [R, K]; weight: one to three of [O, K], whose outputs are concatenated; bias: none, or [O] for each. `gain` [K]: apply
    RMSNorm (`eps`) first. `gated`: of two weights, silu(first output) * second output. `residual` [R, O'] is added. Returns
    [R, O'] in the dtype of `x`, rounded after the norm and at the end. With `squares` [R, P], `x` is the `gained` of
    `residual_linear`, and rows are first divided by their root mean square, computed from these.
    """
    if squares is not None:
        x = (x * torch.rsqrt(squares.sum(-1, keepdim=True) / x.shape[-1] + eps)).to(x.dtype)
    if gain is not None:
        x = rms_norm.plain(x, gain, eps)
    parts = [functional.linear(x, w, bias[i] if bias else None) for i, w in enumerate(weight)]
    out = functional.silu(parts[0]) * parts[1] if gated else torch.cat(parts, -1)
    return out if residual is None else residual + out


def _pass_shapes(x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
    # How many parts the squares have is the kernel's own affair.
    parts = torch.library.get_ctx().new_dynamic_size()
    squares = x.new_empty(x.shape[0], parts, dtype=torch.float32)
    return x.new_empty(residual.shape), x.new_empty(residual.shape), squares


@operator("decode", serves=has_linear_kernels, fake=_pass_shapes)
def residual_linear(
    x: Tensor, weight: Tensor, bias: Sequence[Tensor], residual: Tensor, gain: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Linear layer on rows [R, K] plus residual, which also computes what the following RMSNorm needs, so that the norm
    takes no kernel of its own.

    weight [E, K]; bias: none, or one of [E]; residual [R, E]; gain [E]: weight of that norm. Returns out [R, E], the sum;
    gained [R, E], out times gain, in the dtype of `x`; and squares [R, P] float32, partial sums of squares of out. A linear
    layer on normed rows is that on `gained`, divided by ``sqrt(squares.sum(-1) / E + eps)`` (`project_rows`).
    """
    out = project_rows.plain(x, [weight], bias, residual=residual)
    return out, (out * gain).to(out.dtype), out.float().pow(2).sum(-1, keepdim=True)


def _enter_shape(x: Tensor, weight: Sequence[Tensor], columns: Tensor, key: Tensor) -> Tensor:
    B, n = columns.shape
    D = key.shape[-1]
    return x.new_empty(B, n, weight[0].shape[0] // D, D).transpose(1, 2)


@operator("decode", serves=has_linear_kernels, mutates=("key", "value"), fake=_enter_shape)
def qkv_rope_rows(
    x: Tensor,
    weight: Sequence[Tensor],
    bias: Sequence[Tensor],
    gain: Tensor | None,
    squares: Tensor | None,
    eps: float,
    turn: Tensor,
    columns: Tensor,
    key: Tensor,
    value: Tensor,
) -> Tensor:
    """Attention input, fused: project rows to q, k and v, apply RoPE, write k and v to the cache; returns q [B, H, n, D].

    x [B * n, K]; weight: [H * D, K] and two of [G * D, K]; bias: none, or one each. `gain` or `squares`, or neither: as in
    `project_rows`. turn [2, B, n, D]: cosines and sines. columns, key, value: see `rope_rows`.
    """
    rows = project_rows.plain(x, weight, bias, gain, eps, squares=squares).view(*columns.shape, -1)
    positions = torch.arange(columns.shape[1], device=x.device).expand_as(columns)
    # Where the products are PyTorch's, what turns is a kernel still: one for a dozen.
    return rope_rows.call_directly(rows, turn[0], turn[1], positions, columns, key, value)


@dataclass(frozen=True, eq=False)
class SeparateKVCaches:
    """The KV caches of B sequences at one layer, each in separate buffers.

    pairs  keys and values [1, G, capacity, D] of each sequence, for the plain PyTorch form
    home   [1, G, 1, D], whose first element is the base address for kernels; it also gives sizes and dtype
    table  [B, 4] long on the device: for each sequence's keys the element offset from `home` and the stride between heads,
           then the same for its values. All are multiples of `aligned`, the elements that a kernel loads at a time
    """

    aligned: ClassVar[int] = 8
    pairs: list[tuple[Tensor, Tensor]]
    home: Tensor
    table: Tensor

    @staticmethod
    def addresses(home: Tensor, key: Tensor, value: Tensor) -> list[int]:
        """Return the four numbers of a sequence's row of `table`, computed from its `key`, `value` [1, G, capacity, D]."""
        item = home.element_size()
        return [n for x in (key, value) for n in ((x.data_ptr() - home.data_ptr()) // item, x.stride(1))]


@operator("decode", serves=runs_triton_in_float32)
def decode_attend_each(
    query: Tensor, caches: SeparateKVCaches, columns: Tensor, scale: float, bias: Tensor | None = None
) -> Tensor:
    """Attention of decode steps of a batch in which each sequence has its own KV cache, which already contains the new rows:
    query [B, H, n, D], row i of sequence b sees slots 0 .. columns[b, i]. bias [B, m] float32 is added to the scores of each
    sequence's slots 0 .. m - 1. Returns [B, H, n, D]."""
    found = []
    for b, (key, value) in enumerate(caches.pairs):
        length = int(columns[b, -1]) + 1  # beside a device this form does not run: nothing waits
        own = query[b : b + 1], key[:, :, :length], value[:, :, :length], columns[b : b + 1]
        found.append(decode_attend.plain(*own, scale, bias=None if bias is None else bias[b]))
    return torch.cat(found)


@operator("decode", serves=runs_triton_in_float32)
def rope_rows_each(
    rows: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, columns: Tensor, caches: SeparateKVCaches
) -> Tensor:
    """`rope_rows` where each sequence has its own cache: apply RoPE to rows [B, n, (H + 2 G) * D], write keys and values to
    slots `columns` [B, n]; returns queries [B, H, n, D]."""
    found = []
    for b, (key, value) in enumerate(caches.pairs):
        row, c, s, position, column = (one[b : b + 1] for one in (rows, cos, sin, positions, columns))
        found.append(rope_rows.plain(row, c, s, position, column, key, value))
    return torch.cat(found)


@operator("decode", serves=has_linear_kernels)
def qkv_rope_rows_each(
    x: Tensor,
    weight: Sequence[Tensor],
    bias: Sequence[Tensor],
    gain: Tensor | None,
    squares: Tensor | None,
    eps: float,
    turn: Tensor,
    columns: Tensor,
    caches: SeparateKVCaches,
) -> Tensor:
    """`qkv_rope_rows` where each sequence has its own cache: project rows x [B * n, K] to q, k and v, apply RoPE by `turn`
    [2, B, n, D], write k and v to slots `columns` [B, n]; returns queries [B, H, n, D]."""
    rows = project_rows.plain(x, weight, bias, gain, eps, squares=squares).view(*columns.shape, -1)
    positions = torch.arange(columns.shape[1], device=x.device).expand_as(columns)
    return rope_rows_each.call_directly(rows, turn[0], turn[1], positions, columns, caches)
