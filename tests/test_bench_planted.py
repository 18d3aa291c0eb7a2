"""The benchmarks of what patterns recall: planted heads are what they say, and the rows say what was measured."""

from __future__ import annotations

import importlib
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mmaccel.backends import reference
from mmaccel.core.recipe import Recipe

BENCH = Path(__file__).parent.parent / "bench"


def bench(name: str) -> Any:
    sys.path.insert(0, str(BENCH))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(BENCH))


@pytest.fixture(scope="module")
def recall() -> Any:
    return bench("recall")


def weights(inside: Any) -> torch.Tensor:
    """[H, n, n] softmax weights, all at once."""
    score = inside.query[0].double() @ inside.key[0].double().transpose(1, 2) * inside.scale
    n = score.shape[1]
    return score.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)


def test_rows_are_those_of_dense_attention(recall: Any) -> None:
    inside = recall.draw("columns", 512, 16, 3, torch.float32, torch.device("cpu"))
    rows = torch.tensor([0, 5, 400, 511])
    out, lse = recall.exact(inside, rows)
    weight = weights(inside)[:, rows]
    torch.testing.assert_close(out.double(), weight @ inside.value[0].double(), rtol=1e-4, atol=1e-4)
    assert lse.shape == (inside.query.shape[1], 4)


def test_a_head_left_dense_recalls_all_and_what_is_no_number_shows(recall: Any) -> None:
    inside = recall.draw("columns", 512, 16, 3, torch.float32, torch.device("cpu"))
    rows = torch.tensor([5, 400, 511])
    near = {"name": "a_shape", "sink": 4, "window": 32}
    some = Recipe.load(sparse={"name": "per_head", "table": {0: {0: near}}, "default": "dense"}).sparse.at(0)
    kernel, dense = reference.op, recall.exact(inside, rows)
    one = recall.judged(some, inside, rows, dense, kernel)
    assert 0 < one["recall"] < 1 and one["kept"] < 1

    def broken(*arguments: Any) -> Any:
        out, lse = kernel(*arguments)
        return out, lse * torch.nan

    assert math.isnan(recall.judged(some, inside, rows, dense, broken)["recall"])


@pytest.mark.parametrize("name", ["grid", "2d boundary"])
def test_what_is_planted_holds_most_of_the_weight(recall: Any, name: str) -> None:
    n, frame = 2048, 32
    inside = recall.draw(name, n, frame, 0, torch.float32, torch.device("cpu"))
    weight = weights(inside)
    text = inside.layout.modality[0] == 0
    place, cell = torch.arange(n), inside.layout.cell[0]
    if name == "grid":
        # Each head has one distance of strong diagonals, modulo the frame.
        gap = (place[:, None] - place) % frame
        by_class = torch.stack([(weight * (gap == g)).sum((1, 2)) for g in range(frame)])
        assert (by_class.amax(0) / by_class.mean(0) > 8).all()
    else:
        same = (cell[:, None] == cell) & ~text & ~text[:, None]
        late = ~text & (place > n // 2)
        assert (weight * same)[:, late].sum(2).mean() > 0.5
        assert same[late].float().mean() < 0.03


def test_searched_heads_meet_rivals_at_their_share(recall: Any, tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    recall.main(
        ["--device", "cpu", "--tokens", "2048", "--frame", "32", "--heads", "grid", "--out", str(out)]
    )
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert "environment" in rows[0]
    found = {row["method"]: row for row in rows[1:] if row["case"] == "grid"}
    assert (
        set(found) == {"searched", *recall.RIVALS} - {"visionzip", "fastv"} and found["searched"]["pattern"]
    )
    means = [row for row in rows[1:] if row["case"] == "mean"]
    assert {row["method"]: row["recall"] for row in means} == {m: row["recall"] for m, row in found.items()}
    # The rows of two processes, the second cut off while it wrote.
    other, both = tmp_path / "other.jsonl", tmp_path / "both.jsonl"
    cut = {**found["searched"], "case": "local", "recall": 0.0}
    other.write_text(json.dumps(rows[0]) + "\n" + json.dumps(cut) + "\n" + json.dumps(cut)[:20])
    recall.main(["--rows", str(out), str(other), "--out", str(both)])
    told = [json.loads(line) for line in both.read_text().splitlines()]
    assert [set(row) for row in told[:2]] == [{"environment"}] * 2
    mean = next(row for row in told if row.get("case") == "mean" and row["method"] == "searched")
    assert mean["heads"] == ["grid", "local"] and mean["recall"] == found["searched"]["recall"] / 2
    assert all(0 < row["recall"] <= 1 and row["kept"] > 0 for row in found.values())
    near = [row for row in found.values() if row["kept"] <= 1.05 * found["searched"]["kept"]]
    assert len(near) >= 3 and max(near, key=lambda row: row["recall"])["method"] == "searched"


def test_several_processes_judge_what_is_missing(
    recall: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.jsonl"
    words = ["--device", "cpu", "--tokens", "1024", "--frame", "32", "--heads", "columns", "local"]
    words += ["--processes", "2", "--out", str(out)]
    recall.main([*words, "--limit", "0"])
    assert "not complete" in capsys.readouterr().err
    recall.main(words)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    found = [row for row in lines if row.get("case") in ("columns", "local")]
    assert len(found) == 2 * len(recall.METHODS)
    # The last head was cut off after its first method: it is judged anew, and no row counts twice.
    out.write_text(
        "".join(json.dumps(row) + "\n" for row in lines if row not in found[8:] and "heads" not in row)
    )
    recall.main(words)
    about, rows = recall.together([str(out)])
    assert len(about) == 3 and sorted(map(json.dumps, rows)) == sorted(map(json.dumps, found))
    mean = [json.loads(line) for line in out.read_text().splitlines()][-1]
    assert mean["case"] == "mean" and sorted(mean["heads"]) == ["columns", "local"]


def test_heads_of_several_runs_make_one_curve(tmp_path: Path) -> None:
    out, picture, planted = tmp_path / "rows.jsonl", tmp_path / "curve.svg", bench("planted")
    for seed in ("0", "9"):
        planted.main(["--ratios", "4", "--draws", "7", "--seed", seed, "--out", str(out)])
    planted.main(["--rows", str(out), "--picture", str(picture)])
    rows = [row for row in map(json.loads, out.read_text().splitlines()) if "ratio" in row]
    assert "<svg" in picture.read_text() and len(rows) == 2 * 2 * len(planted.KINDS)
    assert sum(row["exact"] + row["harmonic"] for row in rows) >= 27 and all(
        row["draws"] == 1 for row in rows
    )
