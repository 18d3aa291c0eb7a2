"""Questions about worlds, and worlds as files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mmaccel.eval.cases import Case, Film, cases, cut, tokens_per_frame
from mmaccel.eval.needle import Judged, Tally, judge
from mmaccel.models.loading import load_model, load_processor
from mmaccel.world import World


def test_as_many_questions_of_each_kind_as_asked() -> None:
    asked = list(cases(32, 6, 10, ("needle", "order", "count")))
    assert Counter(case.kind for case in asked) == {"needle": 6, "order": 6, "count": 6}
    seeds = [case.world.seed for case in asked if case.kind == "needle"]
    assert seeds == list(range(10, 16))
    for case in asked:
        truths = {(q.text, q.answer) for q in case.world.questions([case.kind])}
        assert (case.question, case.answer) in truths


def test_cases_are_the_same_every_time() -> None:
    assert list(cases(16, 3, 0, ("count",))) == list(cases(16, 3, 0, ("count",)))


def test_an_impossible_kind_ends() -> None:
    """One frame holds one card, so there is no order to ask about."""
    assert list(cases(1, 2, 0, ("order",))) == []


def test_one_world_alone() -> None:
    asked = list(cases(64, 1, 7, ("needle", "count"), worlds=1))
    assert [case.world.seed for case in asked] == [7, 7]


def test_a_document_keeps_its_order() -> None:
    case = next(cases(8, 1, 1, ("note",), documents=4, tokens_per_frame=15))
    video = Film().watch(case.world)
    content = case.content(video)
    assert [piece["type"] for piece in content[:-1]] == [piece[0] for piece in case.pieces]
    shown = torch.cat([piece["video"].frames for piece in content if piece["type"] == "video"])
    assert torch.equal(shown, video.frames)
    assert content[-1] == {"type": "text", "text": case.question}


def test_right_is_the_word_and_nothing_more() -> None:
    case = Case(World.generate(0, 4), "needle", (("video", 0, 4),), "what colour was the star ?", "red")
    assert case.right(" Red ") and case.right("red")
    assert not any(case.right(said) for said in ("", "redd", "red red", "blue", "the red one"))


def test_a_film_is_written_once_and_read_whole(tmp_path: Path) -> None:
    world = World.generate(2, 12)
    with Film(tmp_path) as film:
        first = film.watch(world)
        made = film.path(world).stat().st_mtime_ns
        assert film.watch(world) is first and len(first) == 12
    with Film(tmp_path) as film:
        assert torch.equal(film.watch(world).frames, first.frames)
        assert film.path(world).stat().st_mtime_ns == made


def test_a_temporary_film_leaves_nothing() -> None:
    with Film() as film:
        one, two = World.generate(0, 4), World.generate(1, 4)
        film.watch(one)
        film.watch(two)
        folder = film.folder
        assert [path.name for path in folder.iterdir()] == [film.path(two).name]
    assert not folder.exists()


def test_cut_keeps_times() -> None:
    video = Film().watch(World.generate(0, 6))
    piece = cut(video, 2, 5)
    assert len(piece) == 3 and torch.equal(piece.times, video.times[2:5]) and piece.fps == video.fps
    assert cut(video, 0, 6) is video


@pytest.mark.parametrize(("name", "tokens"), [("tiny-ov-draft", 16), ("tiny-qwen-draft", 15)])
def test_tokens_of_a_frame(name: str, tokens: int, random_folder: Callable[[str], Path]) -> None:
    assert tokens_per_frame(load_processor(random_folder(name))) == tokens


@pytest.mark.parametrize("name", ["tiny-ov-draft", "tiny-qwen-draft"])
def test_judging_counts_what_was_said(name: str, random_folder: Callable[[str], Path]) -> None:
    """A model that knows nothing is wrong, unless the truth is what it happens to say."""
    from mmaccel.core.recipe import Recipe

    folder = random_folder(name)
    model, processor = load_model(folder, dtype=torch.float32), load_processor(folder)
    recipes = {"dense": Recipe(), "near": Recipe.load("a_shape-short")}
    with Film() as film:
        seen = list(judge(model, processor, recipes, cases(8, 2, 0, ("needle", "count")), film))
    assert len(seen) == 4 and all(set(one.answers) == {"dense", "near"} for one in seen)
    tally = Tally("dense")
    for one in seen:
        tally.add(one)
    assert tally.share() == 0.0
    lucky = [Judged(_answered_by(one.case, one.answers["dense"].text), one.answers) for one in seen]
    tally = Tally("dense")
    for one in [*lucky, seen[0]]:
        tally.add(one)
    (row,) = tally.rows()
    said = [one for one in lucky if one.answers["dense"].text]
    assert row["right"] == len(said) and row["asked"] == 5 and row["accuracy"] == len(said) / 5
    assert row["frames"] == 8 and row["kept"] == 1.0 and row["kinds"]["needle"]["asked"] == 3


def _answered_by(case: Case, said: str) -> Case:
    return Case(case.world, case.kind, case.pieces, case.question, said.strip().lower() or "something else")


def test_a_tally_of_nothing() -> None:
    assert Tally("dense").rows() == [] and Tally("dense").share() is None
