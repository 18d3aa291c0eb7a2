"""The benchmark of transfers runs from end to end on a CPU, at sizes that say nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.benches import ran


def test_every_way_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.jsonl"
    sizes = {
        "frames": 64,
        "retrieve": 32,
        "window": 4,
        "layers": 2,
        "tokens": 4,
        "size": 8,
        "slab-mib": 1,
        "work": 16,
    }
    few = [word for name, size in sizes.items() for word in (f"--{name}", str(size))]
    first, *rows = ran("transfer", out, "--repeats", "2", *few)
    assert "torch" in first["environment"]
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == rows
    asked = {(row["way"], row["run"]): row for row in rows if row["case"] == "question"}
    for run in (1, 4, 16):
        ways = {way: row for (way, at), row in asked.items() if at == run}
        assert set(ways) == {"pieces", "gather", "index"}
        assert ways["pieces"]["copies"] == 2 * 32 * 2
        assert ways["gather"]["copies"] == ways["index"]["copies"] == 2
        assert all(row["gb_s"] > 0 and row["bytes"] == 2 * 32 * 2 * 4 * 4 * 8 * 2 for row in ways.values())
    overlap = {row["way"]: row for row in rows if row["case"] == "overlap"}
    assert set(overlap) == {"ahead", "waiting", "computing"}
    assert overlap["ahead"]["early"] == 1, "on a CPU a transfer has ended when it is issued"
