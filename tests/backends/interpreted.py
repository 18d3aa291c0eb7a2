"""Where the cases of Triton's kernels run: in its interpreter on the CPU, a part of them, or all on a CUDA device."""

import operator
import os
from collections.abc import Callable, Iterable
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.spies import product

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DTYPES = [torch.float16, torch.float32] if INTERPRETED else [torch.bfloat16, torch.float16, torch.float32]


def some(*axes: Iterable[Any]) -> list[Any]:
    """All cases of the product of `axes`; interpreted, those alone that hold each value of an axis."""
    return product(*axes, together=1 if INTERPRETED else len(axes))


def scan(self: Any, given: tuple[Any, ...]) -> list[Any]:
    """What `ScanOps.generic_scan` gives of a combination that is associative, by twice as many elements each step."""
    (one,), data, step = given, given[0].handle.data, 1
    assert self.axis == 0
    while step < len(data):
        pair = (self.to_tensor(x, one.dtype) for x in (np.roll(data, step, 0), data))
        data = np.concatenate([data[:step], self.combine_fn.fn(*pair).handle.data[step:]])
        step *= 2
    return [self.to_tensor(data, one.dtype)]


def in_range(self: Any, left: Any, right: Any, operation: Callable[..., Any]) -> None:
    """What `binary_op_sanitize_overflow_impl` asserts, by NumPy."""
    kind = left.type.scalar
    if kind.int_bitwidth < 64:
        found = getattr(operator, operation.__name__)(*(one.handle.data.astype(int) for one in (left, right)))
        assert kind.get_int_min_value() <= found.min() and found.max() <= kind.get_int_max_value(), kind


if INTERPRETED:
    import triton.language as tl
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    # The language is prepared once, not at each call; types are looked up once; scans and sums go by arrays.
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    interpreter._patch_lang = lambda function: SimpleNamespace(restore=lambda: None)
    named = interpreter._get_np_dtype
    known = cache(named)
    interpreter._get_np_dtype = lambda kind: named(kind) if kind.scalar.is_ptr() else known(kind.scalar)
    interpreter.ScanOps.generic_scan = scan
    TritonSemantic.binary_op_sanitize_overflow_impl = in_range
