"""The benchmark of how sparse heads are chooses the fewest pairs, and tells what they hold in another request."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parent.parent


@pytest.fixture
def sparsity(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "bench")
    return importlib.import_module("sparsity")


def test_the_fewest_pairs_are_chosen(sparsity: Any) -> None:
    first = torch.tensor([[0.9, 0.04, 0.06, 0.0], [1.0, 0.0, 0.0, 0.0], [0.25, 0.25, 0.25, 0.25]])
    mask = sparsity.chosen(first)
    assert mask.tolist() == [[True, False, True, False], [True, False, False, False], [True] * 4]
    second = torch.tensor([[0.1, 0.7, 0.05, 0.15], [0.2, 0.8, 0.0, 0.0], [0.4, 0.3, 0.2, 0.1]])
    told = sparsity.compared(second, mask)
    assert told["count"].tolist() == [2, 1, 4] and told["count_second"].tolist() == [3, 2, 4]
    torch.testing.assert_close(told["reused"], torch.tensor([0.15, 0.2, 1.0]))
    torch.testing.assert_close(told["own"], torch.tensor([0.85, 0.8, 1.0]))


def test_a_request_serves_itself_and_less_another(
    sparsity: Any, random_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    out, picture = tmp_path / "rows.jsonl", tmp_path / "drawn.svg"
    few = ("--models", str(random_folder("tiny-ov-draft")), "--frames", "8", "--device", "cpu")
    sparsity.main([*few, "--out", str(out), "--picture", str(picture)])
    sparsity.main([*few, "--out", str(out), "--seeds", "5", "5"])
    environment, *rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert "environment" in environment and "<svg" in picture.read_text()
    heads = [row for row in rows if row.get("case") == "head"]
    other, same = heads[: len(heads) // 2], heads[len(heads) // 2 :]
    for row in heads:
        assert (
            0 < row["share"] <= 1 and row["chance"] < row["own"] + 1e-6 and row["reused"] <= row["own"] + 1e-6
        )
    assert all(row["reused"] == pytest.approx(row["own"]) and row["own"] >= 0.95 for row in same)
    assert any(row["reused"] < row["own"] - 1e-3 for row in other)
    means = [row for row in rows if row.get("case") == "mean"]
    assert means[0]["share"] == pytest.approx(sum(row["share"] for row in other) / len(other))
