"""Every case of `make bench` has a committed ratio with its reason; what judges a case is tried on made-up times."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from random import Random

import pytest
import test_ratios as bench

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
