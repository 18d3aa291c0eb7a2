"""The comparison of memories: equal windows and budgets, the truth's frames, intervals, and a small run of it."""

from __future__ import annotations

import pytest

from mmaccel.core.errors import RecipeError, WorldError
from mmaccel.eval.stream import Shot, entries, paired, rows, shots, worlds_of
from mmaccel.world import World
from tests.models.streams import pair


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
    # Wilson's interval for 6 of 8, worked out by hand.
    assert told["needle"]["low"] == pytest.approx(0.4093, abs=1e-3)
    assert told["needle"]["high"] == pytest.approx(0.9285, abs=1e-3)
    assert rows([]) == []


def test_pairs_are_of_the_same_questions() -> None:
    mine = [shot("a", n != 3, n) for n in range(4)] + [shot("a", True, 9)]
    theirs = [shot("b", n == 0, n) for n in range(4)]
    (row,) = paired([*mine, *theirs], "a", "b")
    assert (row["questions"], row["gain"]) == (4, 0.5)
    assert row["low"] == pytest.approx(0.5 - 1.96 * (1 / 3) ** 0.5 / 2, abs=1e-6)
    whole = [shot("b", True, n, budget=None) for n in range(4)]
    assert paired([*mine, *whole], "a", "b")[0]["gain"] == -0.25
    few = [shot("a", n == 0, n, budget=4) for n in range(4)]
    told = paired([*whole, *mine, *few], "b", "a")
    assert [(row["budget"], row["gain"]) for row in told] == [(8, 0.25), (4, 0.75)]
    assert paired(mine, "a", "b") == []


def test_a_small_run_finds_the_truth_where_everything_is_seen() -> None:
    model, processor = pair("tiny-ov")
    memories = entries(["full", "recent"], [2], window=6, tokens=16)
    told: list[int] = []
    world = World.generate(3, 30)
    found = list(
        shots(model, processor, memories, [world], kinds=("needle", "scene"), most=2, progress=told.append)
    )
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


def test_unknown_kinds_are_told() -> None:
    model, processor = pair("tiny-ov")
    with pytest.raises(WorldError, match="count"):
        list(shots(model, processor, [], [World.generate(0, 8)], kinds=("count",)))
