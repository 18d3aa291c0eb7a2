"""Runs the tests marked `numeric` by the kernels of several processors: `python -m tests.numeric [options of pytest]`.

numpy's OpenBLAS, by which Triton's interpreter multiplies, and PyTorch's own kernels choose theirs by the processor, and
sum in another order on another. The environment chooses here: one variable for each library, and under it run the tests
marked with that library, `numeric(by="numpy")` or `numeric(by="torch")`. What this processor lacks is left out, with a
line.
"""

import os
import subprocess
import sys
import time

import pytest
import torch

LEVELS = ["DEFAULT", "AVX2", "AVX512"]
SETTINGS = [
    ("numpy", "OPENBLAS_CORETYPE", "Prescott", "DEFAULT"),
    ("numpy", "OPENBLAS_CORETYPE", "Haswell", "AVX2"),
    ("numpy", "OPENBLAS_CORETYPE", "Zen", "AVX2"),
    ("numpy", "OPENBLAS_CORETYPE", "SkylakeX", "AVX512"),
    ("torch", "ATEN_CPU_CAPABILITY", "default", "DEFAULT"),
    ("torch", "ATEN_CPU_CAPABILITY", "avx2", "AVX2"),
    ("torch", "ATEN_CPU_CAPABILITY", "avx512", "AVX512"),
]
"""The library, what the environment names, and the least that a processor must have for it."""

MARK = "numeric(by='{}') and not gpu and not slow"


def said(code: int, library: str) -> str:
    """What the exit status of pytest means."""
    if code == pytest.ExitCode.NO_TESTS_COLLECTED:
        return f"no test marked `numeric(by={library!r})` was found with the options {sys.argv[1:]}"
    return "passed" if code == pytest.ExitCode.OK else f"failed, pytest ended with {code}"


def main() -> int:
    here = torch.backends.cpu.get_cpu_capability()
    lines, codes = [], set()
    for library, variable, value, needed in SETTINGS:
        setting = f"{variable}={value}"
        if here not in LEVELS[LEVELS.index(needed) :]:
            lines.append(f"{setting}: left out, this processor has {here} and not {needed}")
            continue
        print(f"== {setting}", flush=True)
        begin, options = time.monotonic(), ("-q", "-p", "tests.selection", "--long")
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options, "-m", MARK.format(library), *sys.argv[1:]],
            env={**os.environ, variable: value},
            check=False,
        )
        lines.append(f"{setting}: {said(done.returncode, library)}, {time.monotonic() - begin:.0f} s")
        codes.add(done.returncode)
    print(*lines, sep="\n")
    return int(codes - {pytest.ExitCode.NO_TESTS_COLLECTED} != {pytest.ExitCode.OK})


if __name__ == "__main__":
    sys.exit(main())
