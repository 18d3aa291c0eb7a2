"""The benchmark of needles: what it asks first, that it goes on where it stopped, and what its rows tell."""

from __future__ import annotations

import importlib
import json
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parent.parent / "bench"
RECORD = BENCH / "results" / "haystack_h200_202611.jsonl"


@pytest.fixture(scope="module")
def needles() -> Any:
    sys.path.insert(0, str(BENCH))
    try:
        return importlib.import_module("needles")
    finally:
        sys.path.remove(str(BENCH))


def test_what_tells_most_is_asked_first(needles: Any, shipped: Callable[[str], str]) -> None:
    models = [shipped("tiny-ov"), shipped("tiny-qwen")]
    options = Namespace(models=models, documents=[0, 4], lengths=[2, 8, 4], depths=2, samples=3, seed=0)
    options.methods = list(needles.METHODS)
    asked = list(needles.units(options, "bfloat16"))
    # Two questions of each cell at each length, the longest first: 2 tasks, 2 depths, 2 models.
    first = asked[: 3 * 16]
    assert [unit.case.world.frames for unit in first] == [
        frames
        for pair in ((512, 384), (256, 192), (128, 96))
        for _ in range(2)
        for frames in pair
        for _ in range(4)
    ]
    assert {unit.names for unit in first} == {needles.METHODS}
    assert all(unit.setting.compress is None and unit.setting.dtype == "bfloat16" for unit in first)
    zipped = [unit for unit in asked if unit.setting.compress]
    assert asked[48 : 48 + len(zipped)] == zipped and "visionzip" not in zipped[0].names
    exact = [unit for unit in asked if unit.setting.dtype == "float32"]
    assert {unit.names for unit in exact} == {("dense", "searched")}
    # Both models, and both dtypes, are asked about one world after the other.
    assert asked[0].case.world == asked[1].case.world and exact[0].case.world == asked[0].case.world
    # Nothing is asked twice.
    keys = [
        (unit.setting, unit.case.world.frames, unit.case.world.seed, unit.case.question) for unit in asked
    ]
    assert len(set(keys)) == len(keys)


def test_a_run_goes_on_where_it_stopped(
    needles: Any, shipped: Callable[[str], str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.jsonl"
    words = ["--models", shipped("tiny-ov"), "--documents", "0", "--lengths", "0.5", "--depths", "2"]
    words += ["--samples", "1", "--methods", "dense", "searched", "tri_shape", "--device", "cpu"]
    words += ["--renderers", "1", "--out", str(rows)]
    needles.main([*words, "--processes", "0", "--limit", "0"])
    assert "not complete" in capsys.readouterr().err
    needles.main([*words, "--processes", "2"])
    told = capsys.readouterr()
    assert "not complete" not in told.err and "  dense               32: 2/2 (100.0%)" in told.out
    lines = [json.loads(line) for line in rows.read_text().splitlines()]
    answers = [line for line in lines if "recipe" in line]
    # Two questions to three methods, and to two of them with a compressor before; a level for each rival of each.
    assert len(answers) == 12 and sum("level" in line for line in lines) == 2
    assert {line["compress"] for line in answers} == {None, "visionzip"}
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines if line not in answers[-2:]))
    needles.main([*words, "--processes", "1"])
    again = [json.loads(line) for line in rows.read_text().splitlines()]
    assert sorted(map(json.dumps, answers)) == sorted(json.dumps(line) for line in again if "recipe" in line)
    assert len([line for line in again if "level" in line]) == 2


def test_figures_and_maps_follow_from_the_rows(
    needles: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    needles.main(["--rows", str(RECORD), str(RECORD), "--maps", str(tmp_path / "maps")])
    told = capsys.readouterr().out
    both = told[told.index("all models, both tasks") :]
    assert "searched            63/63 = 100.0% (94.3% to 100.0%)\n" in both
    assert "block_topk          45/63 = 71.4%" in both and "against searched -28.6" in both
    assert sorted(path.name for path in (tmp_path / "maps").iterdir()) == [
        f"needles_{model}_{task}_float32.svg"
        for model in ("tiny-ov", "tiny-qwen")
        for task in ("mm-niah", "v-niah")
    ]
