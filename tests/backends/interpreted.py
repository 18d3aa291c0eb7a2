"""Where the cases of Triton's kernels run: in its interpreter on the CPU, a part of them, or all on a CUDA device."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch

from tests.products import product

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = [torch.float16, torch.float32] if INTERPRETED else [torch.bfloat16, torch.float16, torch.float32]


def some(*axes: Iterable[Any]) -> list[Any]:
    """All cases of the product of `axes`; interpreted, always those alone that hold each value of an axis."""
    return product(*axes, together=1 if INTERPRETED else len(axes))
