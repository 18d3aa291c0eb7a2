"""A layer as torch.compile sees it: its attention and the writing of its keys are operators.

What plans and attends is Python that no tracer is to follow, and a pass is no tensor. So a pass has a ticket, a tensor, by
which the operators find it when they run: a pass of the text model is one graph, for any number of layers and any length.
"""

from __future__ import annotations

import itertools
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

_passes: WeakValueDictionary[int, Any] = WeakValueDictionary()
_numbers = itertools.count()


@torch.library.custom_op("mmaccel::layer_attend", mutates_args=())
def layer_attend(
    ticket: Tensor, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float
) -> Tensor:
    """[B, n, H, D]: what `attend` of the pass with this ticket gives, where torch.compile sees an operator."""
    out = _passes[int(ticket)].attend(layer, query, key, value, scale)
    return out.transpose(1, 2).contiguous()


@layer_attend.register_fake
def _(ticket: Tensor, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    return value.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3])


@torch.library.custom_op("mmaccel::layer_append", mutates_args=("ticket",))
def layer_append(ticket: Tensor, layer: int, key: Tensor, value: Tensor) -> None:
    """Append keys and values [B, G, n, D] to the memory of the pass with this ticket. That is said to change, so that what
    compiles neither leaves it out nor lets `layer_attend` come before it."""
    _passes[int(ticket)].state.append(layer, key, value)


@layer_append.register_fake
def _(ticket: Tensor, layer: int, key: Tensor, value: Tensor) -> None:
    return None


def ticket_of(run: Any) -> Tensor:
    """The number [] by which the operators of a compiled layer find `run`, as long as it lives; given to it first."""
    number = next(_numbers)
    _passes[number] = run
    object.__setattr__(run, "ticket", torch.tensor(number, device="cpu"))
    ticket: Tensor = run.ticket
    return ticket
