"""Attention of an accelerated model where gradients are on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmaccel.core.attention import Run, StreamRun
from mmaccel.core.errors import ModelError


class OneWay(torch.autograd.Function):
    """What it is without gradients, and a clear word to whoever asks for one."""

    @staticmethod
    def forward(
        ctx: Any, run: Run | StreamRun, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> Tensor:
        return run.attend(layer, query, key, value, scale)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise ModelError(
            "backward: the attention of an accelerated model has no gradient; detach the recipe to train."
        )
