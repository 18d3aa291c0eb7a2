"""The operators that make and count lists of key blocks: their contracts, and their kernels without a device."""

from __future__ import annotations

import os

import pytest
import torch

from mmaccel.backends.ops.block_lists import listed_area, reach

from .test_triton import run

FILES = ("tests/backends/lists_cases.py", "tests/backends/work_cases.py")


def test_the_operators_keep_their_contracts() -> None:
    row = torch.arange(64, dtype=torch.int32).view(1, 1, 64)
    heads = row.expand(1, 3, 64).contiguous()
    torch.library.opcheck(reach.op, (row, heads, row, row, 0, 20, 16, 16))
    lists, _ = reach(row, heads, row, row, 0, 20, 16, 16)
    torch.library.opcheck(listed_area.op, (lists, torch.empty(0, dtype=torch.int32), row, heads, 16, 16))


def test_interpreted() -> None:
    pytest.importorskip("triton")
    quiet = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-W", "ignore::DeprecationWarning")
    out = run("pytest", *FILES, *quiet, TRITON_INTERPRET="1", PYTEST_ADDOPTS="")
    assert " passed" in out


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_compiled() -> None:
    quiet = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist")
    here = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    out = run("pytest", *FILES, *quiet, PYTEST_ADDOPTS="", CUDA_VISIBLE_DEVICES=here)
    assert " passed" in out
