"""Attention of an accelerated model where gradients are on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

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


def check_training(layers: nn.ModuleList) -> None:
    """Raise `ModelError` for layers that are recomputed for gradients: they run without the cache that is read here."""
    if any(getattr(layer, "gradient_checkpointing", False) and layer.training for layer in layers):
        raise ModelError(
            "gradient_checkpointing: an accelerated model is not trained, and its layers run without a cache under it; call "
            "model.eval(), or detach the recipe to train."
        )
