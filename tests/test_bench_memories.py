"""The benchmark of memories: rows as they come by several processes, runs that go on, files put together."""

import json
import shlex
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import system_table
import torch
from memories import FRAMES, idle, main
from system_table import paired

from mmaccel.core.errors import MmaccelError

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
    mean, low, high = paired(better.tolist(), common.tolist())
    assert 0.4 < low < mean < high < 0.6
    assert paired([1.0, 2.0], [1.0, 2.0]) == (0.0, 0.0, 0.0)
