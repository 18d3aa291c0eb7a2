"""Faults injected into a session: each is told in one sentence, and the stream is as it was."""

import copy
import pickle
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import mmaccel
from mmaccel.core.errors import MmaccelError, ModelError, RecipeError, StoreError, VideoError
from tests.models.streams import FPS, QUESTION, every_stream, film, logits, open_session, pair
from tests.spies import broken, crossed, nth, refusal

TIGHT = every_stream(frames=4, window=6)
NAME = "random-ov"
UNIT = 2 * 2 * 16 * 64 * 4 * 2
"""Bytes of a frame on the host, of all layers."""
KEPT = ("units", "held", "seen", "pruned", "merged", "prototypes", "clusters", "singletons")
"""Counters of what a stream keeps."""


def begun(kv: Any = "rekv", frames: int = 10) -> mmaccel.VideoSession:
    return open_session(NAME, TIGHT.get(kv, kv) if isinstance(kv, str) else kv, frames)


@contextmanager
def unharmed(session: mmaccel.VideoSession, error: type[BaseException], match: str = "") -> Iterator[None]:
    """What is inside fails in one sentence, and leaves the stream able to go on as if it had not been."""
    kv = session.recipe.kv
    before, count, seconds = logits(session), len(session), session.seconds
    figures = {name: n for name, n in session.counters().items() if name in KEPT}
    with pytest.raises(error, match=match or None) as caught:
        yield
    if issubclass(error, MmaccelError):
        told = str(caught.value)
        assert told.endswith(".") and "\n" not in told
    assert figures == {name: n for name, n in session.counters().items() if name in KEPT}
    assert torch.equal(logits(session), before) and len(session) == count and session.seconds == seconds
    with open_session(NAME, kv, count) as twin:
        for one in (session, twin):
            one.watch(film(25)[:5], times=[100.0, 101.0, 102.0, 103.0, 104.0])
        assert torch.allclose(logits(session), logits(twin), atol=1e-5)


@pytest.mark.parametrize("kv", TIGHT)
def test_a_watch_that_is_interrupted_takes_in_nothing(kv: str) -> None:
    def stop(done: int, total: int | None) -> None:
        if done >= 8:
            raise KeyboardInterrupt

    with begun(kv) as session, unharmed(session, KeyboardInterrupt):
        session.watch(film(25), fps=FPS, progress=stop)


@crossed(kv=[name for name in TIGHT if name != "no_cache"], layer=[0, 1])
def test_a_pass_that_breaks_in_the_middle_takes_in_nothing(kv: str, layer: int) -> None:
    session, calls = begun(kv), [2]
    module = session._stream_adapter.view.adapter.layers(session._stream_adapter.view.model)[layer]

    def fail(*_: Any) -> None:
        calls[0] -= 1
        if not calls[0]:
            raise ZeroDivisionError

    with session, unharmed(session, ZeroDivisionError):
        hook = module.register_forward_pre_hook(fail)
        try:
            session.watch(film(25), fps=FPS)
        finally:
            hook.remove()


@pytest.mark.parametrize("kv", TIGHT)
def test_a_question_that_breaks_loses_nothing(kv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for error, calls in ((ZeroDivisionError, 1), (KeyboardInterrupt, 3)):
        with begun(kv) as session, unharmed(session, error), monkeypatch.context() as patch:
            broken(patch, session._stream_adapter, "logits", error, nth(calls))
            session.ask(QUESTION, 8)


def test_a_first_clip_that_fails_leaves_a_fresh_session() -> None:
    with open_session(NAME, TIGHT["rekv"]) as session:
        with pytest.raises(KeyboardInterrupt):
            session.watch(film(9), fps=FPS, progress=Mock(side_effect=KeyboardInterrupt))
        assert len(session) == 0 and session.counters() == {}
        with pytest.raises(ModelError, match="seen no frame"):
            session.ask(QUESTION)
        session.watch(film(10), fps=FPS)
        with begun() as twin:
            assert torch.equal(logits(session), logits(twin))


def test_a_damaged_file_takes_in_nothing(tmp_path: Path) -> None:
    (tmp_path / "film.mp4").write_bytes(b"no film at all")
    with begun() as session, unharmed(session, VideoError):
        session.watch(tmp_path / "film.mp4")
    with begun() as session, unharmed(session, VideoError, "missing"):
        session.watch(tmp_path / "missing.mp4")


def test_the_cap_of_host_memory_is_told_before_it_is_passed() -> None:
    for kv in ("rekv", "offload", "mosaic"):
        with (
            begun({**TIGHT[kv], "store": {"host_bytes": 20 * UNIT}}) as session,
            unharmed(session, StoreError),
        ):
            session.watch(film(25).repeat(4, 1, 1, 1), fps=FPS)


@pytest.mark.parametrize("kv", ["rekv", "offload", "mosaic"])
def test_with_a_place_on_disk_the_cap_changes_nothing(kv: str, tmp_path: Path) -> None:
    disk = {**TIGHT[kv], "store": {"host_bytes": 0, "spill": "disk", "folder": str(tmp_path / "spill")}}
    found = []
    for fields in (TIGHT[kv], disk):
        with begun(fields, 20) as session:
            found.append(logits(session))
            told = session.counters()
            assert bool(list(tmp_path.rglob("slab-*"))) == ("store" in fields)
    assert told["host_disk_bytes"] > 0 and torch.equal(*found)
    assert not list(tmp_path.rglob("slab-*")), "closed, its files are gone"


@pytest.mark.parametrize("kv", ["rekv", "mosaic"])
def test_a_full_disk_is_told_and_nothing_is_lost(tmp_path: Path, monkeypatch, kv: str) -> None:
    from mmaccel.policies.kv.store import saved

    fields = {**TIGHT[kv], "store": {"host_bytes": 0, "spill": "disk", "folder": str(tmp_path)}}
    with begun(fields, 5) as session, unharmed(session, StoreError), monkeypatch.context() as patch:
        patch.setattr(saved, "allocate_file", Mock(side_effect=OSError(28, "No space left on device")))
        session.watch(film(25), fps=FPS)


def held(session: mmaccel.VideoSession) -> list[list[int]]:
    """Of each layer the units on the host."""
    store = session._live.state.store  # type: ignore[union-attr]
    return [store.units(layer) for layer in range(store.shape.layers)]


@pytest.mark.parametrize("kv", ["rekv", "mosaic"])
def test_a_broken_watch_forgets_nothing_while_there_is_room(kv: str) -> None:
    fields = {**TIGHT[kv], "store": {"host_bytes": 40 * UNIT, "spill": "drop_oldest"}}
    with begun(fields, 20) as session:
        before = held(session)
        with unharmed(session, KeyboardInterrupt):
            session.watch(film(25), fps=FPS, progress=Mock(side_effect=KeyboardInterrupt))
        assert [units[: len(old)] for units, old in zip(held(session), before, strict=True)] == before
    with begun(fields, 20) as session:
        with unharmed(session, ModelError, "times: there are 101 for 100 frames"):
            session.watch(film(25).repeat(4, 1, 1, 1), times=[50.0 + i for i in range(101)])
        assert session.counters()["host_dropped"] == 0


@crossed(kv=["rekv", "mosaic"], passes=[1, 2, 4])
def test_a_broken_watch_forgets_no_more_than_a_whole_one_up_to_there(kv: str, passes: int) -> None:
    """Under a cap the new has no place but that of the oldest, and what was overwritten cannot come back."""
    count = 16 * passes

    def stop(done: int, total: int | None) -> None:
        if done >= count:
            raise KeyboardInterrupt

    fields = {**TIGHT[kv], "store": {"host_bytes": 40 * UNIT, "spill": "drop_oldest"}}
    more = film(25).repeat(4, 1, 1, 1)
    with begun(fields, 25) as session, begun(fields, 25) as twin:
        first = session._live.state._first  # type: ignore[union-attr]
        with pytest.raises(KeyboardInterrupt):
            session.watch(more, fps=FPS, progress=stop)
        twin.watch(more[:count], fps=FPS)
        assert held(session) == [[unit for unit in units if unit < first] for units in held(twin)]
        assert len(session) == 25 and session.counters()["host_dropped"] == twin.counters()["host_dropped"]
        there = {*held(session)[0], *range(first, 25)}
        seen = session.ask(QUESTION, 2).evidence
        assert seen and all(one.frames[0] in there for one in seen)
        session.watch(more, fps=FPS)
        assert len(session) == 125 and session.ask(QUESTION, 2).evidence


def cast(session: mmaccel.VideoSession, call: Callable[[], Any]) -> None:
    """`call` while the session's model has another dtype."""
    model = session._stream_adapter.view.model
    try:
        model.double()
        call()
    finally:
        model.float()


WRONG: list[tuple[Any, str]] = [
    (lambda s: s.watch(film(4)[:0]), "no frames"),
    (lambda s: s.watch([]), "no frames"),
    (lambda s: s.watch(3), "a video must be"),
    (lambda s: s.watch(film(4).float()), "give uint8"),
    (lambda s: s.watch(film(4), fps=0), "fps: 0; give a positive"),
    (lambda s: s.watch(film(4), fps=float("inf")), "fps: inf; give a positive"),
    (lambda s: s.watch(film(1), times=[float("nan")]), "times: some are not finite numbers"),
    (lambda s: s.watch(film(2), times=[50.0, float("inf")]), "times: some are not finite numbers"),
    (lambda s: s.watch(film(4), times=[50.0, 51.0]), "one for each frame"),
    (lambda s: s.watch(film(2), times=[50.0, 51.0, 52.0]), "3 for 2 frames"),
    (lambda s: s.watch(film(2), times=[51.0, 50.0]), "they must rise"),
    (lambda s: s.watch(film(2), times=[1.0, 2.0]), r"later than 4\.5"),
    (lambda s: s.ask("  "), "question: it is empty"),
    (lambda s: s.ask(5), "question: 5 is not text; give a string"),
    (lambda s: s.ask(None), "question: None is not text; give a string"),
    (lambda s: s.ask(QUESTION, timeout=10**400), "timeout: a whole number of 1329 bits; give a positive"),
    (lambda s: s.ask(QUESTION, 0), "max_new_tokens: 0; give at least 1"),
    (lambda s: cast(s, lambda: s.watch(film(4))), "cast from torch.float32 to torch.float64 since"),
    (lambda s: cast(s, lambda: s.ask(QUESTION)), "cast from torch.float32 to torch.float64 since"),
    (copy.deepcopy, "neither copied nor pickled; `save` it"),
    (pickle.dumps, "neither copied nor pickled; `save` it"),
    (lambda s: s.load("nowhere"), "nowhere is not a saved session"),
]


def test_wrong_calls_are_one_sentence() -> None:
    with begun() as session, unharmed(session, MmaccelError, WRONG[-1][1]):
        for call, match in WRONG:
            assert re.search(match, refusal(lambda call=call: call(session))), match
        WRONG[-1][0](session)


@pytest.mark.parametrize("kv", ["recent", "mosaic", "streammem"])
def test_memory_is_taken_for_no_more_of_an_answer_than_there_are_positions(kv: str) -> None:
    with begun(kv) as session:
        assert session.ask(QUESTION, 10**12, timeout=0.5).finish_reason in ("stop", "timeout")


def test_a_closed_session_serves_nothing(tmp_path: Path) -> None:
    session = begun()
    session.close()
    session.close()
    for call in (
        lambda: session.watch(film(2)),
        lambda: session.ask(QUESTION),
        lambda: session.save(tmp_path / "a"),
        lambda: session.load(tmp_path / "a"),
    ):
        with pytest.raises(ModelError, match=r"the session is closed; .*\.$"):
            call()
    assert repr(session) == "<VideoSession closed, kv 'rekv'>"


@pytest.mark.parametrize(
    ("choices", "match"),
    [
        ({"kv": "full", "prune": "fastv"}, "layer 2 of a model of 2; give 1 to 1"),
        ({"kv": "full", "draft": "sparse_to_dense"}, "set draft to 'off'"),
        ({"kv": {"name": "rekv", "frames": 0}}, "frames is 0; give at least 1"),
        ({"kv": {"name": "rekv", "window": 4, "local": 5}}, "local is 5"),
        ({"kv": {"name": "recent", "local": 0}}, "local is 0"),
        (
            {"kv": {"name": "offload", "store": {"spill": "drop_oldest"}}},
            "give 'refuse' or 'disk', for it keeps everything[.]",
        ),
        ({"kv": {"name": "no_cache", "kept": 64}}, "at least twice"),
    ],
)
def test_recipes_that_cannot_be_are_refused(choices: dict[str, Any], match: str) -> None:
    model, processor = pair(NAME)
    with pytest.raises(RecipeError, match=match):
        mmaccel.VideoSession(model, processor, None, **choices)


def test_models_and_processors_that_cannot_serve_are_refused() -> None:
    model, processor = pair(NAME)
    with pytest.raises(ModelError, match="load_processor"):
        mmaccel.VideoSession(model, processor.tokenizer, "rekv")
    with pytest.raises(ModelError, match="load the model's own"):
        mmaccel.VideoSession(model, pair("random-qwen" if "ov" in NAME else "random-ov")[1], "rekv")
    with pytest.raises(ModelError, match="'tiny-ov' is not a model; load it first"):
        mmaccel.accelerate("tiny-ov", "grid")  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="not supported"):
        mmaccel.VideoSession(torch.nn.Linear(1, 1), processor, "rekv")
    with begun() as session:
        want = logits(session)
        with mmaccel.accelerate(model, "dense"), pytest.raises(ModelError, match="detach the recipe"):
            session.ask(QUESTION)
        assert torch.equal(logits(session), want)


def test_gaps_and_changes_of_size_and_rate_are_events() -> None:
    frames = film(12)
    large = torch.nn.functional.interpolate(frames.float(), (90, 60)).to(torch.uint8)
    with open_session("random-ov", "full") as session:
        session.watch(frames[:4], fps=2.0)
        session.watch(frames[4:8], times=[2.0, 2.5, 9.0, 9.5])
        session.watch(large[8:], fps=5.0)
        assert [(one.kind, one.seconds, one.lasted) for one in session.events] == [
            ("gap", 2.5, 6.5),
            ("size", 9.7, None),
            ("rate", 9.7, None),
        ]
        assert "frames of 60x90 follow frames of" in session.events[1].why
        assert session.events[2].why == "5 frames a second follow 2 frames a second"
        session.watch(large[:4], fps=5.0)
        with pytest.raises(ModelError, match="must rise"):
            session.watch(frames[:2], times=[1.0, 2.0])
        assert len(session.events) == 3
    with open_session("random-ov", "full") as slow:
        for clip in frames.split(4):
            slow.watch(clip, fps=0.2)
        assert not slow.events, "a frame every five seconds is no gap"
