"""How scripts of bench/ take times, write rows and judge them: draws of verdicts, ratios, failures of stock tests."""

import json
import math
import statistics
import sys
from pathlib import Path
from random import Random
from typing import Any

import drawing
import pair
import pytest
import replayed
import stock
import test_ratios as bench
import timing
import torch

import mmaccel
from tests.models.tiny_random import BUILD

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "tests" / "stock"))

import stock_plugin  # noqa: E402


def test_the_median_of_runs_after_a_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that says how long each call took: the slow first ones do not count, and an outlier moves nothing."""
    clock = [0.0]
    lengths = iter([50.0, 40.0, 1.0, 2.0, 3.0, 4.0, 99.0])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])

    def run() -> None:
        clock[0] += next(lengths)

    times = timing.measure(run, warmup=2, repeats=5)
    assert times.seconds == (1.0, 2.0, 3.0, 4.0, 99.0) and times.median == 3.0
    assert times.row() == {"median_s": 3.0, "low_s": 2.0, "high_s": 4.0, "repeats": 5}


def test_what_is_compared_takes_turns() -> None:
    order: list[str] = []
    runs = {name: (lambda name=name: order.append(name)) for name in "ab"}
    times = timing.compare(runs, warmup=1, repeats=3)
    assert order == ["a", "b"] * 4 and {len(one.seconds) for one in times.values()} == {3}
    with pytest.raises(ValueError, match="repeats: 1"):
        timing.measure(lambda: None, repeats=1)


def test_a_log_begins_with_its_conditions(tmp_path: Path) -> None:
    path = tmp_path / "results" / "toy_cpu_202601.jsonl"
    log = timing.Log(path)
    log.row(case="toy", median_s=0.5)
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    assert {"torch", "transformers", "python", "device", "threads", "command", "commit"} <= set(
        first["environment"]
    )
    assert second == {"case": "toy", "median_s": 0.5}


def draw(pace: float, kept: float = 0.8, failed: str | None = None, **counters: float) -> dict[str, Any]:
    """A generation of 101 tokens, 50 steps and that many tokens a second."""
    counters = {"keep_rate": kept, "window": 4.0, "draft_step_s": 0.002, **counters}
    told = {"tokens": 101, "steps": 50, "seconds": 100 / pace, "tokens_per_s": pace, "a_step": 2.0}
    return {**told, "failed": [failed] if failed else [], "counters": counters}


def test_a_slow_draw_counts_by_the_time_it_takes() -> None:
    told = pair.pooled([draw(50.0), draw(100.0), draw(100.0)], 40.0)
    assert told["seconds"] == 4.0 and told["tokens_per_s"] == pytest.approx(300 / 4)
    assert (told["draws"], told["tokens"], told["steps"], told["a_step"]) == (3, 303, 150, 2.0)
    # Seconds a token 0.02, 0.01, 0.01: their mean has the standard error 1 / 300, a quarter of it.
    assert told["error_per_s"] == pytest.approx(75 / 4)
    assert told["speedup"] == pytest.approx(75 / 40)
    assert told["speedup_error"] == pytest.approx(75 / 160)


def test_one_draw_has_no_error() -> None:
    told = pair.pooled([draw(50.0)], 40.0)
    assert told["tokens_per_s"] == 50.0 and told["error_per_s"] is told["speedup_error"] is None


def test_the_error_is_how_means_of_draws_lie() -> None:
    dice = torch.Generator().manual_seed(0)
    seconds = 1 + 0.05 * torch.randn(400, 9, generator=dice)
    means, errors = zip(*(pair.spread((1 / each).tolist()) for each in seconds), strict=True)
    assert torch.tensor(means).std() == pytest.approx(sum(errors) / len(errors), rel=0.1)


def test_what_failed_in_any_draw_is_told_and_counters_are_means() -> None:
    rows = [draw(50.0, 0.7, "it died"), draw(60.0, 0.9, expected_gain=2.0)]
    told = pair.against(rows, 40.0, 0.81)
    assert told["failed"] == ["it died"]
    assert told["kept_share"] == told["counters"]["keep_rate"] == pytest.approx(0.8)
    assert told["counters"]["expected_gain"] == 2.0
    assert told["of_simulated"] == pytest.approx(told["speedup"] / told["simulated"])


DRAWN = drawing.rows("pipeline_h200x2_202611")
FIRST, SECOND, THIRD = "e779742", "b315a86", "17096be"


def row(tree: str, case: str, **wanted: Any) -> dict[str, Any]:
    """The one row of a tree that is so."""
    here = [one for one in DRAWN if (one["tree"], one.get("case")) == (tree, case)]
    (found,) = (one for one in here if wanted.items() <= one.items())
    return found


def rounds(seed: int, window: int, keep: float, tokens: int) -> tuple[int, int, int, int]:
    """Algorithm 1 over the verdicts of a seed: rounds, those of each mode that are followed by another, tokens kept."""
    dice = torch.Generator().manual_seed(seed)
    said, ahead, count, modes, kept = 1, window - 1, 0, [0, 0], 0
    while True:
        judged = max(min(ahead, tokens - said - 1), 0) + 1
        ranks = replayed.verdicts(judged, keep, dice).tolist()
        good = next((place for place, rank in enumerate(ranks) if rank), judged)
        said, kept, count = said + min(good + 1, judged), kept + good, count + 1
        if said >= tokens:
            return count, modes[0], modes[1], kept
        modes[judged > 1] += 1
        ahead = window - 1 if good == judged else 0


@pytest.mark.parametrize(
    ("tree", "case", "window", "seed"),
    [(FIRST, "parallel", 4, 3), (FIRST, "parallel", 5, 3), (FIRST, "self", 2, 3), (SECOND, "parallel", 4, 9)],
)
def test_rounds_on_two_devices_are_those_of_the_seed_s_verdicts(
    tree: str, case: str, window: int, seed: int
) -> None:
    """Each row's steps and counters are those of its last draw, whose window was not changed on the way."""
    told = row(tree, case, asked=window)
    counters = told["counters"]
    count, before, behind, _ = rounds(seed, window, told["keep"], told["tokens"])
    assert len(told["each_per_s"]) == seed
    assert (told["steps"], counters["pre_verify"], counters["post_verify"]) == (count, before, behind)


@pytest.mark.parametrize(("case", "window"), [("parallel", 4), ("self", 2)])
def test_rounds_of_all_draws_are_those_of_their_seeds(case: str, window: int) -> None:
    """Rows of today have the steps of all draws, and the mean of their counters."""
    told = row(THIRD, case, asked=window)
    draws = told["draws"]
    each = [rounds(seed, window, told["keep"], told["tokens"] // draws) for seed in range(1, draws + 1)]
    count, before, behind, _ = (sum(column) for column in zip(*each, strict=True))
    assert told["steps"] == count and len(told["each_per_s"]) == draws
    means = told["counters"]["pre_verify"], told["counters"]["post_verify"]
    assert means == pytest.approx((before / draws, behind / draws))


def test_a_draw_keeps_the_chance_that_is_stated() -> None:
    """Of each committed token but the first it is known whether it was kept."""
    shares = torch.tensor([rounds(seed, 4, 0.81, 512)[3] / 511 for seed in range(1, 301)])
    assert shares.mean() == pytest.approx(0.81, abs=0.003)
    assert shares.std() == pytest.approx(math.sqrt(0.81 * 0.19 / 511), rel=0.12)


FAILED = stock.read(ROOT / "bench" / "results" / "stock_cpu_202611.jsonl")


def test_the_page_has_the_table_of_its_rows() -> None:
    page = (ROOT / "docs" / "stock.md").read_text(encoding="utf-8")
    assert stock.BEGIN + stock.table(FAILED) + "\n" + stock.END in page


def test_every_failure_has_a_reason() -> None:
    assert {row["recipe"] for row in FAILED} == set(stock.RECIPES) == set(stock_plugin.RECIPES)
    assert set(stock.REASONS) == set(stock_plugin.REASONS)
    for row in FAILED:
        refused = {name.removeprefix("refused: ") for name in row["failed"]} - set(stock.REASONS)
        assert refused <= stock_plugin.IMPOSSIBLE[row["recipe"]]
        assert row["other"] == [] and sum(row["failed"].values()) == row["tests"] - row["passed"]
    dense = next(row for row in FAILED if row["recipe"] == "dense")
    assert dense["tests"] - dense["passed"] <= stock.MOST and set(dense["failed"]) <= set(stock.REASONS)


ERRORS = "mmaccel.core.errors."
UNTRUE = "AssertionError: False is not true"
NO_GRADIENT = f"{ERRORS}ModelError: backward: it has no gradient; detach the recipe to train."


@pytest.mark.parametrize(
    ("recipe", "test", "error", "why"),
    [
        ("dense", "a", NO_GRADIENT, "no gradient"),
        ("dense", "a", f"{UNTRUE}; {stock_plugin.OWN_CONFIG}", "private config copy"),
        ("dense", "test_can_set_attention_dynamically", UNTRUE, "other"),
        ("sequential", "a", f"{ERRORS}DraftError: num_beams: one; set it.", "refused: num_beams"),
        ("dense", "a", f"{ERRORS}ModelError: num_beams: one; set it.", "other"),
        ("window", "a", f"{ERRORS}ModelError: use_cache: leave it out.", "other"),
        ("dense", "test_mismatching_tokens", "AssertionError: none raised", "class of the exception"),
        ("dense", "a", "RuntimeError: mismatching shapes", "other"),
        ("dense", "a", f"{ERRORS}ModelError: something is wrong.", "other"),
        ("dense", "a", "AssertionError: 0 != 2", "other"),
    ],
)
def test_a_failure_is_sorted(recipe: str, test: str, error: str, why: str) -> None:
    assert stock_plugin.reason(recipe, test, error) == why


def test_a_test_that_is_lost_is_a_failure_without_a_reason() -> None:
    row = stock.row("dense", "a", {"one": ("passed", ""), "two": ("passed", "")}, {"one": ("passed", "")})
    assert row["other"] == ["two"] and row["passed"] == 1


@pytest.mark.parametrize("kind", ["qwen", "llava"])
def test_a_failure_beside_a_config_of_ours_is_known_by_it(kind: str) -> None:
    model = BUILD[kind]()
    with mmaccel.accelerate(model):
        ours, theirs = model.model.language_model, model.config
        for value, seen in ((ours, True), (ours.config, True), (theirs, False), (model, False), (5, False)):
            with pytest.raises(AssertionError) as caught:
                _fail_beside(value)
            assert stock_plugin._looks_at_own_config(caught.traceback, ROOT) is seen
            assert not stock_plugin._looks_at_own_config(caught.traceback, ROOT / "bench")


def _fail_beside(value: object) -> None:
    raise AssertionError("False is not true")


BENCH = Path(__file__).parent.parent / "bench"


class Noisy:
    """Turns of a case on a busy machine: times of work and twin jitter, have a heavy tail, and come in bursts of other work.

    A burst is a few tenths of a second in which the work, its twin, or both take up to 1.8 of their time.
    """

    def __init__(self, seed: int, ratio: float, each: float) -> None:
        self.random, self.ratio, self.each = Random(seed), ratio, each
        self.now, self.until, self.slow = 0.0, 0.0, (1.0, 1.0)

    def clock(self) -> float:
        return self.now

    def time(self, side: int) -> float:
        """Takes the time of the work (side 0) or of its twin (1)."""
        draw = self.random
        if self.now >= self.until:
            calm = self.slow == (1.0, 1.0)
            one, both, which = 1 + 0.8 * draw.random(), 1 + 0.8 * draw.random(), draw.randrange(3)
            self.slow = ((one, 1.0), (1.0, one), (both, one))[which] if calm else (1.0, 1.0)
            self.until = self.now + draw.expovariate(1 / 0.2 if calm else 1 / 1.0)
        taken = self.each * draw.lognormvariate(0, 0.06) * self.slow[side]
        if draw.random() < 0.05:
            taken *= 1 + 0.2 * draw.paretovariate(2)
        self.now += taken
        return taken

    def turn(self) -> float:
        twin = self.time(1)
        return self.ratio * self.time(0) / twin


def test_every_case_has_a_committed_ratio_and_a_reason():
    committed = json.loads((BENCH / "ratios.json").read_text())
    assert set(committed) == set(bench.CASES)
    for case in committed.values():
        assert len(case["why"].split()) > 2
        assert case["ratios"] and all(ratio > 0 for ratio in case["ratios"].values())


def test_a_processor_has_its_own_ratio_or_the_largest_of_the_others(monkeypatch, tmp_path):
    path, here = tmp_path / "ratios.json", ["one"]
    monkeypatch.setattr("committed.processor", lambda: here[0])

    def seen() -> list[float]:
        found = []
        for here[0] in ("one", "two", "three"):
            found.append(bench.ratio_of(json.loads(path.read_text())["case"]))
        return found

    bench.commit(path, "case", 1.0, "for a reason")
    here[0] = "two"
    bench.commit(path, "case", 4.0, "for a reason")
    assert seen() == pytest.approx([1.0, 4.0, 4.0])
    here[0] = "two"
    bench.commit(path, "case", 3.0, "for another reason")
    assert seen() == pytest.approx([3.0, 3.0, 3.0])


@pytest.mark.parametrize("each", [0.01, 0.1])
def test_noise_changes_no_verdict_and_moves_no_median(each):
    """1.1 and 1.4 are the same and the slow code on a processor of another kind."""
    for ratio in (1.0, 1.1, 1.4, 1.5):
        found = []
        for seed in range(1000):
            noisy = Noisy(seed, ratio, each)
            found.append(bench.median_ratio(noisy.turn, bench.LIMIT, noisy.clock))
        assert sum((one > bench.LIMIT) != (ratio > bench.LIMIT) for one in found) <= 1, ratio
        assert statistics.median(found) == pytest.approx(ratio, rel=0.01)


def test_turns_end_early_only_below_the_limit():
    for ratio, limit, seconds in ((1.0, 1.25, bench.LEAST), (1.5, 1.25, bench.MOST), (1.0, 0.0, bench.MOST)):
        noisy = Noisy(0, ratio, 0.01)
        bench.median_ratio(noisy.turn, limit, noisy.clock)
        assert seconds <= noisy.now < seconds + 0.5
