"""The picture of latency by video tokens: what is drawn is what the rows say."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from mmaccel.core.errors import MmaccelError

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def curves() -> Any:
    sys.path.insert(0, str(ROOT / "bench"))
    return importlib.import_module("latency_curves")


def rows_of(shape: str, pace: float) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for length in (32, 8, 16):
        tokens = length << 10
        rows.append({"case": "prefill", "shape": shape, "prompt": tokens + 60, "prefill_s": pace * length})
        for count in (1, 6):
            step = {"captured_s": pace * length * count / 1e3, "with_s": 2 * pace * length * count / 1e3}
            rows.append({"case": "flash", "shape": shape, "columns": tokens, "rows": count, **step})
    return rows


def test_a_length_that_was_timed_again_has_its_last_time(curves: Any) -> None:
    twice = [*rows_of("big", 5.0), {"case": "prefill:8192", "failed": "OutOfMemoryError"}, *ROWS]
    for part in (curves.prefill, curves.steps):
        assert part(twice, "big") == part(ROWS, "big")


RATIO = {"case": "ratios", "target": "big", "draft": "small", "columns": 25_088}
ROWS = [
    {"environment": {}},
    *rows_of("big", 2.0),
    *rows_of("small", 0.5),
    {**RATIO, "retention": 0.1, "draft_step_s": 0.003},
    {**RATIO, "retention": 1.0, "draft_step_s": 0.009},
    {**RATIO, "target": "other", "retention": 0.1, "draft_step_s": 0.001},
]


def test_curves_are_those_of_the_rows(curves: Any) -> None:
    assert curves.prefill(ROWS, "big") == [(8252, 16.0), (16444, 32.0), (32828, 64.0)]
    assert curves.steps(ROWS, "small") == [(8192, 4.0), (16384, 8.0), (32768, 16.0)]
    assert curves.steps(ROWS, "small", "with_s") == [(8192, 8.0), (16384, 16.0), (32768, 32.0)]
    assert curves.pruned(ROWS, "big", "small") == [(25_088, 3.0)]


def test_a_picture_is_written_or_told_why_not(curves: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows, picture = tmp_path / "rows", tmp_path / "picture.svg"
    rows.write_text("\n".join(json.dumps(row) for row in ROWS))
    curves.main(["--rows", str(rows), "--target", "big", "--draft", "small", "--picture", str(picture)])
    assert "<svg" in picture.read_text()
    with pytest.raises(MmaccelError, match="no rows of both prefill and flash for absent"):
        curves.draw(ROWS, "big", "absent", picture)
