"""Turns are given in the order in which threads asked, and back to who gave way."""

import threading
import time

import pytest

from mmaccel.core.decoding.generate import Deadline, Ended
from mmaccel.core.streams import parts
from mmaccel.core.streams.parts import FairLock
from tests.spies import beside, finish


def until(turns: FairLock, waiting: int) -> None:
    end = time.monotonic() + 10
    while len(turns._waiting) < waiting:
        assert time.monotonic() < end
        time.sleep(0.001)


def test_turns_come_in_the_order_of_asking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "PATIENCE_S", 60.0)
    turns, order = FairLock(), list[str]()

    def work(name: str) -> None:
        with turns.holding():
            order.append(name)

    with turns.holding(), turns.holding():
        threads = []
        for number, name in enumerate("abc"):
            threads += beside(lambda name=name: work(name))
            until(turns, number + 1)
        turns.yield_lock()
        order.append("first")
        assert order == ["a", "b", "c", "first"]
        threads += beside(lambda: work("d"))
        until(turns, 1)
    finish(threads)
    assert order[-1] == "d" and turns._holder is None


def test_passes_wait_for_what_is_short_and_for_new_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A question comes before a new pass, not before an old one; what another has done is not waited for."""
    turns, order, done = FairLock(), list[str](), threading.Event()

    def work(name: str, **how: object) -> None:
        with turns.holding(**how):
            order.append(name if turns._holder == threading.get_ident() else f"{name} is over")
            if name == "pass":
                done.set()

    with turns.holding():
        threads = []
        ends = {name: {"over": done.is_set} for name in ("pass", "other")}
        begins = {
            name: {"ahead": ahead} for name, ahead in (("question", 60.0), ("short", 50.0), ("late", 0.0))
        }
        for number, (name, how) in enumerate({**ends, "plain": {}, **begins}.items()):
            threads += beside(lambda name=name, how=how: work(name, **how))
            until(turns, number + 1)
    finish(threads)
    assert order[:3] == ["question", "short", "pass"] and turns._holder is None
    assert sorted(order[3:]) == ["late", "other is over", "plain"]


def test_who_holds_nothing_gives_no_way() -> None:
    turns = FairLock()
    turns.yield_lock()
    with turns.holding():
        turns.yield_lock()
        assert turns._holder == threading.get_ident()
    assert turns._holder is None


def test_one_pass_at_a_time_stands_still() -> None:
    """The pass that stands still is gone on with before another one would stand still."""
    turns, order = FairLock(), list[str]()

    def inner() -> None:
        with turns.holding():
            beside(third)
            until(turns, 2)
            turns.yield_lock(inside=True)
            order.append("inner")

    def third() -> None:
        with turns.holding():
            order.append("third")

    with turns.holding():
        threads = beside(inner)
        until(turns, 1)
        turns.yield_lock(inside=True)
        order.append("outer")
        turns.yield_lock(inside=True)
    finish(threads)
    assert order == ["inner", "outer", "third"]


def test_a_deadline_ends_the_wait_and_leaves_the_queue() -> None:
    turns, ended = FairLock(), list[str]()

    def late() -> None:
        try:
            with turns.holding(Deadline(0.05)):
                ended.append("held")
        except Ended as end:
            ended.append(end.reason)

    with turns.holding():
        finish(beside(late))
        assert ended == ["timeout"] and not turns._waiting
    with pytest.raises(Ended):
        deadline = Deadline()
        deadline.cancel()
        with turns.holding(deadline):
            pass
    with turns.holding(Deadline(5)) as waited:
        assert waited < 1


def test_many_threads_lose_no_turn() -> None:
    turns, counts = FairLock(), [0]

    def work() -> None:
        for _ in range(200):
            with turns.holding(Deadline(30)):
                seen = counts[0]
                turns.yield_lock()
                counts[0] = counts[0] + 1
                assert counts[0] > seen

    finish(beside(*[work] * 8))
    assert counts == [1600] and turns._holder is None and not turns._waiting


def test_a_pass_stands_still_for_tokens_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits for something else waits for the pass's end, whoever asked first."""
    monkeypatch.setattr(parts, "PATIENCE_S", 0.0)
    turns, order = FairLock(), list[str]()

    def other() -> None:
        with turns.holding():
            order.append("other")

    def tokens() -> None:
        with turns.holding(token=True):
            order.append("token")
            turns.yield_lock()
            order.append("token")
            turns.wait_for_paused_pass()
            order.append("answered")

    with turns.holding():
        threads = beside(other)
        until(turns, 1)
        threads += beside(tokens)
        until(turns, 2)
        for _ in range(3):  # to the first token, to the second, and to nobody
            turns.yield_to_answers()
            order.append("layer")
    finish(threads)
    assert order == ["token", "layer", "token", "layer", "layer", "other", "answered"]
    assert turns._holder is None and turns._still is None


def test_a_pass_above_one_that_stands_still_lets_tokens_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """What passes put on a model is taken back in order: the lower one waits for the end of the upper one."""
    monkeypatch.setattr(parts, "PATIENCE_S", 0.0)
    turns, order = FairLock(), list[str]()

    def upper() -> None:
        with turns.holding():
            threads.extend(beside(token))
            until(turns, 2)
            turns.yield_lock(inside=True)
            order.append("upper")

    def token() -> None:
        with turns.holding(token=True):
            order.append("token")

    threads = list[threading.Thread]()
    with turns.holding():
        threads += beside(upper)
        until(turns, 1)
        turns.yield_lock(inside=True)
        order.append("lower")
    finish(threads)
    assert order == ["token", "upper", "lower"]


def test_a_token_does_not_wait_for_all_who_asked_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that waits for too long is next, and then whoever asked first: neither has to wait for ever."""
    monkeypatch.setattr(parts, "PATIENCE_S", 0.0)
    turns, order = FairLock(), list[str]()

    def work(name: str) -> None:
        with turns.holding(token=name == "token"):
            order.append(name)

    threads = []
    with turns.holding():
        for number, name in enumerate(("a", "b", "token", "token", "c")):
            threads += beside(lambda name=name: work(name))
            until(turns, number + 1)
    finish(threads)
    assert order == ["token", "a", "token", "b", "c"]
    monkeypatch.setattr(parts, "PATIENCE_S", 60.0)
    order.clear()
    with turns.holding():
        threads = beside(lambda: work("a"))
        until(turns, 1)
        threads += beside(lambda: work("token"))
        until(turns, 2)
        turns.yield_to_answers()  # none has waited for long
        order.append("pass")
    finish(threads)
    assert order == ["pass", "a", "token"]
