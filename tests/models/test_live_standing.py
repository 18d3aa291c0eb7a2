"""A standing question is asked at its rate, and told of when its answer turns, as asking at the same moments shows."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

import mmaccel
from mmaccel.core.errors import MmaccelWarning, ModelError
from mmaccel.core.streams.standing import Change, Standing
from tests.models.streams import every_stream, film, open_session, pair

KV = every_stream(frames=4, window=6)["mosaic"]
QUESTION, EVERY, LAST = "what is the colour ?", 1.0, 3.0


def settle(standing: Standing, seconds: float) -> None:
    """Until it was asked of all that is due."""
    end = time.monotonic() + 30
    while standing.asked is None or seconds - standing.asked >= EVERY:
        assert time.monotonic() < end and standing.failed is None
        time.sleep(0.005)


def turns(says: str | None = None) -> list[tuple[float, str | None, str]]:
    """When the answer turns, as a session that is asked by hand says."""
    found, before, asked = list[tuple[float, str | None, str]](), None, None
    with open_session("tiny-ov", KV) as session:
        for frame in film(25).split(1):
            session.watch(frame, fps=2.0)
            now = session.seconds
            if asked is None or now - asked >= EVERY:
                text, asked = session.ask(QUESTION, 4, between=(now - LAST, now)).text, now
                if (text != before) if says is None else (says in text and says not in (before or "")):
                    found.append((now, before, text))
                before = text
    return found


@pytest.mark.parametrize("says", [None, "some"])
def test_it_is_told_of_what_turns(says: str | None) -> None:
    says = None if says is None else turns()[-1][2]
    told: list[Change] = []
    with open_session("tiny-ov", KV) as session:
        given: dict[str, Any] = {"every": EVERY, "last": LAST, "says": says, "max_new_tokens": 4}
        standing = session.on(QUESTION, told.append, **given)
        for frame in film(25).split(1):
            session.watch(frame, fps=2.0)
            settle(standing, session.seconds)
        standing.cancel()
        assert session.on(QUESTION, told.append).failed is None
    expected = turns(says)
    assert len(expected) >= (1 if says else 2)
    assert [(one.seconds, one.before, one.answer.text) for one in told] == expected
    for one in told:
        assert one.answer.evidence and all(
            one.seconds - LAST <= e.seconds <= one.seconds for e in one.answer.evidence
        )


def test_an_error_ends_it_with_a_word() -> None:
    def fails(turn: Change) -> None:
        raise ZeroDivisionError("no")

    with open_session("tiny-ov", KV) as session:
        with pytest.raises(ModelError, match="every: 0"):
            session.on(QUESTION, print, every=0)
        with pytest.raises(ModelError, match="it is empty"):
            session.on(" ", print)
        standing = session.on(QUESTION, fails, max_new_tokens=2)
        with pytest.warns(MmaccelWarning, match="ended: no"):
            session.watch(film(2), fps=2.0)
            standing._thread.join(20)
        assert isinstance(standing.failed, ZeroDivisionError)


def test_a_coroutine_is_awaited_in_the_loop() -> None:
    async def live() -> None:
        async with mmaccel.AsyncVideoSession(*pair("tiny-ov"), None, kv=KV) as session:
            came: asyncio.Queue[Change] = asyncio.Queue()
            session.on(QUESTION, came.put, max_new_tokens=2)
            session.on(QUESTION, came.put_nowait, max_new_tokens=2)
            await session.watch(film(3), fps=2.0)
            assert [(await asyncio.wait_for(came.get(), 20)).before for _ in range(2)] == [None, None]

    asyncio.run(live())
