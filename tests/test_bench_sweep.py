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


def test_the_share_of_attention_on_the_page_is_that_of_the_rows() -> None:
    results, page = ROOT / "bench" / "results", (ROOT / "docs" / "mminference.md").read_text(encoding="utf-8")
    layer: dict[tuple[int, str], float] = {}
    for row in map(json.loads, (results / "sweep_h200_202611.jsonl").read_text().splitlines()):
        if row.get("case") == "dense" and "median_s" in row:
            scale = row["groups"] / row.get("groups_timed", row["groups"])
            layer[row["tokens"], row["way"]] = 28 * scale * row["median_s"]
    whole: dict[tuple[int, str], float] = {}
    kernel = {"dense": "dense_cudnn", "dense_flash_2": "dense_flash", "auto": "dense_cudnn"}
    tree = None
    for row in map(json.loads, (results / "prefill_h200_202611.jsonl").read_text().splitlines()):
        if "environment" in row:
            tree = row["environment"].get("commit")
        elif tree == "77aa10b-dirty" and row.get("way") in ("dense", "dense_flash_2"):
            whole[row["tokens"], kernel[row["way"]]] = row["median_s"]
        elif tree is None and str(row.get("case")).startswith("short"):
            whole[row["tokens"], "dense_cudnn"] = row["against_s"]
    lines = page.split("### The share of attention in prefill")[1].split("\n\n")[2].splitlines()[2:]
    assert len(lines) == 5
    for line in lines:
        name, *told = (cell.strip() for cell in line.strip("|").split("|"))
        tokens = int(name[:-1]) << {"k": 10, "M": 20}[name[-1]]
        for way, cells in (("dense_cudnn", told[:3]), ("dense_flash", told[3:])):
            if (tokens, way) not in whole:
                assert cells == ["", "", ""]
                continue
            attention, prefill = layer[tokens, way], whole[tokens, way]
            for cell, value in zip(cells[:2], (attention, prefill), strict=True):
                assert float(cell.removesuffix(" s")) == float(f"{value:.3g}")
            assert cells[2] == f"{attention / prefill:.0%}"
