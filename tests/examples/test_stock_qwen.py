"""The stock script of a Qwen user says the same tokens with the line, under a dense recipe, as without it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import mmaccel
from mmaccel import media
from tests.examples import EXAMPLES, example
from tests.media.films import write_film


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    utils = pytest.importorskip("qwen_vl_utils.vision_process")
    pytest.importorskip("accelerate")

    def by_pyav(told: dict[str, Any]) -> Any:
        """A reader of theirs: torchcodec and decord are not here."""
        whole = media.read(told["video"])
        count = utils.smart_nframes(told, total_frames=len(whole), video_fps=whole.source_fps)
        numbers = torch.linspace(0, len(whole) - 1, count).round().long()
        metadata = {"fps": whole.source_fps, "frames_indices": numbers, "total_num_frames": len(whole)}
        return whole.frames[numbers], metadata, count / len(whole) * whole.source_fps

    monkeypatch.setattr(utils, "VIDEO_READER_BACKENDS", {"torchvision": by_pyav})
    monkeypatch.setattr(utils, "FORCE_QWENVL_VIDEO_READER", "torchvision")
    utils.get_video_reader_backend.cache_clear()
    return example("stock_qwen")


@pytest.mark.parametrize("name", ["tiny-qwen", "tiny-qwen3", "tiny-hybrid"])
def test_the_line_changes_no_token_and_reaches_the_model(
    name: str,
    script: ModuleType,
    random_folder: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    film = str(write_film(tmp_path / "film.mp4", 60))
    asked = (random_folder(name), film, "What colour was the star?")
    reports = []

    class Heard(mmaccel.Accelerated):
        def detach(self) -> None:
            reports.append(self.report())
            super().detach()

    monkeypatch.setattr(mmaccel, "accelerate", lambda *_: nullcontext())
    plain = script.answer(*asked, max_new_tokens=8)
    monkeypatch.setattr(
        mmaccel, "accelerate", lambda model, recipe: Heard(model, mmaccel.Recipe.load(recipe))
    )
    dense = script.answer(*asked, recipe="dense", max_new_tokens=8)
    assert torch.equal(dense[1], plain[1]) and dense[0] == plain[0]
    sparse = {"sparse": {"name": "a_shape", "block": 16, "window": 16, "sink": 4}, "dense_tail": 0}
    script.answer(*asked, recipe=sparse, max_new_tokens=8)
    assert [report.kept < 1 for report in reports] == [False, True]
    assert reports[0].video_units == 12


def test_the_script_is_a_stock_one_but_for_the_line() -> None:
    """What is ours in it: an import, and one line."""
    lines = [
        line
        for line in (EXAMPLES / "stock_qwen.py").read_text(encoding="utf-8").splitlines()
        if "mmaccel" in line
    ]
    assert lines == ["import mmaccel", "    with mmaccel.accelerate(model, recipe):  # the line"]
