"""What a draft's process does about a call that ends before it: at a deadline, in the middle of a film, by the collector."""

import copy
import gc
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import mmaccel
from mmaccel.core.adapter import ModelView
from mmaccel.core.attach import adapter_for
from mmaccel.core.decoding.worker import MessageSocket, Worker
from mmaccel.core.errors import DraftError, MmaccelWarning
from mmaccel.core.streams.stream_runner import StreamRunner
from mmaccel.models.prompt_stream import PromptStreamModel
from mmaccel.policies.draft import _remote_drafter, _remote_stream
from mmaccel.policies.draft._draft_model import draft_stream
from mmaccel.policies.draft._remote_stream import END, RemoteDraftStream
from tests.models.streams import FPS, asked_of_film, pair
from tests.policies.draft.test_remote_drafter import NAME, TIGHT, parallel, stop, watching
from tests.spies import heard

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
    with pytest.warns(MmaccelWarning, match=r"did not take its prompt within"):
        fast.generate(**inputs, **HOW, max_time=1.0)
    assert time.monotonic() - began < 4 and not worker.alive
    assert (
        torch.equal(fast.generate(**inputs, **HOW).sequences, want) and fast.report().draft["failed"] is None
    )


class Near(Worker):
    """The near end of a process that is a thread here."""

    alive = True

    def __init__(self, wire: MessageSocket) -> None:
        self.wire = wire

    def post(self, kind: int, *numbers: int, blob: Any) -> None:
        self.send(kind, *numbers, blob=blob())

    def send(self, kind: int, *numbers: int, blob: Any = ()) -> None:
        self.wire.send(kind, *numbers, blob=blob)

    def receive(self, limit_s: float, silence_s: float | None = None) -> Any:
        return self.wire.receive(limit_s)

    def wait_until_sent(self, limit_s: float | None = None) -> None:
        pass


@pytest.fixture
def near() -> Iterator[Near]:
    """A worker whose service, with the tiny model, is a thread."""
    model, _ = pair(NAME)
    ours, theirs = socket.socketpair()
    wire, view = MessageSocket(theirs), ModelView(model, adapter_for(model), adapter_for)
    told = partial(draft_stream, model)
    serve = partial(_remote_drafter.serve_decoder, wire, Mock(), "cpu", lambda settings: told(settings, view))

    def work() -> None:
        with pytest.raises(DraftError, match="has ended"):
            serve()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    yield Near(MessageSocket(ours))
    ours.close()
    thread.join(10)
    theirs.close()
    assert not thread.is_alive()


@pytest.mark.parametrize("collected", [False, True])
def test_a_film_that_is_abandoned_is_read_no_further(
    near: Near, collected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is asked of the process next is done within a second, also where a stream's end is told with the next one."""
    passes = heard(monkeypatch, StreamRunner, "encode", lambda *_: time.sleep(0.1))
    closed = heard(monkeypatch, StreamRunner, "close", lambda *_: None)
    inputs = dict(pair(NAME)[1].chat(asked_of_film(80), fps=FPS))
    first = RemoteDraftStream(
        near, replace(watching("recent"), processor=None, chunk=8, prompt=(PromptStreamModel, inputs))
    )
    first.prepare_question(inputs["input_ids"], 4)
    until = time.monotonic() + 20
    while len(passes) < 2 and time.monotonic() < until:
        time.sleep(0.01)
    first.close(collected)
    assert 2 <= len(passes) < 10
    with closing(RemoteDraftStream(near, watching("recent"))) as second:
        began = time.monotonic()
        second.wait_until_done()
        assert time.monotonic() - began < 1 and len(closed) == 1
