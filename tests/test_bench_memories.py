"""Benchmarks of memories: rows by several processes, runs that go on, files put together; and of streams."""

import json
import math
import shlex
from collections import Counter
from pathlib import Path
from typing import Any

import crowd
import live
import pytest
import system_table
import torch
import watching
from memories import FRAMES, idle, main
from system_table import paired

import mmaccel
from mmaccel.core.errors import MmaccelError
from mmaccel.core.memory import buffers
from tests.benches import ran
from tests.models.streams import FPS, QUESTION, every_stream, film, open_session, pair

FEW = shlex.split("--device cpu --frames 24 --budgets 4 --window 6 --most 1 --kinds needle")


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("processes", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_worlds_by_some_processes_one_more_later_and_files_together(processes: str, tmp_path: Path) -> None:
    out, other, both, brief = (tmp_path / f"{name}.jsonl" for name in ("one", "other", "both", "brief"))
    memories = ("--memory", "mosaic init=8", "rekv")
    main([*FEW, *memories, "--worlds", "2", "--processes", processes, "--out", str(out)])
    counts = Counter(row.get("what") for row in rows(out))
    assert counts["answer"] == 4 and counts["watch"] == 4
    assert {row["memory"] for row in rows(out) if row.get("what") == "answer"} == {"mosaic init=8", "rekv"}
    # The same again asks nothing; what one watch of two worlds lacks is asked, and then one world more.
    main([*FEW, *memories, "--worlds", "2", "--out", str(out)])
    done = [row for row in rows(out) if row.get("what") == "watch"]
    assert len(done) == 4
    out.write_text("".join(json.dumps(row) + "\n" for row in rows(out) if row != done[0]))
    main([*FEW, *memories, "--worlds", "2", "--out", str(out)])
    again = [row for row in rows(out) if row.get("what") == "watch"]
    assert len(again) == 4 and again[:3] == done[1:]
    main([*FEW, *memories, "--worlds", "3", "--out", str(out)])
    found = rows(out)
    # The watch that was lost has asked its question again.
    assert Counter(row.get("what") for row in found)["answer"] == 7
    seeds = {row["seed"] for row in found if row.get("what") == "watch"}
    assert seeds == {100_003 * 24 + n for n in range(3)}
    means = {(row["memory"], row["kind"]): row for row in found if row.get("what") == "mean"}
    assert means["rekv", "all"]["questions"] == 3
    (gap,) = (row for row in found if row.get("what") == "paired" and row["kind"] == "all")
    assert gap["gain"] == means["mosaic init=8", "all"]["accuracy"] - means["rekv", "all"]["accuracy"]
    (watch,) = (row for row in found if row.get("what") == "watches" and row["memory"] == "mosaic init=8")
    assert watch["streams"] == 3 and 0 < watch["clusters"]["semantic"]["purity"] <= 1
    # So short a stream with so wide a window shows little, and that is told.
    absent = {row["memory"]: row["absent"] for row in found if row.get("what") == "idle"}
    assert absent["rekv"] == ["75% of the frames off the device, not 90%"] == absent["mosaic init=8"][-1:]
    # Another run, one world the same: broken off in a line, and put together with the first.
    main([*FEW, *memories, "--worlds", "1", "--seed", "2", "--out", str(other)])
    other.write_text(other.read_text()[:-30])
    main(["--rows", str(out), str(other), str(out), "--out", str(both), "--brief", str(brief)])
    assert [row for row in rows(both) if row.get("what") == "mean"] == [
        row for row in found if row.get("what") == "mean"
    ]
    told = rows(brief)
    assert "environment" in told[0] and {row["what"] for row in told if "what" in row} == {
        "mean", "paired", "watches", "idle"
    }  # fmt: skip


def test_what_did_not_happen_in_a_stream_is_told() -> None:
    told = {"recalled": 8.0, "host_bytes_in": 1.0, "units": 100.0, "resident": 10.0}
    splits = {"eager_splits": 1.0, "deferred": 2.0, "singletons": 1.0, "resolved": 1.0}
    assert idle({"counters": told}) == [] == idle({"counters": {**told, **splits}})
    assert idle({"counters": {**told, **splits, "deferred": 0.0}}) == ["deferred"]
    assert idle({"counters": {**told, "resident": 11.0}}) == ["89% of the frames off the device, not 90%"]
    assert idle({"counters": {"units": 3.0}}) is None


def test_systems_alone_and_together_come_to_a_table(tmp_path: Path) -> None:
    names = ("nothing", "memory", "sparse + memory", "sparse + memory + draft")
    out, table = tmp_path / "systems.jsonl", tmp_path / "table.md"
    more = shlex.split("--cards 7 --scenes 2 --kinds order --told 6 --worlds 1")
    few = [*FEW[:3], "48", *FEW[4:10], *more]
    main([*few, "--plan", "systems", "--memory", *names, "--out", str(out), "--table", str(table)])
    watched = {row["memory"]: row for row in rows(out) if row.get("what") == "watch"}
    assert watched["memory"]["counters"]["ingested"] == watched["memory"]["frames"] == 48
    assert watched["memory"]["kept"] is None and 0 < watched["sparse + memory"]["kept"] < 1
    drafted = watched["sparse + memory + draft"]
    assert drafted["steps"] < 1 and drafted["caption"] == watched["sparse + memory"]["caption"] != ""
    assert drafted["host_bytes"] > watched["memory"]["host_bytes"] > watched["nothing"]["host_bytes"] == 0
    told = table.read_text()
    assert "gave the same text to 1 of 1 questions" in told and "1 films of 48 frames" in told


def test_what_the_table_of_systems_says() -> None:
    right = {
        # Of two films of two questions of a kind each.
        "nothing": ("11", "11"), "memory": ("11", "10"), "memory: rekv": ("10", "00"),
        "sparse + memory + draft": ("11", "00"), "sparse + memory": ("11", "01"),
    }  # fmt: skip
    found: list[dict[str, Any]] = []
    for name, films in right.items():
        for seed, answers in enumerate(films):
            base = {"memory": name, "seed": seed, "frames": 500, "processes": 1}
            held = dict(device_bytes=None, host_bytes=1 << 20, kept=0.5, tokens_per_s=10.0, steps=1.0)
            found.append({**base, **held, "what": "watch", "seconds": 1.0 + seed})
            # Rows by several processes count for what is right, and not for time.
            found.append({**found[-1], "processes": 2, "seconds": 100.0})
            for number, mark in enumerate(answers):
                said = dict(kind="order", question=f"q{number}", said=mark, right=mark == "1", ttft_s=0.01)
                found.append({**base, **said, "what": "answer"})
    # A film that not all were asked about counts for nothing.
    found.append({**found[0], "seed": 9})
    told = system_table.markdown(found)
    assert told.startswith("2 films of 500 frames")
    assert "| memory | 75.0% (50.0 to 100.0) | 75.0% (50.0 to 100.0) |" in told
    assert "| memory | -25.0 (-50.0 to +0.0) | -25.0 (-50.0 to +0.0) |" in told
    assert "- Over *memory*, all: lower bound -50.0 points; -2 required: missed." in told, "the best memory"
    assert "- Over *nothing*, order: lower bound -100.0 points; -2 required: missed." in told
    assert "*sparse + memory + draft* and *sparse + memory* gave the same text to 3 of 4 questions" in told
    assert "| memory | 1.50 | 10.0 | 10 | 1.00 | 50.0% |  | 1 |" in told
    all_but = [row for row in found if row["memory"] != "nothing" or row["what"] == "watch"]
    three = [row for row in found if row["memory"] == "sparse + memory + draft" and row["what"] == "answer"]
    again = system_table.markdown([*all_but, *({**row, "memory": "nothing"} for row in three)])
    assert "- Over *nothing*, order: lower bound +0.0 points; -2 required: met." in again


def test_what_cannot_be_is_told_and_a_limit_keeps_what_there_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(MmaccelError, match="frame"):
        main([*FEW, "--memory", "rekv frame=3", "--worlds", "1", "--out", str(tmp_path / "a.jsonl")])
    out = tmp_path / "b.jsonl"
    main([*FEW, "--memory", "rekv", "--worlds", "1", "--limit", "0.01", "--out", str(out)])
    assert "the time is up" in capsys.readouterr().out
    assert [row.get("what") for row in rows(out)][:2] == [None, "answer"]
    assert not any(row.get("what") == "watch" for row in rows(out))


def test_frames_indexed_one_by_one_are_rekv(tmp_path: Path) -> None:
    # The rows of `--plan parts` add one part at a time to ReKV: with none added they must be ReKV.
    bare = " ".join(f"{name}={value}" for name, value in FRAMES.items())
    out = tmp_path / "out.jsonl"
    few = [*FEW[:3], "72", "--budgets", "4", "--window", "6", "--most", "2", "--worlds", "1"]
    main([*few, "--memory", f"mosaic {bare}", "rekv", "--out", str(out)])
    asked: dict[str, list[tuple[Any, ...]]] = {}
    for row in rows(out):
        if row.get("what") == "answer":
            asked.setdefault(row["memory"], []).append(
                tuple(row[name] for name in ("question", "said", "recall", "alone", "seen"))
            )
    assert len(asked["rekv"]) >= 4
    assert asked["rekv"] == asked[f"mosaic {bare}"]


def test_paired_sees_through_what_is_common() -> None:
    g = torch.Generator().manual_seed(0)
    common = torch.randn(60, generator=g, dtype=torch.float64) * 10
    better = common + 0.5 + 0.1 * torch.randn(60, generator=g, dtype=torch.float64)
    mean, low, high = paired(*(dict(enumerate(x.tolist())) for x in (better, common)))
    assert 0.4 < low < mean < high < 0.6
    assert paired({3: 1.0, 5: 2.0}, {5: 2.0, 3: 1.0}) == (0.0, 0.0, 0.0)
    assert [live.quantile([3.0, 1.0, 2.0], share) for share in (0.0, 0.5, 0.99, 1.0)] == [1.0, 2.0, 3.0, 3.0]


def run(out: Path, *only: str, shrink: int = 10) -> list[dict[str, Any]]:
    """Its rows; none failed."""
    rows = ran("stream", out, "--shrink", str(shrink), "--limit", "1000", "--only", *only)
    assert [row for row in rows if "failed" in row] == []
    return rows


def shown(rows: list[dict[str, Any]]) -> set[str]:
    """What streams were seen to be worth measuring."""
    return {row["way"] for row in rows if row.get("case") == "happened" and row["off"] >= 0.9}


def test_steps_run_and_are_not_run_again(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    rows = run(out, "question", shrink=15)
    assert "torch" in rows[0]["environment"]
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
    again = run(out, "question", "encode", shrink=15)
    assert [row["done"] for row in again if "done" in row] == ["question", "encode"]
    encoded = {row["way"] for row in again if row.get("case") == "encode"}
    assert {f"encode, {way}" for way in encoded} == shown(again) - shown(rows) and len(encoded) == 4


@pytest.mark.slow
def test_memory_and_films_taken_in_at_once(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    rows = run(out, "memory")
    assert {row["way"] for row in rows if row.get("case") == "memory"} == {"rekv", "mosaic", "full"}
    assert shown(rows) == {"memory, rekv", "memory, mosaic"}
    rows = run(out, "ingest", shrink=60)
    films = {(row["way"], row["frames"]): row for row in rows if row.get("case") == "ingest"}
    lengths = sorted({frames for _, frames in films})
    assert len(lengths) == 2 and {way for way, _ in films} == {"window", "sparse", "dense"}
    assert len(films) == 6
    assert all(row["frames_s"] > 0 and row["floor_s"] > 0 for row in films.values())
    assert all(0 < films["sparse", n]["kept"] < 1 and films["sparse", n]["seen"] == 1 for n in lengths)
    assert films["dense", lengths[1]]["scaled"] and "scaled" not in films["dense", lengths[0]]
    ratios = {row["frames"]: row for row in rows if row.get("case") == "ingest ratio"}
    for n in lengths:
        of = films["sparse", n]["frames_s"] / films["window", n]["frames_s"]
        assert ratios[n]["over_window"] == pytest.approx(of)
    assert run(out, "ingest", shrink=60)[: len(rows)] == rows, "steps are not run again"


def test_a_stream_that_shows_too_little_is_no_measurement() -> None:
    with open_session("random-ov", every_stream(frames=6, window=8)["mosaic"]) as session:
        session.watch(film(25), fps=FPS)
        session.ask(QUESTION, 1)
        with pytest.raises(RuntimeError, match=r"no 90% of the stream off the device, but 68\.0%"):
            watching.happened(session, "mosaic", many=False)
    with open_session("random-ov", {"name": "rekv", "window": 2, "frames": 2, "local": 1}) as session:
        session.watch(film(25), fps=FPS)
        with pytest.raises(RuntimeError, match="no recalled"):
            watching.happened(session, "rekv", many=False)
        session.ask(QUESTION, 1)
        assert watching.happened(session, "rekv", many=False)["off"] == 0.92


@pytest.mark.parametrize("kv", ["mosaic", "full", "no_cache"])
def test_a_frame_waits_for_one_piece(kv: str) -> None:
    model, processor = pair("tiny-ov")
    with mmaccel.VideoSession(model, processor, None, kv={"name": kv}) as session:
        session.watch(film(25), fps=2.0)
        given = {"fps": 20.0, "seconds": 1.2, "count": 400, "tokens": 16}
        row = live.measured(session, film(25), **given)
    print(row)
    assert row["answers"] >= 1 and row["frames"] > 3 and row["words"] == 400
    assert not any(math.isnan(value) for value in row.values() if isinstance(value, float))
    assert row["largest"] == sorted(row["largest"], key=lambda one: -one["ms"])
    for one in row["largest"]:
        # All threads take turns: what ran is what the gap was made of, but for waking up. A clip is got ready beside them.
        parts = sum(ms for name, ms in one.items() if name not in ("ms", "at", "other", "clip"))
        assert one["token"] > 0 and parts <= one["ms"] + 0.5, one
    if kv == "mosaic":
        assert {"layers", "tower", "ends", "hooks"} <= row["frame"].keys() and row["frame"]["layers"] > 1
    # Scheduling of a busy machine may stretch a wait: the bound with its 3 ms is the script's.
    assert row["wait p50"] <= max(row["slice max"], row["step max"]) + live.SPARE_MS, row
    answer = row["slice p50"] * 8 + row["step p50"] * 16
    assert row["wait p50"] < answer, "a frame does not wait for an answer"


def test_a_crowd_is_served_or_late_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step adds streams; frames are late where they come faster than they are taken in, and a busy server refuses."""
    some = ["--seconds", "1.2", "--settle", "0.4", "--every", "0.6", "--tokens", "4", "--before", "24"]
    some += ["--host-gib", "64"]  # of all sessions of the process
    monkeypatch.setattr(buffers, "LEAST", 64)  # of a model so small tables would be most of it
    out = tmp_path / "rows.jsonl"
    _, one, two = ran("crowd", out, "--streams", "1", "2", "--fps", "2", *some)
    assert (one["streams"], two["streams"], two["refused"]) == (1, 2, 0)
    for row in (one, two):
        assert row["frames_per_s"] > 0 and row["questions"] > 0 and 0 < row["first p50"] <= row["first p95"]
        assert row["holds_least_s"] >= 12 and row["predicted_gib"] == pytest.approx(
            row["device_gib"], rel=0.2
        )
        assert 0 < row["gap p50"] <= row["gap p99"] and 0 < row["askable p50"] <= row["askable p100"]
    monkeypatch.setattr(crowd, "LATE_S", 0.001)
    *_, row = ran("crowd", tmp_path / "late.jsonl", "--streams", "2", "--fps", "50", *some)
    assert row["late"] == 1 and not row["ok"] and row["frames_a_call"] > 1
    *_, row = ran("crowd", tmp_path / "full.jsonl", "--streams", "3", "--busy", "0.0001", *some)
    assert (row["streams"], row["refused"]) == (1, 2)
