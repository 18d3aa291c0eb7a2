"""Every combination of policies is refused before weights move, or runs, and then each of its parts acts."""

from __future__ import annotations

from collections import Counter

import pytest

from mmaccel.core.registry import registry
from tests.models import matrix


def test_every_policy_is_an_axis_s_choice() -> None:
    assert set(matrix.SPARSE) == set(matrix.AXES["sparse"]) and set(matrix.KV) == set(matrix.AXES["kv"])
    assert set(matrix.DRAFT) == set(registry("draft"))
    assert {*matrix.AXES["own"], *matrix.AXES["prune"]} == {"none", *registry("prune")}


def test_a_refusal_names_two_parts_and_what_to_choose() -> None:
    counts: Counter[bool] = Counter()
    for cell in matrix.cells():
        told = matrix.refusal(cell)
        counts[told is None] += 1
        if told is not None:
            assert sum(f"{part!r}" in told for part in cell[2:]) >= 1 and told.endswith("."), (cell, told)
    print(f"{counts[False]} of {sum(counts.values())} cells are refused")


@pytest.mark.parametrize("cell", matrix.covering(2), ids="-".join)
def test_each_part_acts(cell: matrix.Cell) -> None:
    matrix.check_acted(cell)


@pytest.mark.slow
@pytest.mark.parametrize("family", matrix.AXES["family"])
def test_each_part_acts_three_at_a_time(family: str) -> None:
    """Every choice of three axes together; resumable: `MATRIX_DONE` names a file that keeps the cells that passed."""
    faults = {}
    for cell in sorted(matrix.covering(3), reverse=True):
        if cell.family == family and not matrix.passed(cell):
            try:
                matrix.check_acted(cell)
            except Exception as error:
                faults["-".join(cell)] = f"{type(error).__name__}: {error}"
                print("-".join(cell), faults["-".join(cell)], flush=True)
            else:
                matrix.note_passed(cell)
    assert not faults
