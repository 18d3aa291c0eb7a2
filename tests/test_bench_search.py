"""The benchmark of the search tells what a search of a tiny model took, layer by layer."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from mmaccel.search import Settings, agreement
from tests.models.tiny_random import BUILD, prompt

ROOT = Path(__file__).parent.parent


def test_a_search_is_timed_by_layer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(ROOT / "bench")
    bench = importlib.import_module("search")
    inputs = prompt("qwen", [("text", 12), ("video", 30), ("text", 40)])
    settings = Settings(cost="pairs", block=16, boundaries=["no_boundary", "q_boundary"])
    model = BUILD["qwen"](layers=2)
    table, row = bench.searched(model, inputs, settings, tmp_path)
    assert row["layers"] == len(row["layer_s"]) == len(table["layers"]) == 2
    assert row["level_s"] > 0 and min(row["layer_s"]) > 0
    assert row["all_layers_s"] == pytest.approx(row["level_s"] + 14 * sum(row["layer_s"]))
    assert list(tmp_path.iterdir()) == []
    again, _ = bench.searched(model, inputs, settings, tmp_path)
    assert agreement(table, again) == 1
