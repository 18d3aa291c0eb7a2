"""Pruners of a target on images, and beside a draft whose prompt is pruned too: it drafts from what the target holds."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import mmaccel
from mmaccel.core.attach import adapter_for
from mmaccel.core.errors import MmaccelWarning
from mmaccel.core.layout import IMAGE
from mmaccel.core.prefill.attention import NOTE, Note
from mmaccel.core.prefill.prune import TokenPruner, candidates, quota, thin
from mmaccel.core.registry import registry
from mmaccel.models.install import Hooks
from mmaccel.models.signals import Ear, Listener, VisionProbe
from mmaccel.policies.prune import AttentionPrune, UVPrune
from tests.models.tiny_random import BUILD, PROMPTS, prompt
from tests.policies.prune.layouts import visual
from tests.policies.prune.test_target import PRUNERS

TARGETS = [name for name in PRUNERS if name != "dycoke"]
DRAFTS: dict[str, TokenPruner] = {
    "uv": UVPrune(retention=0.2, layer=4),
    "attention": AttentionPrune(retention=0.2),
}


@pytest.mark.parametrize("name", DRAFTS)
@pytest.mark.parametrize("target, chunk", [*((target, None) for target in TARGETS), ("visionzip", 64)])
def test_it_chooses_among_what_the_read_layers_hold(
    family: str, model: Any, target: str, name: str, chunk: int | None
) -> None:
    """By the states and the attention of those columns alone; its share is of the whole video."""
    inputs, pruner = prompt(family, PROMPTS["long"]), DRAFTS[name]
    (stage,) = pruner.stages(6)
    states: dict[int, list[Tensor]] = {index: [] for index in range(6)}
    told: list[Tensor] = []
    draft = registry("draft").build("sequential", {"model": copy.deepcopy(model), "prune": pruner})
    with torch.no_grad(), mmaccel.accelerate(model, prune=PRUNERS[target], draft=draft, chunk=chunk) as fast:
        layers = fast.adapter.layers(model)
        handles = [
            layer.register_forward_hook(lambda m, a, k, o, i=i: states[i].append(a[0][0]), with_kwargs=True)
            for i, layer in enumerate(layers)
        ]
        layout = fast.adapter.layout(model, inputs)
        listener = Listener(fast, pruner, layout, told.append)
        cache = fast(**inputs, **{NOTE: Note(probes=(listener,))}).past_key_values
        for handle in handles:
            handle.remove()
        left = [cache.state.kept[cache.state.part_of(layer)] for layer in range(6)]
    read = [*stage.hidden, *(n for group in stage.attention for n in group)]
    held = left[max(read)]
    assert held is not None and candidates(thin(layout, held)).numel() < candidates(layout).numel()
    (columns,) = told
    assert torch.isin(columns, held).all()
    count = candidates(layout.take(columns)).numel()
    assert count == min(quota(0.2, candidates(layout).numel()), candidates(layout.take(held)).numel())
    if name == "uv":
        signals = {}
        whole = [torch.cat(states[index]) for index in stage.hidden]
        own = [torch.arange(layout.length) if left[index] is None else left[index] for index in stage.hidden]
        signals["hidden"] = torch.stack([s[torch.isin(o, held)] for s, o in zip(whole, own, strict=True)])
        kept = pruner.keep(signals, thin(layout, held), stage, candidates(layout).numel())
        assert held[kept].tolist() == columns.tolist()
    else:
        assert torch.allclose(listener.attention.sum(-1), torch.ones(()), atol=1e-5)
        mass = (listener.attention[0].mean(0) > 0).nonzero()[:, 0]
        assert torch.isin(held, mass).all(), "what the last layer holds was attended to"


def test_a_pruner_that_hears_nothing_is_told_of(family: str, model: Any, monkeypatch: Any) -> None:
    """A warning and a line in the report, for a draft that waits elsewhere too."""
    inputs = prompt(family, PROMPTS["video"])
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    plain = model.generate(**inputs, **options)
    draft = {"name": "parallel", "model": copy.deepcopy(model), "process": False, "prune": UVPrune(layer=2)}
    monkeypatch.setattr(Ear, "__call__", lambda self, *given: None)
    with mmaccel.accelerate(model, draft=draft) as fast:
        with pytest.warns(MmaccelWarning, match="prune 'uv' received nothing"):
            assert torch.equal(model.generate(**inputs, **options), plain)
        assert "received nothing" in str(fast.report())


@pytest.mark.parametrize("name", TARGETS)
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
    assert bool((told[at] > 0).all())
    assert not told[[c for c in range(layout.length) if c not in visual(layout)]].any()
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
