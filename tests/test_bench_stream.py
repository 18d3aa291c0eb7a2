"""The script of the streams' speed table runs from end to end on the tiny model, and goes on where it stopped."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.benches import ROOT, ran
from tests.models.streams import FPS, QUESTION, every_stream, film, open_session


def run(out: Path, *only: str, shrink: int = 10) -> list[dict[str, Any]]:
    return ran("stream", out, "--shrink", str(shrink), "--limit", "1000", "--only", *only)


def shown(rows: list[dict[str, Any]]) -> set[str]:
    """What streams were seen to be worth measuring."""
    return {row["way"] for row in rows if row.get("case") == "happened" and row["off"] >= 0.9}


def test_steps_run_and_are_not_run_again(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    rows = run(out, "question")
    assert "torch" in rows[0]["environment"]
    assert [row for row in rows if "failed" in row] == []
    ways = {row["way"]: row for row in rows if row.get("case") == "question"}
    assert all(0 < row["p50_s"] <= row["p95_s"] and row["bytes_in"] > 0 for row in ways.values())
    alone = {row["way"]: row for row in rows if row.get("case") == "asked alone"}
    assert alone.keys() == ways.keys() and all(row["p50_s"] > 0 for row in alone.values())
    assert alone["mosaic, no prefetch"]["guessed"] == 0 < alone["mosaic"]["guessed"]
    apart, joined = ways["rekv, a copy a frame"], ways["rekv, coalesced"]
    assert apart["copies_in"] > joined["copies_in"] and apart["bytes_in"] == joined["bytes_in"]
    assert ways["mosaic, asked again"]["bytes_in"] < ways["mosaic"]["bytes_in"]
    assert ways["mosaic, no prefetch"]["guessed"] == 0 < ways["mosaic"]["guessed"]
    # Questions are about planted scenes, and find them.
    assert ways["mosaic"]["recall"] > 0.6 and ways["rekv, coalesced"]["recall"] > 0.6
    happened = {row["way"]: row for row in rows if row.get("case") == "happened"}
    told = happened["question, mosaic"]
    assert min(told["recalled"], told["deferred"], told["singletons"], told["deferred_splits"]) > 0
    assert all(row["off"] >= 0.9 for row in happened.values()) and len(happened) == 2
    again = run(out, "question", "encode")
    assert [row["done"] for row in again if "done" in row] == ["question", "encode"]
    encoded = {row["way"] for row in again if row.get("case") == "encode"}
    assert {f"encode, {way}" for way in encoded} == shown(again) - shown(rows) and len(encoded) == 4


@pytest.mark.slow
def test_steps_that_vary_what_is_asked_of(tmp_path: Path) -> None:
    """Latency by budget, length and memory, splits, memory and the plain model: counterparts of tables and figures."""
    rows = run(tmp_path / "rows.jsonl", "budgets", "lengths", "rivals", "splits", "whole", "memory")
    assert [row for row in rows if "failed" in row] == []
    by: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by.setdefault(row.get("case", ""), []).append(row)
    ways = {"rekv, a copy a frame", "rekv, coalesced", "mosaic"}
    assert {row["way"] for row in by["budgets"]} == {row["way"] for row in by["lengths"]} == ways
    for way in ways:
        budgets = [row for row in by["budgets"] if row["way"] == way]
        assert sorted({row["budget"] for row in budgets}) == [row["budget"] for row in budgets]
        assert budgets[-1]["bytes_in"] > budgets[0]["bytes_in"]
        lengths = [row["frames"] for row in by["lengths"] if row["way"] == way]
        assert len(lengths) == 5 and lengths == sorted(set(lengths))
    assert all(0 < row["p50_s"] <= row["p95_s"] for row in (*by["budgets"], *by["lengths"], *by["rivals"]))
    names = {"no_cache", "livevlm", "streammem", "recent", "full", "offload"}
    assert {row["way"] for row in by["rivals"]} == names
    alone, retrieving = by["splits"]
    assert alone["deferred"] > 0 == alone["deferred_splits"]
    assert retrieving["deferred_splits"] > 0, "watching that retrieves makes the splits it owes"
    assert [row["frames"] for row in by["whole"]] == sorted(row["frames"] for row in by["whole"])
    assert by["whole"][-1]["p50_s"] > by["whole"][0]["p50_s"]
    assert {row["way"] for row in by["memory"]} == {"rekv", "mosaic", "full"}
    held = {f"{step}, {name}" for step in ("budgets", "lengths", "memory") for name in ("rekv", "mosaic")}
    split = {f"splits, {row['way']}" for row in by["splits"]}
    assert shown(rows) == held | split | {"rivals, offload"} and len(split) == 2


def test_a_day_beside_what_is_predicted(tmp_path: Path) -> None:
    rows = run(tmp_path / "rows.jsonl", "day", shrink=200)
    assert [row for row in rows if "failed" in row] == []
    hours = [row for row in rows if row.get("case") == "day"]
    assert [row["hour"] for row in hours] == list(range(1, len(hours) + 1)) and len(hours) >= 3
    assert hours[0]["slower"] == 1 and all(row["slower"] > 0 for row in hours)
    frames = [row["host_predicted"] / (row["frames"] - 2) for row in hours]
    assert frames == [frames[0]] * len(hours), "a window of 2 frames is on the device, all others on the host"
    assert all(row["host_bytes"] >= row["host_predicted"] > 0 for row in hours)
    assert all(row["memory_bytes"] > row["index_bytes"] > 0 for row in hours) and shown(rows) == {
        "day, mosaic"
    }


@pytest.mark.slow
def test_films_taken_in_at_once_asked_under_drafts_and_on_a_capped_device(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    rows = run(out, "ingest", "drafted", "capped", shrink=60)
    assert [row for row in rows if "failed" in row and row.get("case") != "drafted"] == []
    films = {(row["way"], row["frames"]): row for row in rows if row.get("case") == "ingest"}
    lengths = sorted({frames for _, frames in films})
    assert (
        len(lengths) == 2 and {way for way, _ in films} == {"window", "sparse", "dense"} and len(films) == 6
    )
    assert all(row["frames_s"] > 0 and row["floor_s"] > 0 for row in films.values())
    assert all(0 < films["sparse", n]["kept"] < 1 and films["sparse", n]["seen"] == 1 for n in lengths)
    assert films["dense", lengths[1]]["scaled"] and "scaled" not in films["dense", lengths[0]]
    ratios = {row["frames"]: row for row in rows if row.get("case") == "ingest ratio"}
    for n in lengths:
        of = films["sparse", n]["frames_s"] / films["window", n]["frames_s"]
        assert ratios[n]["over_window"] == pytest.approx(of)
    asked = {(row["way"], row["keep"]): row for row in rows if row.get("case") == "drafted"}
    assert len(asked) == 6 and all(row["failed"] is None and row["p50_s"] > 0 for row in asked.values())
    for way in ("sequential", "parallel"):
        often, seldom = (asked[way, keep] for keep in (0.8, 0.05))
        assert often["drafted"] > 0 and seldom["drafted"] > 0
        assert often["accepted"] / often["drafted"] > 2 * seldom["accepted"] / seldom["drafted"]
    assert len([row for row in rows if row.get("case") == "drafted ratio"]) == 4
    capped = {row["way"]: row for row in rows if row.get("case") == "capped"}
    assert len(capped) == 2 and all(row["new"] == 4 and row["tokens"] >= 1000 for row in capped.values())
    assert all(row["host_bytes"] > 0 and 0 < row["kept"] < 1 for row in capped.values())
    assert run(out, "ingest", "drafted", "capped", shrink=60)[: len(rows)] == rows, "steps are not run again"


def test_a_stream_that_shows_too_little_is_no_measurement() -> None:
    sys.path.insert(0, str(ROOT / "bench"))
    happened = importlib.import_module("happened")
    with open_session("random-ov", every_stream(frames=6, window=8)["mosaic"]) as session:
        session.watch(film(25), fps=FPS)
        session.ask(QUESTION, 1)
        with pytest.raises(RuntimeError, match=r"no 90% of the stream off the device, but 68\.0%"):
            happened.happened(session, "mosaic", many=False)
    with open_session("random-ov", {"name": "rekv", "window": 2, "frames": 2, "local": 1}) as session:
        session.watch(film(25), fps=FPS)
        with pytest.raises(RuntimeError, match="no recalled"):
            happened.happened(session, "rekv", many=False)
        session.ask(QUESTION, 1)
        assert happened.happened(session, "rekv", many=False)["off"] == 0.92
