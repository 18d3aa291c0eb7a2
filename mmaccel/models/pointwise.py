"""What acts on each row alone: on some rows at a time, so that a long prompt needs no room for what it holds, and in one
kernel where there is one.

A feed-forward block of a 7B model holds 38 GB for each of three products at a million tokens; on 32 768 rows at a time it
holds 1.2, and the matrices are as full as the device wants them. What such a layer does beside its products moves memory:
of 38 ms at 131 072 tokens on an H200 all but 10 are steps that one kernel takes together.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from mmaccel.backends.ops import pointwise
from mmaccel.models.install import Hooks

ROWS = 1 << 15
"""Rows at a time; a shorter prompt goes through at once, and meets no other arithmetic than without us."""


def in_chunks(hooks: Hooks, modules: Iterable[nn.Module], family: Any) -> None:
    """Let `modules` take long inputs [B, n, E] in pieces of `ROWS` rows; `family` is their `Family`."""
    for module in modules:
        if is_gated(module, family):
            hooks.wrap(module, "forward", gated, module)
        hooks.wrap(module, "forward", _by_rows)
        if is_norm(module, family):
            hooks.wrap(module, "forward", normed_or, module)


def rotate_by(
    hooks: Hooks,
    modules: Iterable[nn.Module],
    name: str,
    turned: Callable[..., tuple[Tensor, Tensor]] | None = None,
) -> None:
    """Let attention `modules` rotate queries and keys in place, or by `turned`, which is given their own function and what
    that is given. `name`: what they call their own function.

    Their forward is the same code, in which one name means another function: what is theirs is not touched.
    """
    for module in modules:
        known: Any = getattr(module.forward, "__func__", None)
        if name not in getattr(getattr(known, "__code__", None), "co_names", ()):
            continue
        names = {**known.__globals__, name: functools.partial(turned or _turned, known.__globals__[name])}
        ours = FunctionType(known.__code__, names, known.__name__, known.__defaults__, known.__closure__)
        ours.__kwdefaults__ = known.__kwdefaults__
        # What is compiled around it goes by the names of the module, which ours has a copy of.
        wrapper = functools.partial(torch.compiler.disable(ours), module)
        hooks.put(module, "forward", functools.wraps(module.forward)(wrapper))


def _by_rows(whole: Callable[..., Any], hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
    batch, n = hidden.shape[:2]
    # Where gradients are wanted, all that the pieces hold is kept anyway.
    if args or kwargs or batch * n <= ROWS or _wants_gradients(hidden):
        return whole(hidden, *args, **kwargs)
    rows, out = ROWS // batch, None
    for begin in range(0, n, rows):
        piece = whole(hidden[:, begin : begin + rows])
        if out is None:
            out = piece.new_empty(batch, n, *piece.shape[2:])
        out[:, begin : begin + rows] = piece
    return out


def is_norm(module: nn.Module, family: Any) -> bool:
    """Whether `module` is a norm by the root mean square, with a weight and no more."""
    return type(module).__name__ in family.rms_norms


def is_gated(module: nn.Module, family: Any) -> bool:
    """Whether `module` is a feed-forward block of three products, gated by a SiLU."""
    silu = type(getattr(module, "act_fn", None)).__name__ in ("SiLU", "SiLUActivation")
    return silu and type(module).__name__ in family.gated_mlps


def normed(module: Any, hidden: Tensor, family: Any) -> Tensor:
    """What the norm `module` makes of `hidden`, by one kernel where there is one; for code that nobody compiles."""
    return normed_or(module, module, hidden) if is_norm(module, family) else module(hidden)  # type: ignore[no-any-return]


def normed_or(module: Any, whole: Callable[..., Any], hidden: Tensor) -> Any:
    """What the norm `module` makes of `hidden`, by one kernel where there is one; `whole` is its own forward."""
    fits = module.weight.dtype == hidden.dtype and pointwise.fusible(hidden)
    if not fits or _wants_gradients(hidden, module.weight):
        return whole(hidden)
    return pointwise.rms_norm(hidden, module.weight, module.variance_epsilon)


def gated(module: Any, whole: Callable[..., Any], hidden: Tensor) -> Any:
    """What the gated block `module` makes of `hidden`, its gate by one kernel where there is one, else by its `whole`."""
    if not pointwise.fusible(hidden) or torch.is_grad_enabled():
        return whole(hidden)
    gate = module.gate_proj(hidden)
    pointwise.silu_times_(gate, module.up_proj(hidden))
    return module.down_proj(gate)


def _turned(
    whole: Callable[..., Any], query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any
) -> Any:
    one = cos.shape == sin.shape and cos.dtype == sin.dtype == query.dtype == key.dtype
    fits = one and cos.shape[1:] == query.shape[2:] and cos.shape[0] in (1, query.shape[0])
    fits = fits and pointwise.fusible(query)
    if args or kwargs or not fits or torch.is_grad_enabled():
        return whole(query, key, cos, sin, *args, **kwargs)
    pointwise.rotate_(query, cos, sin)
    pointwise.rotate_(key, cos, sin)
    return query, key


def _wants_gradients(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`x` [..., D] rotated by angles [..., D], the first half of its coordinates paired with the second."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin
