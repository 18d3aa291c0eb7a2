"""Runs a vision tower's norms, gates and rotations in one kernel each, and its products in sizes that are fast.

Qwen2.5-VL's feed-forward blocks have an inner size of 3,420 at most published sizes. In 16 bits its rows begin at multiples
of 8 bytes, and Hopper's matrix units copy rows that begin at multiples of 16: cuBLAS takes kernels of the generation before.
Filled up with zeros to 3,424 the products are those of the same numbers. The filled-up weights are copies that are made when
the tower first runs, and that go when the tower is as it was before; the model's own weights are never touched, so that
what is saved, moved or trained in the meantime is the model's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from mmaccel.backends import pointwise
from mmaccel.models.pointwise import gated, is_gated, is_norm, normed_or, replace, turning

if TYPE_CHECKING:
    from mmaccel.models.family import Family

TURN = "apply_rotary_pos_emb_vision"
"""The functions that the tower's attention modules call to rotate queries and keys."""

ALIGNED = 16
"""Bytes: a row that begins at a multiple of these is copied by Hopper's matrix units themselves."""

_AT_WORK: WeakSet[nn.Module] = WeakSet()
"""Towers that already run so."""


def lighter(undo: ExitStack, family: Family, model: nn.Module) -> None:
    """Let the model's tower run in fewer kernels, where they exist; `undo` restores it and frees copies of weights. Leaves
    a tower of a family without windows, or one that already runs so, as it is."""
    tower = family.windowed(model)
    if tower is None or tower in _AT_WORK:
        return
    undo.callback(_AT_WORK.discard, tower)
    _AT_WORK.add(tower)
    modules = list(tower.modules())
    replace(undo, [one for one in modules if is_norm(one)], _normed)
    replace(undo, [one for one in modules if is_gated(one)], _gate)
    turning(undo, modules, _turned, TURN)


def _normed(module: nn.Module) -> Callable[..., Any]:
    return functools.partial(normed_or, module, module.forward)


def _gate(module: nn.Module) -> Callable[..., Any]:
    return functools.partial(_gated, Filled(module), module.forward)


def _gated(filled: Filled, whole: Callable[..., Any], hidden: Tensor) -> Any:
    """[..., E]: the output of the feed-forward block for `hidden` [..., E]."""
    fits = pointwise.fusible(hidden) and not torch.is_grad_enabled() and not torch.compiler.is_compiling()
    weights = filled.weights(hidden) if fits else None
    if weights is None:
        return gated(filled.module, whole, hidden)
    gate, up, down, gate_bias, up_bias, down_bias = weights
    wide = linear(hidden, gate, gate_bias)
    pointwise.silu_times_(wide, linear(hidden, up, up_bias))
    return linear(wide, down, down_bias)


class Filled:
    """The weights of a feed-forward block, padded with zeros to an inner size that is a multiple of `ALIGNED` bytes.

    What is filled up adds nothing: its gate is silu(0) * 0, and its column of the last product is zero. Copies are made anew
    when a weight was replaced or changed in place.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module: Any = module
        self._made_of: tuple[Any, ...] | None = None
        self._held: tuple[Tensor | None, ...] = ()

    def weights(self, hidden: Tensor) -> tuple[Any, ...] | None:
        """Weights of gate, up and down, then their biases or None; None where the block has to run by itself: its inner size
        is good already, or its products are not plain ones of the type and on the device of `hidden`."""
        parts = self.module.gate_proj, self.module.up_proj, self.module.down_proj
        if not all(map(_is_plain, parts)):
            return None
        given = [part.weight for part in parts] + [part.bias for part in parts]
        inner, size = parts[0].weight.shape[0], ALIGNED // hidden.element_size()
        alike = all(x is None or (x.dtype, x.device) == (hidden.dtype, hidden.device) for x in given)
        if not alike or inner % size == 0:
            return None
        known = tuple(
            None if x is None else (x.data_ptr(), 0 if x.is_inference() else x._version) for x in given
        )
        if known != self._made_of:
            rows, more = [*given[:2], *given[3:5]], -inner % size
            gate, up, *bias = [None if x is None else pad(x, (0, 0) * (x.ndim - 1) + (0, more)) for x in rows]
            self._held = gate, up, pad(given[2], (0, more)), *bias, given[5]
            self._made_of = known
        return self._held


def _is_plain(part: Any) -> bool:
    """Whether `part` is a product with its own weight and nothing else: no adapter, no quantized weight, no hook."""
    hooked = part._forward_hooks or part._forward_pre_hooks or "forward" in part.__dict__
    return type(part) is nn.Linear and type(part.weight) is nn.Parameter and not hooked


def _turned(
    whole: Callable[..., Any], query: Tensor, key: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """Queries and keys [rows, H, D] turned in place by angles [rows, D], in float32 as the tower does."""
    fits = cos.dtype == sin.dtype == torch.float32 and query.dtype == key.dtype and cos.shape == sin.shape
    if not fits or not pointwise.fusible(query) or torch.is_grad_enabled():
        turned: tuple[Tensor, Tensor] = whole(query, key, cos, sin)
        return turned
    for one in (query, key):
        pointwise.rotate_(one.transpose(0, 1)[None], cos[None], sin[None])
    return query, key
