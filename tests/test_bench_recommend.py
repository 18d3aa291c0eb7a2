"""The bench of `mmaccel recommend` runs settings of a session and of `generate`, and predicts their memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests import SOURCES

ROOT = Path(__file__).parent.parent


def test_two_settings_run_and_their_memory_is_predicted(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    few = ("--device", "cpu", "--shrink", "12", "--limit", "9000", "--out", str(out))
    only = ("--only", "exact:llava-onevision-7b:3:1", "exact:llava-onevision-7b:8:5")
    done = subprocess.run(
        [sys.executable, "bench/recommend.py", *few, *only],
        env={**os.environ, "PYTHONPATH": SOURCES}, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = [row for row in map(json.loads, out.read_text().splitlines()) if row.get("case") == "recommend"]
    assert [(row["frames"], row["questions"]) for row in rows] == [(7, 1), (20, 5)], done.stdout
    # Seconds depend on who else uses the machine; bytes do not.
    assert all(row["peak_reached"] and row["predicted_s"] > 0 for row in rows), rows
