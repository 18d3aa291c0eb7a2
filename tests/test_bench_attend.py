"""The benchmark of attention runs from end to end on a CPU, at a length that says nothing."""

from __future__ import annotations

from pathlib import Path

from tests.benches import ran

FEW = "--tokens 512 --repeats 2 --warmup 0 --size 16 --heads 4 2 --dtype float32"


def test_every_case_runs(tmp_path: Path) -> None:
    first, *rows = ran("attend", tmp_path / "rows.jsonl", *FEW.split())
    assert "torch" in first["environment"]
    assert [row for row in rows if "failed" in row] == []
    cases = {row["case"] for row in rows}
    assert {
        "a_shape",
        "vertical_slash_near",
        "vertical_slash_frames",
        "grid",
        "q_boundary",
        "boundary_2d_single",
    } <= cases
    for case in cases:
        ways = {row["way"]: row for row in rows if row["case"] == case}
        assert set(ways) == {"dense_flash", "index", "index_first", "reference", "reference and index"}
        assert 0 < ways["reference"]["kept"] < 1.2 and ways["reference"]["median_s"] > 0
        assert ways["reference"]["against_s"] == ways["dense_flash"]["median_s"]


def test_ways_of_others_are_timed_beside(tmp_path: Path) -> None:
    """They get the tensors, and what ours computes; their rows stand among ours."""
    other = tmp_path / "other.py"
    other.write_text(
        "def ways(query, key, value, facts):\n"
        "    if 'columns' not in facts:\n"
        "        return\n"
        "    columns, diagonals = facts['columns'], facts['diagonals']\n"
        "    assert columns.shape[:2] == diagonals.shape[:2] == query.shape[:2]\n"
        "    assert facts['tokens'] == query.shape[2] == key.shape[2] == value.shape[2]\n"
        "    kept = facts['plan'].to_mask()\n"
        "    assert kept[0, 0, -1, columns[0, 0]].all() and kept[0, 1, -1, facts['tokens'] - 1 - diagonals[0, 1]].all()\n"
        "    yield 'the other', lambda: query + 1\n"
    )
    cases = ("--cases", "vertical_slash_frames", "a_shape", "--no-dense", "--beside", str(other))
    _, *rows = ran("attend", tmp_path / "rows.jsonl", *cases, *FEW.split())
    told = [(row["case"], row["way"]) for row in rows if row["way"] == "the other"]
    assert told == [("vertical_slash_frames", "the other")]
    assert [row for row in rows if "failed" in row] == []
