"""Turns are given in the order of asking, and back to who gave way; of a message that leaves a thread nothing is kept."""

import gc
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from mmaccel.core.decoding.generate import CallEnded, Deadline
from mmaccel.core.decoding.worker import AsyncSender, Blob
from mmaccel.core.errors import DraftError
from mmaccel.core.streams import fair_lock
from mmaccel.core.streams.fair_lock import FairLock
from tests.spies import beside, broken, finish, until


class Asked:
    """A lock, the threads that have asked for it, and what they did, in order."""

    def __init__(self) -> None:
        self.turns, self.order, self.threads = FairLock(), list[str](), list[threading.Thread]()

    def __call__(self, work: str | Callable[[], None], **how: Any) -> None:
        """Another thread asks for the lock: to do `work`, or to note that name where it holds it."""

        def note() -> None:
            with self.turns.hold(**how):
                self.order.append(str(work))

        waiting = len(self.turns._waiting)
        self.threads += beside(note if isinstance(work, str) else work)
        until(lambda: len(self.turns._waiting) > waiting)

    def over(self) -> list[str]:
        finish(self.threads)
        assert self.turns._holder is None and self.turns._still is None
        return self.order


def test_turns_come_in_the_order_of_asking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_lock, "PATIENCE_S", 60.0)
    asked = Asked()
    with asked.turns.hold(), asked.turns.hold():
        for name in "abc":
            asked(name)
        asked.turns.yield_lock()
        asked.order.append("first")
        assert asked.order == ["a", "b", "c", "first"]
        asked("d")
    assert asked.over()[-1] == "d"


def test_passes_wait_for_what_is_short_and_for_new_questions() -> None:
    """A question comes before a new pass, not before an old one; what another has done is not waited for."""
    asked, done = Asked(), threading.Event()

    def work(name: str) -> None:
        with asked.turns.hold(over=done.is_set):
            asked.order.append(name if asked.turns._holder == threading.get_ident() else f"{name} is over")
            if name == "pass":
                done.set()

    with asked.turns.hold():
        asked(lambda: work("pass"))
        asked(lambda: work("other"))
        asked("plain")
        for name, ahead in (("question", 60.0), ("short", 50.0), ("late", 0.0)):
            asked(name, ahead=ahead)
    assert asked.over()[:3] == ["question", "short", "pass"]
    assert sorted(asked.order[3:]) == ["late", "other is over", "plain"]


def test_who_holds_nothing_gives_no_way() -> None:
    turns = FairLock()
    turns.yield_lock()
    with turns.hold():
        turns.yield_lock()
        assert turns._holder == threading.get_ident()
    assert turns._holder is None


@pytest.mark.parametrize(("token", "order"), [(False, "inner outer third"), (True, "third inner outer")])
def test_one_pass_stands_still_above_another(
    token: bool, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What passes put on a model is taken back in order, before another pass would stand still; tokens come between."""
    monkeypatch.setattr(fair_lock, "PATIENCE_S", 0.0)
    asked = Asked()

    def inner() -> None:
        with asked.turns.hold():
            asked("third", token=token)
            asked.turns.yield_lock(inside=True)
            asked.order.append("inner")

    with asked.turns.hold():
        asked(inner)
        asked.turns.yield_lock(inside=True)
        asked.order.append("outer")
        asked.turns.yield_lock(inside=True)
    assert asked.over() == order.split()


def test_a_deadline_ends_the_wait_and_leaves_the_queue() -> None:
    turns, ended = FairLock(), list[str]()

    def late() -> None:
        try:
            with turns.hold(Deadline(0.05)):
                ended.append("held")
        except CallEnded as end:
            ended.append(end.reason)

    with turns.hold():
        finish(beside(late))
        assert ended == ["timeout"] and not turns._waiting
    with pytest.raises(CallEnded):
        deadline = Deadline()
        deadline.cancel()
        with turns.hold(deadline):
            pass
    with turns.hold(Deadline(5)) as waited:
        assert waited < 1


def test_many_threads_lose_no_turn() -> None:
    turns, counts = FairLock(), [0]

    def work() -> None:
        for _ in range(200):
            with turns.hold(Deadline(30)):
                seen = counts[0]
                turns.yield_lock()
                counts[0] = counts[0] + 1
                assert counts[0] > seen

    finish(beside(*[work] * 8))
    assert counts == [1600] and turns._holder is None and not turns._waiting


def test_a_pass_stands_still_for_tokens_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits for something else waits for the pass's end, whoever asked first."""
    monkeypatch.setattr(fair_lock, "PATIENCE_S", 0.0)
    asked = Asked()

    def tokens() -> None:
        with asked.turns.hold(token=True):
            asked.order.append("token")
            asked.turns.yield_lock()
            asked.order.append("token")
            asked.turns.wait_for_paused_pass()
            asked.order.append("answered")

    with asked.turns.hold():
        asked("other")
        asked(tokens)
        for _ in range(3):  # to the first token, to the second, and to nobody
            asked.turns.yield_to_answers()
            asked.order.append("layer")
    assert asked.over() == ["token", "layer", "token", "layer", "layer", "other", "answered"]


def test_an_answer_pauses_for_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A question to a draft that is the model itself uses what its answer's steps use."""
    monkeypatch.setattr(fair_lock, "PATIENCE_S", 0.0)
    asked = Asked()
    with asked.turns.hold():
        asked("token", token=True)
        with asked.turns.answering():
            asked.turns.yield_to_answers()
        asked.order.append("answer")
        asked.turns.yield_to_answers()
        asked.order.append("pass")
    assert asked.over() == ["answer", "token", "pass"]


def test_who_reads_results_waits_for_the_device_and_tokens_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, done = Asked(), threading.Event()
    monkeypatch.setattr(torch.cuda, "Event", lambda: Mock(query=done.is_set))
    monkeypatch.setattr(torch.cuda, "current_stream", Mock())

    def read() -> None:
        with asked.turns.hold():
            asked.turns.wait_for_queue(torch.device("cuda"))
            asked.order.append("read")

    def token() -> None:
        with asked.turns.hold(token=True):
            asked.order.append("token")
            done.set()

    asked.threads += beside(read)
    until(lambda: asked.turns._holder is not None)
    asked("pass")
    asked.threads += beside(token)
    assert asked.over() == ["token", "read", "pass"]


def test_passes_wait_for_the_device_and_nobody_else_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the device has two passes to run, tokens and questions get turns, and a pass only when the first is done."""

    class Launched:
        def __init__(self) -> None:
            self.done = threading.Event()
            self.query, self.record, self.synchronize = self.done.is_set, Mock(), self.done.wait

    monkeypatch.setattr(torch.cuda, "Event", lambda **how: passes.append(Launched()) or passes[-1])
    monkeypatch.setattr(torch.cuda, "current_stream", Mock())
    asked, passes, on_gpu = Asked(), list[Launched](), Mock(is_cuda=True)
    turns = asked.turns

    def launch(name: str) -> None:
        with turns.hold(over=lambda: False):
            asked.order.append(name)
            turns.add_launched_pass(on_gpu)
        turns.wait_for_device()
        asked.order.append(f"{name} is near")

    launch("first")
    asked.threads += beside(lambda: launch("second"))
    until(lambda: len(passes) == 2 and turns._holder is None)
    assert turns.is_contended
    asked(lambda: launch("third"))
    with turns.hold():
        asked.order.append("question")
    with turns.hold(token=True):
        asked.order.append("token")
    assert asked.order == ["first", "first is near", "second", "question", "token"]
    passes[0].done.set()
    until(lambda: len(passes) == 3)
    for one in passes:
        one.done.set()
    assert {*asked.over()[5:]} == {"second is near", "third", "third is near"}
    turns.add_launched_pass(torch.zeros(1))
    assert len(passes) == 3

    def launch_three() -> None:
        with turns.hold(over=lambda: False):
            for _ in range(3):
                turns.add_launched_pass(on_gpu)
        turns.wait_for_device()

    asked.threads += beside(launch_three)
    until(lambda: len(passes) == 6)
    time.sleep(0.05)
    assert turns._holder is not None  # the third waits for the first
    passes[3].done.set()
    until(lambda: turns._holder is None)
    passes[4].query = Mock(side_effect=RuntimeError("illegal memory access"))
    with turns.hold():  # of which whoever uses the device next is told
        passes[4].done.set()
    asked.over()
    assert not turns.is_contended


def test_a_token_does_not_wait_for_all_who_asked_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that waits for too long is next, and then whoever asked first: neither has to wait for ever."""
    monkeypatch.setattr(fair_lock, "PATIENCE_S", 0.0)
    asked = Asked()
    with asked.turns.hold():
        for name in ("a", "b", "token", "token", "c"):
            asked(name, token=name == "token")
    assert asked.over() == ["token", "a", "token", "b", "c"]
    monkeypatch.setattr(fair_lock, "PATIENCE_S", 60.0)
    asked = Asked()
    with asked.turns.hold():
        asked("a")
        asked("token", token=True)
        asked.turns.yield_to_answers()  # none has waited for long
        asked.order.append("pass")
    assert asked.over() == ["pass", "a", "token"]


FAR_S = 10.0


def drop(kind: int, *numbers: int, blob: Sequence[Blob] = ()) -> None:
    """A wire that takes everything."""


def refuse(kind: int, *numbers: int, blob: Sequence[Blob] = ()) -> None:
    raise DraftError("nobody is there")


@pytest.mark.parametrize("send", [drop, refuse])
def test_nothing_of_a_prompt_is_kept_whether_it_leaves_or_not(send: Any) -> None:
    """An error holds the frames that it came through, and these the pixels: a failed prompt must not stay that way."""
    outbox, pixels = AsyncSender(send), torch.zeros(8)
    gone = weakref.ref(pixels)
    outbox.put(1, (), lambda pixels=pixels: [pixels.numpy().data])  # type: ignore[misc]
    outbox.wait(FAR_S)
    del pixels
    gc.collect()
    assert gone() is None and (outbox.error is None) == (send is drop)


def test_a_prompt_is_not_kept_while_the_next_one_leaves() -> None:
    outbox, going = AsyncSender(drop), threading.Event()
    pixels = torch.zeros(8)
    gone = weakref.ref(pixels)

    def second() -> list[Blob]:
        assert going.wait(FAR_S)
        return []

    outbox.put(1, (), lambda pixels=pixels: [pixels.numpy().data])  # type: ignore[misc]
    del pixels
    outbox.put(1, (), second)
    first = outbox._thread
    assert first is not None
    for _ in range(100):
        if gone() is None:
            break
        first.join(0.05)
    assert gone() is None and outbox.is_sending
    going.set()
    outbox.wait(FAR_S)


def test_the_thread_may_come_to_end_its_own_worker() -> None:
    """A worker that nobody has any more is ended by whatever thread collects garbage: the one of its outbox, too."""
    outbox, waited = AsyncSender(drop), threading.Event()

    def collects() -> list[Blob]:
        outbox.wait()
        waited.set()
        return []

    outbox.put(1, (), collects)
    outbox.wait(FAR_S)
    assert waited.is_set() and outbox.error is None


def test_a_thread_that_cannot_be_started_leaves_nothing_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    outbox, sent = AsyncSender(lambda kind, *numbers, blob=(): sent.append(kind)), list[int]()
    with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="new thread"):
        broken(patched, threading.Thread, "start", RuntimeError("can't start new thread"))
        outbox.put(1, (), lambda: [])
    assert not outbox.is_sending
    outbox.wait(FAR_S)
    outbox.put(2, (), lambda: [])
    outbox.wait(FAR_S)
    assert sent == [2]


def test_a_thread_that_is_ended_from_within_does_not_stay_busy() -> None:
    outbox = AsyncSender(drop)
    outbox.put(1, (), Mock(side_effect=SystemExit))
    outbox.wait(FAR_S)
    assert not outbox.is_sending and "SystemExit" in str(outbox.error)
