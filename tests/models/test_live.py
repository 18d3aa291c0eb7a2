"""A stream under asyncio, and a standing question: each says what a session says at the same moment."""

import asyncio
import functools
import gc
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import mmaccel
from mmaccel.core.errors import MmaccelWarning, ModelError
from mmaccel.core.files import checkpoint_io
from mmaccel.core.streams import session_io
from mmaccel.core.streams.standing import AnswerChange, StandingQuestion
from mmaccel.media import Video
from tests.models.streams import FPS, QUESTION, every_stream, film, open_session, pair
from tests.spies import heard, until

TIGHT = every_stream(frames=4, window=6)


def open_live(name: str, kv: Any, **choices: Any) -> mmaccel.AsyncVideoSession:
    return mmaccel.AsyncVideoSession(*pair(name), None, kv=kv, **choices)


def in_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test that awaits, for a minute at most."""

    @functools.wraps(test)
    def run(**given: Any) -> None:
        asyncio.run(asyncio.wait_for(test(**given), 60))

    return run


@in_a_loop
async def test_answers_are_those_of_a_session(tmp_path: Path) -> None:
    with open_session("random-qwen", TIGHT["rekv"], 9) as session:
        whole = session.ask(QUESTION, 8)
    async with open_live("random-qwen", TIGHT["rekv"]) as session:
        assert await session.watch(film(9), fps=FPS) == 9 == session.frames
        reply = session.ask(QUESTION, 8)
        pieces = [piece async for piece in reply]
        assert reply.answer is not None and reply.answer.ids == whole.ids and len(pieces) > 1
        assert "".join(pieces).strip() == whole.text == (await session.ask(QUESTION, 8)).text
        await session.save(tmp_path / "saved")
    again = await mmaccel.AsyncVideoSession.resume(*pair("random-qwen"), tmp_path / "saved")
    async with again:
        assert (await again.ask(QUESTION, 8)).ids == whole.ids and again.seconds == 4.0
        assert await again.ingest(film(4), fps=FPS) == 4
    with pytest.raises(ModelError, match="closed"):
        await again.watch(film(2))


@in_a_loop
async def test_errors_come_to_who_waits() -> None:
    async with open_live("random-ov", TIGHT["rekv"]) as session:
        with pytest.raises(ModelError, match="has seen no frame"):
            await session.ask(QUESTION)
        with pytest.raises(ModelError, match="max_new_tokens"):
            session.ask(QUESTION, 0)
        with pytest.raises(ModelError, match="no frames"):
            await session.watch([])
        await session.watch(film(2), fps=FPS)
        with pytest.raises(ModelError, match="temperatur: it is no setting"):
            await session.ask(QUESTION, temperatur=1)


def one_by_one(frames: Any, go: threading.Event) -> Iterator[Any]:
    """Clips of a frame each, from when `go` is set."""
    assert go.wait(10)
    for n, frame in enumerate(frames):
        yield Video(frame[None], torch.tensor([n / FPS], dtype=torch.float64), FPS, FPS, 1 / FPS)


@in_a_loop
async def test_a_question_waits_for_the_first_frame_of_a_watch() -> None:
    """The task that watches has not run when the question is asked, and its source is silent for a while."""
    go = threading.Event()
    async with open_live("random-ov", TIGHT["rekv"]) as session:
        assert len(session) == 0 and session
        task = asyncio.create_task(session.watch(one_by_one(film(5), go), fps=FPS))
        asyncio.get_running_loop().call_later(0.3, go.set)
        assert (await session.ask(QUESTION, 4)).ids
        assert await task == 5 == len(session)


@in_a_loop
async def test_a_question_before_the_first_frame_ends_by_its_deadline() -> None:
    go = threading.Event()
    async with open_live("random-ov", TIGHT["rekv"]) as session:
        task = asyncio.create_task(session.watch(one_by_one([], go), fps=FPS))
        assert (await session.ask(QUESTION, timeout=0.2)).finish_reason == "timeout"
        reply = session.ask(QUESTION)
        await reply.aclose()
        assert (await reply).finish_reason == "cancelled"
        late = asyncio.ensure_future(session.ask(QUESTION)._whole())
        asyncio.get_running_loop().call_later(0.2, go.set)
        with pytest.raises(ModelError, match="has seen no frame"):  # for none came
            await late
        assert await task == 0


def test_a_thread_asks_before_the_first_frame() -> None:
    """Each of both ways to ask waits; the thread that takes in frames itself, before its first one, gets an error."""
    go = threading.Event()
    with open_session("random-ov", TIGHT["rekv"]) as session, ThreadPoolExecutor(1) as other:
        late = other.submit(session.watch, one_by_one(film(3), go), fps=FPS)
        while not session._feeds:
            time.sleep(0.01)
        pieces = session.ask(QUESTION, 4, stream=True)
        threading.Timer(0.2, go.set).start()
        assert session.ask(QUESTION, 4).ids and "".join(pieces) and late.result(10) == 3

    def asks() -> Iterator[Any]:
        session.ask(QUESTION, 4)
        yield from ()

    with (
        open_session("random-ov", TIGHT["rekv"]) as session,
        pytest.raises(ModelError, match="has seen no frame"),
    ):
        session.watch(asks(), fps=FPS)


@in_a_loop
async def test_cancelling_a_watch_keeps_what_was_read() -> None:
    async with open_live("random-ov", TIGHT["rekv"], chunk=64) as session:
        seen = asyncio.Event()
        loop = asyncio.get_running_loop()
        task = asyncio.ensure_future(
            session.watch(film(25), fps=FPS, progress=lambda done, _: loop.call_soon_threadsafe(seen.set))
        )
        await seen.wait()
        task.cancel()
        with pytest.warns(MmaccelWarning, match="cancelled"), pytest.raises(asyncio.CancelledError):
            await task
        assert 0 < session.frames < 25
        await session.watch(film(2), fps=FPS)  # and what follows runs as usual


@in_a_loop
async def test_who_reads_no_further_ends_the_answer() -> None:
    """By closing the reply, by cancelling the task, or by leaving it to the collector."""
    async with open_live("random-qwen", TIGHT["rekv"]) as session:
        await session.watch(film(9), fps=FPS)
        reply = session.ask(QUESTION, 4000)
        async for _ in reply:
            break
        await reply.aclose()
        assert (await reply).finish_reason == "cancelled"
        answer = asyncio.ensure_future(session.ask(QUESTION, 4000)._whole())
        await asyncio.sleep(0.2)
        answer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await answer
        async for _ in session.ask(QUESTION, 4000):
            break
        gc.collect()
        assert (await asyncio.wait_for(session.ask(QUESTION, 2)._whole(), 5)).ids


def test_wrong_frames_are_told_beside_an_answer() -> None:
    """What changed nothing is not taken back, and so waits for no answer."""
    with open_session("random-ov", TIGHT["rekv"], 4) as session:
        with session._asking.hold(), ThreadPoolExecutor(1) as other:
            late = other.submit(session.watch, film(2), [0.0, 1.0])
            with pytest.raises(ModelError, match="be later than"):
                late.result(5)
        assert session.frames == 4


def test_a_call_waits_for_a_clip_of_another_by_its_deadline() -> None:
    with (
        open_session("random-ov", TIGHT["rekv"]) as session,
        session._stream.hold(),
        ThreadPoolExecutor(1) as other,
    ):
        late = other.submit(session.watch, film(2), fps=FPS, timeout=0.2)
        with pytest.warns(MmaccelWarning, match="timeout"):
            assert late.result(5) == 0


def test_waiting_is_told_apart_from_work_and_figures_are_read_between_passes() -> None:
    """Frames that come while another thread has the model wait for it; a server leaves that out of their cost."""
    with open_session("random-ov", TIGHT["rekv"]) as session, ThreadPoolExecutor() as pool:
        assert session.waited_s < 0.1
        session.watch(film(2), fps=FPS)
        before = session.waited_s
        with session._stream_adapter.turns.hold():
            taken = pool.submit(session.watch, film(2), fps=FPS)
            wait([taken], 0.3)
        assert taken.result() == 2 and 0.15 < session.waited_s - before < 10
        # Figures are read between passes.
        with session._stream_adapter.turns.hold():
            reads = [pool.submit(session.counters), pool.submit(session.clusters)]
            assert not wait(reads, 0.2).done
        assert reads[0].result(5)["bytes"] and reads[1].result(5) is not None


def test_the_disk_leaves_the_model_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another session may use the model while files of a save are written, and checksums of a save or of a load are made."""
    held = list[Any]()
    with open_session("random-ov", TIGHT["rekv"], 4) as session:
        turns = session._stream_adapter.turns
        for place, name in ((session_io, "_print_of"), (checkpoint_io, "_write_file")):
            heard(monkeypatch, place, name, lambda *_: held.append(turns._holder))
        session.save(tmp_path)
        saved = len(held)
        session.load(tmp_path)
    assert 0 < saved < len(held) and set(held) == {None}


KV = every_stream(frames=4, window=6)["mosaic"]
WHERE, EVERY, LAST = "what is the colour ?", 1.0, 3.0


def settle(standing: StandingQuestion, seconds: float) -> None:
    """Until it was asked of all that is due."""
    until(lambda: standing.failed or not (standing.asked is None or seconds - standing.asked >= EVERY))
    assert standing.failed is None


@functools.cache
def by_hand() -> list[tuple[float, str]]:
    """What a session that is asked by hand says, and when."""
    said = list[tuple[float, str]]()
    with open_session("tiny-ov", KV) as session:
        for frame in film(25).split(1):
            session.watch(frame, fps=2.0)
            now = session.seconds
            if not said or now - said[-1][0] >= EVERY:
                said.append((now, session.ask(WHERE, 4, between=(now - LAST, now)).text))
    return said


def turning(says: str | None = None) -> list[tuple[float, str | None, str]]:
    """When the answer turns by hand."""
    found, before = list[tuple[float, str | None, str]](), None
    for now, text in by_hand():
        if (text != before) if says is None else (says in text and says not in (before or "")):
            found.append((now, before, text))
        before = text
    return found


def test_a_clip_of_many_passes_is_asked_about_pass_by_pass() -> None:
    """The seconds of a stream are those of frames that its memory has: `last` finds some at any moment."""
    told = list[tuple[int, float]]()
    with open_session("tiny-ov", KV, chunk=64) as session:
        standing = session.on(WHERE, lambda change: None, every=EVERY, last=LAST, max_new_tokens=1)
        session.watch(film(48), fps=2.0, progress=lambda done, total: told.append((done, session.seconds)))
        settle(standing, session.seconds)
    assert len(told) > 4 and all(seconds == (done - 1) / 2 for done, seconds in told)


@pytest.mark.parametrize("says", [None, "some"])
def test_it_is_told_of_what_turns(says: str | None) -> None:
    says = None if says is None else turning()[-1][2]
    told: list[AnswerChange] = []
    with open_session("tiny-ov", KV) as session:
        given: dict[str, Any] = {"every": EVERY, "last": LAST, "says": says, "max_new_tokens": 4}
        standing = session.on(WHERE, told.append, **given)
        for frame in film(25).split(1):
            session.watch(frame, fps=2.0)
            settle(standing, session.seconds)
        standing.cancel()
        assert session.on(WHERE, told.append).failed is None
    expected = turning(says)
    assert len(expected) >= (1 if says else 2)
    assert [(one.seconds, one.before, one.answer.text) for one in told] == expected
    for one in told:
        assert one.answer.evidence
        assert all(one.seconds - LAST <= e.seconds <= one.seconds for e in one.answer.evidence)


def test_an_error_ends_it_with_a_word() -> None:
    with open_session("tiny-ov", KV) as session:
        with pytest.raises(ModelError, match="every: 0"):
            session.on(WHERE, print, every=0)
        with pytest.raises(ModelError, match="it is empty"):
            session.on(" ", print)
        standing = session.on(WHERE, Mock(side_effect=ZeroDivisionError("no")), max_new_tokens=2)
        with pytest.warns(MmaccelWarning, match="ended: no"):
            session.watch(film(2), fps=2.0)
            standing._thread.join(20)
        assert isinstance(standing.failed, ZeroDivisionError)
        with pytest.raises(ModelError, match="call: None; give a function"):
            session.on(WHERE, None)  # type: ignore[arg-type]
        with pytest.raises(ModelError, match="max_new_tokens: 0"):
            session.on(WHERE, print, max_new_tokens=0)


def test_a_change_has_the_seconds_that_its_answer_saw() -> None:
    """Frames that came while it waited for its turn are in it, and in its seconds; what was due meanwhile is counted."""
    told = list[AnswerChange]()
    with open_session("tiny-ov", KV) as session:
        standing = session.on(WHERE, told.append, every=EVERY, max_new_tokens=1)
        with session._asking.hold():  # as while another question is read
            for frame in film(7).split(1):
                session.watch(frame, fps=2.0)
                until(lambda: standing._due is not None)
        until(lambda: bool(told))
        assert [one.seconds for one in told] == [3.0] and standing.skipped == 3
        assert max(one.seconds for one in told[0].answer.evidence) == 3.0


@pytest.mark.parametrize("kv", TIGHT)
@in_a_loop
async def test_usage_is_read_while_a_pass_is_under_way(kv: str) -> None:
    async with open_live("random-ov", TIGHT[kv]) as session:
        await session.watch(film(9), fps=FPS)
        await session.ask(QUESTION, 2)
        wanted = session.counters()
        with session.session._stream_adapter.turns.hold():
            read = await asyncio.to_thread(session.usage)
        assert read == {name: wanted[name] for name in read}
        assert {"bytes", "host_bytes", "host_disk_bytes", "questions"} & {*wanted} <= {*read}


@in_a_loop
async def test_a_coroutine_is_awaited_in_the_loop() -> None:
    async with mmaccel.AsyncVideoSession(*pair("tiny-ov"), None, kv=KV) as session:
        came: asyncio.Queue[Any] = asyncio.Queue()
        session.on(WHERE, came.put, max_new_tokens=2)
        session.on(WHERE, came.put_nowait, max_new_tokens=2)
        await session.watch(film(3), fps=2.0)
        assert [(await asyncio.wait_for(came.get(), 20)).before for _ in range(2)] == [None, None]
        session.session._answer = Mock(side_effect=ModelError("no"))  # type: ignore[method-assign]
        session.on(WHERE, print, fails=came.put)
        await session.watch(film(1), fps=2.0)
        assert str(await asyncio.wait_for(came.get(), 20)) == "no"


@in_a_loop
async def test_what_was_found_before_the_close_is_told() -> None:
    """Also where telling it takes a while."""
    told, found = list[str](), threading.Event()

    async def slowly(change: AnswerChange) -> None:
        found.set()
        await asyncio.sleep(0.2)
        told.append(change.answer.text)

    async with mmaccel.AsyncVideoSession(*pair("tiny-ov"), None, kv=KV) as session:
        session.on(WHERE, slowly, max_new_tokens=2)
        await session.watch(film(3), fps=2.0)
        assert await asyncio.to_thread(found.wait, 20)
    assert told and told[0]
