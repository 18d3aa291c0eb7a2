"""The comparison of memories: equal windows and budgets, the truth's frames, intervals, clusters, and a small run of it."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch

from mmaccel.core.attach import adapter_for
from mmaccel.core.errors import RecipeError, WorldError
from mmaccel.core.streams.session import VideoSession
from mmaccel_lab.eval.footage import Footage, Viewing
from mmaccel_lab.eval.haystack import Gap
from mmaccel_lab.eval.purity import adjusted_rand, clusterings, contingency, purity, shown
from mmaccel_lab.eval.stream import Shot, Watch, entries, shots, together, worlds_of
from mmaccel_lab.eval.stream_tables import paired, rows, watches, whole
from mmaccel_lab.world import World
from mmaccel_lab.world.records import Card, Segment
from tests.models.streams import pair
from tests.spies import heard


def shot(memory: str, right: bool, number: int = 0, **changes: object) -> Shot:
    fields: dict[str, object] = {
        "memory": memory, "budget": 8, "seed": 1, "frames": 64, "kind": "needle", "question": f"q{number}",
        "answer": "red", "said": "red" if right else "blue", "right": right, "recall": 0.5, "alone": 1.0, "seen": 8.0,
        "off": 0.9, "ttft_s": 0.1,
    }  # fmt: skip
    return Shot(**{**fields, **changes})  # type: ignore[arg-type]


def test_all_memories_get_the_same_windows_and_budgets() -> None:
    found = entries(["rekv", "recent", "no_cache", "window", "full", "mosaic"], [4, 16], window=8, tokens=10)
    assert [(one.name, one.budget) for one in found] == [
        ("rekv", 4), ("rekv", 16), ("recent", 4), ("recent", 16), ("no_cache", 4), ("no_cache", 16), ("window", 4),
        ("window", 16), ("full", None), ("mosaic", 4), ("mosaic", 16),
    ]  # fmt: skip
    kv = {(one.name, one.budget): one.kv for one in found}
    assert {kv[name, 4].window for name in ("rekv", "recent", "mosaic")} == {8}  # type: ignore[attr-defined]
    assert {kv[name, 16].frames for name in ("rekv", "no_cache", "mosaic")} == {16}  # type: ignore[attr-defined]
    assert [kv["recent", n].local for n in (4, 16)] == [4, 8]  # type: ignore[attr-defined]
    assert [kv["window", n].window for n in (4, 16)] == [40, 80]  # type: ignore[attr-defined]
    given = entries([{"name": "rekv", "frames": 3, "label": "few"}], [4], window=8, tokens=10)
    assert (given[0].name, given[0].kv.frames) == ("few", 3)  # type: ignore[attr-defined]
    with pytest.raises(RecipeError):
        entries([{"name": "rekv", "frame": 3}], [4], window=8, tokens=10)


def test_rows_weigh_kinds_alike_and_bound_what_they_say() -> None:
    found = [shot("a", n < 6, n) for n in range(8)] + [shot("a", n < 1, n, kind="order") for n in range(2)]
    told = {row["kind"]: row for row in rows(found)}
    assert told["needle"]["accuracy"] == 0.75 and told["order"]["accuracy"] == 0.5
    assert told["all"]["accuracy"] == 0.625 and told["all"]["questions"] == 10
    assert told["needle"]["seen"] == told["all"]["seen"] == 8.0
    assert told["needle"]["named"] is None and told["all"]["named"] is None, "it is not told"
    some = [shot("a", n < 3, n, named=n != 1) for n in range(4)] + [shot("a", True, 9, kind="order")]
    named = {row["kind"]: row["named"] for row in rows(some)}
    assert named["needle"] == pytest.approx(2 / 3) and named["order"] is None, "of right answers"
    assert named["all"] is None, "the mean lacks a kind"
    # Wilson's interval for 6 of 8, worked out by hand.
    assert told["needle"]["low"] == pytest.approx(0.4093, abs=1e-3)
    assert told["needle"]["high"] == pytest.approx(0.9285, abs=1e-3)
    assert rows([]) == []


def test_the_mean_of_kinds_is_as_sure_as_its_kinds() -> None:
    """Kinds that are all wrong or all right have a width too: of one kind the mean has that kind's interval."""
    wrong, right = (
        [shot("a", False, n) for n in range(3)],
        [shot("a", True, n, kind="order") for n in range(5)],
    )
    for some in (wrong, right):
        one, mean = rows(some)
        assert (mean["low"], mean["high"]) == pytest.approx((one["low"], one["high"])), "of one kind"
    needle, order, mean = rows(wrong + right)
    assert mean["low"] == pytest.approx(0.5 - (1 - order["low"]) / 2)
    assert mean["high"] == pytest.approx(0.5 + needle["high"] / 2)
    for count in range(1, 60):
        *_, mean = rows(
            [shot("a", False, n, kind=kind) for n in range(count) for kind in ("needle", "order")]
        )
        assert mean["low"] == 0.0, "not below it by rounding"


def test_pairs_are_of_the_same_questions() -> None:
    mine = [shot("a", n != 3, n) for n in range(4)] + [shot("a", True, 9)]
    theirs = [shot("b", n == 0, n) for n in range(4)]
    row, total = paired([*mine, *theirs], "a", "b")
    assert (row["questions"], row["gain"]) == (4, 0.5)
    gap = Gap.of([(True, True), (True, False), (True, False), (False, False)])
    assert (row["low"], row["high"]) == (gap.low, gap.high)
    assert (total["kind"], total["questions"], total["gain"]) == ("all", 4, 0.5)
    assert (total["low"], total["high"]) == pytest.approx((gap.low, gap.high)), "of one kind"
    every = [shot("b", True, n, budget=None) for n in range(4)]
    assert paired([*mine, *every], "a", "b")[0]["gain"] == -0.25
    few = [shot("a", n == 0, n, budget=4) for n in range(4)]
    told = [row for row in paired([*every, *mine, *few], "b", "a") if row["kind"] == "needle"]
    assert [(row["budget"], row["gain"]) for row in told] == [(8, 0.25), (4, 0.75)]
    assert paired(mine, "a", "b") == []


def test_kinds_weigh_the_same_in_what_is_gained() -> None:
    mine = [shot("a", True, n) for n in range(30)] + [
        shot("a", n < 5, 50 + n, kind="order") for n in range(10)
    ]
    theirs = [shot("b", n < 15, n) for n in range(30)] + [
        shot("b", n < 5, 50 + n, kind="order") for n in range(10)
    ]
    rows = {row["kind"]: row for row in paired(mine + theirs, "a", "b")}
    assert rows["needle"]["gain"] == 0.5 and rows["order"]["gain"] == 0.0 and rows["all"]["gain"] == 0.25
    halves = [(rows[kind]["high"] - rows[kind]["low"]) / 2 for kind in ("needle", "order", "all")]
    assert halves[2] == pytest.approx((halves[0] ** 2 + halves[1] ** 2) ** 0.5 / 2)
    assert rows["needle"]["low"] > 0 > rows["order"]["low"] and rows["all"]["questions"] == 40


def test_of_a_run_that_was_broken_off_whole_questions_count() -> None:
    found = [shot("a", True, n, budget=b) for n in range(3) for b in (4, 8)] + [
        shot("b", True, n, budget=b) for n, b in ((0, 4), (0, 8), (1, 4))
    ]
    assert {(one.memory, one.budget, one.question) for one in whole(found)} == {
        (memory, budget, "q0") for memory in "ab" for budget in (4, 8)
    }
    assert whole([]) == []


def test_one_watch_serves_what_matters_at_a_question_alone() -> None:
    others = [{"name": "mosaic", "reps": 0, "label": "no"}, {"name": "rekv", "local": 3, "label": "near"}]
    names = ["mosaic", "rekv", "recent", "no_cache", "livevlm", "full", *others]
    found = together(entries(names, [4, 16], window=8, tokens=10))
    assert [(group[0].name, [one.budget for one in group]) for group in found] == [
        ("mosaic", [4, 16]), ("rekv", [4, 16, 4, 16]), ("recent", [4, 16]), ("no_cache", [4, 16]), ("livevlm", [4]),
        ("livevlm", [16]), ("full", [None]), ("no", [4, 16]),
    ]  # fmt: skip


@pytest.mark.parametrize("name", [pytest.param("tiny-ov", marks=pytest.mark.slow), "random-qwen"])
def test_a_watch_for_all_budgets_answers_as_one_for_each(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, processor = pair(name)
    names = ["rekv", {"name": "mosaic", "index": {"name": "clusters", "init": 8}}, "recent", "no_cache"]
    memories = entries(names, [2, 8], window=6, tokens=16)
    world = World.generate(5, 27)

    def told(found: Iterable[Shot]) -> list[dict[str, object]]:
        return [{**one.to_dict(), "ttft_s": 0.0} for one in found]

    shared = told(shots(model, processor, memories, [world], most=1))
    monkeypatch.setattr("mmaccel_lab.eval.stream.together", lambda memories: [[one] for one in memories])
    alone = told(shots(model, processor, memories, [world], most=1))
    assert len(shared) >= 8 * 2 and len({one["seen"] for one in shared}) > 2

    def order(one: dict[str, object]) -> tuple[str, ...]:
        return tuple(str(one[name]) for name in ("memory", "budget", "question"))

    assert sorted(shared, key=order) == sorted(alone, key=order)


@pytest.mark.parametrize("name", ["tiny-ov", "random-qwen"])
def test_the_vision_tower_looks_at_a_world_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, processor = pair(name)
    stream_adapter = type(adapter_for(model).stream_adapter(model, processor))
    looked = heard(monkeypatch, stream_adapter, "features", lambda self, frames, size: len(frames))
    world, recipe = World.generate(5, 70), entries(["rekv"], [4], 6, 16)[0].recipe
    footage = Footage(model, processor, world, 0.3)
    assert looked == [64, 6] and len(footage.frames) == 70
    with Viewing(model, processor, recipe) as one, Viewing(model, processor, recipe) as other:
        one.show(footage, 1.0)
        assert looked == [64, 6] and one.frames == 70
        # Seen in other company the features are the same but for their last digits.
        for piece in footage.frames.clone().split(64):
            other.watch(piece, fps=1.0)
        assert sum(looked) > 140
        for mine, its in zip(states(one)._rings, states(other)._rings, strict=True):
            torch.testing.assert_close(mine.key, its.key, atol=1e-4, rtol=1e-4)


def states(session: Viewing) -> Any:
    assert session._live is not None
    return session._live.state


def test_a_small_run_finds_the_truth_where_everything_is_seen() -> None:
    model, processor = pair("tiny-ov")
    memories = entries(["full", "recent"], [2], window=6, tokens=16)
    told: list[int] = []
    world = World.generate(3, 30)
    seen: list[Watch] = []
    how: dict[str, Any] = {"kinds": ("needle", "scene"), "most": 2}
    found = list(shots(model, processor, memories, [world], **how, progress=told.append, watched=seen.append))
    assert [(one.memory, one.budget, one.clusters) for one in seen] == [("full", None, {}), ("recent", 2, {})]
    assert all(one.seconds > 0 and one.counters["units"] == 30 for one in seen)
    assert [row["streams"] for row in watches(seen)] == [1, 1]
    assert sum(told) == 2 * 30 + len(found)
    full = [one for one in found if one.memory == "full"]
    last = [one for one in found if one.memory == "recent"]
    assert len(full) == len(last) >= 3 and {one.question for one in full} == {one.question for one in last}
    assert all(one.recall == 1.0 and one.off == 0.0 for one in full)
    assert sum(one.right for one in full) >= len(full) - 1, "the model was trained for this"
    assert all(one.off == pytest.approx(1 - 6 / 30) for one in last)
    assert {one.seen for one in full} == {30.0} and {one.seen for one in last} == {2.0}
    truth = {question.text: question.frames for question in world.questions()}
    for one in last:
        seen = [frame >= 28 for frame in truth[one.question]]
        assert one.recall == pytest.approx(sum(seen) / len(seen))
    assert [one.seed for one in worlds_of(20, 3, 5)] == [5, 6, 7]


def test_a_film_is_ingested_under_a_recipe_as_a_session_does() -> None:
    model, processor = pair("tiny-ov")
    beside = {"sparse": "grid", "draft": {"name": "sequential"}}
    film: dict[str, Any] = {"name": "mosaic", "ingest": True}
    names = [{**film, "label": "three", "beside": beside}, {**film, "label": "alone"}, "mosaic"]
    memories = entries(names, [4], window=6, tokens=16)
    assert [len(group) for group in together(memories)] == [1, 1, 1]
    world, seen = World.generate(3, 30), list[Watch]()
    found = list(shots(model, processor, memories, [world], most=2, told=5, watched=seen.append))
    three, alone, watched = seen
    assert three.counters["ingested"] == alone.counters["ingested"] == 30
    assert "ingested" not in watched.counters
    assert three.kept is not None and alone.kept is None
    assert three.steps is not None and three.steps < 1 == alone.steps and len(alone.caption.split()) == 5
    footage = Footage(model, processor, world, 0.3)
    with VideoSession(model, processor, memories[0].recipe) as session:
        session.ingest(footage.frames, fps=1.0)
        said = [session.ask(one.question, 8).text for one in found if one.memory == "three"]
    assert said == [one.said for one in found if one.memory == "three"] and len(said) > 4


def test_more_questions_about_pairs_of_cards_where_more_are_asked_for() -> None:
    world = next(one for one in (World.generate(seed, 60) for seed in range(99)) if len(one.cards) == 8)
    assert [len(world.questions([kind], 28)) for kind in ("order", "combine")] == [28, 28]
    assert len(set(world.questions(["order"], 28))) == 28 and len(world.questions("order")) == 4


def test_unknown_kinds_are_told() -> None:
    model, processor = pair("tiny-ov")
    with pytest.raises(WorldError, match="count"):
        list(shots(model, processor, [], [World.generate(0, 8)], kinds=("count",)))


def world() -> World:
    segments = (Segment(0, 4, "beach"), Segment(4, 8, "city"), Segment(8, 12, "beach"))
    return World(7, 12, "needle", (Card(5, "red", "star"),), segments)


def test_a_unit_shows_its_scene_or_its_card() -> None:
    assert shown(world(), 1).tolist() == [0] * 4 + [1, 2, 1, 1] + [0] * 4
    assert shown(world(), 2).tolist() == [0, 0, 2, 1, 0, 0]
    assert shown(world(), 5).tolist() == [1, 2], "frames of a unit that is not complete are in no cluster"


def test_figures_by_hand() -> None:
    truth = torch.tensor([0, 0, 0, 1, 1, 2])
    counts = contingency(torch.tensor([9, 9, 4, 4, 4, 4]), truth)
    assert counts.tolist() == [[1, 2, 1], [2, 0, 0]]
    assert purity(counts) == pytest.approx(4 / 6)
    # Pairs together: 2 in both, 7 in clusters, 4 in things, of 15.
    assert adjusted_rand(counts) == pytest.approx((2 - 28 / 15) / (5.5 - 28 / 15))
    assert adjusted_rand(contingency(truth + 5, truth)) == 1.0


def test_levels_are_judged_by_layer() -> None:
    good = torch.tensor([0, 0, 0, 0, 1, 2, 1, 1, 3, 3, 3, 3])
    one = torch.zeros(12, dtype=torch.long)
    found = clusterings(world(), {"visual": good[None], "semantic": torch.stack([good, one])}, 1)
    assert (found["visual"].clusters, found["visual"].purity, found["visual"].cards) == (4, 1.0, 1.0)
    # Pairs together: 15 in both and in clusters, 31 in things, of 66.
    assert found["visual"].rand == pytest.approx((15 - 15 * 31 / 66) / (23 - 15 * 31 / 66))
    assert found["visual"].chance < 1
    both = found["semantic"]
    assert (both.clusters, both.purity, both.cards) == (2.5, pytest.approx((1 + 8 / 12) / 2), 0.5)
    tiles = clusterings(world(), {"semantic": good.repeat_interleave(3)[None]}, 1)["semantic"]
    assert tiles.purity == 1.0 and tiles.cards == 1.0
    assert clusterings(world(), {}, 1) == {}
