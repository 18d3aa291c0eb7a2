"""Pictures of pruned drafts: what is drawn is what the rows say."""

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
    return importlib.import_module("pruning_curves")


def drafts(pruner: str, retention: float, accepted: float, rate: float) -> dict[str, Any]:
    return {"what": "draft", "pruner": pruner, "retention": retention, "accepted": accepted, "rate": rate}


ROWS = [
    {"environment": {}},
    drafts("uv", 0.1, 2.0, 0.7),
    drafts("uv", 1.0, 3.0, 0.8),
    drafts("uv, layer 8", 0.1, 9.0, 0.9),
    {"what": "frames", "pruner": "uv", "retention": 0.1, "kept": [0.5, 0.25, 0.25, 0.0]},
]
RATIOS = [{"case": "ratios", "retention": 0.1, "step_s": 8.0, "draft_step_s": 1.0}]


def test_curves_are_those_of_the_rows(curves: Any) -> None:
    assert curves.lengths(ROWS) == {"uv": [(0.0, 3.0), (0.9, 2.0)]}
    assert curves.places(ROWS, 0.1) == {"uv": [2.0, 1.0, 1.0, 0.0]} and not curves.places(ROWS, 0.5)
    ((pruned, gain),) = curves.gains(ROWS, RATIOS)["uv"]
    # No window and no luck: the draft is right 0.7 of the time, and 1 / (1 - 0.7) tokens a refusal are the most there are.
    assert pruned == 0.9 and 1.5 < gain < 1 / (1 - 0.7)


def test_a_picture_is_written_or_told_why_not(curves: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name, rows in (("rows", ROWS), ("ratios", RATIOS), ("none", ROWS[:2])):
        (tmp_path / name).write_text("\n".join(json.dumps(row) for row in rows))
    told = ["--picture", str(tmp_path / "picture.svg")]
    curves.main(["--rows", str(tmp_path / "rows"), "--ratios", str(tmp_path / "ratios"), *told])
    assert "<svg" in (tmp_path / "picture.svg").read_text()
    with pytest.raises(MmaccelError, match="no rows"):
        curves.main(["--rows", str(tmp_path / "none"), *told])
