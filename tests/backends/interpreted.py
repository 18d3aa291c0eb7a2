"""Where the cases of Triton's kernels run: in its interpreter on the CPU, a part of them, or all on a CUDA device."""

import os
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from tests.products import product

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DTYPES = [torch.float16, torch.float32] if INTERPRETED else [torch.bfloat16, torch.float16, torch.float32]


def first(count: int, *cases: Any) -> list[Any]:
    """All of these cases; interpreted, those behind the first `count` are slow."""
    late = (pytest.mark.slow,) if INTERPRETED else ()
    told = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*case, marks=late if n >= count else ()) for n, case in enumerate(told)]


def some(*axes: Iterable[Any]) -> list[Any]:
    """All cases of the product of `axes`; interpreted, always those alone that hold each value of an axis."""
    return product(*axes, together=1 if INTERPRETED else len(axes))
