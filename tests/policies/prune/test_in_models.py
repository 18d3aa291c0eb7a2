"""Pruners inside models: what they hear of a prefill, on images, and beside a draft whose prompt is pruned too."""

import copy
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import mmaccel
from mmaccel.core.attach import Accelerated, adapter_for
from mmaccel.core.decoding.draft import DraftStrategy
from mmaccel.core.errors import MmaccelWarning
from mmaccel.core.layout import IMAGE
from mmaccel.core.prefill.prune import (
    NOTE,
    ForwardPassInfo,
    ForwardProbe,
    PrefillPass,
    TokenPruner,
    candidate_columns,
    kept_layout,
    share_token_count,
)
from mmaccel.core.registry import registry
from mmaccel.core.report import Meter, SequenceMeter
from mmaccel.models import signals as model_signals
from mmaccel.models.install import Hooks
from mmaccel.policies.draft import Sequential, SparseToDense
from mmaccel.policies.prune import AttentionPrune, RandomPrune, UniformPrune, UVPrune
from tests.models.tiny_random import BUILD, PROMPTS, prompt
from tests.policies.prune import by_hand
from tests.policies.prune.by_hand import looking, visual
from tests.policies.prune.test_target import PRUNERS
from tests.spies import broken, product

LISTENERS: dict[str, TokenPruner] = {
    "uv": UVPrune(retention=0.3, layer=2),
    "uv of the last layer": UVPrune(retention=0.3, layer=4, base=1),
    "uv of the default layer": UVPrune(retention=0.5),
    "attention": AttentionPrune(retention=0.3),
    "attention by variation": AttentionPrune(retention=0.4, mass=1.0, variation=True),
    "uniform": UniformPrune(retention=0.3),
    "random": RandomPrune(retention=0.3),
}


@contextmanager
def listening(model: Any, *pruners: TokenPruner) -> Iterator[Accelerated]:
    """`model` accelerated densely, whose layers can be read by `pruners`."""
    with mmaccel.accelerate(model) as fast, Hooks() as hooks:
        model_signals.hook_hidden_states(hooks, fast.adapter.attended_layers(model), *pruners)
        yield fast


def read_by(*probes: ForwardProbe) -> dict[str, ForwardPassInfo]:
    """The argument of a forward pass that is read by `probes`."""
    return {NOTE: ForwardPassInfo(probes=probes)}


@pytest.fixture(scope="module")
def shallow(family: str) -> Any:
    return BUILD[family](layers=4, seed=7)


@torch.no_grad()
def known(model: Any, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """States [5, S, E] after every number of layers, before the last norm, and attention [4, S, S]."""
    plain = by_hand.eager(model)
    states: list[Tensor] = []
    handles = [
        layer.register_forward_hook(lambda m, a, o: states.append(a[0][0]))
        for layer in plain.model.language_model.layers
    ]
    handles.append(
        plain.model.language_model.norm.register_forward_pre_hook(lambda m, a: states.append(a[0][0]))
    )
    out = plain(**inputs, output_attentions=True)
    for handle in handles:
        handle.remove()
    return torch.stack(states), torch.stack([a[0].mean(0) for a in out.attentions])


@pytest.mark.parametrize(
    ("name", "kind", "passes"),
    product(LISTENERS, ["video", "two videos"], ["one", "chunks", "video, then text"]),
)
def test_signals_are_the_model_s_own(family: str, shallow: Any, name: str, kind: str, passes: str) -> None:
    inputs, pruner = prompt(family, PROMPTS[kind], seed=2), LISTENERS[name]
    (stage,) = pruner.pruning_stages(4)
    states, attention = known(shallow, inputs)
    told: list[Tensor] = []
    with torch.no_grad(), listening(shallow, pruner) as fast:
        layout = fast.adapter.layout(shallow, inputs)
        rows = looking(layout)
        embeds = fast.adapter.embed(shallow, inputs)
        places = fast.adapter.positions(shallow, inputs)
        S = layout.length
        cuts = {"one": [S], "chunks": [*range(5, S, 9), S], "video, then text": [rows[0], S]}[passes]
        listener = model_signals.DraftPruningProbe(fast, pruner, layout, told.append)
        cache, begin = None, 0
        for end in cuts:
            piece = {"inputs_embeds": embeds[:, begin:end], "position_ids": places[..., begin:end]}
            out = fast.adapter.text_model(shallow)(
                **piece, **read_by(listener), past_key_values=cache, use_cache=True
            )
            cache, begin = out.past_key_values, end
        assert listener.done
    signals = {}
    if stage.hidden:
        signals["hidden"] = states[list(stage.hidden)]
    if stage.attention:
        signals["attention"] = torch.stack([attention[list(g)].mean(0)[rows] for g in stage.attention])
        torch.testing.assert_close(listener.attention, signals["attention"], atol=1e-6, rtol=0)
    assert [t.tolist() for t in told] == [pruner.keep(signals, layout, stage).tolist()]


def test_it_is_told_while_later_layers_still_run(family: str, shallow: Any) -> None:
    inputs = prompt(family, PROMPTS["video"])
    when: list[str] = []
    pruner = UVPrune(layer=2)
    with torch.no_grad(), listening(shallow, pruner) as fast:
        layout = fast.adapter.layout(shallow, inputs)
        hooks = [
            layer.register_forward_hook(lambda m, a, o, i=i: when.append(f"layer {i}"))
            for i, layer in enumerate(fast.adapter.layers(shallow))
        ]
        fast(
            **inputs,
            **read_by(
                model_signals.DraftPruningProbe(fast, pruner, layout, lambda columns: when.append("told"))
            ),
        )
        for hook in hooks:
            hook.remove()
    assert when == ["layer 0", "layer 1", "told", "layer 2", "layer 3"]


def test_a_run_is_read_by_its_own_probes_alone(family: str, shallow: Any) -> None:
    inputs = prompt(family, PROMPTS["video"])

    class Mine(ForwardProbe):
        def __init__(self) -> None:
            self.seen: list[int] = []

        def read_attention_inputs(self, run: PrefillPass, layer: int, *rest: Any) -> None:
            self.seen.append(layer)

    with torch.no_grad(), mmaccel.accelerate(shallow) as fast:
        one, two = Mine(), Mine()
        fast(**inputs, **read_by(one))
        fast(**inputs)
        fast(**inputs, **read_by(one, two))
    assert one.seen == [0, 1, 2, 3] * 2 and two.seen == [0, 1, 2, 3]


@pytest.mark.parametrize("draft", ["uv", "attention", "sparse_to_dense"])
def test_eight_threads_all_draft_and_say_the_plain_text(
    family: str, shallow: Any, draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads share the model; what reads a prompt on its way through the layers is of one prompt alone."""
    monkeypatch.setattr(shallow.generation_config, "eos_token_id", None)
    frames = [4 + 2 * number for number in range(8)]
    work = [prompt(family, [("text", 4), ("video", n), ("text", 5)], seed=n) for n in frames]
    told = {"max_new_tokens": 10, "do_sample": False}
    want = [shallow.generate(**inputs, **told) for inputs in work]
    choice: DraftStrategy = SparseToDense(window=3, retention=0.5)
    if draft != "sparse_to_dense":
        pruner = UVPrune(retention=0.5, layer=2) if draft == "uv" else AttentionPrune(retention=0.5)
        choice = Sequential(model=copy.deepcopy(shallow), window=3, prune=pruner)
    meters: list[SequenceMeter] = []
    sequence = Meter.new_sequence
    monkeypatch.setattr(Meter, "new_sequence", lambda self: meters.append(sequence(self)) or meters[-1])
    with mmaccel.accelerate(shallow, draft=choice), ThreadPoolExecutor(8) as threads:
        got = list(threads.map(lambda inputs: shallow.generate(**inputs, **told), work))
    assert all(torch.equal(one, plain) for one, plain in zip(got, want, strict=True))
    assert len(meters) == 8
    for meter in meters:
        assert meter.failed is None and sum(meter.windows) > 0


@pytest.mark.parametrize("pruner", [UVPrune(layer=2), AttentionPrune(), UniformPrune()], ids=lambda p: p.name)
def test_a_pruner_that_fails_ends_the_draft_and_not_the_target(
    family: str, shallow: Any, pruner: TokenPruner, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = prompt(family, PROMPTS["video"])
    plain = shallow.generate(**inputs, max_new_tokens=6, do_sample=False)
    draft = Sequential(model=copy.deepcopy(shallow), prune=pruner)
    with mmaccel.accelerate(shallow, draft=draft) as fast:
        broken(monkeypatch, type(pruner), "keep", RuntimeError("out of memory"))
        with pytest.warns(MmaccelWarning, match="out of memory"):
            assert torch.equal(shallow.generate(**inputs, max_new_tokens=6, do_sample=False), plain)
        assert "out of memory" in str(fast.report())
        layout = fast.adapter.layout(shallow, inputs)
        with pytest.raises(RuntimeError, match="out of memory"):
            fast(**inputs, **read_by(model_signals.DraftPruningProbe(fast, pruner, layout, print)))


def test_paid_is_causal_softmax_attention() -> None:
    g = torch.Generator().manual_seed(0)
    query, key = torch.randn(6, 3, 8, generator=g), torch.randn(2, 10, 8, generator=g)
    at = torch.tensor([2, 5, 9])
    got = model_signals.mean_attention_weights(query, key, at, 0.3)
    for n, column in enumerate(at.tolist()):
        rows = [(query[h, n] @ key[h // 3, : column + 1].T * 0.3).softmax(-1) for h in range(6)]
        torch.testing.assert_close(got[n, : column + 1], torch.stack(rows).mean(0))
        assert not got[n, column + 1 :].any()


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
    (stage,) = pruner.pruning_stages(6)
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
        listener = model_signals.DraftPruningProbe(fast, pruner, layout, told.append)
        cache = fast(**inputs, **{NOTE: ForwardPassInfo(probes=(listener,))}).past_key_values
        for handle in handles:
            handle.remove()
        left = [cache.state.kept[cache.state.part_index_of_layer(layer)] for layer in range(6)]
    read = [*stage.hidden, *(n for group in stage.attention for n in group)]
    held = left[max(read)]
    assert held is not None
    assert candidate_columns(kept_layout(layout, held)).numel() < candidate_columns(layout).numel()
    (columns,) = told
    assert torch.isin(columns, held).all()
    count = candidate_columns(layout.select_tokens(columns)).numel()
    assert count == min(
        share_token_count(0.2, candidate_columns(layout).numel()),
        candidate_columns(layout.select_tokens(held)).numel(),
    )
    if name == "uv":
        signals = {}
        whole = [torch.cat(states[index]) for index in stage.hidden]
        own = [torch.arange(layout.length) if left[index] is None else left[index] for index in stage.hidden]
        signals["hidden"] = torch.stack([s[torch.isin(o, held)] for s, o in zip(whole, own, strict=True)])
        kept = pruner.keep(signals, kept_layout(layout, held), stage, candidate_columns(layout).numel())
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
    monkeypatch.setattr(model_signals.HiddenStateHook, "__call__", lambda self, *given: None)
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
    held = set(state.held_indices(len(state.kept) - 1, layout.length).tolist())
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
        probe = model_signals.VisionAttentionProbe(hooks, model, adapter)
        adapter.embed(model, inputs)
        told = probe.pop_signals(layout)["vision_attention"]
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

    def renamed(self: Any, pixel_values: Any, **kwargs: Any) -> Any:
        return encode(self, pixel_values, **kwargs)

    monkeypatch.setattr(type(model.model), "get_video_features", renamed)
    with mmaccel.accelerate(model, prune=PRUNERS["visionzip"]) as fast:
        assert torch.equal(fast(**{**inputs}).logits, want)
