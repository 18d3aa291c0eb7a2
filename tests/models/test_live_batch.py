"""Frames of several sessions of one model that wait at once: one batch, which leaves each memory as alone."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import mmaccel
from mmaccel.core.decoding import replay
from mmaccel.core.decoding.generate import Deadline, Speculation
from mmaccel.core.errors import ModelError
from mmaccel.core.streams import fair_lock, joint
from mmaccel.models import step
from mmaccel.models.packed import BatchedStreamPass
from mmaccel.models.stream import HFStreamAdapter
from mmaccel.policies.draft import Sequential
from mmaccel.policies.kv._archived import SharedArchive
from tests.core.test_replay import MADE, Recorded
from tests.models.streams import FPS, QUESTION, SEARCHES, every_stream, film, open_session, pair, told
from tests.spies import beside, broken, crossed, finish, heard, until

MEMORIES: dict[str, Any] = {**every_stream(frames=4, window=6), **SEARCHES}
SESSIONS = 3


def opened(name: str, kv: Any) -> list[mmaccel.VideoSession]:
    """Sessions with streams of their own, each longer than a window."""
    sessions = [open_session(name, kv) for _ in range(SESSIONS)]
    for number, one in enumerate(sessions):
        one.watch(film(10 + 2 * number, seed=3 + number), fps=FPS)
    return sessions


def news(number: int) -> torch.Tensor:
    """What comes next in a stream: so many frames that all go into one batch, where units are one frame or two."""
    return film(2 + 2 * number, seed=8 + number)


def at_once(sessions: list[mmaccel.VideoSession]) -> list[Any]:
    """Each watches its news in a thread of its own; all wait for the model at once. What they return or raise."""
    works = [lambda n=n, one=one: one.watch(news(n), fps=FPS) for n, one in enumerate(sessions)]
    turns = sessions[0]._stream_adapter.turns
    with ThreadPoolExecutor(len(works)) as pool:
        with turns.hold():
            futures = [pool.submit(work) for work in works]
            # What comes before a pass is short; then all wait for the pass.
            until(lambda: len(turns._waiting) == len(works))
        found = [one.exception(60) or one.result() for one in futures]
    assert not turns.waiting_passes and turns._holder is None
    return found


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many streams each pass of the layers had, from now on."""
    return heard(monkeypatch, joint, "_run", len)


def alike(some: list[mmaccel.VideoSession], others: list[mmaccel.VideoSession]) -> None:
    for one, other in zip(some, others, strict=True):
        assert one.shown == other.shown and len(one) == len(other)
        ours, theirs = one.clusters(), other.clusters()
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(own, theirs[key]) for key, own in ours.items())
        assert told(one.ask(QUESTION, 12)) == told(other.ask(QUESTION, 12))


@crossed(name=["random-ov", "random-qwen"], kv=MEMORIES)
def test_a_batch_leaves_each_memory_as_alone(name: str, kv: str, batches: list[int]) -> None:
    apart, both = opened(name, MEMORIES[kv]), opened(name, MEMORIES[kv])
    for number, one in enumerate(apart):
        one.watch(news(number), fps=FPS)
    batches.clear()
    found = at_once(both)
    assert found == [len(news(number)) for number in range(SESSIONS)]
    batched = MEMORIES[kv]["name"] not in ("no_cache", "streammem")
    assert max(batches) == (SESSIONS if batched else 1)
    alike(apart, both)


@pytest.mark.parametrize("where", ["begin_pass", "append", "view", "end_pass"])
def test_what_fails_in_one_stream_ends_its_pass_alone(where: str, batches: list[int]) -> None:
    kv = MEMORIES["mosaic"]
    apart, both = opened("random-ov", kv), opened("random-ov", kv)
    for number in (0, 2):
        apart[number].watch(news(number), fps=FPS)
    state = both[1]._live.state  # type: ignore[union-attr]
    setattr(state, where, Mock(side_effect=RuntimeError("no room")))
    batches.clear()
    found = at_once(both)
    delattr(state, where)
    assert batches[0] == SESSIONS and isinstance(found[1], RuntimeError) and str(found[1]) == "no room"
    alike(apart, both)
    assert both[1].watch(news(1), fps=FPS) == len(news(1)) == apart[1].watch(news(1), fps=FPS)
    alike(apart[1:2], both[1:2])


def test_what_fails_for_all_leaves_every_stream_as_it_was(batches: list[int], monkeypatch) -> None:
    apart, both = (opened("random-ov", MEMORIES["rekv"]) for _ in range(2))
    batches.clear()
    with monkeypatch.context() as patch:
        broken(patch, HFStreamAdapter, "run_batched_passes", RuntimeError("the layers broke"))
        found = at_once(both)
    assert batches == [SESSIONS] and [str(one) for one in found] == ["the layers broke"] * SESSIONS
    assert len({id(one) for one in found}) == SESSIONS  # each call adds to its own
    alike(apart, both)


def test_a_call_that_ends_while_it_waits_is_not_taken_in(batches: list[int]) -> None:
    sessions = opened("random-ov", MEMORIES["rekv"])
    turns, before = sessions[0]._stream_adapter.turns, [len(one) for one in sessions]
    batches.clear()
    works = [lambda n=n, one=one: one.watch(news(n), fps=FPS) for n, one in enumerate(sessions)]
    with turns.hold():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(mmaccel.core.streams.intake.FrameIntake, "_turn", turned)
            threads = beside(*works)
            until(lambda: len(turns.waiting_passes) == SESSIONS)
        sessions[1].cancel()
        until(lambda: len(turns.waiting_passes) == SESSIONS - 1)
    finish(threads)
    assert batches == [SESSIONS - 1] and not turns.waiting_passes and turns._holder is None
    came = [len(news(0)), 0, len(news(2))]
    assert [len(one) for one in sessions] == [a + b for a, b in zip(before, came, strict=True)]


@contextmanager
def turned(*_: Any) -> Iterator[None]:
    """In the place of a turn, for what comes before a pass."""
    yield


def test_a_batch_has_no_more_units_than_a_pass(batches: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joint, "UNITS", 7)
    sessions = opened("random-ov", MEMORIES["rekv"])
    batches.clear()
    found = at_once(sessions)
    assert found == [2, 4, 6] and sorted(batches) in ([1, 2], [1, 1, 1])


def test_a_tower_that_fails_for_all_is_run_for_each(batches: list[int], monkeypatch) -> None:
    apart, both = (opened("random-ov", MEMORIES["rekv"]) for _ in range(2))
    for number, one in enumerate(apart):
        one.watch(news(number), fps=FPS)
    most = len(news(SESSIONS - 1))
    fails = RuntimeError("no room")
    broken(monkeypatch, HFStreamAdapter, "features", fails, lambda _, frames, size: len(frames) > most)
    batches.clear()
    found = at_once(both)
    assert batches == [SESSIONS] and found == [len(news(number)) for number in range(SESSIONS)]
    alike(apart, both)


class Interrupted(list[Any]):
    """Passes that wait, of which the last call of a method is interrupted."""

    def __init__(self, how: str, calls: int) -> None:
        super().__init__()
        self.how, self.left = how, calls

    def _interrupt(self, how: str) -> None:
        self.left -= how == self.how
        if how == self.how and not self.left:
            raise KeyboardInterrupt

    def append(self, one: Any) -> None:
        super().append(one)
        self._interrupt("append")

    def remove(self, one: Any) -> None:
        super().remove(one)
        self._interrupt("remove")


def test_an_interrupt_where_a_pass_begins_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    one = open_session("random-ov", MEMORIES["rekv"], 4)
    turns = one._stream_adapter.turns
    monkeypatch.setattr(turns, "waiting_passes", Interrupted("append", 1))
    with pytest.raises(KeyboardInterrupt):
        joint.run_queued_units(joint.QueuedUnits(one._live, film(2), [2.0, 2.5]), Deadline())
    assert not turns.waiting_passes and turns._holder is None


def test_an_interrupt_where_passes_begin_leaves_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between what takes passes off those that wait, and their run."""
    apart, both = (opened("random-ov", MEMORIES["rekv"])[:2] for _ in range(2))
    turns = both[0]._stream_adapter.turns
    with monkeypatch.context() as patch:
        patch.setattr(turns, "waiting_passes", Interrupted("remove", 2))
        found = at_once(both)
    assert sum(isinstance(one, KeyboardInterrupt) for one in found) == 1
    assert sum(isinstance(one, ModelError) for one in found) == 1
    alike(apart, both)


def test_a_pass_that_has_waited_comes_before_all_that_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many calls of other streams there are."""
    one, order = open_session("random-ov", MEMORIES["rekv"], 4), list[str]()
    turns = one._stream_adapter.turns

    def run_pass() -> None:
        with turns.hold(over=lambda: False):
            order.append("pass")

    def run_short() -> None:
        with one._turn():
            order.append("short")

    monkeypatch.setattr(one._live, "counters", lambda: order.append("counters"))
    works, threads = [run_pass, run_short, one.counters], list[threading.Thread]()
    with turns.hold():
        for work in works:
            threads.extend(beside(work))
            until(lambda: len(turns._waiting) == len(threads))
        monkeypatch.setattr(fair_lock, "monotonic", lambda: time.monotonic() + 2)
    finish(threads)
    assert order[0] == "pass" and sorted(order) == ["counters", "pass", "short"]


def test_rows_of_a_stream_that_fails_are_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch, "empty_like", lambda like, dtype: torch.full_like(like, torch.nan, dtype=dtype)
    )
    fails = Mock(side_effect=RuntimeError("no room"))
    runs = [SimpleNamespace(attend=fails), SimpleNamespace(attend=lambda layer, query, *_: query)]
    joined = BatchedStreamPass([(run, 2, False) for run in runs], lambda: None)  # type: ignore[misc]
    rows = torch.ones(1, 1, 4, 3)
    assert joined.attend(0, rows, rows, rows, 1.0)[0, 0, :, 0].tolist() == [0, 0, 1, 1] and set(
        joined.errors
    ) == {0}


def test_sessions_that_wrap_one_stock_processor_share_batches() -> None:
    """Each wraps it anew; and those of another processor may see other pixels."""
    cpu, stock = torch.device("cpu"), object()
    told = [SimpleNamespace(stock=one) for one in (stock, stock, object())]
    first, second, third = (
        HFStreamAdapter.batch_key.fget(  # type: ignore[attr-defined]
            SimpleNamespace(frame_pruner=None, layer_devices=[cpu], device=cpu, processor=one)
        )
        for one in told
    )
    assert first == second != third


class Unfit:
    """What cannot be captured."""

    def __init__(self, *_: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")


@torch.no_grad()
@pytest.mark.parametrize("why", ["hook", "library", "unfit", ""])
def test_what_is_not_replayed_is_a_batch(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is replayed runs by itself, behind passes that have begun: its end may let go of what these are to read."""
    monkeypatch.setattr(step, "DEVICES", ("cpu",))
    monkeypatch.setattr(replay, "_Replay", Unfit if why == "unfit" else Recorded)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    sessions, order = opened("random-ov", MEMORIES["rekv"]), list[Any]()
    turns, layer = sessions[0]._stream_adapter.turns, pair("random-ov")[0].model.language_model.layers[0]
    with layer.register_forward_hook(lambda *_: None) if why == "hook" else nullcontext():
        if why == "library":
            monkeypatch.setattr(layer.mlp, "__class__", type("Adapter", (type(layer.mlp),), {}))
        for one in sessions[0 if why else 1 :]:
            one._live.state.pass_replays.works = True  # type: ignore[union-attr]
        for _ in range(3):
            sessions[2].watch(film(2), fps=FPS)
        alone = joint.QueuedUnits(sessions[2]._live, film(2), [99.0, 99.5]).batch_key is None
        assert alone is (why in ("", "unfit"))  # as the last pass was; of that a capture failed in its middle
        tell: Any = lambda _, runs, *more, **how: order.append(len(runs))  # noqa: E731
        heard(monkeypatch, HFStreamAdapter, "run_batched_passes", tell)
        heard(monkeypatch, SharedArchive, "end_pass", lambda state: order.append(state))
        with turns.hold():
            joint._run(waits := [joint.QueuedUnits(x._live, film(2), [99.0, 99.5], 0.0) for x in sessions])
    assert order == [SESSIONS if why else 1, *(one._live.state for one in sessions)]  # type: ignore[union-attr]
    assert not any(one.error for one in waits)
    if not why:  # a forward that is replaced is called, too
        calls = heard(monkeypatch, layer.mlp, "forward", lambda *_: True)
        sessions[2].watch(film(2), fps=FPS)
        assert calls
    sessions[0]._stream_adapter.each.close()  # type: ignore[attr-defined]


@torch.no_grad()
def test_a_long_question_that_gives_way_leaves_the_captures_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes through the modules, which wrap their forward for it while a frame comes in between two layers."""
    monkeypatch.setattr(step, "DEVICES", ("cpu",))
    monkeypatch.setattr(replay, "_Replay", Recorded)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    first, second = opened("random-ov", MEMORIES["rekv"])[:2]
    shared = first._stream_adapter.each.unit_buffers  # type: ignore[attr-defined]
    for one in (first, second):
        one._live.state.pass_replays.works = True  # type: ignore[union-attr]
        for _ in range(3):
            one.watch(film(2), fps=FPS)
    buffers, turns, found = shared.find(), first._stream_adapter.turns, list[Any]()
    give_way = turns.yield_lock

    def meet(inside: bool = False) -> None:
        if inside and len(found) < 2:
            (thread,) = beside(lambda: (found.append(shared.find()), second.watch(film(2), fps=FPS)))
            while thread.is_alive():
                give_way(inside)
        give_way(inside)

    monkeypatch.setattr(turns, "yield_lock", meet)
    made = len(MADE)
    first.ask(f"{QUESTION} " * 30, 2)
    assert found == [buffers] * 2 and shared.find() is buffers and made == len(MADE)
    layers = first._stream_adapter.model.model.language_model.layers  # type: ignore[attr-defined]
    for forward in (
        layers[1].mlp.forward,
        lambda *_: None,
    ):  # a user's own, also of a module of the same class
        buffers = shared.find()
        monkeypatch.setattr(layers[0].mlp, "forward", forward)
        assert shared.find() is not buffers
    first._stream_adapter.each.close()  # type: ignore[attr-defined]


WAYS = [
    ("full", {}, 0),
    ("rekv", {"between": (0.0, 6.0)}, 0),
    ("rekv", {}, 0),
    ("rekv", {}, 1),
    ("full", {}, 1),
]


@pytest.mark.parametrize(("kv", "how", "drafts"), WAYS)
def test_tokens_come_between_the_layers_of_a_question(
    kv: str, how: dict[str, Any], drafts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of answers have buffers of their own, also of a model that drafts for itself; all have as many rows here."""
    monkeypatch.setattr(step, "DEVICES", ("cpu",))
    monkeypatch.setattr(step, "WIDTHS", (16, 64))
    monkeypatch.setattr(fair_lock, "PATIENCE_S", 0.0)
    own = {"draft": Sequential(model=pair("random-ov")[0], window=15)} if drafts else {}
    opens = partial(open_session, "random-ov", MEMORIES[kv])
    with opens() as first, opens(**own) as second:
        first.watch(film(9, seed=3), fps=FPS)
        second.watch(film(12, seed=6), fps=FPS)
        alone = first.ask(QUESTION, 6, **how).ids, second.ask(QUESTION, 24, **how).ids
        turns, here = first._stream_adapter.turns, threading.current_thread()
        tokens, seen, found = list[str](), list[bool](), list[Any]()
        commit, give_way = Speculation.commit_next_tokens, turns.yield_to_answers

        def committed(self: Any) -> None:
            tokens.append(threading.current_thread().name)
            if len(tokens) == 1 + drafts:
                with turns.release_temporarily():
                    until(lambda: bool(seen))
            commit(self)

        def between_layers() -> None:
            if threading.current_thread() is here:
                seen.append(False)
                if len(seen) < 3:
                    until(lambda: found or any(one.token for one in turns._waiting))
                    seen[-1] = not found
            give_way()

        monkeypatch.setattr(Speculation, "commit_next_tokens", committed)
        monkeypatch.setattr(turns, "yield_to_answers", between_layers)
        begun = beside(lambda: found.append(second.ask(QUESTION, 24, **how).ids))
        until(lambda: bool(tokens))
        assert first.ask(QUESTION, 6, **how).ids == alone[0]
        finish(begun)
    assert found == [alone[1]] and any(seen)
