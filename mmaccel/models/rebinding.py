"""Lets a module's forward call a function of ours where its code calls one of its own file: RoPE, or the convolution of a
Gated DeltaNet. The forward runs as a copy in which one name is rebound; nothing global changes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from mmaccel.backends.ops import delta, layer_ops
from mmaccel.models.install import Hooks

PACKED = ("seq_idx", "cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k")
"""Arguments of a forward that tell the ends of sequences which lie in one row."""


def rebind_function(hooks: Hooks, modules: Iterable[nn.Module], name: str, ours: Callable[..., Any]) -> None:
    """Let the forward of `modules` call `ours`, which gets the original function and its arguments, where it calls the
    function `name`. A module whose forward calls none of that name is left as it is."""
    for module in modules:
        known: Any = getattr(module.forward, "__func__", None)
        if (copied := _copy_rebound(known, name, ours)) is None:
            continue
        # Not compiled itself: what is kept of a compiled forward goes by the code, which both have, and not by the names.
        wrapper = functools.partial(_unless_compiled, torch.compiler.disable(copied), known, module)
        hooks.put(module, "forward", functools.wraps(module.forward)(wrapper))


def _copy_rebound(known: Any, name: str, ours: Callable[..., Any]) -> FunctionType | None:
    """A copy of the function `known`, or of that which its decorators wrap, in which `name` is `ours`; None: it has no such
    name."""
    code = getattr(known, "__code__", None)
    if code is None:
        return None
    names, cells = known.__globals__, known.__closure__
    if name in code.co_names:
        names = {**names, name: functools.partial(ours, names[name])}
    else:
        inner = getattr(known, "__wrapped__", None)
        if inner is None or not cells or (copied := _copy_rebound(inner, name, ours)) is None:
            return None
        cells = tuple(CellType(copied) if cell.cell_contents is inner else cell for cell in cells)
    made = FunctionType(code, names, known.__name__, known.__defaults__, cells)
    made.__kwdefaults__ = known.__kwdefaults__
    return made


def _unless_compiled(ours: Callable[..., Any], plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A compiler goes by the names of the module, which ours has a copy of; what it makes of theirs is few kernels too."""
    return (plain if torch.compiler.is_compiling() else ours)(*args, **kwargs)


def apply_rope_in_place(
    whole: Callable[..., Any], query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Rotate query and key [B, H, n, D] in place, in the dimensions that the angles have, by one kernel each; or call
    `whole`, the attention module's own RoPE function."""
    size = cos.shape[-1]
    one = cos.shape == sin.shape and cos.dtype == sin.dtype == query.dtype == key.dtype
    fits = one and cos.shape[1:-1] == query.shape[2:-1] and cos.shape[0] in (1, query.shape[0])
    fits = fits and size <= query.shape[-1] and layer_ops.fusible(query)
    if args or kwargs or not fits or torch.is_grad_enabled():
        return whole(query, key, cos, sin, *args, **kwargs)
    layer_ops.rotate_(query[..., :size], cos, sin)
    layer_ops.rotate_(key[..., :size], cos, sin)
    return query, key


def fuse_deltanet(hooks: Hooks, modules: Iterable[nn.Module]) -> None:
    """Let Gated DeltaNet `modules` compute their convolution with its SiLU, and their gated norm, by one kernel each."""
    some: list[Any] = list(modules)
    rebind_function(hooks, some, "causal_conv1d_fn", _convolved)
    for module in some:
        hooks.wrap(module.norm, "forward", _gated_norm, module.norm)


def _convolved(
    whole: Callable[..., Any],
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **told: Any,
) -> Any:
    """The convolution of hidden [B, C, S] and its activation. The result lies row by row, as it is read."""
    packed = any(told.get(name) is not None for name in PACKED)
    same = hidden.dtype == weight.dtype and layer_ops.fusible(hidden)
    if bias is not None or activation != "silu" or packed or not same or torch.is_grad_enabled():
        return whole(hidden, weight, bias, activation=activation, **told)
    return delta.convolve_silu(hidden.mT, weight).mT


def _gated_norm(module: Any, whole: Callable[..., Any], hidden: Tensor, gate: Tensor) -> Any:
    same = hidden.dtype == gate.dtype == module.weight.dtype and layer_ops.fusible(hidden)
    if not same or torch.is_grad_enabled():
        return whole(hidden, gate)
    return delta.gated_rms_norm(hidden, gate, module.weight, module.variance_epsilon)
