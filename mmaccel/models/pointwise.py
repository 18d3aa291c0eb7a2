"""Modules that act on each row alone, run on some rows at a time, so that a long prompt needs no room for what they hold.

A feed-forward block of a 7B model holds 38 GB for each of three products at a million tokens; on 32 768 rows at a time it
holds 1.2, and the matrices are as full as the device wants them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

ROWS = 1 << 15
"""Rows at a time; a shorter prompt goes through at once, and meets no other arithmetic than without us."""


def in_chunks(modules: Sequence[nn.Module]) -> Callable[[], None]:
    """Let `modules` take long inputs [B, n, E] in pieces of `ROWS` rows; the returned call puts them back as they were."""
    before = [(module, module.__dict__.get("forward")) for module in modules]
    for module in modules:
        whole: Callable[..., Any] = module.forward
        module.__dict__["forward"] = functools.wraps(whole)(functools.partial(_by_rows, whole))

    def undo() -> None:
        for module, forward in before:
            module.__dict__.pop("forward", None)
            if forward is not None:
                module.__dict__["forward"] = forward

    return undo


def _by_rows(whole: Callable[..., Any], hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
    batch, rows = hidden.shape[0], ROWS // max(1, hidden.shape[0])
    n = hidden.shape[1]
    # Where gradients are wanted, all that the pieces hold is kept anyway.
    if args or kwargs or batch * n <= ROWS or (torch.is_grad_enabled() and hidden.requires_grad):
        return whole(hidden, *args, **kwargs)
    out: Tensor | None = None
    for begin in range(0, n, rows):
        piece = whole(hidden[:, begin : begin + rows])
        if out is None:
            out = piece.new_empty(batch, n, *piece.shape[2:])
        out[:, begin : begin + rows] = piece
    return out
