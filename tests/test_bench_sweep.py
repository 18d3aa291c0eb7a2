"""The curves of a layer by length: dense once a length, the fastest of its kernels, and patterns with their indices."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_a_sweep_runs_and_is_shown_again(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    how = ("--device", "cpu", "--dtype", "float32", "--heads", "4", "2", "--size", "16", "--repeats", "2")
    command = [sys.executable, "bench/sweep.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    def run(*more: str) -> str:
        done = subprocess.run(
            [*command, *more],
            env=environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    shown = run("--out", str(out), *how, "--lengths", "0.25", "0.5", "--warmup", "0").splitlines()[-3:]
    assert [line.split()[0] for line in shown] == ["tokens", "256", "512"]
    assert shown[0].split()[1:] == [
        "dense",
        "FlashAttention-2",
        "a_shape",
        "vertical_slash",
        "grid",
        "boundary_2d",
    ]
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [r["tokens"] for r in rows if r.get("case") == "dense" and "median_s" in r] == [256, 512]
    assert run("--rows", str(out)).splitlines() == shown


def test_the_fastest_dense_kernel_counts_for_all_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "bench")
    seconds_of = importlib.import_module("sweep").seconds_of
    told = dict(tokens=8, groups=4)
    rows = [
        dict(told, case="dense", way="dense_flash", median_s=3.0, groups_timed=1),
        dict(told, case="dense", way="dense_cudnn", median_s=2.0, groups_timed=1),
        dict(told, case="dense", way="dense_other", failed="no"),
        dict(told, case="grid", way="index", median_s=0.5),
        dict(told, case="grid", way="triton", median_s=1.0, index_s=0.5),
        dict(told, case="grid", way="triton and index", median_s=1.5, index_s=0.5),
    ]
    found = seconds_of(rows)
    assert found == {"dense": {8: (8.0, 0.0)}, "FlashAttention-2": {8: (12.0, 0.0)}, "grid": {8: (1.0, 0.5)}}
