"""A stream under asyncio: what is awaited is what a session says, and a task that is cancelled ends its pass."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest

import mmaccel
from mmaccel.core.errors import MmaccelWarning, ModelError
from mmaccel.core.streams import session_io
from tests.models.streams import FPS, QUESTION, every_stream, film, open_session, pair

TIGHT = every_stream(frames=4, window=6)


def open_live(name: str, kv: Any, **choices: Any) -> mmaccel.AsyncVideoSession:
    return mmaccel.AsyncVideoSession(*pair(name), None, kv=kv, **choices)


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 60))


def test_answers_are_those_of_a_session(tmp_path: Path) -> None:
    with open_session("random-ov", TIGHT["rekv"]) as session:
        session.watch(film(9), fps=FPS)
        whole = session.ask(QUESTION, 8)

    async def live() -> None:
        async with open_live("random-ov", TIGHT["rekv"]) as session:
            assert await session.watch(film(9), fps=FPS) == 9 == session.frames
            reply = session.ask(QUESTION, 8)
            pieces = [piece async for piece in reply]
            assert reply.answer is not None and reply.answer.ids == whole.ids and len(pieces) > 1
            assert "".join(pieces).strip() == whole.text == (await session.ask(QUESTION, 8)).text
            await session.save(tmp_path / "saved")
        again = await mmaccel.AsyncVideoSession.resume(*pair("random-ov"), tmp_path / "saved")
        async with again:
            assert (await again.ask(QUESTION, 8)).ids == whole.ids and again.seconds == 4.0
            assert await again.ingest(film(4), fps=FPS) == 4
        with pytest.raises(ModelError, match="closed"):
            await again.watch(film(2))

    run(live())


def test_errors_come_to_who_waits() -> None:
    async def live() -> None:
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

    run(live())


def test_cancelling_a_watch_keeps_what_was_read() -> None:
    async def live() -> None:
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

    run(live())


def test_closing_a_reply_ends_the_answer() -> None:
    async def live() -> None:
        async with open_live("random-ov", TIGHT["rekv"]) as session:
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
            assert (await session.ask(QUESTION, 2)).ids

    run(live())


def test_leaving_a_reply_ends_the_answer() -> None:
    async def live() -> None:
        async with open_live("random-ov", TIGHT["rekv"]) as session:
            await session.watch(film(9), fps=FPS)
            async for _ in session.ask(QUESTION, 4000):
                break
            gc.collect()
            assert (await session.ask(QUESTION, 2)).ids

    asyncio.run(asyncio.wait_for(live(), 5))


def test_wrong_frames_are_told_beside_an_answer() -> None:
    """What changed nothing is not taken back, and so waits for no answer."""
    with open_session("random-ov", TIGHT["rekv"]) as session:
        session.watch(film(4), fps=FPS)
        with session._asking.holding(), ThreadPoolExecutor(1) as other:
            late = other.submit(session.watch, film(2), [0.0, 1.0])
            with pytest.raises(ModelError, match="be later than"):
                late.result(5)
        assert session.frames == 4


def test_a_call_waits_for_a_clip_of_another_by_its_deadline() -> None:
    with (
        open_session("random-ov", TIGHT["rekv"]) as session,
        session._stream.holding(),
        ThreadPoolExecutor(1) as other,
    ):
        late = other.submit(session.watch, film(2), fps=FPS, timeout=0.2)
        with pytest.warns(MmaccelWarning, match="timeout"):
            assert late.result(5) == 0


def test_waiting_is_told_apart_from_work() -> None:
    """Frames that come while another thread has the model wait for it; a server leaves that out of their cost."""
    with open_session("random-ov", TIGHT["rekv"]) as session, ThreadPoolExecutor() as pool:
        assert session.waited_s < 0.1
        session.watch(film(2), fps=FPS)
        before = session.waited_s
        with session._stream_adapter.turns.holding():
            taken = pool.submit(session.watch, film(2), fps=FPS)
            wait([taken], 0.3)
        assert taken.result() == 2 and 0.15 < session.waited_s - before < 10


def test_figures_are_read_between_passes() -> None:
    with open_session("random-ov", TIGHT["rekv"]) as session, ThreadPoolExecutor(2) as other:
        session.watch(film(4), fps=FPS)
        with session._stream_adapter.turns.holding():
            reads = [other.submit(session.counters), other.submit(session.clusters)]
            assert not wait(reads, 0.2).done
        assert reads[0].result(5)["bytes"] and reads[1].result(5) is not None


def test_the_disk_leaves_the_model_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another session may use the model while checksums of a save or of a load are made."""
    real, held = session_io._print_of, list[Any]()
    with open_session("random-ov", TIGHT["rekv"]) as session:
        session.watch(film(4), fps=FPS)
        turns = session._stream_adapter.turns
        monkeypatch.setattr(
            session_io, "_print_of", lambda *given: (held.append(turns._holder), real(*given))[1]
        )
        session.save(tmp_path)
        saved = len(held)
        session.load(tmp_path)
    assert 0 < saved < len(held) and set(held) == {None}
