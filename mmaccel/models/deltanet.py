"""Speeds up Gated DeltaNet modules on prompts: convolution with SiLU is one kernel, and the gated norm is one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from mmaccel.backends.ops import delta, layer_ops
from mmaccel.models.install import Hooks
from mmaccel.models.modules import rebind_function
from mmaccel.models.recurrent import add_input_hooks

PACKED = ("seq_idx", "cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k")
"""Arguments of a forward that tell the ends of sequences which lie in one row."""


def hook_deltanet(hooks: Hooks, modules: Iterable[nn.Module]) -> None:
    """Make Gated DeltaNet `modules` record their input, from which a rollback recomputes their state, and compute their
    convolution with its SiLU by one kernel and their gated norm by one."""
    some: list[Any] = list(modules)
    add_input_hooks(hooks, some)
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
    same = hidden.dtype == weight.dtype and layer_ops.can_fuse(hidden)
    if bias is not None or activation != "silu" or packed or not same or torch.is_grad_enabled():
        return whole(hidden, weight, bias, activation=activation, **told)
    return delta.convolve_silu(hidden.mT, weight).mT


def _gated_norm(module: Any, whole: Callable[..., Any], hidden: Tensor, gate: Tensor) -> Any:
    same = hidden.dtype == gate.dtype == module.weight.dtype and hidden.device == module.weight.device
    same = same and layer_ops.can_fuse(hidden)
    if not same or torch.is_grad_enabled():
        return whole(hidden, gate)
    return delta.gated_rms_norm(hidden, gate, module.weight, module.variance_epsilon)
