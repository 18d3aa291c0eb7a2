"""The Triton backend without a device: `test_kernel_cases.py` has it interpreted, `test_architectures.py` compiled.

Whether Triton interprets is settled when it is imported, and PyTorch may have imported it long ago, so each of these runs
in a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mmaccel.backends import select, triton

pytest.importorskip("triton")
ROOT = Path(__file__).parent.parent.parent


def run(*arguments: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=600,
        check=False,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", **environment},
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return done.stdout


def test_tells_why_it_cannot_run() -> None:
    """On the CPU it never can: the interpreter is for tests."""
    reason = triton.usable(torch.device("cpu"))
    assert reason is not None and "cuda" in reason
    assert select.usable("cpu")["triton"] == reason
