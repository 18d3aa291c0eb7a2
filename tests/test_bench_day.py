"""The script of 24 hours of stream: one hour of it, gone on with by a second call."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from mmaccel.core.report import read_rows


@pytest.mark.slow
def test_it_goes_on_where_it_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("fastapi", "uvicorn"):
        pytest.importorskip(name)
    sys.path.insert(0, str(Path(__file__).parent.parent / "bench"))
    day = importlib.import_module("day")
    out = tmp_path / "rows.jsonl"
    words = "--folder", str(tmp_path / "day"), "--out", str(out), "--fps", "0.1", "--keep-seconds", "1200"
    for hours in (1, 2):
        monkeypatch.setattr(sys, "argv", ["day.py", "--hours", str(hours), *words])
        with pytest.raises(SystemExit) as ended:
            day.main()
        assert not ended.value.code
    rows = [row for row in read_rows(out) if "hour" in row]
    assert [row["hour"] for row in rows] == [1, 2] and rows[1]["frames"] == 2 * 360
    assert all(row["same"] == row["questions"] > 0 and row["same_held"] for row in rows)
    assert rows[1]["let_go"] == 2 * 360 - 121
