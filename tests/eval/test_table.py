"""The model card's table: its rows, their bounds, and how they are written."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from mmaccel import load_model, load_processor
from mmaccel.core.attach import adapter_for
from mmaccel.core.errors import ModelError
from mmaccel.core.recipe import Recipe
from mmaccel_lab.eval import table
from mmaccel_lab.eval.cases import Film
from mmaccel_lab.eval.jobs import Job, measure_in, merged
from mmaccel_lab.eval.table import ENTRIES, Entry, Line, frames_of, markdown, measure, step_ratio


def test_lengths_are_met_in_frames() -> None:
    found = [frames_of(entry, 16) for entry in ENTRIES if entry.task == "V-NIAH"]
    assert found == [8, 32, 128, 512, 2048, 4096]
    for entry in ENTRIES:
        frames = frames_of(entry, 15)
        tokens = frames * 15 / (0.75 if entry.documents else 1)
        assert abs(tokens - entry.tokens) <= max(0.1 * entry.tokens, 4 * 15)
        assert not entry.documents or frames % entry.documents == 0


def test_a_line_is_held_to_its_bounds() -> None:
    assert Line("V-NIAH", 8, 128, 0.98, 50, 0.98).met
    assert not Line("V-NIAH", 8, 128, 0.979, 50, 0.98).met
    assert not Line("draft agrees", 8, 128, 0.95, 50, 0.5, 0.9).met
    assert not Line("V-NIAH", 8, 128, None, 0, 0.98).met


def test_markdown_tells_what_was_missed() -> None:
    lines = [
        Line("V-NIAH", 8, 128, 1.0, 50, 0.98),
        Line("count", 512, 8192, 0.5, 50, 0.9),
        Line("draft step", 0, 1024, 4.2, 1, 3.0, 6.0),
        Line("scene", 512, 8192, 0.3, 50, 0.0),
    ]
    rows = markdown(lines).splitlines()[2:]
    assert rows[0] == "| V-NIAH | 8 | 128 | 100.0% | 50 | at least 98.0% |  |"
    assert rows[1].endswith("at least 90.0% (missed) |  |")
    assert rows[2] == "| draft step | - | 1024 | 4.20 | 1 | 3.00 to 6.00 |  |"
    assert rows[3].endswith("| - |  |")


@pytest.fixture
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a step costs is told by few of them."""
    monkeypatch.setattr(table, "step_ratio", partial(step_ratio, length=16, steps=4, rounds=1))


def test_measuring_gives_a_line_an_entry(random_folder: Callable[[str], Path], few_steps: None) -> None:
    folder = random_folder("tiny-qwen-draft")
    model, processor = load_model(folder, dtype=torch.float32), load_processor(folder)
    entries = (
        Entry("V-NIAH", 128, ("needle",), 0.98),
        Entry("MM-NIAH", 240, ("needle", "note"), 0.95, documents=2),
        Entry("caption", 128, (), 0.9),
    )
    told: list[tuple[str, int, int]] = []
    how: dict[str, Any] = {"entries": entries, "progress": lambda *what: told.append(what)}
    with Film() as film:
        lines = list(measure(model, processor, film, samples=1, draft=model, **how))
    assert [line.task for line in lines] == ["V-NIAH", "MM-NIAH", "caption", "draft agrees", "draft step"]
    assert [line.asked for line in lines[:2]] == [1, 2] and lines[3].value == 1.0
    assert told[-1] == ("caption 128", 1, 1) and ("MM-NIAH 240", 2, 2) in told


def test_steps_are_compared_by_what_they_cost_alone(
    random_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a clock that each layer moves on by one, and that other work holds up for a third of the time."""
    small = load_model(random_folder("tiny-ov-draft"), dtype=torch.float32)
    large = load_model(random_folder("tiny-ov"), dtype=torch.float32)
    clock = itertools.count(1)
    now = [0.0]

    def layer(*_: Any) -> None:
        now[0] += 1 if next(clock) % 24 < 16 else 50

    monkeypatch.setattr(table.time, "perf_counter", lambda: now[0])
    depths = {}
    for model in (small, large):
        layers = adapter_for(model).layers(model)
        depths[model] = len(layers)
        for module in layers:
            module.register_forward_hook(layer)
    assert depths[large] > depths[small]
    assert step_ratio(small, small, length=16, steps=12) == 1
    assert step_ratio(large, small, length=16, steps=12) == depths[large] / depths[small]


def _loaded(folder: Path) -> tuple[Any, Any, Any]:
    model = load_model(folder, dtype=torch.float32)
    return model, load_processor(folder), model


def test_jobs_change_no_figure(random_folder: Callable[[str], Path], few_steps: None) -> None:
    """Answers over two processes, and captions over more processes than there are captions."""
    load = partial(_loaded, random_folder("tiny-qwen-draft"))
    entries = (Entry("V-NIAH", 128, ("needle", "count"), 0.98), Entry("caption", 128, (), 0.9))
    recipe = Recipe()
    told: list[tuple[str, int, int]] = []
    model, processor, draft = load()
    with Film() as film:
        alone = list(measure(model, processor, film, samples=1, draft=draft, entries=entries))
    assert {line.device for line in alone} == {"CPU, float32"}
    with Film() as film:
        rest = measure(model, processor, film, samples=1, draft=draft, entries=entries, done=alone[1:])
        assert [line.task for line in rest] == ["V-NIAH"]
    job = Job(load=load, samples=1, seed=0, recipe=recipe, entries=entries)
    together = list(measure_in(2, job, lambda *what: told.append(what)))
    assert [line.task for line in together] == ["V-NIAH", "caption", "draft agrees", "draft step"]
    for one, same in zip(alone[:-1], together[:-1], strict=True):
        assert one.value is not None and same.value is not None
        assert replace(same, value=round(same.value, 9)) == replace(one, value=round(one.value, 9))
    # Which process is heard last depends on the machine.
    assert told[-1] in {("V-NIAH 128", 2, 2), ("caption 128", 1, 1)} <= set(told)


def test_merged_lines_weigh_answers() -> None:
    lines = [
        Line("count", 8, 120, 1.0, 3, 0.9),
        Line("count", 8, 130, 0.0, 1, 0.9),
        Line("count", 8, 128, None, 0, 0.9),
    ]
    assert merged(lines) == Line("count", 8, 122, 0.75, 4, 0.9)
    assert merged(lines[2:]) == lines[2]


def test_an_error_of_a_job_is_raised(tmp_path: Path) -> None:
    job = Job(load=partial(_loaded, tmp_path), samples=1, seed=0, recipe=Recipe())
    with pytest.raises(ModelError, match="config"):
        list(measure_in(1, job))
