"""The benchmark of memories: rows as they come by several processes, runs that go on, files put together."""

from __future__ import annotations

import importlib
import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mmaccel.core.errors import MmaccelError

ROOT = Path(__file__).parent.parent
FEW = (
    "--device", "cpu", "--frames", "24", "--budgets", "4", "--window", "6", "--most", "1", "--kinds", "needle",
)  # fmt: skip


@pytest.fixture(scope="module")
def main() -> Callable[..., None]:
    sys.path.insert(0, str(ROOT / "bench"))
    found: Callable[..., None] = importlib.import_module("memories").main
    return found


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_worlds_by_two_processes_one_more_later_and_files_together(
    main: Callable[..., None], tmp_path: Path
) -> None:
    out, other, both, brief = (tmp_path / f"{name}.jsonl" for name in ("one", "other", "both", "brief"))
    memories = ("--memory", "mosaic init=8", "rekv")
    main([*FEW, *memories, "--worlds", "2", "--processes", "2", "--out", str(out)])
    counts = Counter(row.get("what") for row in rows(out))
    assert counts["world"] == 2 and counts["answer"] == 4 and counts["watch"] == 4
    assert {row["memory"] for row in rows(out) if row.get("what") == "answer"} == {"mosaic init=8", "rekv"}
    # The same again asks nothing, three worlds ask one more.
    main([*FEW, *memories, "--worlds", "2", "--out", str(out)])
    main([*FEW, *memories, "--worlds", "3", "--out", str(out)])
    found = rows(out)
    assert Counter(row.get("what") for row in found)["answer"] == 6
    seeds = {row["seed"] for row in found if row.get("what") == "world"}
    assert seeds == {100_003 * 24 + n for n in range(3)}
    means = {(row["memory"], row["kind"]): row for row in found if row.get("what") == "mean"}
    assert means["rekv", "all"]["questions"] == 3
    (gap,) = (row for row in found if row.get("what") == "paired" and row["kind"] == "all")
    assert gap["gain"] == means["mosaic init=8", "all"]["accuracy"] - means["rekv", "all"]["accuracy"]
    (watch,) = (row for row in found if row.get("what") == "watches" and row["memory"] == "mosaic init=8")
    assert watch["streams"] == 3 and 0 < watch["clusters"]["semantic"]["purity"] <= 1
    # Another run, one world the same: broken off in a line, and put together with the first.
    main([*FEW, *memories, "--worlds", "1", "--seed", "2", "--out", str(other)])
    other.write_text(other.read_text()[:-30])
    main(["--rows", str(out), str(other), str(out), "--out", str(both), "--brief", str(brief)])
    assert [row for row in rows(both) if row.get("what") == "mean"] == [
        row for row in found if row.get("what") == "mean"
    ]
    told = rows(brief)
    assert "environment" in told[0] and {row["what"] for row in told if "what" in row} == {
        "mean", "paired", "watches"
    }  # fmt: skip


def test_what_cannot_be_is_told_and_a_limit_keeps_what_there_is(
    main: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(MmaccelError, match="frame"):
        main([*FEW, "--memory", "rekv frame=3", "--worlds", "1", "--out", str(tmp_path / "a.jsonl")])
    out = tmp_path / "b.jsonl"
    main([*FEW, "--memory", "rekv", "--worlds", "1", "--limit", "0.01", "--out", str(out)])
    assert "the time is up" in capsys.readouterr().out
    assert [row.get("what") for row in rows(out)][:2] == [None, "answer"]
    assert not any(row.get("what") == "world" for row in rows(out))
