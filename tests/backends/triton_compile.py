"""Compile the kernels for a CUDA device that need not be there: ``python -m tests.backends.triton_compile 90``.

Prints a row for each way they are used: name, bytes of shared memory, instructions of the matrix units, bytes of stack a
thread (where registers spill to), registers a thread, warps.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from mmaccel.backends.block_attend import BlockLists, KeySpan, Part
from mmaccel.backends.triton.prefill import attend
from mmaccel.backends.triton.prefill import runs as of_runs
from mmaccel.backends.triton.prefill import split_k_schedule as work
from mmaccel.backends.triton.prefill.kernel import attend_kernel, merge_kernel

S, FAR = 512, 2**31 - 1


class Elsewhere:
    """What Triton asks of a driver in order to compile."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0


class Compiled:
    """Stands in for a kernel: a launch compiles it and goes no further."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.found: list[Any] = []

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **named: self.found.append(self.kernel.warmup(*args, grid=grid, **named))


def compiled(
    dtype: torch.dtype,
    *,
    block: int = 64,
    lists: int = 28,
    size: int = 128,
    runs: bool = False,
    **named: Any,
) -> list[Any]:
    def rows(n: int, kind: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(1, lists, n, dtype=kind)

    query = torch.empty(1, S, 28, size, dtype=dtype).transpose(1, 2)
    key = torch.empty(1, S, 4, size, dtype=dtype).transpose(1, 2)
    row, kind = torch.zeros(1, lists, S // block, 5, dtype=torch.int64), rows(S // block, torch.int8)
    spans = tuple(
        KeySpan(rows(S), rows(S), rows(S), lo, hi, BlockLists(row, None if runs else rows(S)[0, 0], kind))
        for lo, hi in ((0, FAR), (5, 7))
    )
    if runs:
        named = {"rows": S, **named}
    walk, merge = Compiled(attend_kernel), Compiled(merge_kernel)
    shared = {80: 166912, 90: 232448}[driver.active.get_current_target().arch]
    with (
        mock.patch.object(attend, "merge_kernel", merge),
        mock.patch.object(attend, "_shared", lambda _: shared),
        # What is made of lists before: `index_compile` has these.
        mock.patch.object(of_runs, "paired_kernel", Compiled(of_runs.paired_kernel)),
        mock.patch.object(work, "length_kernel", Compiled(work.length_kernel)),
        mock.patch.object(work, "work_kernel", Compiled(work.work_kernel)),
    ):
        attend.block_attend(
            query,
            key,
            key,
            *Part(rows(S), spans).pack(),
            block,
            block,
            0.1,
            kernel=walk,
            **named,
        )
    return walk.found + merge.found


def used(kernel: Any) -> tuple[int, int]:
    """Bytes of stack and registers of a thread."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(re.findall(r"STACK:(\d+)", told)[-1]), int(re.findall(r"REG:(\d+)", told)[-1])


WAYS: dict[str, dict[str, Any]] = {
    "bf16": dict(dtype=torch.bfloat16),
    "fp16": dict(dtype=torch.float16, size=96),
    "fp32": dict(dtype=torch.float32),
    "shared lists": dict(dtype=torch.bfloat16, lists=1),
    "large blocks": dict(dtype=torch.bfloat16, block=128),
    "split": dict(dtype=torch.bfloat16, chunk=2),
    "two blocks of queries": dict(dtype=torch.bfloat16, runs=True, chunk=2),
}


def main(capability: int) -> None:
    driver.set_active(Elsewhere(capability))
    for name, way in WAYS.items():
        if way.get("runs") and capability < 90:
            continue  # two blocks go together only where shared memory is as large as on Hopper
        kernels = compiled(**way)
        ptx = kernels[0].asm["ptx"]
        products = len(re.findall(r"\b(?:wgmma\.mma_async|mma)\.sync", ptx))
        stack = sum(used(k)[0] for k in kernels)
        walk = kernels[0]
        told = products, stack, used(walk)[1], walk.metadata.num_warps
        print(name, max(k.metadata.shared for k in kernels), *told, sep=",")


if __name__ == "__main__":
    assert triton.knobs.runtime.interpret is False
    main(int(sys.argv[1]))
