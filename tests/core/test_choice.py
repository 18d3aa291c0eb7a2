"""Dense or sparse, told from sizes and measured costs before anything is planned."""

from dataclasses import replace

import pytest
import torch

from mmaccel.backends import reference, select
from mmaccel.backends.measure import Costs, LinearCost
from mmaccel.backends.ops.dense_attend import dense_attend
from mmaccel.core.layout import TokenLayout
from mmaccel.core.memory.kv import KVView
from mmaccel.core.prefill.attention import AttentionConfig, ForwardPass
from mmaccel.core.recipe import Recipe
from mmaccel.core.report import Meter
from tests.spies import broken

RECIPE = Recipe.load(sparse={"name": "a_shape", "sink": 128, "window": 1024}, dense_tail=0)


@pytest.mark.parametrize("why", ["measured: blocks by reference", "asked for by name"])
@pytest.mark.parametrize("rounds", [0, 3])
def test_a_draft_that_failed_is_told_once_whatever_the_choice(why: str, rounds: int) -> None:
    meter = Meter()
    for _ in range(rounds):
        meter.count_round(4, 2)
    meter.record_draft_failure("out of cheese")
    told = str(meter.report({}, "reference", {}, torch.device("cpu"), why))
    assert told.count("out of cheese") == 1 and ("draft: nothing" in told) == (rounds == 0)


@pytest.mark.parametrize(
    ("rounds", "tokens", "line"),
    [
        ([], 1, "draft: tree was asked for and did nothing: the first token needs no draft"),
        ([0, 0], 3, "draft: tree was asked for and did nothing: it proposed nothing in 2 target steps"),
        (
            [0, 4],
            3,
            "draft: 2 of 4 accepted in 1 round, 2.00 a round; the answer waited 0.500 s for it to read the",
        ),
    ],
)
def test_an_idle_draft_is_told_and_its_reading_is_not_decoding(monkeypatch, rounds, tokens, line) -> None:
    clock = iter([0.0, 1.0, 2.0, 3.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    (one := (whole := Meter()).new_sequence()).count_tokens(1)
    for proposed in rounds:
        one.count_round(proposed, proposed // 2)
    for _ in range(tokens - 1):
        one.count_tokens(1)
    one.record_draft_end({"draft_wait_seconds": 0.5 * bool(any(rounds))}, [])
    report = whole.report({"draft": {"name": "tree"}}, "reference", {}, torch.device("cpu"))
    assert line in str(report) and "\ndraft: nothing" not in str(report)
    assert report.tokens_per_s == (None if tokens == 1 else 2 / 1.5 if any(rounds) else 1.0)


def test_a_question_that_stays_dense_says_why_beside_the_note_of_live_frames() -> None:
    meter, recipe = Meter(), {"sparse": {"name": "grid"}}
    meter.add_note("sparse: frames given to watch see all")
    assert len(meter.report(recipe, "reference", {}, torch.device("cpu")).notes) == 1
    meter.idle["it saves nothing"] = None
    assert meter.report(recipe, "reference", {}, torch.device("cpu")).notes[1].endswith(": it saves nothing")


def priced(each: float, fixed: float = 0.0, **more: LinearCost) -> Costs:
    """A pair of dense attention costs 1, one of listed blocks `each`, and `fixed` once."""
    return Costs(LinearCost(0.0, 1.0), {"reference": LinearCost(fixed, each)}, **more)


def road(costs: Costs | None, recipe: Recipe = RECIPE) -> AttentionConfig:
    return AttentionConfig(
        recipe, "reference", reference.op, choice=select.BackendChoice("reference", "told", costs)
    )


def going(costs: Costs | None, recipe: Recipe = RECIPE) -> ForwardPass:
    return ForwardPass(road(costs, recipe))


def query(rows: int, batch: int = 1) -> torch.Tensor:
    return torch.empty(batch, 4, rows, 16, device="meta")


@pytest.mark.parametrize("batch", [1, 3])
def test_the_bound_is_what_sparse_may_cost(batch: int) -> None:
    """Blocks three times as dear as dense: a window of 1024 and its sinks win once the prompt is long enough for that; late
    rows of a long prompt pay sooner."""
    costs = priced(3.0)
    for n in (1 << 10, 1 << 11, 1 << 12, 1 << 13, 1 << 14, 1 << 16):
        listed = RECIPE.sparse.max_blocks_total(n, n) * 64**2
        assert going(costs).beats_dense(0, query(n, batch), n) == (3 * listed < n * (n + 1) / 2)
    for rows, keys, pays in ((1 << 16, 1 << 16, True), (1 << 10, 1 << 10, False), (2048, 2048, False)):
        assert going(costs).beats_dense(0, query(rows), keys) == pays
    assert going(costs).beats_dense(0, query(2048), 1 << 16)


def test_dense_attention_within_a_window_is_cheaper() -> None:
    """A row of dense attention sees the sinks and the window, or what there is; the pattern must beat that."""
    nothing = torch.empty(0)
    cases = (300, 300, 4, 100), (200, 300, 30, 120), (50, 300, 0, 100), (64, 300, 9, 400)
    for rows, keys, sinks, window in cases:
        seen = sum(min(column + 1, sinks + window) for column in range(keys - rows, keys))
        view = KVView(nothing, nothing, None, sinks, window)
        for price, pays in ((seen - 1, True), (seen + 1, False)):
            assert going(priced(0.0, price * 4.0)).beats_dense(0, query(rows), keys, view) == pays


def test_planning_is_part_of_the_price_and_of_a_short_prompt_nothing_is_looked_at(monkeypatch) -> None:
    """Where making a plan costs more than dense attention, the pattern is not asked what it would list."""
    dear = priced(1.0, planning=LinearCost(1e12, 0.0))
    assert not going(dear).beats_dense(0, query(1 << 16), 1 << 16)
    broken(monkeypatch, type(RECIPE.sparse), "max_blocks_total", AssertionError("a bound was asked for"))
    costs = priced(1.0, planning=LinearCost(4 * 2000**2 / 2, 0.0))
    run = ForwardPass(road(costs), layout=TokenLayout.text(1, 1900))
    assert not run.beats_dense(0, query(1900), 1900)
    with pytest.raises(AssertionError, match="asked for"):
        run.beats_dense(0, query(2100), 2100)


def test_a_loose_bound_counts_no_more_than_causality_admits() -> None:
    """1024 diagonals may touch every block of 8192 keys: then the pattern costs what dense costs, not twice that."""
    recipe = Recipe.load(sparse={"name": "vertical_slash"})
    n = 8192
    assert recipe.sparse.max_blocks_total(n, n) * 64**2 > 1.5 * n * (n + 1) / 2
    assert going(priced(0.9), recipe).beats_dense(0, query(n), n)


@pytest.mark.parametrize(("each", "name"), [(1e-9, "a_shape"), (1e9, "dense")])
def test_a_layer_runs_what_pays(each: float, name: str) -> None:
    way = road(priced(each))
    q, k = torch.randn(1, 4, 100, 16), torch.randn(1, 2, 100, 16)
    out = ForwardPass(way, layout=TokenLayout.text(1, 100)).attend(0, q, k, k, 0.25)
    assert way.meter.names[0] == (name,) * 4
    torch.testing.assert_close(out, dense_attend(q, k, k, 0.25))


def test_without_costs_a_pattern_runs() -> None:
    assert going(None).beats_dense(0, query(64), 64)
    assert ForwardPass(AttentionConfig(RECIPE, "reference", reference.op)).beats_dense(0, query(64), 64)


SAVING = [("a_shape", 140, 1024, "dense"), ("a_shape", 140, 32, "a_shape"), ("a_shape", 66, 32, "dense")]


@pytest.mark.parametrize(("name", "rows", "window", "ran"), [*SAVING, ("block_topk", 140, 0, "dense")])
def test_without_costs_a_later_turn_that_saves_nothing_is_dense(name, rows, window, ran) -> None:
    """A pattern by content lists what it lists at its first layer, and the next ones go by that."""
    sizes = {"sink": 64, "window": window} if window else {"budget": 1.0}
    recipe, keys = Recipe.load(sparse={"name": name, "block": 16, **sizes}), 400
    way, q, k = road(None, recipe), torch.randn(1, 4, rows, 16), torch.randn(1, 2, keys, 16)
    turn = ForwardPass(way, layout=TokenLayout.text(1, keys), start=keys - rows, later=True)
    for layer in (0, 1):
        turn.attend(layer, q, k, k, 0.25)
    assert way.meter.names[1] == (ran,) * 4
    assert (ran == "dense") == any(one.startswith(("the pattern is", "fewer")) for one in way.meter.idle)
    replace(turn, later=False, config=(first := road(None, recipe))).attend(0, q, k, k, 0.25)
    assert first.meter.names[0] == (name,) * 4
