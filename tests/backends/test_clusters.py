"""What a question retrieves by clusters: the kernels without a device and on one, and where there are too many clusters."""

from __future__ import annotations

import os
from unittest import mock

import pytest
import torch

from mmaccel.backends.ops import clusters, operator

from .test_triton import run

QUIET = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist")
CASES = "tests/backends/clusters_cases.py"


def test_interpreted() -> None:
    pytest.importorskip("triton")
    warnings = ("-W", "ignore::DeprecationWarning")
    out = run("pytest", CASES, *QUIET, *warnings, TRITON_INTERPRET="1", PYTEST_ADDOPTS="")
    assert " passed" in out and "failed" not in out and "skipped" not in out


def test_very_many_clusters_are_sorted() -> None:
    """Comparing each with all is for some thousands."""
    launched = mock.Mock()
    with (
        mock.patch.object(operator, "usable", lambda device: None),
        mock.patch("mmaccel.backends.triton.stream.outside", launched),
    ):
        for count in (clusters.MOST, clusters.MOST + 1):
            clusters.outside(torch.zeros(1, count), torch.ones(count, dtype=torch.long), 3, 0)
    assert launched.call_count == 1 and launched.call_args[0][0].shape == (1, clusters.MOST)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_compiled() -> None:
    here = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    out = run("pytest", CASES, *QUIET, PYTEST_ADDOPTS="", CUDA_VISIBLE_DEVICES=here)
    assert " passed" in out
