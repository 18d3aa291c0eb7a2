"""The speed table's script runs from end to end at lengths that say nothing, and goes on where it stopped."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from mmaccel.backends.ops import dense_attend as dense
from tests.benches import ROOT, ran

FEW = "--shrink 2048 --quick --dtype float32 --heads 4 2 --size 16"


def run(out: Path, *only: str) -> list[dict[str, Any]]:
    return ran("prefill", out, *FEW.split(), "--only", *only)


def test_steps_run_and_are_not_run_again(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    rows = run(out, "layer:grid_128k", "model:128k")
    assert "torch" in rows[0]["environment"]
    assert [row for row in rows if "failed" in row] == []
    assert [row["done"] for row in rows if "done" in row] == ["layer:grid_128k", "model:128k"]
    ways = {row["way"]: row for row in rows if row.get("case") == "model:128k"}
    assert set(ways) == {"sparse", "dense", "dense_flash_2"} and 0 < ways["sparse"]["kept"] < 1
    assert ways["dense"]["median_s"] > 0 and ways["dense"]["layers_timed"] == 8
    again = run(out, "layer:grid_128k", "layer:a_shape_128")
    assert [row["done"] for row in again if "done" in row][2:] == ["layer:a_shape_128"]


def test_the_tower_alone_is_timed(tmp_path: Path) -> None:
    rows = run(tmp_path / "rows.jsonl", "vision:")
    assert [row for row in rows if "failed" in row] == []
    done = ["vision:128k", "vision:512k", "vision:1m", "vision:hour"]
    assert [row["done"] for row in rows if "done" in row] == done
    ways = [(row["case"], row["way"], row["most"], row["patches"]) for row in rows if "way" in row]
    # Frames of 196 tokens, of four patches each: two of them at least, and a call has at most 16 384.
    assert ways == [
        ("vision:128k", "parts", 16384, 2 * 784),
        ("vision:128k", "whole", None, 2 * 784),
        ("vision:512k", "parts", 16384, 2 * 784),
        ("vision:1m", "parts", 16384, 2 * 784),
        *[("vision:hour", way, 16384, 2 * 288) for way in ("modules", "parts") * 3],
    ]
    assert all(row["median_s"] > 0 for row in rows if "way" in row)


def test_every_way_of_dense_attention_can_be_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also that by flash-attn 4, which no CPU has: what is changed is taken back."""
    monkeypatch.syspath_prepend(ROOT / "bench")
    prefill = importlib.import_module("prefill")
    before = dense.FLASH_FROM, dense.FASTEST
    taken = {}
    for way, changed in prefill.DENSE.items():
        with patch.multiple(dense, **changed):
            taken[way] = dense.FLASH_FROM, dense.FASTEST
    assert taken["dense_flash_attn_4"] == before == (dense.FLASH_FROM, dense.FASTEST)
    # In the two others no prompt is long enough.
    assert all(taken[way][0] > 1 << 40 for way in ("dense", "dense_flash_2"))
    assert taken["dense"][1] == before[1] != taken["dense_flash_2"][1]


def test_a_ratio_and_where_it_may_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "bench")
    ratio_of = importlib.import_module("prefill").ratio_of
    same = [1.0, 1.01, 0.99, 1.02, 0.98, 1.0, 1.0]
    middle, low = ratio_of(same, same)
    assert middle == 1 and 0.97 < low <= 1
    middle, low = ratio_of([2 * s for s in same], same)
    assert middle == pytest.approx(2) and 1.9 < low <= 2
    # One run that was disturbed says little of the ratio.
    assert ratio_of(same, [*same[:-1], 9.0])[1] > 0.95
