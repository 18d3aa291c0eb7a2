"""Questions to any model: whether it wraps another one, and where it computes."""

from __future__ import annotations

import torch
from torch import nn


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside a wrapper that has `get_base_model`, as PEFT's have; any other model itself."""
    inner = getattr(model, "get_base_model", None) if isinstance(model, nn.Module) else None
    return inner() if callable(inner) else model


def home_of(model: nn.Module) -> torch.device:
    """Where a model computes first: the device of its first weights, or, where these are offloaded, that of the hooks that
    fetch them (`execution_device`, of the library accelerate)."""
    first = next(model.parameters()).device
    if first.type != "meta":
        return first
    for module in model.modules():
        hook = getattr(module, "_hf_hook", None)
        for one in (hook, *getattr(hook, "hooks", ())):
            device = getattr(one, "execution_device", None)
            if device is not None:
                return torch.device(device)
    return first
