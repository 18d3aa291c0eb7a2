"""The kernel for Hopper without a device: what is made before it, interpreted, and the kernel itself compiled."""

from __future__ import annotations

import pytest

from .test_triton import run

pytest.importorskip("triton")


@pytest.mark.numeric(by="numpy")
def test_interpreted() -> None:
    quiet = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-W", "ignore::DeprecationWarning")
    out = run("pytest", "tests/backends/hopper_cases.py", *quiet, TRITON_INTERPRET="1", PYTEST_ADDOPTS="")
    assert " passed" in out and "failed" not in out and "skipped" not in out


def test_compiles_for_a_device_that_is_not_here() -> None:
    """Products are asynchronous, keys come by the copy engine, tiles fit, and next to nothing spills."""
    rows = run("tests.backends.hopper_compile", TRITON_INTERPRET="0").splitlines()
    assert len(rows) == 7
    for row in rows:
        _, shared, products, copies, spilled = row.split(",")
        assert int(shared) <= 232448 and int(products) > 0 and int(copies) > 0 and int(spilled) <= 32, row
