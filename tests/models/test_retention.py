"""What a memory lets go of: by age, for room, thinned; what is pinned stays, and who asks for what is gone is told."""

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import mmaccel
from mmaccel.core.errors import ModelError, RecipeError, StoreError
from mmaccel.core.streams.sources import Clip
from mmaccel.policies.kv import _archived, _index
from mmaccel.policies.kv.store import slabs
from tests.models.streams import CLUSTERS, FPS, QUESTION, logits, open_session, pair, resumed
from tests.models.streams import film as frames_of

COUNT, WINDOW, KEEP = 50, 6, 8.0
ALL = 1 << 20
MOSAIC: dict[str, Any] = {"name": "mosaic", "window": WINDOW, "local": 2, "index": CLUSTERS}
KEEPERS: dict[str, dict[str, Any]] = {
    "rekv": {"name": "rekv", "window": WINDOW, "frames": ALL},
    "mosaic": {**MOSAIC, "frames": ALL, "encode_frames": 0},
    "mosaic few": {**MOSAIC, "frames": 4, "encode_frames": 2},
}
LAST = (COUNT - 1) / FPS


def film(count: int) -> torch.Tensor:
    return torch.cat([frames_of(25), frames_of(25, 4)])[:count]


def watched(kv: str, count: int = COUNT, **fields: Any) -> mmaccel.VideoSession:
    session = open_session("random-ov", {**KEEPERS[kv], **fields})
    for begin in range(0, count, 7):
        session.watch(film(count)[begin : begin + 7], fps=FPS)
    return session


def first(session: mmaccel.VideoSession, between: tuple[float, float] | None = None) -> torch.Tensor:
    return logits(session, concurrent=True, between=between)


def held(session: mmaccel.VideoSession) -> list[float]:
    """The seconds of the frames that the memory has on the host."""
    live: Any = session._live
    shown = session.shown
    return [shown[unit] for unit in live.state.store.units(0)]


@pytest.mark.parametrize("kv", ["rekv", "mosaic"])
def test_what_is_old_is_gone_as_if_the_question_left_it_out(kv: str) -> None:
    with watched(kv) as whole, watched(kv, keep_seconds=KEEP) as session:
        begin = LAST - KEEP
        assert held(whole)[0] == 0.0 and held(session)[0] == begin
        near, far = first(session), first(whole)
        assert torch.equal(near, first(whole, (begin, LAST)))
        assert not torch.allclose(near, far, atol=1e-3), "the rest makes a difference"
        counted, event = session.counters(), session.events[-1]
        assert counted["let_go"] == begin * FPS and whole.counters()["let_go"] == 0
        assert (event.kind, len(session.events)) == ("let_go", 1) and not whole.events
        assert (event.seconds, event.lasted) == (begin - 1 / FPS, begin - 1 / FPS)
        with pytest.raises(ModelError, match="holds nothing of that time any more"):
            session.ask(QUESTION, 2, between=(0.0, begin - 1.0))
        assert session.ask(QUESTION, 2, between=(begin, begin + 2.0)).ids


@pytest.mark.parametrize("kv", KEEPERS)
def test_evidence_is_of_what_is_kept_and_a_pin_stays(kv: str) -> None:
    with open_session("random-ov", {**KEEPERS[kv], "keep_seconds": KEEP}) as session:
        session.pin(1.0, 2.0)  # before any frame
        session.watch(film(COUNT)[:10], fps=FPS)
        session.pin(12.0, 12.5)  # to come
        session.watch(film(COUNT)[10:], fps=FPS)
        session.watch(film(COUNT)[:1])
        now = session.seconds
        old = [second for second in held(session) if second < now - KEEP]
        assert old == [1.0, 1.5, 2.0, 12.0, 12.5]
        answer = session.ask(QUESTION, 2)
        assert answer.evidence
        assert all(one.seconds in old or one.seconds >= now - KEEP for one in answer.evidence)
        assert session.ask(QUESTION, 2, between=(0.5, 2.5)).evidence[0].seconds == 1.0
        session.unpin(1.0, 2.0)
        session.watch(film(COUNT)[:1])
        assert held(session)[:2] == [12.0, 12.5]
        with pytest.raises(ModelError, match="unpin: nothing is pinned from 1 to 2 s"):
            session.unpin(1.0, 2.0)
        with pytest.raises(ModelError, match=r"pin: 2\.0 to 1\.0; give"):
            session.pin(2.0, 1.0)
        with pytest.raises(ModelError, match="pin: 'a' to 2; give two numbers"):
            session.pin("a", 2)  # type: ignore[arg-type]


@pytest.mark.parametrize("kv", KEEPERS)
def test_thinning_keeps_fewer_the_older_they_are(kv: str) -> None:
    with watched(kv, keep_seconds=4.0, thin=True) as session:
        now, shown = session.seconds, session.shown
        left = set(held(session))
        for unit, second in enumerate(shown[: COUNT - WINDOW]):
            age = now - second
            every = 1 if age <= 4.0 else 2 if age < 8.0 else 4 if age < 16.0 else 8
            assert (second in left) == (unit % every == 0), second
        assert session.ask(QUESTION, 2).ids


@pytest.mark.parametrize("kv", ["rekv", "mosaic few"])
def test_it_lasts_through_a_save_and_lets_go_afterwards(kv: str, tmp_path: Path) -> None:
    with watched(kv, keep_seconds=KEEP) as session:
        session.pin(LAST - 5.0, LAST - 4.0)
        with resumed(session, tmp_path / "s") as again:
            assert held(again) == held(session) and again.counters()["let_go"] == session.counters()["let_go"]
            for one in (session, again):
                one.watch(film(COUNT)[:40])
            assert held(again) == held(session)
            assert held(again)[:3] == [LAST - 5.0, LAST - 4.5, LAST - 4.0]
            assert torch.equal(first(again), first(session))
            again.unpin(LAST - 5.0, LAST - 4.0)


def test_frames_that_come_within_an_answer_take_nothing_from_it() -> None:
    """What is too old by then goes once the answer is over."""
    with watched("rekv", 30, keep_seconds=KEEP) as session, watched("rekv", 30, keep_seconds=KEEP) as still:
        want = still.ask(QUESTION, 8)
        reply = session.ask(QUESTION, 8, stream=True)
        pieces = [next(reply)]
        session.watch(film(COUNT)[:40], fps=FPS)
        pieces += list(reply)
        assert reply.answer is not None
        assert (reply.answer.ids, reply.answer.evidence) == (want.ids, want.evidence)
        session.watch(film(COUNT)[:1])
        assert held(session)[0] >= session.seconds - KEEP


def unit_bytes(session: mmaccel.VideoSession) -> int:
    live: Any = session._live
    shape = live.state.store.shape
    return int(shape.nbytes * shape.layers)


def test_one_cap_over_all_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A session that comes later takes room from the one that holds most, and all of them together stay below the cap."""
    # Streams that other tests keep count too.
    for listed in (slabs, _archived):
        monkeypatch.setattr(listed, "_open", weakref.WeakKeyDictionary())
    with watched("rekv") as one:
        unit = unit_bytes(one)
    # A slab is a 64th of it.
    cap = 64 * unit
    fields = {"store": {"process_bytes": cap, "spill": "drop_oldest"}}
    with (
        watched("rekv", **fields) as early,
        watched("rekv", **fields) as late,
        watched("rekv", **fields) as last,
    ):
        for _ in range(2):
            for one in (early, late, last):
                one.watch(film(COUNT), fps=FPS)
                took = [session.counters()["host_bytes"] for session in (early, late, last)]
                assert sum(took) <= cap
        assert min(took) > 0.2 * cap and max(took) - min(took) <= cap / 16
        for one in (early, late, last):
            kept = held(one)
            assert kept == one.shown[-WINDOW - len(kept) : -WINDOW], "the last ones, without a hole"
            assert one.events[-1].kind == "let_go" and one.events[-1].seconds < kept[0]
            assert one.counters()["let_go"] == len(one.shown) - WINDOW - len(kept)
            stretch = (kept[0], one.seconds)
            with open_session("random-ov", KEEPERS["rekv"]) as whole:
                for frames in (film(COUNT),) * 3:
                    whole.watch(frames, fps=FPS)
                assert torch.equal(first(one), first(whole, stretch)), "what was moved is what was stored"


def test_a_pinned_moment_stays_when_room_is_made() -> None:
    with watched("rekv", 20) as one:
        unit = unit_bytes(one)
    with watched("rekv", 20, store={"host_bytes": 24 * unit, "spill": "drop_oldest"}) as session:
        session.pin(2.0, 4.0)
        session.watch(film(COUNT), fps=FPS)
        assert held(session)[:5] == [2.0, 2.5, 3.0, 3.5, 4.0] and session.counters()["host_dropped"] > 0
        session.pin(0.0, 1e6)
        before = held(session)
        with pytest.raises(StoreError, match="all of them are pinned; unpin some"):
            session.watch(film(COUNT), fps=FPS)
        assert held(session) == before and session.ask(QUESTION, 2).ids


@pytest.mark.parametrize("kv", ["rekv", "mosaic"])
def test_what_has_no_room_beside_pins_drops_nothing(kv: str, tmp_path: Path) -> None:
    """Some units could go, and too few."""
    with watched(kv, 20) as one:
        unit = unit_bytes(one)
    with watched(kv, 20, store={"host_bytes": 16 * unit, "spill": "drop_oldest"}) as session:
        session.pin(4.0, 7.5)
        stored, before = held(session), logits(session)
        with pytest.raises(StoreError, match="too many of them are pinned; unpin some"):
            session.watch(film(COUNT), fps=FPS)
        assert held(session) == stored and torch.equal(logits(session), before)
        with resumed(session, tmp_path / "s"):
            pass  # it says the same


@pytest.mark.parametrize("kv", ["rekv", "mosaic"])
def test_a_stream_whose_old_frames_are_all_gone_answers_after_a_load(kv: str, tmp_path: Path) -> None:
    """A camera that paused for longer than frames are kept."""
    with open_session("random-ov", {**KEEPERS[kv], "keep_seconds": 5.0}) as session:
        session.watch(film(24), fps=FPS)
        session.watch(film(WINDOW), times=[60 + n / FPS for n in range(WINDOW)])
        assert not held(session)
        with resumed(session, tmp_path / "s") as again:
            again.watch(film(2), times=[70.0, 70.5])


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"keep_seconds": 0}, "keep_seconds is 0; give a positive number"),
        ({"keep_seconds": float("inf")}, "keep_seconds is inf"),
        ({"thin": True}, "thin has no effect without keep_seconds"),
        ({"store": {"process_bytes": -1}}, "process_bytes is -1"),
    ],
)
def test_fields_that_cannot_be(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(RecipeError, match=says):
        mmaccel.Recipe.load({"kv": {"name": "rekv", **fields}})


@pytest.mark.parametrize("kv", KEEPERS)
def test_what_the_index_knew_of_them_is_given_back(kv: str, tmp_path: Path, monkeypatch) -> None:
    """Its rows stay as many as the stream keeps units, and what it finds is what one without that finds."""

    def run(least: int) -> mmaccel.VideoSession:
        monkeypatch.setattr(_index, "LEAST", least)
        monkeypatch.setattr(slabs, "ROWS", 0)
        session = open_session("random-ov", {**KEEPERS[kv], "keep_seconds": KEEP})
        session.watch(film(10), fps=FPS)
        session.pin(1.0, 2.0)
        for round in range(5):
            for begin in range(0, COUNT, 7):
                session.watch(film(COUNT)[begin : begin + 7], fps=FPS)
            session.ask(QUESTION, 2)
            if round == 3:
                session.unpin(1.0, 2.0)
        return session

    with run(8) as session, run(ALL) as whole:
        index, other = (one._live.state.index for one in (session, whole))  # type: ignore[union-attr]
        units = session._live.state.units()  # type: ignore[union-attr]
        assert other._known() == units and index._known() < 4 * KEEP * FPS < units / 3
        # As many slots of units and layers as are held, on host and device.
        for one in (session, whole):
            state: Any = one._live.state  # type: ignore[union-attr]
            one._rest()
            assert state.store.table.slot.shape[1] < 4 * KEEP * FPS
            assert state.prefetcher._tables.shape[1] < 4 * KEEP * FPS + WINDOW + 2
        assert held(session) == held(whole)
        if KEEPERS[kv]["frames"] == ALL:
            assert torch.equal(first(session), first(whole))
            now = session.seconds
            assert torch.equal(first(session, (now - 5, now - 2)), first(whole, (now - 5, now - 2)))
        answer = session.ask(QUESTION, 4)
        assert answer.evidence and all(one.seconds >= session.seconds - KEEP for one in answer.evidence)
        levels = session.clusters()
        for name, rows in levels.items():
            assert rows.shape == whole.clusters()[name].shape
            kept = {session.shown.index(second) for second in held(session)}
            old = [unit for unit in range(units - WINDOW) if unit not in kept]
            assert (rows[:, sorted(kept)] >= 0).all() and (rows[:, old[:-200]] == -1).all()
        # A hierarchy that is read back is checked: its clusters, their units and their parents.
        with resumed(session, tmp_path / "s") as again:
            assert again.ask(QUESTION, 4).evidence == answer.evidence
            for one in (again, session):
                one.watch(film(COUNT), fps=FPS)
            assert torch.equal(first(again), first(session))
        before = first(session)
        with pytest.raises(ModelError, match="they must rise"):
            session.watch(film(30), times=[session.seconds + 1 + i % 20 for i in range(30)])
        assert torch.equal(first(session), before)


def test_the_memory_of_a_draft_lets_go_too() -> None:
    model, processor = pair("tiny-ov")
    kv = {**KEEPERS["rekv"], "keep_seconds": KEEP}
    fields = {"name": "sequential", "model": "tiny-ov-draft", "kv": kv}
    with mmaccel.VideoSession(model, processor, None, kv=kv, draft=fields) as session:
        for begin in range(0, COUNT, 10):
            session.watch(film(COUNT)[begin : begin + 10], fps=FPS)
        own: Any = session._live.draft_stream.stream  # type: ignore[union-attr]
        assert own._live.state.store.units(0) == session._live.state.store.units(0)  # type: ignore[union-attr]
        assert session.ask(QUESTION, 4).ids and session.report().draft["failed"] is None


def test_a_question_that_is_refused_leaves_letting_go_on() -> None:
    """It is refused between the snapshot and the question itself."""
    found = []
    for refused in (False, True):
        with open_session("random-ov", {**KEEPERS["rekv"], "keep_seconds": KEEP}) as session:
            session.watch(film(COUNT)[:20], fps=FPS)
            if refused:
                with pytest.raises(ModelError, match="positions"):
                    session.ask("word " * 40000, 2)
            for begin in range(20, COUNT, 5):
                session.watch(film(COUNT)[begin : begin + 5], fps=FPS)
            found.append((held(session)[0], session.counters()["let_go"]))
    assert found[0] == found[1] and found[0][0] > 10


def test_a_watch_that_is_undone_has_let_nothing_go() -> None:
    with open_session("random-ov", {**KEEPERS["rekv"], "keep_seconds": KEEP}) as session:
        session.watch(film(COUNT)[:20], fps=FPS)
        before = held(session), session.frames, list(session.events)

        def clips(video: Any, fps: Any, check: Any) -> Any:
            yield Clip(film(COUNT)[20:26], None, None, part=True)
            raise RuntimeError("damaged")

        adapter: Any = session._stream_adapter
        adapter.iterate_clips = clips
        with pytest.raises(RuntimeError, match="damaged"):
            session.watch("film.mp4", times=[1000.0 + n for n in range(12)])
        assert (held(session), session.frames, list(session.events)) == before
