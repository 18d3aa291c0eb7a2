"""The kernel for Hopper without a device: what is made before it, interpreted."""

from __future__ import annotations

import pytest

from .test_triton import run

pytest.importorskip("triton")


@pytest.mark.numeric(by="numpy")
def test_interpreted() -> None:
    quiet = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-W", "ignore::DeprecationWarning")
    out = run("pytest", "tests/backends/hopper_cases.py", *quiet, TRITON_INTERPRET="1", PYTEST_ADDOPTS="")
    assert " passed" in out and "failed" not in out and "skipped" not in out
