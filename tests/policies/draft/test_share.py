"""How much of the video a draft reads, chosen by what was measured: the whole first, and never a slower part for long."""

import copy
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import mmaccel
from mmaccel.core.decoding.draft import Prompt
from mmaccel.core.errors import RecipeError
from mmaccel.policies.draft import Parallel
from mmaccel.policies.draft._window_model import PAUSE, SETTLED, PipelineTimes, ReadingChoice
from mmaccel.policies.draft.parallel import ParallelDraftState
from mmaccel.policies.prune import UVPrune
from tests.models.tiny_random import BUILD, PROMPTS, prompt
from tests.spies import heard

UV = UVPrune(retention=0.1, layer=2)


def answer(
    shares: ReadingChoice, length: int = 3000, window: int | None = None, **figures: float
) -> tuple[str, str]:
    """One answer's way of reading, "whole" or "part", with its note; it ends with `figures` of that way."""
    reading = shares.reading(UV, length, window, 16, sampled=False)
    way = "whole" if reading.pruner is None else "part"
    keep, draft_s = figures[f"{way}_keep"], figures[f"{way}_s"]
    pace = PipelineTimes(step_s=10.0, draft_s=draft_s)
    pace.judged, pace.kept = pace.judged + 100, pace.kept + 100 * keep
    reading.way.add(pace)
    return way, reading.note


@pytest.mark.parametrize("window", [None, 5])
def test_the_faster_of_two_measured_ways_is_taken(window: int | None) -> None:
    """A part that is read no faster and kept less often is tried once; one that gains is kept."""
    worse = {"whole_keep": 0.85, "whole_s": 2.0, "part_keep": 0.6, "part_s": 1.9}
    shares = ReadingChoice()
    ways = [answer(shares, window=window, **worse) for _ in range(5)]
    assert [way for way, _ in ways] == ["whole", "part", "whole", "whole", "whole"]
    assert "measured first, before 0.1 of the video" in ways[0][1]
    assert "read 0.1 of the video: to measure it" in ways[1][1]
    assert "read the whole video: expected" in ways[2][1]
    better = {"whole_keep": 0.85, "whole_s": 9.0, "part_keep": 0.8, "part_s": 2.0}
    ways = [answer(shares, length=60_000, window=window, **better) for _ in range(4)]
    assert [way for way, _ in ways] == ["whole", "part", "part", "part"], "a longer prompt is another case"
    assert [answer(shares, window=window, **worse)[0]] == ["whole"]


def test_a_part_that_cannot_gain_is_not_tried() -> None:
    """A draft's steps take hardly less with nothing to read: not even one answer is slower than with the whole video."""
    figures = {"whole_keep": 0.85, "whole_s": 2.0, "part_keep": 0.85, "part_s": 1.0}
    shares = ReadingChoice(bare_s=1.95)
    ways = [answer(shares, **figures) for _ in range(4)]
    assert [way for way, _ in ways] == ["whole"] * 4 and "at most with 0.1 of the video" in ways[-1][1]
    shares = ReadingChoice(bare_s=0.9)
    assert [answer(shares, **figures)[0] for _ in range(3)] == ["whole", "part", "part"]


def test_a_way_that_is_never_ready_gains_nothing() -> None:
    """Its answers end before a window is judged: after two of them the other way is tried, and then kept."""
    shares = ReadingChoice()
    found = []
    for _ in range(5):
        reading = shares.reading(UV, 100, 4, 16, sampled=False)
        found.append(reading.pruner is None)
        known = dict(step_s=10.0, draft_s=2.0, judged=60.0, kept=50.0) if reading.pruner is not None else {}
        pace = PipelineTimes(**known)
        reading.way.add(pace)
    assert found == [True, True, False, False, False]


def test_an_answer_is_counted_once_however_often_it_is_closed() -> None:
    shares, choice = ReadingChoice(), Parallel(model="x", prune=UV, prune_when="measured")
    draft = ParallelDraftState(Mock(), choice, [torch.device("cpu")], 5, shares)
    draft.begin(Prompt({}, torch.zeros(1, 9, dtype=torch.long)))
    for _ in range(2):
        draft.close()
    assert [way.answers for ways in shares.ways.values() for way in ways] == [1, 0]


def test_what_is_sampled_at_a_given_window_does_not_hang_on_the_clock() -> None:
    shares = ReadingChoice()
    for sampled, window, want in ((True, 4, [None] * 3), (True, None, [UV, UV])):
        for pruner in want:
            reading = shares.reading(UV, 100, window, 16, sampled)
            assert reading.pruner is pruner
            reading.way.add(
                PipelineTimes(step_s=10.0, draft_s=9.0 if pruner is None else 2.0, judged=60.0, kept=50.0)
            )


@pytest.mark.parametrize("family", BUILD)
def test_either_way_the_text_is_the_plain_one_and_the_report_says_which(
    family: str, monkeypatch: Any
) -> None:
    model = BUILD[family](layers=3)
    inputs = prompt(family, PROMPTS["video"])
    options: dict[str, Any] = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None}
    plain = model.generate(**inputs, **options)
    told: list[int] = heard(
        monkeypatch, ParallelDraftState, "keep_columns", lambda state, columns: columns.numel()
    )
    draft = Parallel(model=copy.deepcopy(model), process=False, prune=UV, prune_when="measured", window=3)
    notes = []
    with mmaccel.accelerate(model, draft=draft) as fast:
        for _ in range(3):
            assert torch.equal(model.generate(**inputs, **options), plain)
            report = fast.report()
            assert report.draft["accepted"] > 0 and report.draft["failed"] is None
            notes.append(next(line for line in str(report).splitlines() if "it read" in line))
    assert "read the whole video: it is measured" in notes[0] and "read 0.1 of the video: to" in notes[1]
    assert "expected" in notes[2] and len(told) == (2 if "read 0.1 of the video" in notes[2] else 1)


def test_when_to_prune_is_checked() -> None:
    with pytest.raises(RecipeError, match="prune_when is 'often'; give 'always' or 'measured'"):
        Parallel(prune=UV, prune_when="often")
    with pytest.raises(RecipeError, match="prune_when is 'measured' and prune is null; give a pruner"):
        Parallel(prune_when="measured")


def test_a_draft_that_pauses_is_judged_anew_before_it_pauses_again() -> None:
    """Target steps without a draft say nothing of it; what was found in a row doubles the pause."""
    pace = PipelineTimes(step_s=1.0, draft_s=4.0)
    for _ in range(SETTLED):
        pace.record_target_step(1.0)
        pace.record_verification(0, True)
    assert pace.pause_length(0.5) == PAUSE
    for _ in range(PAUSE):
        pace.record_target_step(1.0)
    assert pace.pause_length(0.5) == 0
    for _ in range(SETTLED):
        pace.record_verification(0, True)
    assert pace.pause_length(0.5) == 2 * PAUSE
    for _ in range(SETTLED):
        pace.record_verification(0, True)
    assert pace.pause_length(1.02) == 4 * PAUSE, (
        "what the processes tell each other takes more than this gains"
    )
    for _ in range(SETTLED):
        pace.record_verification(3, False)
    assert pace.pause_length(2.0) == 0 and pace.pauses == 0
