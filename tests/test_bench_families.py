"""The script that holds other families against Qwen2.5-VL-7B runs on tiny models, and says what it scales by."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benches import ran


def test_rows_of_each_part_beside_the_scaled_first_shape(tmp_path: Path) -> None:
    rows = ran(
        "families", tmp_path / "rows.jsonl", *["--shrink", "512", "--repeats", "2", "--questions", "2"]
    )
    assert [row for row in rows if "failed" in row] == []
    shapes = ["qwen2.5-vl-7b", "qwen3-vl-8b", "qwen3.5-9b", "internvl3.5-8b", "glm-4.1v-9b"]
    for case in ("prefill", "decode", "question"):
        found = [row for row in rows if row.get("case") == case]
        assert [row["shape"] for row in found] == shapes
        assert "ratio" not in found[0] and all(row["seconds"] > 0 < row["work"] for row in found)
        for row in found[1:]:
            scaled = found[0]["seconds"] * row["work"] / found[0]["work"]
            assert row["scaled_s"] == pytest.approx(scaled)
            assert row["ratio"] == pytest.approx(row["seconds"] / scaled)
    assert all(row["captured"] for row in rows if row.get("case") == "decode")
