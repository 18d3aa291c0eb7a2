"""The benchmark of the wire goes all its ways, and its rows say which."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_every_way_has_its_row(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    few = ("--repeats", "5", "--ids", "3", "--pixels", "1000")
    done = subprocess.run(
        [sys.executable, "bench/wire.py", "--out", str(out), *few],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = {row["case"]: row for row in map(json.loads, out.read_text().splitlines()[1:])}
    assert set(rows) == {"socket", "gloo", "prompt", "prompt pickled"}
    assert rows["socket"]["ids"] == rows["gloo"]["ids"] == 3 and rows["prompt"]["bytes"] == 2000
    assert all(row["median_s"] > 0 for row in rows.values())
