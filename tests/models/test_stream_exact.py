"""A stream that keeps and sees everything is the plain model's prompt; how it is cut, saved or shared changes nothing."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import mmaccel
from mmaccel.core.registry import registry
from tests.models.streams import (
    FPS,
    QUESTION,
    every_stream,
    film,
    logits,
    open_session,
    pair,
    plain,
    said,
)
from tests.products import product

WHOLE = every_stream()
TIGHT = every_stream(frames=6, window=8)
TOLERANCE, EQUAL = 1e-4, 1e-5
pytestmark = [pytest.mark.numeric(by="torch"), pytest.mark.in_turn("kv", 4)]
MIXED = [("tiny-ov", "rekv"), ("tiny-ov", "mosaic"), ("tiny-qwen", "rekv"), ("tiny-qwen", "mosaic")]
BOTH = product(("random-ov", "random-qwen"), WHOLE)


@pytest.mark.parametrize(("name", "kv"), [*BOTH, *MIXED])
def test_with_room_for_all_it_is_the_plain_model(name: str, kv: str) -> None:
    fields = dict(WHOLE[kv])
    if "positions" in registry("kv")[kv].__dataclass_fields__:
        fields["positions"] = "original"
    with open_session(name, fields) as session:
        session.watch(film(13), fps=FPS)
        assert (logits(session) - plain(name, 13)).abs().max() <= TOLERANCE
        assert session.ask(QUESTION, 4).text == said(name, 13, 4)


@pytest.mark.parametrize("kv", ["rekv", "mosaic"])
def test_compact_places_are_the_true_ones_when_nothing_is_left_out(kv: str) -> None:
    with open_session("random-qwen", {**WHOLE[kv], "positions": "compact"}) as session:
        session.watch(film(13), fps=FPS)
        assert (logits(session) - plain("random-qwen", 13)).abs().max() <= TOLERANCE


@pytest.mark.parametrize("kv", TIGHT)
def test_questions_and_other_sessions_do_not_disturb_a_stream(kv: str) -> None:
    name = "random-qwen"
    films = [film(16, seed) for seed in (3, 4)]
    alone = []
    for frames in films:
        with open_session(name, TIGHT[kv]) as session:
            session.watch(frames[:8], fps=FPS)
            session.watch(frames[8:], fps=FPS)
            alone.append(logits(session))
    with (
        open_session(name, TIGHT[kv]) as one,
        open_session(name, TIGHT[kv]) as two,
        open_session(name, "full") as third,
    ):
        third.watch(films[0][:5], fps=FPS)
        for half in (slice(0, 8), slice(8, 16)):
            one.watch(films[0][half], fps=FPS)
            two.watch(films[1][half], fps=FPS)
            third.ask(QUESTION, 2)
            first = logits(one)
            one.ask("how many shapes were shown ?", 2)
            assert torch.equal(logits(one), first)
        assert torch.allclose(logits(one), alone[0], atol=EQUAL) and torch.equal(logits(two), alone[1])
        assert not torch.equal(alone[0], alone[1])


@pytest.mark.parametrize(("name", "kv"), [*(("random-qwen", kv) for kv in TIGHT), ("random-ov", "mosaic")])
def test_saved_and_loaded_it_goes_on(tmp_path: Path, name: str, kv: str) -> None:
    frames = film(25)
    model, processor = pair(name)
    with open_session(name, TIGHT[kv]) as session:
        session.watch(frames[:19], fps=FPS)
        session.save(tmp_path / "stream")
        before = logits(session)
        with mmaccel.VideoSession.resume(model, processor, tmp_path / "stream") as other:
            assert other.recipe == session.recipe and other.frames == 19 and other.seconds == session.seconds
            assert torch.equal(logits(other), before)
            assert other.ask(QUESTION, 4).evidence == session.ask(QUESTION, 4).evidence
            for one in (session, other):
                one.watch(frames[19:], fps=FPS)
            assert torch.allclose(logits(other), logits(session), atol=EQUAL)
            assert not torch.equal(logits(other), before)


@pytest.mark.parametrize("name", ["tiny-ov", "tiny-qwen"])
def test_the_model_is_left_as_it_was(name: str) -> None:
    model, _ = pair(name)
    frames = film(9)
    plain(name, 9)  # what the model itself makes at its first run
    state = copy.deepcopy(model.state_dict())
    before = {path: _outline(module) for path, module in model.named_modules()}
    with open_session(name, TIGHT["rekv"]) as session:
        session.watch(frames, fps=FPS)
        assert {path: _outline(module) for path, module in model.named_modules()} == before
        session.ask(QUESTION, 3)
    assert {path: _outline(module) for path, module in model.named_modules()} == before
    assert all(torch.equal(a, b) for a, b in zip(state.values(), model.state_dict().values(), strict=True))


def _outline(module: Any) -> Any:
    hooks = tuple(
        (k, len(v)) for k, v in module.__dict__.items() if k.startswith("_") and isinstance(v, dict)
    )
    return {k: id(v) for k, v in module.__dict__.items() if not k.startswith("_")}, hooks


def test_seconds_of_a_unit_move_the_places_as_in_the_plain_model() -> None:
    frames = film(12)
    found = []
    for fps in (0.75, 3.0):
        with open_session("random-qwen", "full") as session:
            session.watch(frames, fps=fps)
            assert (logits(session) - plain("random-qwen", 12, fps=fps)).abs().max() <= TOLERANCE
            found.append(logits(session))
    assert (found[0] - found[1]).abs().max() > 10 * TOLERANCE


@pytest.mark.parametrize(("kv", "count"), product(WHOLE, [1, 2, 3, 7]))
def test_a_unit_that_is_not_complete_is_seen_as_the_processor_fills_it(kv: str, count: int) -> None:
    frames = film(count)
    with open_session("random-qwen", WHOLE[kv]) as session:
        for frame in frames:
            session.watch(frame[None], fps=FPS)
        assert (logits(session) - plain("random-qwen", count)).abs().max() <= TOLERANCE


def test_clusters_of_short_films_split_and_are_retrieved() -> None:
    """What is shown above of `mosaic` is shown of a stream with clusters, not of one that has not begun to cluster."""
    with open_session("random-ov", TIGHT["mosaic"]) as session:
        session.watch(film(25).repeat(2, 1, 1, 1), fps=FPS)
        session.ask(QUESTION, 2)
        told = session.counters()
    named = ("clusters", "visual_clusters", "eager_splits", "deferred", "singletons", "resolved", "recalled")
    assert min(told[name] for name in named) > 0, {name: told[name] for name in named}
    assert told["deferred_splits"] > 0 and told["resident"] == 8 < told["units"]
