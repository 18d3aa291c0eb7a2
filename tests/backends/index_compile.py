"""Compile the kernels of indices for a CUDA device that need not be there: ``python -m tests.backends.index_compile 90``.

Prints a row for each: name, bytes of shared memory, instructions of the matrix units, bytes of stack a thread (where
registers spill to).
"""

from __future__ import annotations

import re
import sys
from unittest import mock

import torch
from torch import Tensor
from triton.runtime import driver

from mmaccel.backends.triton.prefill import (
    classes,
    estimate,
    estimate_grid,
    lists,
    runs,
    slashes,
    strides,
    strongest,
)
from mmaccel.backends.triton.prefill import split_k_schedule as work

from .triton_compile import Compiled, Elsewhere, used

N, C = 4096, 196


def numbers(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.int32)


def main(capability: int) -> None:
    driver.set_active(Elsewhere(capability))
    query, key = (
        torch.empty(1, n, h, 128, dtype=torch.bfloat16).transpose(1, 2) for n, h in ((64, 28), (N, 4))
    )
    at = long = torch.zeros(1, 64, dtype=torch.int64)
    kept = torch.zeros(1, 28, N + 1, dtype=torch.bool)[..., :-1]
    of = torch.zeros(1, 28, 1, dtype=torch.int64)
    taken = [
        (estimate, "totals_kernel"),
        (estimate, "merge_kernel"),
        (estimate, "lines_kernel"),
        (estimate_grid, "classes_kernel"),
        (estimate_grid, "phases_kernel"),
        (strongest, "digits_kernel"),
        (strongest, "tally_kernel"),
        (strongest, "chosen_kernel"),
        (strides, "strides_kernel"),
        (slashes, "mark_kernel"),
        (slashes, "without_kernel"),
        (slashes, "steps_kernel"),
        (slashes, "rows_kernel"),
        (slashes, "gaps_kernel"),
        (classes, "turned_kernel"),
        (work, "length_kernel"),
        (work, "work_kernel"),
        (lists, "present_kernel"),
        (lists, "area_kernel"),
        (runs, "paired_kernel"),
        (runs, "unsure_kernel"),
    ]
    kernels = {name: Compiled(getattr(module, name)) for module, name in taken}
    for module, name in taken:
        mock.patch.object(module, name, kernels[name]).start()
    estimate.line_sums(query, key, None, at, None, N, False)
    order = numbers(1, N), numbers(1, C + 1), numbers(1, 64), torch.zeros(1, 1024)
    estimate_grid.class_phases(query, key, None, at, None, N, False, *order, long[0, :1], "contrast", False)
    scores = torch.zeros(1, 28, N)
    strongest.strongest(scores, scores, long[:, 0], 1000, 1024)
    strides.stride_scores(torch.zeros(2, 1, 28, N), long[:, 0], 8, 1024, "contrast")
    lines = long.new_zeros(1, 28, 1000)
    slashes.line_keys(numbers(1, N), lines, lines, N, 64)
    told = long.new_zeros(1, 28, 9, 5)
    work.Work.even([told[..., 1], told[:, :1, :, 1]], 1, 28, 9, 1, 264, 4096)
    lists.listed_area(told, numbers(9), numbers(1, 1, 9 * 64), numbers(1, 1, N), 64, 64)
    runs.paired(told)
    runs.unsure(numbers(1, 1, 64).to(torch.int8))
    slashes.slash_runs(
        kept, numbers(3, 3), numbers(1, 64), numbers(1, 64), numbers(3, 1, 64),
        numbers(1, 9), numbers(1, 9, 2, 2), numbers(1, 9), 64,
    )  # fmt: skip
    begin = numbers(1, C + 1)
    classes.turned_classes(
        numbers(3, 1, N), begin, numbers(3, 1, N), begin, long[0, :1], of, of, of, 64, False, 64, 64
    )
    for name, kernel in kernels.items():
        one = kernel.found[-1]
        products = len(re.findall(r"\b(?:wgmma\.mma_async|mma)\.sync", one.asm["ptx"]))
        print(name, one.metadata.shared, products, used(one)[0], sep=",")


if __name__ == "__main__":
    main(int(sys.argv[1]))
