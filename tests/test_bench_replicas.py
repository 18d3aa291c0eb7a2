"""The bench of replicas starts the command, with Ray and without, and its streams are answered."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("httpx2")
RAY = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install '.[ray]'"
)


@pytest.mark.slow
@pytest.mark.parametrize("replicas", ["0", pytest.param("2", marks=RAY)])
def test_streams_are_served(
    shipped: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replicas: str
) -> None:
    shipped("tiny-ov")
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "bench"))
    out = tmp_path / "rows.jsonl"
    words = ["--replicas", replicas, "--streams", "3", "--seconds", "3", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["replicas.py", *words])
    importlib.import_module("replicas").main()
    first, row = map(json.loads, out.read_text().splitlines())
    assert first["environment"]["torch"] and row["replicas"] == int(replicas) and row["streams"] == 3
    assert row["questions"] > 2 and row["frames_per_s"] >= row["clip"] * row["questions_per_s"] > 0
    assert 0 < row["question_median_s"] <= row["question_p95_s"] < 30
