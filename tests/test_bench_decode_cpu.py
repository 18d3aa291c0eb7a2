"""The benchmark of drafts on two cores: its ways, its rows, and what it concludes of rows that were measured apart."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mmaccel import load_model
from mmaccel.cli import answer
from mmaccel.core.report import Report
from tests.models.tiny_random import BUILD, PROMPTS, prompt

sys.path.insert(0, str(Path(__file__).parent.parent / "bench"))

import decode_cpu
import expected


def test_no_verdict_without_both_ways() -> None:
    row = {"case": "sequential uv", "window": 5, "draft": {"prune": {}}}
    assert (
        decode_cpu.verdict([row, {"case": "parallel inline", "window": 4, "draft": {"process": False}}])
        is None
    )


def test_a_way_starts_one_process_and_what_it_is_held_against_is_plain(
    shipped: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []
    reports: list[Report] = []
    generate = answer.generate

    class Noted(subprocess.Popen[bytes]):
        def __init__(self, *given: Any, **more: Any) -> None:
            super().__init__(*given, **more)
            started.append(self)

    def noted(model: Any, *given: Any, **more: Any) -> tuple[torch.Tensor, Report]:
        ids, report = generate(model, *given, **more)
        reports.append(report)
        return ids, report

    monkeypatch.setattr("mmaccel.core.decoding.worker.subprocess.Popen", Noted)
    monkeypatch.setattr(answer, "generate", noted)
    name = shipped("tiny-qwen")
    model = load_model(name, dtype=torch.float32)
    inputs = decode_cpu.prompts(name, model, 16, 2, 3)
    drafts = {way: draft for way, draft in decode_cpu.ways((4,)).items() if way == "parallel 4"}
    (row,) = decode_cpu.measured(model, inputs, 24, drafts, 2)
    assert row["captions"] == 4 and row["same"] and not row["failed"] and row["kept"] > 0
    assert len(started) == 1 and started[0].poll() is not None
    # In turns: a plain generation, which nobody drafts for, and one of the way.
    assert [report.draft["rounds"] > 0 for report in reports] == [False, True] * 4


def test_rows_of_drawn_tokens(shipped: Callable[[str], str]) -> None:
    """Each caption has a seed of its own, the same for every way; texts differ, so that nothing is called the same."""
    name = shipped("tiny-qwen")
    model = load_model(name, dtype=torch.float32)
    inputs = decode_cpu.prompts(name, model, 8, 1, 3)
    drafts = {way: {"name": "prompt_lookup"} for way in ("one", "other")}
    one, other = decode_cpu.measured(model, inputs, 16, drafts, 2, 1.5, 7)
    assert one["same"] is other["same"] is None and one["temperature"] == 1.5 and one["captions"] == 2
    drawn = [(row["tokens"], row["rounds"], row["kept"], row["a_step"]) for row in (one, other)]
    assert drawn[0] == drawn[1] and not one["failed"]


def test_shares_kept_under_sampling_are_held_against_each_other() -> None:
    base = {"model": "tiny-ov", "temperature": 0.7, "speedup": 1.5, "plain_per_s": 10.0, "tokens_per_s": 15.0}
    base |= {"window": 1, "draft_step_s": 0.1, "share": 0.8, "a_step": 1.0}
    turns = base | {"case": "sequential 1", "draft": {}, "kept": 0.5, "rounds": 10_000}
    ahead = base | {"case": "parallel 1", "draft": {}, "kept": 0.53, "rounds": 10_000}
    *_, told = decode_cpu.conclusions([turns, ahead])
    assert told["case"] == "kept" and told["temperature"] == 0.7 and not told["reached"]
    assert told["gap"] == pytest.approx(0.03) and told["standard_error"] == pytest.approx(0.00706, abs=1e-5)
    should = {
        "case": "expected",
        "model": "tiny-ov",
        "temperature": 0.7,
        "parallel 1": 0.52,
        "sequential 1": 0.5,
    }
    *_, told = decode_cpu.conclusions([turns, ahead | {"kept": 0.51}, should])
    assert told["reached"] and told["expected_gap"] == pytest.approx(0.02)
    assert decode_cpu.conclusions([turns, ahead | {"temperature": 1.5}]) == []
    lines = decode_cpu.table([turns, ahead, told]).splitlines()
    assert (
        "| tiny-ov | 0.7 | parallel 1 | 1.00 | 0.53 | 15 | 10 | 1.50 x |" in lines
        and "+0.010" in lines[-1]
        and "expected +0.020." in lines[-1]
    )


def test_expected_shares_are_those_of_all_places_and_of_the_starts_of_rounds() -> None:
    """Every other token is sure, the rest are kept half the time; rounds end up at the sure ones."""
    told = expected.shares([torch.tensor([0.5, 1.0] * 500)])
    assert told["tokens"] == 1000 and told["parallel 1"] == 0.75
    # From a hard place to the next hard one, or, refused, to a sure one, and from there to sure ones alone.
    assert told["sequential 1"] == pytest.approx(1.0, abs=0.01)
    model = BUILD["qwen"](layers=1)
    ids = torch.arange(5) + 20
    same = expected.chances(model, model, prompt("qwen", PROMPTS["video"]), ids, 0.7)
    assert torch.allclose(same, torch.ones(4))
    other = expected.chances(model, BUILD["qwen"](seed=1), prompt("qwen", PROMPTS["video"]), ids, 0.7)
    assert len(other) == 4 and other.min() < 0.99


def test_rows_measured_apart_have_one_verdict(tmp_path: Path) -> None:
    base = {"captions": 2, "frames": 8, "model": "tiny-ov", "share": 0.8, "plain_per_s": 10.0}
    turns = {"case": "sequential 3", "draft": {"name": "sequential"}, "window": 3, "speedup": 1.5}
    ahead = {
        "case": "parallel 4",
        "draft": {"name": "parallel"},
        "window": 4,
        "speedup": 2.4,
        "draft_step_s": 0.02,
    }
    old = {"case": "verdict", "model": "tiny-ov", "reached": False}
    other = {**base, **turns, "model": "tiny-qwen", "frames": 16}
    paths = [tmp_path / name for name in ("one", "two", "all")]

    def written(path: Path, *rows: dict[str, Any]) -> None:
        path.write_text(
            "".join(json.dumps(row) + "\n" for row in ({"environment": {"of": path.name}}, *rows))
        )

    def merged(*given: Path) -> list[dict[str, Any]]:
        decode_cpu.main(["--rows", *map(str, given), "--out", str(paths[2])])
        return [json.loads(line) for line in paths[2].read_text().splitlines()]

    written(paths[0], {**base, **turns}, old, other)
    written(paths[1], {**base, **ahead})
    found = merged(*paths[:2])
    assert [row.get("case") for row in found] == [
        None,
        "sequential 3",
        "sequential 3",
        None,
        "parallel 4",
        "verdict",
    ]
    assert found[-1]["against_sequential"] == 2.4 / 1.5 and found[-1]["model"] == "tiny-ov"
    # Once more, with what was put together before: nothing stands there twice.
    assert merged(paths[2], *paths[:2]) == found
    with pytest.raises(SystemExit, match="parallel 4 of tiny-ov was measured twice"):
        written(paths[0], {**base, **ahead, "speedup": 2.5})
        merged(*paths[:2])
    with pytest.raises(SystemExit, match="captions of tiny-ov are"):
        written(paths[0], {**base, **turns, "captions": 3})
        merged(*paths[:2])
    assert merged(paths[2]) == found
