"""A stream whose model's layers lie on two devices: it answers, rests and saves as on one."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import mmaccel
from mmaccel.core.errors import ModelError
from mmaccel.core.memory.split import SplitState
from mmaccel.models import loading, stream
from tests.models.streams import FPS, QUESTION, every_stream, film, logits, pair
from tests.products import product

pytestmark = pytest.mark.in_turn("kv", 4)

CPU, OTHER = torch.device("cpu"), torch.device("cpu:0")
"""Two names of the one device that is always there: hooks and memories are laid as for two."""
KV = every_stream(frames=6, window=4)
SPARSE = {"name": "a_shape", "sink": 16, "window": 32}


@pytest.fixture(autouse=True)
def two_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer says on which of the two it was put: of a CPU's weights nobody else knows."""

    def home(layer: Any) -> torch.device:
        hooks = layer._forward_pre_hooks.values()
        return next((one.device for one in hooks if isinstance(one, loading.MoveInputs)), CPU)

    monkeypatch.setattr(stream, "home_of", home)


def sessions(name: str, kv: Any, **choices: Any) -> tuple[mmaccel.VideoSession, mmaccel.VideoSession]:
    """On one device, and on two of two layers each."""
    model, processor = pair(name, 4)
    spread = copy.deepcopy(model)
    loading.spread_layers(spread, [CPU, OTHER])
    one, two = (mmaccel.VideoSession(each, processor, None, kv=kv, **choices) for each in (model, spread))
    return one, two


@pytest.mark.parametrize(
    ("kv", "name", "way"),
    product([kv for kv in KV if kv != "no_cache"], ["random-ov", "random-qwen"], ["watch", "ingest"]),
)
def test_it_answers_as_on_one_device(name: str, kv: str, way: str) -> None:
    one, two = sessions(name, KV[kv])
    with one, two:
        for session in (one, two):
            getattr(session, way)(film(25), fps=FPS)
            session.watch(film(9, seed=4), fps=FPS)
        state: Any = two._live.state  # type: ignore[union-attr]
        assert isinstance(state, SplitState) and len(state._states) == 2
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


def test_a_pattern_and_a_draft_act_on_both(tmp_path: Path) -> None:
    recipe = {"kv": KV["mosaic"], "sparse": SPARSE, "backend": "reference", "draft": "prompt_lookup"}
    model, processor = pair("random-ov", 4)
    spread = copy.deepcopy(model)
    loading.spread_layers(spread, [CPU, OTHER])
    said = []
    for each in (model, spread):
        with mmaccel.VideoSession(each, processor, recipe) as session:
            session.ingest(film(25), fps=FPS)
            assert 0 < (session.report().kept or 0) < 1
            said.append((logits(session), session.ask(QUESTION, 8).ids))
    assert torch.equal(said[0][0], said[1][0]) and said[0][1] == said[1][1]


def test_it_is_saved_and_resumed_on_as_many_devices(tmp_path: Path) -> None:
    one, two = sessions("random-ov", KV["rekv"])
    model, processor = two._stream_adapter.model, pair("random-ov", 4)[1]  # type: ignore[attr-defined]
    with one, two:
        two.watch(film(25), fps=FPS)
        two.save(tmp_path / "two")
        wanted = logits(two)
        with mmaccel.VideoSession.resume(model, processor, tmp_path / "two") as again:
            assert torch.equal(logits(again), wanted)
        with pytest.raises(ModelError, match="spread the model as it was then"):
            mmaccel.VideoSession.resume(pair("random-ov", 4)[0], processor, tmp_path / "two")


def test_a_memory_of_frames_needs_one_device() -> None:
    one, two = sessions("random-ov", KV["no_cache"])
    with one, two, pytest.raises(ModelError, match="choose a memory of keys and values"):
        two.watch(film(9), fps=FPS)


def test_a_cap_of_the_host_is_shared_by_layers() -> None:
    policy: Any = mmaccel.Recipe.load(kv={"name": "rekv", "host_bytes": 1000}).kv
    assert policy.for_layers(0.25).host_bytes == 250
    assert mmaccel.Recipe.load(kv="rekv").kv.for_layers(0.25).host_bytes is None


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


def test_a_pruner_acts_on_both() -> None:
    said = []
    for devices in ([CPU] * 4, [CPU, CPU, OTHER, OTHER]):
        model, processor = pair("random-ov", 4)
        recipe = {"kv": KV["full"], "prune": {"name": "fastv", "layer": 1, "retention": 0.5}}
        with mmaccel.VideoSession(model, processor, recipe) as session:
            session._stream_adapter.layer_devices = devices
            session.watch(film(25), fps=FPS)
            assert isinstance(session._live.state, SplitState) == (len(set(devices)) == 2)  # type: ignore[union-attr]
            said.append(logits(session))
            counted = session.counters()
            assert 0 < min(n for name, n in counted.items() if name.startswith("visual")) < counted["visual"]
    assert torch.equal(*said)
