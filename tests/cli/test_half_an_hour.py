"""An mp4 of half an hour through the command and through Python: four kinds of question, evidence, counters, same words."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import pytest

import mmaccel
from mmaccel_lab.world import World, write_mp4
from mmaccel_lab.world.words import QUESTIONS

Call = Callable[..., tuple[int, str, str]]
FRAMES, FPS = 900, 0.5
SEED = 67
KV = "{name: mosaic, window: 32, frames: 64, local: 8, cache: 32}\n"


class Asked(NamedTuple):
    kind: str
    text: str
    answer: str
    frames: tuple[int, ...]


def all_questions(world: World) -> list[Asked]:
    """Of the four kinds about a world: every card, every two cards in an order of their own, and each scene's first time."""
    draw, found = random.Random(0), list[Asked]()
    for one in world.questions(["needle", "scene"]):
        found.append(Asked(one.kind, one.text, one.answer, one.frames))
    for first, second in combinations(world.cards, 2):
        one, other = draw.sample((first, second), 2)
        at = (first.frame, second.frame)
        names = (one.shape, other.shape)
        found.append(Asked("order", QUESTIONS["order"].format(*names), first.shape, at))
        colours = f"{one.colour} and {other.colour}"
        found.append(Asked("combine", QUESTIONS["combine"].format(*names), colours, at))
    return found


@pytest.fixture(scope="module")
def half_an_hour(tmp_path_factory: pytest.TempPathFactory) -> tuple[World, Path]:
    world = replace(World.generate(SEED, FRAMES), fps=FPS)
    path = tmp_path_factory.mktemp("film") / "film.mp4"
    write_mp4(world, path, 112, 112)
    assert world.frames / world.fps == 30 * 60
    return world, path


@pytest.mark.slow
@pytest.mark.parametrize("model", ["tiny-ov", "tiny-qwen"])
def test_half_an_hour(model: str, half_an_hour: tuple[World, Path], call: Call, tmp_path: Path) -> None:
    world, film = half_an_hour
    questions = all_questions(world)
    kinds = Counter(one.kind for one in questions)
    assert len(questions) >= 50 and set(kinds) == {"needle", "scene", "order", "combine"}
    (tmp_path / "recipe.yaml").write_text(f"kv: {KV}")
    asked = [part for one in questions for part in ("--question", one.text)]
    status, out, err = call(
        "watch", film, "--model", model, "--recipe", tmp_path / "recipe.yaml", "--json", "--max-new-tokens", 8, "--live",
        "--save", tmp_path / "saved", *asked, "--device", "cpu",
    )  # fmt: skip
    assert status == 0, err
    told = json.loads(out)
    assert told["frames"] == FRAMES and told["complete"] and told["seconds"] == (FRAMES - 1) / FPS
    answers = {one["question"]: one for one in told["answers"]}
    assert len(answers) == len(questions) == len(told["answers"])
    counters = told["counters"]
    assert 1 - counters["resident"] / counters["units"] >= 0.9
    named = (
        "recalled", "eager_splits", "deferred", "deferred_splits", "singletons", "host_bytes_in", "host_copies_in",
        "fetch_covered", "fetch_cached",
    )  # fmt: skip
    assert min(counters[one] for one in named) > 0, {one: counters[one] for one in named}
    assert 0 < counters["prefetch_coverage"] <= 1
    right = Counter(one.kind for one in questions if answers[one.text]["answer"].strip(" .") == one.answer)
    assert right.total() >= 0.5 * len(questions) and set(right) == set(kinds), f"{right} of {kinds}"
    assert all(one["evidence"] and one["ttft_s"] > 0 for one in answers.values())
    # The same from Python, from the start and from what the command saved.
    net, processor = mmaccel.load_model(model).float(), mmaccel.load_processor(model)
    with mmaccel.VideoSession(net, processor, tmp_path / "recipe.yaml") as session:
        assert session.watch(film) == FRAMES
        said = [session.ask(one.text, 8) for one in questions]
    assert [one.text for one in said] == [answers[one.text]["answer"] for one in questions]
    with mmaccel.VideoSession.resume(net, processor, tmp_path / "saved") as session:
        assert [session.ask(one.text, 8).text for one in questions[:12]] == [one.text for one in said[:12]]
