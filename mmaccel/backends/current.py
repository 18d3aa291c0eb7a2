"""The current device while kernels are launched."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

Attend = Callable[..., tuple[Tensor, Tensor]]


def on_its_device(kernel: Attend) -> Attend:
    """`kernel`, with the device of its first tensor as the current one.

    Launches go to the current device whatever tensors they are given, and the layers of a model may lie on several.
    """

    @wraps(kernel)
    def there(query: Tensor, *args: Any, **named: Any) -> tuple[Tensor, Tensor]:
        with torch.cuda.device_of(query):  # type: ignore[no-untyped-call]
            return kernel(query, *args, **named)

    return there
