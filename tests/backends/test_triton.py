"""The Triton backend without a device: files of cases interpreted, or compiled on one; `test_architectures.py` compiles all.

Whether Triton interprets is settled when it is imported, and PyTorch may have imported it long ago, so each of these runs
in a process of its own.
"""

import os

import pytest
import torch

from mmaccel.backends import select, triton
from tests import python

pytest.importorskip("triton")


def run(*arguments: str, **environment: str) -> str:
    """What a module prints in a process that sees no device."""
    return python("-m", *arguments, **{"CUDA_VISIBLE_DEVICES": "", **environment}).stdout


def test_tells_why_it_cannot_run() -> None:
    """On the CPU it never can: the interpreter is for tests."""
    reason = triton.why_unusable(torch.device("cpu"))
    assert reason is not None and "CUDA" in reason
    assert select.why_unusable("cpu")["triton"] == reason


QUIET = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-W", "ignore::DeprecationWarning")


def ran(names: str, *options: str, **environment: str) -> None:
    files = [f"tests/backends/{name}_cases.py" for name in names.split() if name != "together"]
    if "together" in names:
        files += ["tests/core/test_masked.py::test_a_planned_layer[dense1]", "tests/models/together_cases.py"]
    out = run("pytest", *files, *QUIET, *options, PYTEST_ADDOPTS="", **environment)
    assert " passed" in out and "failed" not in out and "skipped" not in out


@pytest.mark.always
@pytest.mark.numeric(by="numpy")
@pytest.mark.parametrize(
    "options", ["", *(pytest.param(f"-m slow --shard {n}/16", marks=pytest.mark.slow) for n in range(16))]
)
def test_interpreted(options: str, pytestconfig: pytest.Config) -> None:
    """All in one process: a start takes as long as thirty cases."""
    words = options.split() + ["--long"] * bool(pytestconfig.getoption("--long"))
    ran("triton together clusters decode hopper index lists pointwise", *words, TRITON_INTERPRET="1")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["clusters", "index", "lists", "pointwise"])
def test_compiled(name: str) -> None:
    """Those of the other files run in `test_triton_gpu`, `test_decode_gpu` and `test_hopper_gpu`."""
    ran(name, "-m", "", CUDA_VISIBLE_DEVICES=os.environ.get("CUDA_VISIBLE_DEVICES", "0"))


FIRST = "2000,4001,12001"
"""Lengths at which nothing is split, some parts are, and all are and have many rows: what is compiled for them differs; the
third is `slow`."""


@pytest.mark.parametrize(
    ("architecture", "kernel", "first", "others"),
    [
        pytest.param("sm_80", "kernel.attend_kernel", FIRST, 3, marks=pytest.mark.slow),
        pytest.param("sm_90", "hopper.hopper_kernel", FIRST, 9, marks=pytest.mark.slow),
        ("sm_90", "hopper.hopper_kernel", FIRST.rpartition(",")[0], 1),
    ],
)
def test_a_new_length_compiles_nothing(architecture: str, kernel: str, first: str, others: int) -> None:
    """Whatever it is a multiple of, whatever frames its video has: what is compiled hangs on the pattern."""
    rows = run(
        "tests.backends.launch_keys", architecture, first, str(others), TRITON_INTERPRET="0"
    ).splitlines()
    new = {name: int(again) for name, _, again, _ in (row.split("; ", 3) for row in rows)}
    seen = {
        kernel,
        "kernel.work_items_kernel",
        "lines.gapped_block_list_kernel",
        "lists.assemble_slices_kernel",
        "decode.flash_decode_kernel",
    }
    assert seen <= set(new) and len(new) > 25
    assert {name for name, again in new.items() if again} == set()
