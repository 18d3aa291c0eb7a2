"""A frame's way through the vision tower as a CUDA graph (`step.TowerSteps`), without a device."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from mmaccel.core.attach import adapter_for
from mmaccel.core.decoding import replay
from mmaccel.models import step
from tests.core.test_replay import Repeated
from tests.models.streams import film, pair


class Kept(Repeated):
    """Results lie in fixed places also where no others are given, as those of a graph do."""

    made = calls = 0

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        Kept.made += 1

    def __call__(self) -> Any:
        Kept.calls += 1
        self.out = self.out or tuple(torch.empty_like(one) for one in self.work())
        return super().__call__()


def adapters(name: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[Any]]:
    """A model, and streams on it whose tower is captured as on a device."""
    monkeypatch.setattr(step, "DEVICES", ("cpu",))
    monkeypatch.setattr(replay, "_Replay", Kept)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    Kept.made = Kept.calls = 0
    model, processor = copy.deepcopy(pair(name)[0]), pair(name)[1]
    made = [adapter_for(model).stream_adapter(model, processor) for _ in range(2)]  # type: ignore[attr-defined]
    for one in made:
        step.steps_of(one).tower._replays.works = True
    return model, made


def test_the_tower_of_a_frame_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for all streams of a model, of which each keeps what it was given; of more frames the modules are called."""
    model, both = adapters("random-ov", monkeypatch)
    frames, size, family = film(8), (42, 70), both[0].family
    wanted = [family.encode_frames(model, both[0]._pixels(frame, size)).clone() for frame in frames.split(1)]
    found = [both[n % 2].features(frame, size) for n, frame in enumerate(frames.split(1))]
    assert Kept.made == 1
    for (features, marks), right in zip(found, wanted, strict=True):
        assert torch.equal(torch.cat([features.flatten(0, 1), marks]), right)
    both[1].features(frames[:3], size)
    assert both[0].features(frames[:2], size)[0].shape[0] == 2 and Kept.made == 1
    assert len(step.steps_of(both[0]).tower._replays._held["tower"]) == 2


def test_a_tower_that_is_changed_or_heard_is_not_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (one, _) = adapters("random-ov", monkeypatch)
    frame, size, heard = film(1), (42, 70), list[int]()
    plain = [one.features(frame, size)[0] for _ in range(3)]
    assert torch.equal(plain[0], plain[2]) and Kept.made == 1
    replayed = Kept.calls
    block: Any = one._tower[0]
    hook = block.register_forward_hook(lambda *given: heard.append(1))
    for _ in range(3):
        assert torch.equal(one.features(frame, size)[0], plain[0])
    hook.remove()
    assert len(heard) == 3
    block.forward = lambda hidden, *rest, whole=block.forward, **more: whole(hidden + 1, *rest, **more)
    assert not torch.equal(one.features(frame, size)[0], plain[0])
    assert Kept.calls == replayed  # a graph would neither call a hook nor a module's own `forward`
    del block.forward
    assert torch.equal(one.features(frame, size)[0], plain[0]) and Kept.calls == replayed + 1
    # Other weights in the same place are read, and those that lie elsewhere captured anew.
    weight = block.mlp.fc1.weight
    for change in (lambda: weight.data.mul_(2), lambda: setattr(weight, "data", weight.data * 2)):
        with torch.no_grad():
            change()
        found = [one.features(frame, size)[0] for _ in range(3)]
        wanted = one.family.encode_frames(model, one._pixels(frame, size))[:-1]
        assert all(torch.equal(some.flatten(0, 1), wanted) for some in found)
        assert not torch.equal(found[0], plain[0])
    assert Kept.made == 2
    # Nor is a weight of the model itself, which stands outside of the tower.
    model.model.image_newline = torch.nn.Parameter(model.model.image_newline.detach() + 1)
    marks = [one.features(frame, size)[1] for _ in range(3)]
    assert Kept.made == 3 and all(torch.equal(some, marks[0]) for some in marks)
    model.model.vision_tower.set_attn_implementation("eager")
    for _ in range(3):
        one.features(frame, size)
    assert Kept.made == 4


def test_a_tower_that_needs_more_than_pixels_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    _, (one, _) = adapters("random-qwen", monkeypatch)
    for _ in range(3):
        one.features(film(2), (42, 70))
    assert not Kept.made and not step.steps_of(one).tower._replays._held
