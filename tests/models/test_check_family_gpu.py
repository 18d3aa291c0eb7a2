"""Families on a CUDA device, where norms, gates and rotations are kernels of ours."""

from __future__ import annotations

import pytest
import torch
import transformers
from packaging.version import Version

import mmaccel
from tests.models.test_check_family import KINDS
from tests.models.tiny_random import sampler

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("kind", KINDS)
def test_it_keeps_its_promises_there(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In true float32: products in TF32 would be off by more than is allowed."""
    if kind == "perception_lm" and Version(transformers.__version__) < Version("5.23"):
        pytest.skip("its tower needs a newer timm under earlier transformers")
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    mmaccel.check_family(sampler(kind).kind, device="cuda")
