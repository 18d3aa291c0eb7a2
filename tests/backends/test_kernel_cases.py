"""The files of cases of Triton's kernels, interpreted without a device and compiled on one, each in a process of its own."""

from __future__ import annotations

import os

import pytest
import torch

from .test_triton import run

pytest.importorskip("triton")
QUIET = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-W", "ignore::DeprecationWarning")
PRODUCTS = pytest.mark.numeric(by="numpy")
INTERPRETED = [
    pytest.param("triton", marks=PRODUCTS),
    pytest.param("carried clusters decode gather hopper index lists pieces pointwise work", marks=PRODUCTS),
]


def ran(names: str, **environment: str) -> None:
    files = [f"tests/backends/{name}_cases.py" for name in names.split()]
    files += ["tests/core/test_masked.py::test_a_planned_layer"] * (names == "triton")
    out = run("pytest", *files, *QUIET, PYTEST_ADDOPTS="", **environment)
    assert " passed" in out and "failed" not in out and "skipped" not in out


@pytest.mark.parametrize("names", INTERPRETED)
def test_interpreted(names: str) -> None:
    ran(names, TRITON_INTERPRET="1")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    "name", ["carried", "clusters", "gather", "index", "lists", "pieces", "pointwise", "work"]
)
def test_compiled(name: str) -> None:
    """Those of the other files run in `test_triton_gpu`, `test_decode_gpu` and `test_hopper_gpu`."""
    ran(name, CUDA_VISIBLE_DEVICES=os.environ.get("CUDA_VISIBLE_DEVICES", "0"))
