"""The model card's table: its rows, their bounds, and how they are written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from mmaccel.eval.cases import Film
from mmaccel.eval.table import ENTRIES, Entry, Line, frames_of, markdown, measure, step_ratio
from mmaccel.models.loading import load_model, load_processor


def test_lengths_are_met_in_frames() -> None:
    assert [frames_of(entry, 16) for entry in ENTRIES if entry.task == "V-NIAH"] == [
        8,
        32,
        128,
        512,
        2048,
        4096,
    ]
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
    assert rows[0] == "| V-NIAH | 8 | 128 | 100.0% | 50 | at least 98.0% |"
    assert rows[1].endswith("at least 90.0% (missed) |")
    assert rows[2] == "| draft step | - | 1024 | 4.20 | 1 | 3.00 to 6.00 |"
    assert rows[3].endswith("| - |")


def test_measuring_gives_a_line_an_entry(random_folder: Callable[[str], Path]) -> None:
    folder = random_folder("tiny-qwen-draft")
    model, processor = load_model(folder, dtype=torch.float32), load_processor(folder)
    entries = (
        Entry("V-NIAH", 128, ("needle",), 0.98),
        Entry("MM-NIAH", 240, ("needle", "note"), 0.95, documents=2),
        Entry("caption", 128, (), 0.9),
    )
    told: list[tuple[str, int, int]] = []
    with Film() as film:
        lines = list(
            measure(
                model,
                processor,
                film,
                samples=2,
                draft=model,
                entries=entries,
                progress=lambda task, done, total: told.append((task, done, total)),
            )
        )
    assert [line.task for line in lines] == ["V-NIAH", "MM-NIAH", "caption", "draft agrees", "draft step"]
    assert [line.asked for line in lines[:2]] == [2, 4] and lines[3].value == 1.0
    assert told[-1] == ("caption 128", 2, 2) and ("MM-NIAH 240", 4, 4) in told


def test_a_model_costs_as_much_as_itself(random_folder: Callable[[str], Path]) -> None:
    small = load_model(random_folder("tiny-ov-draft"), dtype=torch.float32)
    large = load_model(random_folder("tiny-ov"), dtype=torch.float32)
    assert 1 / 3 < step_ratio(small, small, length=64, steps=12) < 3
    assert step_ratio(large, small, length=64, steps=12) > 1.5
