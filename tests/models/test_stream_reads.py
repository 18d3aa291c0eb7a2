"""Frames on their way into a stream: nothing is read back from the device, so that the host runs ahead of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mmaccel.backends.ops import clusters
from mmaccel.core.attach import adapter_for
from mmaccel.core.decoding.generate import Deadline
from mmaccel.policies.kv.mosaic import ClusterIndex
from mmaccel.policies.kv.mosaic.split import UnitMeans
from tests.models.streams import FPS, film, open_session, pair
from tests.models.tiny_random import BUILD, PROMPTS, batch, prompt
from tests.policies.kv.test_question_reads import Counted

MOSAIC = {"name": "mosaic", "frames": 4, "window": 6, "local": 2, "index": {"name": "clusters", "init": 8}}
MEMORIES: dict[str, tuple[dict[str, Any], int]] = {
    # Of a clip, however long: a tower of one layer, and two layers of which each gives units to the store.
    "mosaic, retrieving": (MOSAIC, 240),
    "mosaic, window alone": ({**MOSAIC, "encode_frames": 0}, 200),
    "rekv": ({"name": "rekv", "frames": 4, "window": 6}, 200),
}
"""Each with the launches of a pass at most."""
KERNELS = [(clusters, name) for name in ("scored", "outside", "ordered", "selected", "folded")]


def unseen(work: Any) -> Any:
    """`work` of the host alone, whose tensors are none of a device's."""

    def done(*given: Any) -> Any:
        with torch.utils._python_dispatch._disable_current_modes():
            return work(*given)

    return done


@pytest.mark.parametrize("kind", sorted(BUILD))
def test_features_of_frames_are_those_that_the_model_puts_in_their_places(kind: str) -> None:
    model = BUILD[kind]()
    inputs = batch(kind, [prompt(kind, PROMPTS["video"], seed=seed) for seed in (0, 1)])
    family = adapter_for(model)
    with torch.no_grad():
        placed = family.embed(model, inputs)[inputs["input_ids"] == model.config.video_token_id]
        assert torch.equal(family.frames(model, inputs), placed)


@pytest.mark.parametrize("name", ["random-ov", "random-qwen"])
def test_pixels_without_a_text_are_those_with_one(name: str) -> None:
    _, processor = pair(name)
    frames = film(4)
    whole = processor(processor.video_token, videos=[frames], add_special_tokens=False)
    alone = processor.pixels(frames)
    assert alone and all(torch.equal(whole[each], value) for each, value in alone.items())


@pytest.mark.parametrize("memory", sorted(MEMORIES))
def test_watching_reads_nothing_back_and_launches_little(
    memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but the clustering and its tables, which are the host's own: it is given what has arrived, and gives them once."""
    fields, most = MEMORIES[memory]
    with open_session("random-ov", fields) as session:
        # The addresses of places on the host are told to the device when they are new.
        for some in (film(16), film(16)[8:]):
            session.watch(some, fps=FPS)
        live: Any = session._live
        monkeypatch.setattr(UnitMeans, "waiting", 0)
        for name in ("refresh", "_survey"):
            monkeypatch.setattr(ClusterIndex, name, unseen(getattr(ClusterIndex, name)))
        monkeypatch.setattr(type(live.state), "idle", lambda self: None)
        before = live.state.units()
        frames = film(24)[16:]
        counted = Counted(monkeypatch)
        # Each of these is one kernel.
        for of, name in KERNELS:
            monkeypatch.setattr(of, name, counted.as_one(getattr(of, name)))
        with counted:
            live.take(frames, [100.0 + i for i in range(8)], lambda count: None, Deadline())
        assert live.state.units() == before + 8
        launched = sum(counted.launched.values())
        assert 100 < launched <= most, counted.launched.most_common()
        assert (counted.launched["gather_units"] > 0) == (memory == "mosaic, retrieving")
