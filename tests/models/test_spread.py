"""A model over several devices says what it says on one; so does a stream, which rests and saves as on one."""

import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import DynamicCache

import mmaccel
from mmaccel.core.attach import adapter_for
from mmaccel.core.decoding.draft import Proposal
from mmaccel.core.errors import ModelError
from mmaccel.core.layout import TokenLayout
from mmaccel.core.memory.split import MultiDeviceStreamState
from mmaccel.core.prefill.attention import ForwardPass
from mmaccel.models import decode, loading, shapes, step, stream
from mmaccel.models.runner import HFRunner
from mmaccel.policies.draft import Off, Sequential
from tests.models.streams import FPS, QUESTION, every_stream, film, logits, pair, resumed
from tests.models.tiny_random import BUILD, PROMPTS, prompt
from tests.spies import crossed

CPU, OTHER = torch.device("cpu"), torch.device("cpu:0")
"""Two names of the one device that is always there: hooks and runs are laid as for two."""


@pytest.fixture(params=sorted(BUILD))
def family(request: pytest.FixtureRequest) -> tuple[str, Any]:
    model = BUILD[request.param](layers=3)
    return request.param, model


@given(st.lists(st.integers(1, 100), min_size=1, max_size=20), st.integers(0, 500), st.integers(1, 8))
def test_layers_are_dealt_out_in_order(sizes: list[int], ends: int, count: int) -> None:
    count = min(count, len(sizes))
    chosen = loading.balance_layers_over_devices(sizes, ends, count)
    assert chosen == sorted(chosen) and set(chosen) == set(range(count))


def test_layers_are_dealt_out_evenly() -> None:
    # Ends that weigh two layers leave the first device two fewer.
    assert loading.balance_layers_over_devices([10] * 10, 20, 2) == [0] * 4 + [1] * 6
    assert loading.balance_layers_over_devices([10] * 9, 0, 3) == [0] * 3 + [1] * 3 + [2] * 3
    assert loading.balance_layers_over_devices([10] * 3, 1000, 3) == [0, 1, 2]


def test_runs_begin_and_end_at_home() -> None:
    assert loading.group_layers_by_device([CPU, CPU], CPU) == [(CPU, [0, 1])]
    three = loading.group_layers_by_device([CPU, OTHER, OTHER], CPU)
    assert three == [(CPU, [0]), (OTHER, [1, 2]), (CPU, [])]
    assert loading.group_layers_by_device([OTHER, CPU], CPU) == [(CPU, []), (OTHER, [0]), (CPU, [1])]


def test_it_says_what_it_says_on_one_device(family: tuple[str, Any]) -> None:
    name, model = family
    inputs = prompt(name, PROMPTS["video"])
    want = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    undo = loading.spread_layers_over_devices(model, [CPU, OTHER])
    layers, norm = adapter_for(model).layers(model), adapter_for(model).text_model(model).norm
    hooked = [bool(module._forward_pre_hooks) for module in (*layers, norm)]
    assert hooked == [True] * 4
    peer = BUILD[name](seed=1)
    for draft in (Off(), Sequential(model=peer, window=3, prune="uv")):
        with mmaccel.accelerate(model, draft=draft) as fast:
            assert torch.equal(fast.generate(**inputs, max_new_tokens=12, do_sample=False), want)
    assert torch.equal(model.generate(**inputs, max_new_tokens=12, do_sample=False), want)
    (memo,) = {id(hook.memo): hook.memo for hook in norm._forward_pre_hooks.values()}.values()
    assert not memo, "what was handed over is kept no longer than the pass"
    undo()
    assert not any(module._forward_pre_hooks for module in (*layers, norm))


def test_fewer_layers_than_devices_is_told(family: tuple[str, Any]) -> None:
    with pytest.raises(ModelError, match="at most one for each layer"):
        loading.spread_layers_over_devices(family[1], ["cpu"] * 4)
    with pytest.raises(ModelError, match="give one or more"):
        loading.spread_layers_over_devices(family[1], [])


def in_runs(monkeypatch: pytest.MonkeyPatch, *first: int) -> None:
    """Steps in as many runs as numbers, of the layers from these on."""

    def runs(places: Any, home: torch.device) -> list[tuple[torch.device, list[int]]]:
        ends = [*first[1:], len(places)]
        return [(home, list(range(a, b))) for a, b in zip(first, ends, strict=True)]

    monkeypatch.setattr(loading, "group_layers_by_device", runs)


@crossed("family", first=[(0, 1), (0, 2, 3), (0, 0, 3)], family=sorted(BUILD))
@torch.no_grad()
def test_a_step_in_runs_is_the_step(family: tuple[str, Any], first: tuple[int, ...], monkeypatch) -> None:
    """Chains, shorter ones than the width, and trees: what a run gives is what the next one takes, all rows of it."""
    name, model = family
    inputs = prompt(name, PROMPTS["interleaved"])
    tree = Proposal(torch.tensor([5, 6, 7, 8]), parents=torch.tensor([-1, -1, 0, 1])).branches
    told = []
    for split in (False, True):
        if split:
            in_runs(monkeypatch, *first)
        runner = HFRunner(model, adapter_for(model), DynamicCache(), (1, 4, 8))
        runner.prefill(inputs)
        said = [runner.step(torch.tensor(ids)) for ids in ([[7]], [[9, 3]], [[4, 5, 6, 7]], [[2]])]
        said.append(runner.step(torch.tensor([[4, 5, 6, 7, 8]]), tree))
        runner.accept(torch.tensor([0, 2, 4]))
        said.append(runner.step(torch.tensor([[3]])))
        assert len(runner.steps.parts) == (len(first) if split else 1)
        told.append(said)
    for one, other in zip(*told, strict=True):
        assert torch.equal(one, other)


def test_what_a_hook_hands_over() -> None:
    """Tensors, tuples of them and runs come to the device; named arguments once for all layers there."""
    memo: dict[Any, Any] = {}
    meta = torch.device("meta")
    one, other, last = (loading.MoveInputsHook(meta, memo, ends) for ends in (False, False, True))
    hidden, angles = torch.ones(2), (torch.ones(3), torch.ones(3))
    named = {"position_embeddings": angles, "past_key_values": object(), "attention_mask": None}
    (moved,), first = one(torch.nn.Identity(), (hidden,), dict(named))
    _, second = other(torch.nn.Identity(), (moved,), dict(named))
    assert moved.is_meta and all(angle.is_meta for angle in first["position_embeddings"])
    assert second["position_embeddings"] is first["position_embeddings"]
    assert first["past_key_values"] is named["past_key_values"] and first["attention_mask"] is None
    assert memo
    last(torch.nn.Identity(), (moved,), {})
    assert not memo
    with mock.patch.object(torch.Tensor, "to", autospec=True) as to:
        for place in (meta, CPU):
            loading.MoveInputsHook(place, {}, False)(torch.nn.Identity(), (hidden,), {})
    assert [call.kwargs["non_blocking"] for call in to.call_args_list] == [True, False]
    road: Any = None
    run = ForwardPass(road, layout=TokenLayout.text(1, 4, "cpu"))
    _, there = one(torch.nn.Identity(), (moved,), {"mmaccel_pass": run})
    assert there["mmaccel_pass"].layout.device == meta and not there["mmaccel_pass"].layout.has_padding


def test_a_shape_is_made_where_its_layers_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same modules, layer by layer, as one that is made at once; and its steps may be captured."""
    shape = shapes.SHAPES["llava-onevision-0.5b"]
    monkeypatch.setitem(shapes.SHAPES, "llava-onevision-0.5b", replace(shape, vocab=2000))
    more: dict[str, Any] = {"layers": 3, "vision_layers": 1, "dtype": torch.float32}
    model = shapes.build_model("llava-onevision-0.5b", devices=[CPU, OTHER], **more)
    whole = shapes.build_model("llava-onevision-0.5b", **more)
    assert {n: p.shape for n, p in model.named_parameters()} == {
        n: p.shape for n, p in whole.named_parameters()
    }
    text = adapter_for(model).text_model(model)
    assert text.config.num_hidden_layers == 3
    assert [layer.self_attn.layer_idx for layer in text.layers] == [0, 1, 2]
    assert all(
        float(layer.mlp.up_proj.weight.detach().std()) == pytest.approx(0.02, rel=0.1)
        for layer in text.layers
    )
    ids = torch.tensor([[3, 4, 5]])
    out = model.generate(input_ids=ids, max_new_tokens=3, do_sample=False)
    assert out.shape == (1, 6)


def test_hooks_of_ours_do_not_keep_steps_from_being_captured(family: tuple[str, Any], monkeypatch) -> None:
    _, model = family
    monkeypatch.setattr(step, "DEVICES", ("cpu",))
    loading.spread_layers_over_devices(model, [CPU, OTHER])
    assert decode.can_capture_decode(model, adapter_for(model), DynamicCache())
    adapter_for(model).layers(model)[1].register_forward_pre_hook(lambda *_: None)
    assert not decode.can_capture_decode(model, adapter_for(model), DynamicCache())


@pytest.mark.gpu
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_devices_say_what_one_says(family: tuple[str, Any], order: tuple[int, int]) -> None:
    """fp32, captured steps, with and without a draft."""
    if torch.cuda.device_count() < 2:
        pytest.skip("it needs two devices")
    name, model = family
    places = [f"cuda:{number}" for number in order]
    model.to(places[0])
    inputs = {k: v.to(places[0]) for k, v in prompt(name, PROMPTS["video"]).items()}
    want = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    loading.spread_layers_over_devices(model, places)
    assert {str(p.device) for p in model.parameters()} == set(places)
    for draft in (Off(), Sequential(model=BUILD[name](seed=1).to("cuda:1"), window=3)):
        with mmaccel.accelerate(model, draft=draft) as fast:
            assert torch.equal(fast.generate(**inputs, max_new_tokens=24, do_sample=False), want)


KV = every_stream(frames=6, window=4)
SPARSE = {"name": "a_shape", "sink": 16, "window": 32}


@pytest.fixture(autouse=True)
def two_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer says on which of the two it was put: of a CPU's weights nobody else knows."""

    def home(layer: Any) -> torch.device:
        hooks = layer._forward_pre_hooks.values()
        return next((one.device for one in hooks if isinstance(one, loading.MoveInputsHook)), CPU)

    monkeypatch.setattr(stream, "home_device", home)


def sessions(name: str, kv: Any, **choices: Any) -> tuple[mmaccel.VideoSession, mmaccel.VideoSession]:
    """On one device, and on two of two layers each."""
    model, processor = pair(name, 4)
    spread = copy.deepcopy(model)
    loading.spread_layers_over_devices(spread, [CPU, OTHER])
    one, two = (mmaccel.VideoSession(each, processor, None, kv=kv, **choices) for each in (model, spread))
    return one, two


@crossed(kv=[kv for kv in KV if kv != "no_cache"], name=["random-ov", "random-qwen"], way=["watch", "ingest"])
def test_it_answers_as_on_one_device(name: str, kv: str, way: str) -> None:
    one, two = sessions(name, KV[kv])
    with one, two:
        for session in (one, two):
            getattr(session, way)(film(25), fps=FPS)
            session.watch(film(9, seed=4), fps=FPS)
        state: Any = two._live.state  # type: ignore[union-attr]
        assert isinstance(state, MultiDeviceStreamState) and len(state._states) == 2
        assert torch.equal(logits(one), logits(two))
        said, again = one.ask(QUESTION, 5), two.ask(QUESTION, 5)
        assert said.ids == again.ids
        assert [(e.frames, e.share, e.recalled) for e in said.evidence] == [
            (e.frames, pytest.approx(e.share), pytest.approx(e.recalled)) for e in again.evidence
        ]
        scores = [one.score for one in again.evidence if one.score is not None]
        assert not scores or 0.5 < sum(scores) <= 1 + 1e-6  # those that hardly reached it are not listed
        mine, others = one.counters(), two.counters()
        # Each device has a scratch of its own.
        assert mine["units"] == others["units"] and 0.95 < others["bytes"] / mine["bytes"] < 1.2
        assert mine.get("host_bytes_in", 0.0) == pytest.approx(others.get("host_bytes_in", 0.0), rel=0.2)
        layers = ("recalled", "pages", "fetch_needed")
        assert {name: mine.get(name) for name in layers} == {name: others.get(name) for name in layers}


def test_a_device_gets_what_is_of_its_pass_when_the_others_have_theirs() -> None:
    """What is sent to a device waits for what it has to do; so would a first device that got rows too early."""
    model, processor = pair("random-ov", 4)
    spread, order = copy.deepcopy(model), list[Any]()
    loading.spread_layers_over_devices(spread, [CPU, OTHER])
    layers, norm = adapter_for(spread).layers(spread), adapter_for(spread).text_model(spread).norm
    for number, layer in enumerate(layers):
        layer.register_forward_pre_hook(lambda _, args, number=number: order.append(number))
    norm.register_forward_pre_hook(lambda _, args: order.append(tuple(args[0].shape[:2])))
    with mmaccel.VideoSession(spread, processor, None, kv=KV["mosaic"]) as session:
        session.watch(film(9), fps=FPS)
        state: Any = session._live.state  # type: ignore[union-attr]
        for number, one in enumerate(state._states):
            begin = one.begin_pass
            one.begin_pass = lambda told, begin=begin, number=number: (
                order.append(f"memory {number}"),
                begin(told),
            )
        order.clear()
        session.watch(film(9, seed=4), fps=FPS)
        assert order == ["memory 0", 0, 1, 2, "memory 1", 3, (1, 0)] or order == [
            "memory 0", 0, 1, "memory 1", 2, 3, (1, 0)
        ]  # fmt: skip
        for one in state._states:
            del one.begin_pass
        session.ask(QUESTION, 2)
        assert order[-1] == (1, 1)


def test_an_ingestion_reads_of_the_first_device_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later device that is read, or waited for, has the first one wait for it before its next pass."""
    model, processor = pair("random-ov", 4)
    spread, at, reads, counts = copy.deepcopy(model), [-1], list[tuple[Any, int]](), list[Any]()
    loading.spread_layers_over_devices(spread, [CPU, OTHER])
    known = TokenLayout.host_value

    def fact(layout: TokenLayout, name: Any, read: Any) -> Any:
        return known(layout, name, lambda: (reads.append((name, at[0])), read())[1])

    grid = {"name": "grid", "block": 16}
    recipe = {"kv": KV["mosaic"], "sparse": grid, "backend": "reference", "chunk": 64}
    with mmaccel.VideoSession(spread, processor, recipe) as session:
        session.watch(film(2), fps=FPS)
        state: Any = session._live.state  # type: ignore[union-attr]

        def enters(number: int, *_: Any) -> None:
            at[0] = number
            counts.append(state.last_listed)

        for number, layer in enumerate(adapter_for(spread).layers(spread)):
            layer.register_forward_pre_hook(partial(enters, number))
        monkeypatch.setattr(TokenLayout, "host_value", fact)
        session.ingest(film(25, seed=4), fps=FPS)
        assert 0 < (session.report().kept or 0) < 1
    assert {name for name, _ in reads} >= {"has_padding"} and {layer for _, layer in reads} == {0}
    assert len(counts) > 4 and all(one is counts[0] is not None for one in counts)


@pytest.mark.parametrize(
    ("kv", "choices"),
    [
        ("mosaic", {"sparse": SPARSE, "backend": "reference", "draft": "prompt_lookup"}),
        ("full", {"prune": {"name": "fastv", "layer": 1, "retention": 0.5}}),
    ],
    ids=str,
)
def test_a_pattern_and_a_draft_or_a_pruner_act_on_both(kv: str, choices: dict[str, Any]) -> None:
    said = []
    for session in sessions("random-ov", KV[kv], **choices):
        with session:
            (session.ingest if "sparse" in choices else session.watch)(film(25), fps=FPS)
            found, kept, counted = logits(session), session.report().kept, session.counters()
            if "sparse" in choices:
                assert 0 < (kept or 0) < 1
            else:
                left = min(n for name, n in counted.items() if name.startswith("visual"))
                assert 0 < left < counted["visual"]
            split = isinstance(session._live.state, MultiDeviceStreamState)  # type: ignore[union-attr]
            said.append((found, session.ask(QUESTION, 8).ids, split))
    (one, ids, whole), (other, again, split) = said
    assert torch.equal(one, other) and ids == again and (whole, split) == (False, True)


def test_it_is_saved_and_resumed_on_as_many_devices(tmp_path: Path) -> None:
    one, two = sessions("random-ov", KV["rekv"])
    with one, two:
        two.watch(film(25), fps=FPS)
        with resumed(two, tmp_path / "two"):
            pass
        with pytest.raises(ModelError, match="spread the model as it was then"):
            mmaccel.VideoSession.resume(*pair("random-ov", 4), tmp_path / "two")


def test_a_memory_of_frames_needs_one_device() -> None:
    one, two = sessions("random-ov", KV["no_cache"])
    with one, two, pytest.raises(ModelError, match="choose a memory of keys and values"):
        two.watch(film(9), fps=FPS)


def test_a_cap_of_the_host_is_shared_by_layers() -> None:
    policy: Any = mmaccel.Recipe.load(kv={"name": "rekv", "store": {"host_bytes": 1000}}).kv
    assert policy.for_layer_share(0.25).store.host_bytes == 250
    assert mmaccel.Recipe.load(kv="rekv").kv.for_layer_share(0.25).store.host_bytes is None


def test_clusters_are_of_all_layers_where_a_device_has_one() -> None:
    model, processor = pair("random-ov", 3)
    with mmaccel.VideoSession(model, processor, None, kv=KV["mosaic"]) as one:
        one.watch(film(25), fps=FPS)
        wanted = one._live.state.clusters()  # type: ignore[union-attr]
    with mmaccel.VideoSession(model, processor, None, kv=KV["mosaic"]) as two:
        two._stream_adapter.layer_devices = [CPU, OTHER, OTHER]
        two.watch(film(25), fps=FPS)
        found = two._live.state.clusters()  # type: ignore[union-attr]
    assert {name: rows.shape for name, rows in found.items()} == {
        name: rows.shape for name, rows in wanted.items()
    }
    assert all(torch.equal(found[name], rows) for name, rows in wanted.items())
