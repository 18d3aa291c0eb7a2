"""How often kernels are compiled: what is launched for a prompt of a new length was compiled for another one."""

from __future__ import annotations

import pytest

from .test_triton import run

FIRST = "2000,4001,12001"
"""Lengths at which nothing is split, some parts are, and all are and have many rows: what is compiled for them differs."""


@pytest.mark.parametrize(
    ("architecture", "kernel", "others"),
    [
        pytest.param("sm_80", "kernel.attend_kernel", 3, marks=pytest.mark.slow),
        pytest.param("sm_90", "hopper.hopper_kernel", 9, marks=pytest.mark.slow),
        ("sm_90", "hopper.hopper_kernel", 1),
    ],
)
def test_a_new_length_compiles_nothing(architecture: str, kernel: str, others: int) -> None:
    """Whatever it is a multiple of, whatever frames its video has: what is compiled hangs on the pattern."""
    rows = run(
        "tests.backends.launch_keys", architecture, FIRST, str(others), TRITON_INTERPRET="0"
    ).splitlines()
    new = {name: int(again) for name, _, again, _ in (row.split("; ", 3) for row in rows)}
    seen = {
        kernel,
        "kernel.work_kernel",
        "lines.gaps_kernel",
        "lists.pieces_kernel",
        "decode.piece_kernel",
    }
    assert seen <= set(new) and len(new) > 25
    assert {name for name, again in new.items() if again} == set()
