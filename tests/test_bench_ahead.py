"""How much of what a question needs is fetched ahead: the benchmark tells it, of later layers and of all."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest


def test_a_stream_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parent.parent / "bench"), *sys.path])
    out = tmp_path / "rows.jsonl"
    few = ["--models", "tiny-qwen", "--budgets", "8", "--frames", "48", "--seeds", "3"]
    monkeypatch.setattr(sys, "argv", ["bench/ahead.py", "--out", str(out), *few])
    importlib.import_module("ahead").main()
    environment, row = (json.loads(line) for line in out.read_text().splitlines())
    assert "torch" in environment["environment"] and row["questions"] > 4
    # Nothing is fetched ahead for the first layer.
    assert 0 < row["all"] < row["later"] <= 1 and row["covered"] > 0 < row["missing"]
