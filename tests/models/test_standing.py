"""How standing questions end: by an error, with their session, with the program; and who waits for whom."""

import atexit
import gc
import importlib.util
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest

from mmaccel.core.errors import MmaccelWarning
from mmaccel.core.streams import standing as module
from mmaccel.core.streams.standing import AnswerChange
from tests.models.streams import every_stream, film, open_session
from tests.spies import until

KV = every_stream(frames=4, window=6)["mosaic"]
WHERE = "what is the colour ?"


def test_its_end_is_told_and_it_is_kept_no_longer() -> None:
    """`fails` gets the error in place of a warning."""
    told = list[Exception]()
    with open_session("tiny-ov", KV) as session:
        ended = session.on(WHERE, Mock(side_effect=ZeroDivisionError("no")), fails=told.append)
        cancelled = session.on(WHERE, print)
        cancelled.cancel()
        session.watch(film(2), fps=2.0)
        until(lambda: not session._standing and not module._running)
        assert told == [ended.failed] and cancelled.failed is None


def test_a_call_may_end_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda error: None)
    with open_session("tiny-ov", KV) as session:
        session.on(WHERE, Mock(side_effect=SystemExit))
        session.watch(film(2), fps=2.0)
        until(lambda: not session._standing and not module._running)


def test_a_session_that_is_dropped_without_a_close_is_freed() -> None:
    """Its questions end with it, also one that the user keeps, and one whose `call` knows the session."""
    told, session = list[AnswerChange](), open_session("tiny-ov", KV)
    kept, gone = session.on(WHERE, told.append, max_new_tokens=1), weakref.ref(session)
    others = session.on(WHERE, lambda change, of=session: told.append(change), max_new_tokens=1)._thread
    session.watch(film(2), fps=2.0)
    until(lambda: len(told) == 2)
    del session
    until(lambda: gc.collect() >= 0 and gone() is None)
    for thread in (kept._thread, others):
        thread.join(20)
        assert not thread.is_alive()
    assert kept.failed is None and not module._running


def test_a_program_that_ends_waits_for_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """One within the model while Python finalizes aborts the process."""
    at_exit, ended = list[Callable[[], None]](), list[Any]()
    monkeypatch.setattr(atexit, "register", at_exit.append)
    spec: Any = importlib.util.spec_from_file_location("again", module.__file__)
    again: Any = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "again", again)
    spec.loader.exec_module(again)
    again.end_questions = ended.append
    again._running |= {threading.Thread(): lambda: "one", threading.Thread(): lambda: None}
    at_exit[0]()
    assert ended == [["one"]]


def test_a_session_closes_behind_its_standing_questions() -> None:
    """A whole answer is told, with its evidence, and no thread is left in the model; also where `call` itself closes it."""
    told, held = list[AnswerChange](), threading.Event()

    def slowly(change: AnswerChange) -> None:
        held.set()
        time.sleep(0.1)
        told.append(change)

    with open_session("tiny-ov", KV) as session:
        standing = session.on(WHERE, slowly, max_new_tokens=1)
        session.watch(film(2), fps=2.0)
        assert held.wait(20)
    assert len(told) == 1 and told[0].answer.evidence and not standing._thread.is_alive()
    with open_session("tiny-ov", KV) as session:
        closing = session.on(WHERE, lambda change: session.close(), max_new_tokens=1)
        session.watch(film(2), fps=2.0)
        closing._thread.join(20)
        assert session._closed and closing.failed is None


def test_reports_that_close_each_other_s_sessions_end() -> None:
    both, meet = [open_session("tiny-ov", KV) for _ in range(2)], threading.Barrier(2)

    def stop_all(change: AnswerChange) -> None:
        meet.wait(20)
        for one in both:
            one.close()

    asked = [one.on(WHERE, stop_all, max_new_tokens=1) for one in both]
    for one in both:
        one.watch(film(2), fps=2.0)
    for each in asked:
        each._thread.join(20)
        assert not each._thread.is_alive()
    assert all(one._closed for one in both)


def test_a_close_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a report that waits for the thread that closes. A question that it begins meanwhile ends too."""
    monkeypatch.setattr(module, "EXIT_S", 0.3)
    session, over, begun = open_session("tiny-ov", KV), threading.Event(), list[Any]()

    def waits(change: AnswerChange) -> None:
        begun.append(session.on("And now?", print))
        over.wait(20)

    standing = session.on(WHERE, waits, max_new_tokens=1)
    session.watch(film(2), fps=2.0)
    until(lambda: bool(begun))
    with pytest.warns(MmaccelWarning, match="has not returned within 0.3 s"):
        session.close()
    over.set()
    for one in (standing, *begun):
        one._thread.join(20)
        assert not one._thread.is_alive()


def test_it_goes_on_when_the_first_frames_are_taken_back() -> None:
    """An ingestion that ends early takes in nothing; the question is asked of what comes later."""
    told = list[AnswerChange]()
    with open_session("tiny-ov", KV) as session:
        standing = session.on(WHERE, told.append, max_new_tokens=1)

        def waits(done: int, total: int | None) -> None:
            if session.frames:
                standing.notify_frames()
                until(lambda: standing._due is not None)
                time.sleep(0.3)

        with pytest.warns(MmaccelWarning, match="reached its timeout"):
            assert session.ingest(film(6), fps=2.0, progress=waits, timeout=0.2) == 0
        until(lambda: standing._due is None)
        session.watch(film(2), fps=2.0)
        until(lambda: bool(told))
        assert standing.failed is None


def test_a_cancelled_ingestion_ends_no_other_session() -> None:
    """What its progress calls may run passes of the same model."""
    with open_session("tiny-ov", KV) as session, open_session("tiny-ov", KV) as other:
        taken = list[int]()

        def nested(done: int, total: int | None) -> None:
            if len(taken) < 3:
                session.cancel()
                taken.append(other.watch(film(2), fps=2.0))

        with pytest.warns(MmaccelWarning, match="was cancelled"):
            session.ingest(film(6), fps=2.0, progress=nested)
        assert taken and set(taken) == {2}
