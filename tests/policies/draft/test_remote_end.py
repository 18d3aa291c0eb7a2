"""What a draft's process does about a call that ends before it: at a deadline, in the middle of a film, by the collector."""

import copy
import gc
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from typing import Any, ClassVar
from unittest.mock import Mock

import pytest
import torch

import mmaccel
from mmaccel.core.adapter import ModelView
from mmaccel.core.decoding import worker as worker_module
from mmaccel.core.decoding.generate import Deadline
from mmaccel.core.decoding.worker import AsyncSender, Blob, Worker
from mmaccel.core.errors import MmaccelWarning
from mmaccel.core.layout import TokenLayout
from mmaccel.models.prompt_stream import PromptStreamModel
from mmaccel.policies.draft import Parallel, _remote_stream
from mmaccel.policies.draft._remote_drafter import RemoteDrafter, RemoteTurn
from mmaccel.policies.draft._remote_stream import END
from tests.models.streams import FPS, asked_of_film, pair
from tests.policies.draft.conftest import NAME
from tests.policies.draft.test_remote_drafter import TIGHT, parallel, stop, watching
from tests.spies import broken, heard

pytestmark = pytest.mark.usefixtures("forked")
HOW: dict[str, Any] = {"do_sample": False, "max_new_tokens": 8, "return_dict_in_generate": True}


@pytest.fixture(scope="module", params=["full", "mosaic"])
def fast(request: pytest.FixtureRequest) -> Iterator[mmaccel.Accelerated]:
    with mmaccel.accelerate(
        copy.deepcopy(pair(NAME)[0]), kv=TIGHT[request.param], draft=parallel(True)
    ) as made:
        yield made


def test_a_cache_that_is_collected_is_told_of_with_the_next_prompt(
    fast: mmaccel.Accelerated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is sent while the collector runs, which may be in the midst of something else that is being sent."""
    inputs = pair(NAME)[1].chat(asked_of_film(10), fps=FPS)
    told = heard(monkeypatch, Worker, "send", lambda _, kind, number, *rest, **named: (kind, number))
    out = fast.generate(**inputs, **HOW)
    worker, count = worker_of(fast), len(told)
    assert not _remote_stream._OVER[worker]
    del out
    gc.collect()
    over = [*_remote_stream._OVER[worker]]
    assert len(over) == 1 + (fast.recipe.kv.name == "mosaic"), (
        "of a memory of streams the draft has a stream too"
    )
    assert len(told) == count
    fast.generate(**inputs, **HOW, use_cache=False)
    assert [told.count((END, number)) for number in over] == [1] * len(over)
    assert not {*over} & {*_remote_stream._OVER[worker]}


def worker_of(fast: mmaccel.Accelerated) -> Worker:
    (worker,) = (one for one in fast.view._held.values() if isinstance(one, Worker))
    return worker


def test_a_call_ends_at_its_deadline_though_the_process_takes_nothing(fast: mmaccel.Accelerated) -> None:
    """The process is ended, for it may not read the prompt once the call has returned; the next call has another one."""
    inputs = pair(NAME)[1].chat(asked_of_film(40), fps=FPS)
    want = fast.generate(**inputs, **HOW).sequences
    worker = worker_of(fast)
    stop(worker)
    began = time.monotonic()
    with pytest.warns(MmaccelWarning, match=r"did not take its prompt by the call"):
        fast.generate(**inputs, **HOW, max_time=1.0)
    assert time.monotonic() - began < 4 and not worker.alive
    assert torch.equal(fast.generate(**inputs, **HOW).sequences, want)
    assert fast.report().draft["failed"] is None


def test_what_another_sends_next_does_not_end_the_process(worker: Worker, monkeypatch) -> None:
    """Sequences share it: one whose prompt is sent may go, though the next one's is on its way."""
    going = threading.Event()

    def another() -> list[Blob]:
        assert going.wait(10)
        return []

    worker.send_in_background(END, 0, blob=list)
    with monkeypatch.context() as patched:
        send = worker.send_in_background
        heard(patched, AsyncSender, "wait", lambda *_: send(END, 0, blob=another), after=True)
        worker.wait_until_sent(5.0)
    assert worker.alive and worker._outbox.is_sending
    going.set()


def test_a_process_that_takes_its_prompt_is_not_ended_though_the_call_is_over(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large prompt, which is on the way for more than twice as long as it may stand still."""
    monkeypatch.setattr(worker_module, "STILL_S", 0.4)
    end: Any = worker.wire._end

    def slowly(data: Blob) -> None:
        time.sleep(len(data) / 1e7)
        end.sendall(data)

    monkeypatch.setattr(worker.wire, "_end", Mock(wraps=end, sendall=slowly, fileno=end.fileno))
    worker.send_in_background(END, 0, blob=lambda: [bytes(10_000_000)])
    worker.wait_until_sent(0.1)
    assert worker.alive and not worker._outbox.is_sending


@dataclass(frozen=True, kw_only=True)
class Slow(Parallel):
    service: ClassVar[str] = "tests.policies.draft.toy_service:serve_slowly"


def test_the_stream_of_a_call_that_has_ended_waits_for_no_other_s_prompt(target: ModelView) -> None:
    """The deadline was that call's: what a later one, or the cache's end, sends does not end the process."""
    inputs, going = dict(pair(NAME)[1].chat(asked_of_film(10), fps=FPS)), threading.Event()
    film = replace(watching("recent"), processor=None, prompt=(PromptStreamModel, inputs))
    stream: Any = Slow(model=f"{NAME}-draft").open_stream(target, replace(film, deadline=Deadline(0.01)))
    worker: Worker = stream._worker
    stream.prepare_question(inputs["input_ids"], 4)
    stream.end_question()
    assert not worker._outbox.is_sending, "the prompt is the caller's again"
    worker.send_in_background(END, 0, blob=lambda: [bytes(going.wait(10))])
    stream.end_ingest()
    assert worker.alive and worker._outbox.is_sending
    going.set()
    stream.wait_until_done()
    stream.close()


def test_a_turn_from_which_nothing_goes_on_is_freed(worker: Worker) -> None:
    """It is in the process until the next prompt has it."""
    ids, past = torch.arange(4), TokenLayout.text(1, 4)
    for fails in (True, False):
        engine, turn = RemoteDrafter(worker, 10), RemoteTurn(worker, 1 << 40, ids)
        assert engine.continues_from(turn, torch.arange(6), past)
        with pytest.MonkeyPatch.context() as patch, suppress(RuntimeError):
            broken(patch, AsyncSender, "put", RuntimeError("no new thread"), lambda *_, fails=fails: fails)
            engine.begin({"input_ids": torch.arange(6)[None]}, None, True, False, 0)
        engine.close()
        del engine, turn
        gc.collect()
        assert (1 << 40 in _remote_stream._OVER[worker]) is fails
        _remote_stream._OVER[worker].clear()


@pytest.mark.parametrize("collected", [False, True])
def test_a_film_that_is_abandoned_is_read_no_further(target: ModelView, collected: bool) -> None:
    """What is asked of the process next is done within a second, also where a stream's end is told with the next one."""
    inputs = dict(pair(NAME)[1].chat(asked_of_film(80), fps=FPS))
    film = replace(watching("recent"), processor=None, chunk=8, prompt=(PromptStreamModel, inputs))
    draft = Slow(model=f"{NAME}-draft", window=4)
    first: Any = draft.open_stream(target, film)
    first.prepare_question(inputs["input_ids"], 4)
    time.sleep(0.5)  # of some three seconds that it takes
    assert first._worker.receive_message(0.0) is None, "it is being read"
    first.close(collected)
    began = time.monotonic()
    with closing(draft.open_stream(target, watching("recent"))) as second:
        second.wait_until_done()  # type: ignore[attr-defined]
        assert time.monotonic() - began < 1
