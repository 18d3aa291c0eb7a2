"""`mmaccel draw` of a saved session: its clusters in time, what questions retrieve, errors in a sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import mmaccel
from mmaccel_lab.world import World, render

pytest.importorskip("matplotlib")
Call = Callable[..., tuple[int, str, str]]


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
        status, _, err = call(*command, *wrong, "--out", out)
        assert status == 2 and match in err and err.count("\n") == 1
    status, _, err = call(*command, "--out", truth)
    assert status == 2 and "is a file" in err


def test_a_memory_without_clusters_wants_a_question(call: Call, ov: str, tmp_path: Path) -> None:
    session = saved(ov, tmp_path / "session", {"name": "rekv", "window": 8, "frames": 4})
    command = ("draw", session, "--model", ov, "--out", tmp_path / "pictures")
    status, _, err = call(*command)
    assert status == 2 and "give --question" in err
    status, told, _ = call(*command, "--question", "what colour was the star ?")
    assert status == 0 and "retrieved.png" in told and "timeline" not in told
