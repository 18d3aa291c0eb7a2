"""The script of the streams' speed table runs from end to end on the tiny model, and goes on where it stopped."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


def run(out: Path, *only: str) -> list[dict[str, Any]]:
    few = ("--device", "cpu", "--shrink", "10", "--only", *only)
    done = subprocess.run(
        [sys.executable, "bench/stream.py", "--out", str(out), *few],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_steps_run_and_are_not_run_again(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    rows = run(out, "question")
    assert "torch" in rows[0]["environment"]
    assert [row for row in rows if "failed" in row] == []
    ways = {row["way"]: row for row in rows if row.get("case") == "question"}
    assert all(0 < row["p50_s"] <= row["p95_s"] and row["bytes_in"] > 0 for row in ways.values())
    apart, joined = ways["rekv, a copy a frame"], ways["rekv, coalesced"]
    assert apart["copies_in"] > joined["copies_in"] and apart["bytes_in"] == joined["bytes_in"]
    assert ways["mosaic, asked again"]["bytes_in"] < ways["mosaic"]["bytes_in"]
    assert ways["mosaic, no prefetch"]["guessed"] == 0 < ways["mosaic"]["guessed"]
    # Questions are about planted scenes, and find them.
    assert ways["mosaic"]["recall"] > 0.6 and ways["rekv, coalesced"]["recall"] > 0.6
    again = run(out, "question", "encode")
    assert [row["done"] for row in again if "done" in row] == ["question", "encode"]
