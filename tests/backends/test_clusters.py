"""What a question retrieves by clusters: the kernels without a device and on one, and where there are too many clusters."""

from __future__ import annotations

import os
from unittest import mock

import pytest
import torch

from mmaccel.backends import clusters
from mmaccel.backends import triton as backend

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
    with mock.patch.object(backend, "usable", lambda device: None):
        few = clusters._of(torch.device("cuda"), clusters.MOST)
        many = clusters._of(torch.device("cuda"), clusters.MOST + 1)
    assert few.__name__ == "mmaccel.backends.triton.stream.clusters"
    assert many.__name__ == "mmaccel.backends.reference.clusters"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_compiled() -> None:
    here = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    out = run("pytest", CASES, *QUIET, PYTEST_ADDOPTS="", CUDA_VISIBLE_DEVICES=here)
    assert " passed" in out
