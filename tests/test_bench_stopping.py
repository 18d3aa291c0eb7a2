"""Benchmarks of several processes that are told to end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

BENCH = Path(__file__).parent.parent / "bench"
LONG = {
    # Two that ask, one that writes films, and Python's.
    "needles.py": (["--models", "tiny-ov", "--methods", "dense", "--lengths", "32", "--renderers", "1"], 4),
}
"""What would take long, and by how many processes."""


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="children are read from /proc")
@pytest.mark.parametrize("script", LONG)
def test_processes_end_with_the_one_that_began_them(script: str, tmp_path: Path) -> None:
    words, count = LONG[script]
    rows, folder = tmp_path / "rows.jsonl", tmp_path / "temporary"
    folder.mkdir()
    command = [sys.executable, str(BENCH / script), "--device", "cpu", "--processes", "2", *words]
    with subprocess.Popen(
        [*command, "--out", str(rows)],
        stdout=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)},
    ) as parent:
        told = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
        children: list[str] = []
        ends = time.monotonic() + 60
        while len(children) < count and time.monotonic() < ends:
            time.sleep(0.1)
            children = told.read_text().split()
        parent.terminate()
        assert parent.wait(30) == 128 + signal.SIGTERM
    assert len(children) == count
    while (
        left := [child for child in children if Path(f"/proc/{child}").exists()]
    ) and time.monotonic() < ends:
        time.sleep(0.1)
    assert left == [] and not list(folder.glob("mmaccel-*"))
