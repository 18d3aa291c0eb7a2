"""Table 3 row by row, its scaling, and the levelling of costs."""

from collections.abc import Mapping
from typing import Any

import pytest

from mmaccel.core.errors import RecipeError
from mmaccel.core.layout import IMAGE, MODALITIES, VIDEO
from mmaccel.search.measure import choose_head_pattern, choose_slot_patterns
from mmaccel.search.space import (
    KINDS,
    LONG,
    SHARES,
    BudgetScale,
    budget_rows,
    build_pattern,
    find_budget_step,
    find_candidates_at_target_cost,
    merge_equal_candidates,
    pattern_json_key,
    recipe_for_all_slots,
    recipe_for_slot,
    recipe_from_slots,
    slots_of_boundary_type,
)

FULL = BudgetScale(LONG, 196, 64)
VIDEO_AND_TEXT = (0, 2)
TWO = ("no_boundary", "q_boundary")


def told(pattern: Mapping[str, Any]) -> tuple[Any, ...]:
    """A row as Table 3 writes it."""
    if pattern["name"] == "grid":
        return (*(pattern[n] for n in ("stride", "horizontal", "vertical", "slash")), pattern.get("window"))
    if pattern["name"] == "a_shape":
        return pattern["sink"], pattern["window"]
    return pattern["vertical"], pattern["slash"]


def test_long_contexts_take_the_table_as_it_is() -> None:
    # Horizontal, vertical, slash.
    lines = [tuple(mark == "1" for mark in one) for one in ("100", "010", "001", "110", "011", "111")]
    # Each grid without its window, and with it.
    expected: list[tuple[Any, ...]] = [
        (stride, *on, window) for stride in ("frame", "free") for on in lines for window in (None, 1024)
    ]
    expected += [(128, 1024), (128, 2048), (128, 4096)]
    expected += [(1000, 1024), (1000, 2048), (2000, 2048), (1000, 3096), (2000, 3096)]
    expected += [(1000, 4096), (2000, 4096), (3500, 200), (1000, 2500)]
    for context in (LONG, 4 * LONG):
        found = [row.make(0) for row in budget_rows(BudgetScale(context, 196, 64))]
        assert [told(pattern) for pattern in found] == expected and len(found) == 24 + 12
    assert told(FULL.target_pattern()) == (1024, 4096)
    assert all(build_pattern(row.make(step)).block == 64 for row in budget_rows(FULL) for step in (-8, 0, 8))


def test_short_contexts_take_shares_and_whole_frames() -> None:
    scale = BudgetScale(8192, 15, 64)
    assert told(scale.target_pattern()) == (128, 510)
    found = {row.label: row.make(0) for row in budget_rows(scale)}
    assert told(found["a_shape (128, 1024)"]) == (16, 135)
    assert told(found["vertical_slash (1000, 4096)"]) == (125, 512)
    grid = found["grid (free, slash, 1024)"]
    assert (grid["window"], grid["sink"]) == (128, 16)
    assert told(BudgetScale(512, 0, 64).target_pattern()) == (8, 32)
    assert told(BudgetScale(256, 64, 64).target_pattern()) == (4, 64)  # never less than a frame


def test_rows_of_ours_are_there_where_that_is_wanted() -> None:
    found = budget_rows(BudgetScale(LONG, 196, 64, extended=True))
    theirs, ours = found[:36], found[36:]
    for row, plain in zip(theirs, budget_rows(FULL), strict=True):
        slash = plain.label.startswith("vertical_slash")
        assert row.make(3) == {**plain.make(3), **({"sink": 7} if slash else {})}
        assert row.label == (f"ours: {plain.label}, first 7" if slash else plain.label)
        assert row.aim == plain.aim == 1.0 and not plain.label.startswith("ours:")
    assert tuple(row.aim for row in ours) == SHARES
    assert all(row.label.startswith("ours: first block and slash") for row in ours)
    # Levelling changes its diagonals; the first tokens are one block at any length.
    assert [told(ours[0].make(step)) for step in (0, 16, -16)] == [(64, 4096), (64, 8192), (64, 2048)]
    assert told(budget_rows(BudgetScale(8192, 15, 64, extended=True))[-1].make(0)) == (64, 512)
    assert all(build_pattern(row.make(step)).sink == 64 for row in ours for step in (-8, 0, 8))  # type: ignore[attr-defined]


def test_our_row_is_brought_to_several_shares_of_the_target() -> None:
    ours = budget_rows(BudgetScale(LONG, 196, 64, extended=True))[36:]
    found = [find_budget_step(row, affine, 0.02)[1] for row in ours]
    assert [one.state for one in found] == ["level"] * len(SHARES)
    for one, share in zip(found, SHARES, strict=True):
        assert one.cost == pytest.approx(affine(one.pattern)) == pytest.approx(share, rel=0.02)


def test_a_head_that_costs_more_than_the_mean_takes_less_of_our_row() -> None:
    scale = BudgetScale(LONG, 196, 64, extended=True)
    space = find_candidates_at_target_cost(
        scale, ["no_boundary"], VIDEO_AND_TEXT, affine, 0.02, share=lambda p: 1.0
    )
    candidates = space["no_boundary"]
    mine = [n for n, one in enumerate(candidates) if one.rows[0].startswith("ours: first block")]
    scores = [0.5] * len(candidates)
    for n, error in zip(mine, (0.1, 0.11, 0.12, 0.2, 0.3), strict=True):
        scores[n] = error
    # This head lists an eighth more than the mean of heads.
    head = {
        "scores": {"no_boundary": {"all": scores}},
        "shares": {"no_boundary": {"all": [1.125] * len(scores)}},
    }
    pattern, cost = choose_slot_patterns("no_boundary", space, head, 64, 0.02)
    assert pattern == candidates[mine[2]].pattern and cost == pytest.approx(1.125 * 0.84, rel=0.02)


def affine(pattern: Mapping[str, Any]) -> float:
    """A cost with a part that does not scale, as launches have; the target's is 1."""
    if pattern["name"] == "grid":
        lines = {1: 0.4, 2: 0.7, 3: 1.3}[sum(pattern[n] for n in ("horizontal", "vertical", "slash"))]
        return lines + 0.7 * (pattern.get("window", 0) + pattern.get("sink", 0)) / 5120
    size = sum(pattern[n] for n in ("sink", "window", "vertical", "slash") if n in pattern)
    return 0.3 + 0.7 * size / 5120


def test_budgets_are_changed_until_costs_are_level() -> None:
    tried: list[str] = []

    def cost(pattern: Mapping[str, Any]) -> float:
        tried.append(pattern_json_key(pattern))
        return affine(pattern)

    candidates = [find_budget_step(row, cost, 0.05)[1] for row in budget_rows(FULL)]
    states = {c.rows[0]: c.state for c in candidates}
    # Three kinds of line cost more than the target without any window; fewer cost less, and a window brings them to it.
    for name, state in states.items():
        if "horizontal+vertical+slash" in name:
            assert state == "dear", name
        elif name.startswith("grid") and "1024" not in name:
            assert state == "under", name
        else:
            assert state == "level", name
    assert all(abs(c.cost - 1) <= 0.05 for c in candidates if states[c.rows[0]] == "level")
    # An A-shape keeps its window, a vertical-slash its ratio, and a grid its lines and its sink.
    found = {c.rows[0]: c.pattern for c in candidates}
    assert [found[f"a_shape (128, {w})"]["window"] for w in (1024, 2048, 4096)] == [1024, 2048, 4096]
    both = found["vertical_slash (3500, 200)"]
    assert both["vertical"] / both["slash"] == pytest.approx(17.5, rel=0.01)
    grids = [found[f"grid (free, {lines}, 1024)"] for lines in ("slash", "horizontal+vertical")]
    assert grids[0]["window"] > 2 * grids[1]["window"] > 1024 and grids[0]["sink"] == grids[1]["sink"] == 128
    assert len(tried) < 36 * 4


def test_costs_that_never_fall_low_enough_end_as_dear() -> None:
    flat = [find_budget_step(row, lambda p: 1.5, 0.05)[1] for row in budget_rows(FULL)]
    assert {c.state for c in flat} == {"dear"}
    cheap = [find_budget_step(row, lambda p: 0.5, 0.05)[1] for row in budget_rows(FULL)]
    assert {c.state for c in cheap} == {"under"}


def test_rows_that_come_to_one_pattern_are_one_candidate() -> None:
    steps = [find_budget_step(row, affine, 0.001)[1] for row in budget_rows(FULL)]
    candidates = merge_equal_candidates(steps)
    names = [row for c in candidates for row in c.rows]
    assert sorted(names) == sorted(row.label for row in budget_rows(FULL))
    assert len({pattern_json_key(c.pattern) for c in candidates}) == len(candidates) < 36


def test_a_type_that_is_always_dearer_is_left_out() -> None:
    def cost(pattern: Mapping[str, Any]) -> float:
        return 3.0 if pattern["name"] == "boundary_2d" else 1.0

    space = find_candidates_at_target_cost(FULL, KINDS, VIDEO_AND_TEXT, cost, 0.05)
    assert list(space) == ["no_boundary", "k_boundary", "q_boundary"]
    nothing = find_candidates_at_target_cost(FULL, KINDS, VIDEO_AND_TEXT, lambda p: 3.0, 0.05)
    assert [dict(c.pattern) for c in nothing["no_boundary"]] == [FULL.target_pattern()] and len(nothing) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_slots_make_the_pattern_of_their_type(kind: str) -> None:
    places = slots_of_boundary_type(kind, VIDEO_AND_TEXT)
    modality = {name: m for m, name in MODALITIES.items()}
    assert len(places) == {"no_boundary": 1, "boundary_2d": 4}.get(kind, 2)
    near = [dict(name="a_shape", sink=n, window=16, block=16) for n in range(len(places))]
    whole = build_pattern(recipe_from_slots(kind, {s.name: p for s, p in zip(places, near, strict=True)}, 16))
    for slot, inner in zip(places, near, strict=True):
        lone = build_pattern(recipe_for_slot(kind, slot, inner, 16))
        if kind == "no_boundary":
            assert lone == whole == build_pattern(inner)
        elif kind == "boundary_2d":
            q, k = (modality[name] for name in slot.name.split(">"))
            assert whole.modality_groups[q][k] == lone.modality_groups[q][k] == build_pattern(inner)
            assert lone.modality_groups[IMAGE][IMAGE] is None
            assert whole.modality_groups[IMAGE][IMAGE] == whole.modality_groups[VIDEO][VIDEO]
        else:
            assert getattr(whole, slot.name) == getattr(lone, slot.name) == build_pattern(inner)
            assert lone.image is None and whole.image == whole.video
    assert recipe_for_all_slots(kind, near[0], VIDEO_AND_TEXT, 16)["block"] == 16


def head_of(scores: Mapping[str, Any], shares: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    return {"scores": scores, "shares": shares, "kept": {"no_boundary": 0.2, "q_boundary": 0.3}, **more}


def test_the_nearest_output_wins_and_the_simplest_of_equals() -> None:
    space = find_candidates_at_target_cost(FULL, TWO, VIDEO_AND_TEXT, lambda p: 1.0, 0.05)
    count = len(space["no_boundary"])
    scores = [0.5] * count
    one, half = [1.0] * count, [0.5] * count
    head = head_of(
        {
            "no_boundary": {"all": [*scores[:-1], 0.1]},
            "q_boundary": {"text": [None, 0.0, *scores[2:]], "video": scores},
        },
        {"no_boundary": {"all": one}, "q_boundary": {"text": half, "video": half}},
        errors={"no_boundary": 0.1, "q_boundary": 0.1},
    )
    made = choose_head_pattern(space, head, 64, 0.05)
    assert made["kind"] == "no_boundary" and made["score"] == 0.1 and made["share"] == 0.2
    assert made["pattern"] == space["no_boundary"][-1].pattern and made["cost"] == 1.0
    head["errors"]["q_boundary"] = 0.09
    made = choose_head_pattern(space, head, 64, 0.05)
    assert made["kind"] == "q_boundary" and made["cost"] == 1.0
    assert made["pattern"]["text"] == space["q_boundary"][1].pattern
    assert made["pattern"]["video"] == space["q_boundary"][0].pattern


def test_slots_give_way_where_a_head_would_cost_too_much() -> None:
    """Candidates that are level in all slots together are not when each slot takes the one that is dear there."""
    space = find_candidates_at_target_cost(FULL, TWO, VIDEO_AND_TEXT, lambda p: 1.0, 0.05)
    count = len(space["q_boundary"])
    scores = {"text": [0.1, 0.2, *[0.9] * (count - 2)], "video": [0.4, 0.3, 0.31, *[0.9] * (count - 3)]}
    # The first lists most for texts, the second for videos, the third less there than the second.
    shares = {"text": [0.7, 0.3, *[0.5] * (count - 2)], "video": [0.3, 0.7, 0.34, *[0.5] * (count - 3)]}
    whole = {"all": [0.5] * count}
    head = head_of({"no_boundary": whole, "q_boundary": scores}, {"no_boundary": whole, "q_boundary": shares})
    pattern, cost = choose_slot_patterns("q_boundary", space, head, 64, 0.05)
    assert pattern["text"] == space["q_boundary"][0].pattern
    assert pattern["video"] == space["q_boundary"][2].pattern and cost == pytest.approx(1.04)
    # With room for both nothing gives way; with room for none the cheapest is left.
    pattern, cost = choose_slot_patterns("q_boundary", space, head, 64, 0.5)
    assert pattern["video"] == space["q_boundary"][1].pattern and cost == pytest.approx(1.4)
    dear = head_of(
        head["scores"], {**head["shares"], "q_boundary": {n: [3 * x for x in s] for n, s in shares.items()}}
    )
    pattern, cost = choose_slot_patterns("q_boundary", space, dear, 64, 0.05)
    assert cost == pytest.approx(3 * 0.6) and pattern["text"] == space["q_boundary"][1].pattern


def test_wrong_settings_are_told() -> None:
    from mmaccel.search import SearchSettings

    for fields, words in (
        (dict(boundaries=("q_bound",)), "did you mean 'q_boundary'"),
        (dict(boundaries=()), "none is named"),
        (dict(context=10), "at least 256"),
        (dict(tolerance=0.0), "between 0 and 1"),
        (dict(repeats=0), "at least 1"),
        (dict(cost="time"), "'seconds' or 'pairs'"),
    ):
        with pytest.raises(RecipeError, match=words):
            SearchSettings(**fields)  # type: ignore[arg-type]
