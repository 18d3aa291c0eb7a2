"""A draft that cannot keep up with a stream, or does not pay, pauses and says so; none outlasts its call's deadline."""

from __future__ import annotations

import time
import warnings
from typing import Any

import pytest

from mmaccel.core.errors import MmaccelWarning
from mmaccel.core.streams import stream_runner
from mmaccel.core.streams.draft_stream import LocalDraftStream
from mmaccel.policies.draft import Parallel, Sequential, parallel
from tests.models.streams import FPS, QUESTION, every_stream, film, open_session, pair

NAME, TOKENS = "random-ov", 14
MOSAIC = every_stream(frames=6, window=8)["mosaic"]


def opened(draft: Any) -> Any:
    return open_session(NAME, MOSAIC, draft=draft, chunk=64)


def agreeing() -> Sequential:
    return Sequential(model=pair(NAME)[0], window=3)


def slowed(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    take = LocalDraftStream.take

    def slow(self: LocalDraftStream, *given: Any) -> None:
        time.sleep(seconds)
        take(self, *given)

    monkeypatch.setattr(LocalDraftStream, "take", slow)


def test_a_draft_that_holds_up_the_stream_is_put_to_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    with opened("off") as quiet:
        quiet.watch(film(18), fps=FPS)
        want = quiet.ask(QUESTION, TOKENS)
    slowed(monkeypatch, 0.4)
    with opened(agreeing()) as session, warnings.catch_warnings():
        warnings.simplefilter("error", MmaccelWarning)  # what is slow for a moment keeps its draft
        session.watch(film(18)[:2], fps=FPS)
        monkeypatch.setattr(stream_runner, "SLOW_S", 1.0)
        with pytest.warns(MmaccelWarning, match=r"goes on without a draft .*held up the stream.*cheaper kv"):
            session.watch(film(18)[2:], fps=FPS)
        answer = session.ask(QUESTION, TOKENS)
        assert answer.ids == want.ids and "drafted" not in answer.counters and len(session) == 18
        assert "held up the stream" in session.report().draft["failed"]


def test_a_target_that_is_as_slow_keeps_its_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_runner, "SLOW_S", 0.0)
    monkeypatch.setattr(stream_runner, "SLOW", 1e6)
    slowed(monkeypatch, 0.05)
    with opened(agreeing()) as session:
        session.watch(film(18), fps=FPS)
        assert session.ask(QUESTION, TOKENS).counters["drafted"] > 0


def test_watching_ends_at_its_timeout_with_a_slow_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    slowed(monkeypatch, 0.2)
    with opened(agreeing()) as session:
        began = time.monotonic()
        with pytest.warns(MmaccelWarning, match="reached its timeout"):
            taken = session.watch(film(25), fps=FPS, timeout=1.0)
        assert time.monotonic() - began < 3.0  # of five seconds that the draft would take
        assert 0 < taken == len(session) < 25
        live = session._live
        assert live.beside.stream._live.info.times == live.info.times


def test_a_draft_reads_no_longer_than_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    read = LocalDraftStream.read
    with opened(agreeing()) as session, warnings.catch_warnings():
        warnings.simplefilter("error", MmaccelWarning)
        session.watch(film(18), fps=FPS)
        whole = session.ask(QUESTION, TOKENS)

        def ending(self: LocalDraftStream, *given: Any) -> Any:
            session.cancel()
            return read(self, *given)

        monkeypatch.setattr(LocalDraftStream, "read", ending)
        answer = session.ask(QUESTION, TOKENS)
        assert answer.finish_reason == "cancelled" and answer.ids == whole.ids[:2]
        assert session.report().draft["failed"] is None
        monkeypatch.setattr(LocalDraftStream, "read", read)
        again = session.ask(QUESTION, TOKENS)
        assert again.ids == whole.ids and again.counters["drafted"] == whole.counters["drafted"] > 0


def test_a_draft_that_does_not_pay_rests_on_a_stream_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "best_window", lambda *given: (1, 0.9))
    with opened("off") as quiet, opened(Parallel(model=pair(NAME)[0], process=False)) as session:
        for one in (quiet, session):
            one.watch(film(18), fps=FPS)
        assert session.ask(QUESTION, 60).ids == quiet.ask(QUESTION, 60).ids
        report = session.report()
        assert report.draft["counters"]["pauses"] > 0 and "draft: paused" in str(report)
