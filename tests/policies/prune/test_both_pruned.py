"""A draft whose prompt is pruned beside a target whose prompt is pruned: it drafts, from what the target still holds."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import mmaccel
from mmaccel.core.errors import MmaccelWarning
from mmaccel.core.prefill.attention import NOTE, Note
from mmaccel.core.prefill.prune import TokenPruner, candidates, quota, thin
from mmaccel.core.registry import registry
from mmaccel.models.signals import Ear, Listener
from mmaccel.policies.prune import AttentionPrune, FastV, PyramidDrop, SparseVLM, UVPrune, VisionZip
from tests.models.tiny_random import BUILD, PROMPTS, prompt
from tests.products import product

TARGETS: dict[str, TokenPruner] = {
    "fastv": FastV(retention=0.4),
    "pyramid_drop": PyramidDrop(stages_at=(0.34, 0.5, 0.7)),
    "sparsevlm": SparseVLM(retention=(0.6, 0.3), layers=(1, 3)),
    "visionzip": VisionZip(retention=0.5, contextual=0.4),
}
DRAFTS: dict[str, TokenPruner] = {
    "uv": UVPrune(retention=0.2, layer=4),
    "attention": AttentionPrune(retention=0.2),
}


@pytest.fixture(scope="module", params=BUILD)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def model(family: str) -> Any:
    return BUILD[family](layers=6, seed=5)


@pytest.mark.parametrize(
    ("strategy", "target", "pruner"), product(["sequential", "parallel"], TARGETS, DRAFTS)
)
def test_it_drafts_and_changes_no_token(
    family: str, model: Any, strategy: str, target: str, pruner: str
) -> None:
    """How the draft proposes does not depend on the pair; all pairs of every strategy: test_matrix, slow."""
    inputs = prompt(family, PROMPTS["video"])
    options = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}
    fields = {"model": copy.deepcopy(model), "prune": DRAFTS[pruner], "window": 3}
    if strategy == "parallel":
        fields["process"] = False
    with mmaccel.accelerate(model, prune=TARGETS[target]):
        plain = model.generate(**inputs, **options)
    draft = registry("draft").build(strategy, fields)
    with mmaccel.accelerate(model, prune=TARGETS[target], draft=draft) as fast:
        assert torch.equal(model.generate(**inputs, **options), plain)
        told = fast.report().draft
    assert told["failed"] is None and told["rounds"] > 0 and told["accepted"] > 0


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
    with torch.no_grad(), mmaccel.accelerate(model, prune=TARGETS[target], draft=draft, chunk=chunk) as fast:
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
