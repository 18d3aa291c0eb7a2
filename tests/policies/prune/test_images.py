"""Images under the pruners of a target: their tokens go as those of videos do, their finer tiles' too."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mmaccel
from mmaccel.core.attach import adapter_for
from mmaccel.core.layout import IMAGE
from mmaccel.models.install import Hooks
from mmaccel.models.signals import VisionProbe
from tests.models.tiny_random import BUILD, PROMPTS, prompt
from tests.policies.prune.layouts import visual
from tests.policies.prune.test_target import PRUNERS


@pytest.fixture(scope="module", params=BUILD)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def model(family: str) -> Any:
    return BUILD[family](layers=6, seed=5)


@pytest.mark.parametrize("name", [name for name in PRUNERS if name != "dycoke"])
@pytest.mark.parametrize("kind", ["image", "interleaved"])
def test_images_are_pruned(family: str, model: Any, name: str, kind: str) -> None:
    """By the share that is asked for, their finer tiles too; marks at the ends of rows of tiles stay."""
    inputs = prompt(family, PROMPTS[kind], seed=2)
    layout = adapter_for(model).layout(model, inputs)
    images = [c for c in visual(layout) if int(layout.modality[0, c]) == IMAGE]
    # 4 of merged patches; a base view of 16 and two tiles of 16 side by side, each row of which ends in a mark.
    each = 4 if family == "qwen" else 16 + 32
    assert len(images) == each * (1 if kind == "image" else 2)
    with torch.no_grad(), mmaccel.accelerate(model, prune=PRUNERS[name]) as fast:
        out = fast(**inputs)
        state, told = out.past_key_values.state, fast.report().kv
    held = set(state.held_by(len(state.kept) - 1, layout.length).tolist())
    assert told["visual"] == len(visual(layout)) and told["held_mean"] < layout.length
    gone = set(range(layout.length)) - held
    assert gone & set(images) and gone <= set(visual(layout))
    assert layout.length - 1 in held


@pytest.mark.parametrize("kind", ["image", "interleaved"])
def test_visionzip_reads_the_tower_of_images(family: str, model: Any, kind: str) -> None:
    """What each of an image's tokens receives in the tower, tile by tile, is where its feature is."""
    inputs = prompt(family, PROMPTS[kind], seed=9)
    layout, adapter = adapter_for(model).layout(model, inputs), adapter_for(model)
    with torch.no_grad(), Hooks() as hooks:
        probe = VisionProbe(hooks, model, adapter)
        adapter.embed(model, inputs)
        told = probe.take(layout)["vision_attention"]
    at = [c for c in visual(layout) if int(layout.modality[0, c]) == IMAGE]
    # A mean over the patches that pay: what all tokens of a frame or a tile receive adds up to one.
    assert (
        bool((told[at] > 0).all())
        and not told[[c for c in range(layout.length) if c not in visual(layout)]].any()
    )
    if family == "llava":
        base = at[:16]
        torch.testing.assert_close(told[base].sum(), torch.tensor(1.0), atol=1e-4, rtol=0)
        torch.testing.assert_close(told[at[16:48]].sum(), torch.tensor(2.0), atol=1e-4, rtol=0)
    assert "get_image_features" not in model.model.__dict__


@torch.no_grad()
def test_pixels_may_have_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in transformers 5.17, whose LLaVA-OneVision calls those of a video pixel_values."""
    model = BUILD["llava"](layers=4, seed=5)
    inputs = prompt("llava", PROMPTS["interleaved"], seed=2)
    with mmaccel.accelerate(model, prune=PRUNERS["visionzip"]) as fast:
        want = fast(**inputs).logits
    encode = type(model.model).get_video_features

    def renamed(self: Any, pixel_values: torch.Tensor, **kwargs: Any) -> Any:
        return encode(self, pixel_values, **kwargs)

    monkeypatch.setattr(type(model.model), "get_video_features", renamed)
    with mmaccel.accelerate(model, prune=PRUNERS["visionzip"]) as fast:
        assert torch.equal(fast(**{**inputs}).logits, want)
