"""`mmaccel watch` of a file ingests it: frames see all before them, the pattern acts, questions and stops cut it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import mmaccel
from mmaccel_lab.world import World, write_mp4
from tests.cli.test_half_an_hour import FPS, SEED, all_questions

Call = Callable[..., tuple[int, str, str]]
NARROW = "kv: {name: rekv, frames: 4, window: 4, local: 2, encode_frames: 0}\n"
GRID = "sparse: {name: a_shape, sink: 16, window: 64, block: 16}\n"


@pytest.fixture
def told(call: Call, clip: str, ov: str, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """What `watch` of the clip says of itself, under a recipe in YAML."""
    path = tmp_path / "recipe.yaml"

    def run(recipe: str, *words: object) -> dict[str, Any]:
        path.write_text(recipe)
        base = ("watch", clip, "--model", ov, "--recipe", path, "--fps", 0.5, "--max-new-tokens", 4, "--json")
        status, out, err = call(*base, "--question", "how many ?", "--clip", 8, *words)
        assert (status, err) == (0, "")
        found: dict[str, Any] = json.loads(out)
        return found

    return run


def test_a_file_is_ingested_as_a_session_does(
    told: Callable[..., dict[str, Any]], clip: str, ov: str, tmp_path: Path
) -> None:
    stored, live = told(NARROW), told(NARROW, "--live")
    assert stored["frames"] == live["frames"] == 32
    assert stored["counters"]["ingested"] == 32 and stored["counters"]["ingest_seen"] == 1
    assert "ingested" not in live["counters"]
    model, processor = mmaccel.load_model(ov).float(), mmaccel.load_processor(ov)
    for found, how in ((stored, "ingest"), (live, "watch")):
        with mmaccel.VideoSession(model, processor, tmp_path / "recipe.yaml") as session:
            assert getattr(session, how)(clip, fps=0.5) == 32
            answer = session.ask("how many ?", 4)
        assert found["answers"][0]["answer"] == answer.text
        scores = [one["score"] for one in found["answers"][0]["evidence"]]
        assert scores == pytest.approx([one.score for one in answer.top(5)], abs=1e-4)
    scores = [[one["score"] for one in found["answers"][0]["evidence"]] for found in (stored, live)]
    assert scores[0] != pytest.approx(scores[1], abs=1e-4), "under the window alone it is another"


@pytest.mark.parametrize("cut", [("--question", "what was first ?@30"), ("--save-every", 1e-9)])
def test_a_question_s_time_and_a_save_end_an_ingestion(
    told: Callable[..., dict[str, Any]], tmp_path: Path, cut: tuple[object, ...]
) -> None:
    save = ("--save", tmp_path / "s")
    found = told(NARROW, *cut, *save)
    assert found["frames"] == found["counters"]["ingested"] == 32
    assert 0.1 < found["counters"]["ingest_seen"] < 1
    assert told(NARROW, "--save-every", 0, *save)["counters"]["ingest_seen"] == 1
    assert [one["frames"] for one in found["answers"]] == [*([16] if len(found["answers"]) > 1 else []), 32]


def test_the_pattern_acts_on_a_file_and_is_told_where_it_does_not(
    told: Callable[..., dict[str, Any]],
) -> None:
    stored, live = told(NARROW + GRID), told(NARROW + GRID, "--live")
    assert 0 < stored["kept"] < 1 and set(stored["heads"]) == {"a_shape"}
    assert stored["notes"] == []
    assert live["kept"] is None and "acts on those given to ingest" in live["notes"][0]


def test_a_memory_that_does_not_ingest_watches(
    told: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mmaccel.policies.kv.rekv.ReKV.ingests", False)
    found = told(NARROW)
    assert found["frames"] == 32 and "ingested" not in found["counters"]


SECONDS = [pytest.param(256, id="short"), pytest.param(1800, id="half an hour", marks=pytest.mark.slow)]


@pytest.mark.parametrize("seconds", SECONDS)
@pytest.mark.parametrize("model", ["tiny-ov", "tiny-qwen"])
def test_one_recipe_has_all_three_systems_at_work(
    model: str, seconds: int, call: Call, shipped: Callable[[str], str], tmp_path: Path
) -> None:
    """Through `watch` and through `generate`: right answers, and no part idle."""
    name, film = shipped(model), tmp_path / "film.mp4"
    world = replace(World.generate(SEED, int(seconds * FPS)), fps=FPS)
    write_mp4(world, film, 112, 112)
    questions = all_questions(world)
    needles = [one for one in questions if one.kind == "needle"][:2]
    asked = needles + [one for one in questions if one.kind == "order"][:4]
    base = ("--model", name, "--recipe", "everything", "--max-new-tokens", 8, "--device", "cpu", "--json")
    words = [part for one in asked for part in ("--question", one.text)]
    status, out, err = call("watch", film, *base, *words)
    assert status == 0, err
    found = json.loads(out)
    assert found["frames"] == world.frames and found["counters"]["ingest_seen"] == 1
    right = [
        one["answer"].strip(" .") == want.answer for one, want in zip(found["answers"], asked, strict=True)
    ]
    assert sum(right) >= len(asked) - 1, found["answers"]
    assert found["kept"] < 1 and any("grid" in head for head in found["heads"]) and found["notes"] == []
    assert all(one["counters"]["recalled"] > 0 and one["counters"]["drafted"] > 0 for one in found["answers"])
    # All of them, also where the model's processor takes fewer unless it is asked.
    status, out, err = call("ask", film, needles[0].text, *base, "--frames", world.frames)
    assert status == 0, err
    one = json.loads(out)
    assert one["frames"] == world.frames and one["answer"].strip(" .") == needles[0].answer
    assert one["kept"] < 1 and one["draft"]["rounds"] > 0 and one["draft"]["failed"] is None
