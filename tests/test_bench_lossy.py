"""Lossy pruners held side by side really see the same share of the video."""

from __future__ import annotations

import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from mmaccel import load_model, load_processor
from mmaccel.cli.answer import prompt
from mmaccel.core.attach import adapter_for
from mmaccel.core.recipe import Recipe
from mmaccel_lab.eval.caption import caption_cases
from mmaccel_lab.eval.cases import Film
from mmaccel_lab.eval.pruning import average_share, seen_share, write

sys.path.insert(0, str(Path(__file__).parent.parent / "bench"))

from lossy import counted, lossy

NAMES = ("dycoke", "fastv", "pyramid_drop", "sparsevlm", "visionzip")


@pytest.fixture(scope="module", params=["tiny-ov", "tiny-qwen"])
def asked(request: pytest.FixtureRequest) -> tuple[Any, dict[str, Any]]:
    model = load_model(request.param, dtype=torch.float32)
    case = next(islice(caption_cases(32, 1, 500), 0, None))
    with Film() as film:
        content = case.content(film.watch(case.world))
        return model, prompt(load_processor(request.param), content, model)


@pytest.mark.parametrize("name", NAMES)
def test_a_tenth_is_a_tenth(asked: tuple[Any, dict[str, Any]], name: str) -> None:
    model, inputs = asked
    depth = len(adapter_for(model).layers(model))
    pruner = lossy(0.1, depth)[name]
    _, report = write(model, inputs, Recipe(prune=pruner), 4)
    assert seen_share(report.kv, pruner, depth) == pytest.approx(0.1, abs=0.01)


@pytest.mark.parametrize("share", [0.04, 0.1, 0.2, 0.3, 0.5])
@pytest.mark.parametrize("name", NAMES)
def test_settings_reach_what_is_asked_for(name: str, share: float) -> None:
    assert counted(lossy(share, 8)[name], 8) == pytest.approx(share, abs=1e-6)


def test_a_share_that_no_setting_keeps_is_refused() -> None:
    with pytest.raises(ValueError, match=r"dycoke has no setting that keeps 0\.02; give a share"):
        lossy(0.02, 8)


def test_a_share_seen_leaves_out_what_is_before_the_first_cut() -> None:
    told = {"visual": 100.0, "visual from layer 1": 30.0, "visual from layer 3": 10.0}
    assert average_share(told, 5) == pytest.approx((1 + 0.3 + 0.3 + 0.1 + 0.1) / 5)
    fast = lossy(0.1, 5)["fastv"]
    assert seen_share(told, fast, 5) == pytest.approx((0.3 + 0.3 + 0.1 + 0.1) / 4)
    shown = {"visual": 100.0, "visual from layer 0": 25.0, "visual seen decoding": 5.0}
    assert seen_share(shown, lossy(0.1, 5)["dycoke"], 5) == pytest.approx((0.25 + 4 * 0.05) / 5)
    assert seen_share({"visual": 0.0}, fast, 5) == 1.0
