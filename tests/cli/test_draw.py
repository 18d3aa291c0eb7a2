"""`mmaccel draw` of a saved session: its clusters in lanes of time, and what questions retrieve."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import mmaccel
from mmaccel.cli.draw import LANES, Truth, retrieved, runs, timeline
from mmaccel.core.decoding.generate import Evidence
from mmaccel_lab.world import World, render
from tests.cli import Call

pytest.importorskip("matplotlib")


def saved(ov: str, folder: Path, kv: dict[str, object]) -> Path:
    model, processor = mmaccel.load_model(ov, dtype=torch.float32), mmaccel.load_processor(ov)
    world = World.generate(3, 40)
    with mmaccel.VideoSession(model, processor, None, kv=kv) as session:
        assert session.clusters() == {} and session.shown == []
        session.watch(render(world.table(0.3), 168, 280), fps=1.0)
        session.save(folder)
    return folder


def test_a_session_is_drawn(call: Call, ov: str, tmp_path: Path) -> None:
    session = saved(
        ov, tmp_path / "session", {"name": "mosaic", "window": 8, "index": {"name": "clusters", "init": 12}}
    )
    truth, out = tmp_path / "truth.json", tmp_path / "pictures"
    truth.write_text(json.dumps(World.generate(3, 40).truth()))
    command = ("draw", session, "--model", ov, "--format", "svg")
    asked = ("--question", "what colour was the star ?", "--truth", truth, "--layer", 1, "--layer", 0)
    status, told, err = call(*command, *asked, "--out", out)
    assert status == 0, err
    names = ["retrieved.svg", "timeline-layer00.svg", "timeline-layer01.svg"]
    assert sorted(path.name for path in out.iterdir()) == names
    assert all(name in told and "<svg" in (out / name).read_text() for name in names)
    for wrong, match in (
        (("--layer", 99), "there is no 99"),
        (("--truth", session / "session.json"), "holds no truth"),
        (("--truth", tmp_path / "none.json"), "holds no truth"),
    ):
        assert match in call.error(*command, *wrong, "--out", out)
    assert "is a file" in call.error(*command, "--out", truth)


def test_a_memory_without_clusters_wants_a_question(call: Call, ov: str, tmp_path: Path) -> None:
    session = saved(ov, tmp_path / "session", {"name": "rekv", "window": 8, "frames": 4})
    command = ("draw", session, "--model", ov, "--out", tmp_path / "pictures")
    assert "give --question" in call.error(*command)
    status, told, _ = call(*command, "--question", "what colour was the star ?")
    assert status == 0 and "retrieved.png" in told and "timeline" not in told


def test_runs_are_in_order_of_time() -> None:
    assert runs([5, 5, 2, 5, 2, 2]) == {5: [(0, 2), (3, 4)], 2: [(2, 3), (4, 6)]}
    assert list(runs([5, 5, 2])) == [5, 2] and runs([]) == {}


def test_a_lane_for_each_cluster_and_one_for_many_small_ones() -> None:
    world = World.generate(3, 60)
    visual = torch.arange(60)[None] // 10
    semantic = torch.stack([torch.zeros(120, dtype=torch.long), torch.arange(120) // 2])
    shown = [2.0 * n for n in range(60)]
    truth = Truth(world.truth())
    drawn = timeline({"visual": visual, "semantic": semantic}, shown, 1, truth)
    scenes, above, below = drawn.axes
    assert len(scenes.texts) == len(world.segments) and len(above.collections) == 6
    assert len(below.collections) == LANES and below.get_ylabel().startswith("60 semantic")
    assert "layer 1" in below.get_ylabel() and "layer" not in above.get_ylabel()
    (first, *_), (x0, x1) = above.collections, above.get_xlim()
    assert (x0, x1) == (0, 120) and first.get_paths()[0].get_extents().x1 == 20
    assert len(timeline({"visual": visual}, shown, 0).axes) == 1


def test_what_a_question_rests_on_is_marked() -> None:
    world = World.generate(3, 60)
    (question, *_) = world.questions(["order"])
    evidence = [Evidence((n, n), float(n), 0.5, 4, 0.3) for n in (3, 9)]
    told = Truth(world.truth())
    assert told.moments(question.text) == tuple(float(n) for n in question.frames)
    asked = question.text.capitalize().replace(" ?", "?").replace(" ,", ",")
    assert asked != question.text and told.moments("what else ?") == ()
    drawn = retrieved([(asked, "star", evidence), ("what else ?", "no", evidence)], 60.0, told)
    assert [len(axes.lines) for axes in drawn.axes] == [2, 0]
    assert [len(axes.collections[0].get_segments()) for axes in drawn.axes] == [2, 2]
