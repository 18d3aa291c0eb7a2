"""What a draft's process does about a call that ends before it: at a deadline, in the middle of a film, by the collector."""

import copy
import gc
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch

import mmaccel
from mmaccel.core.adapter import ModelView
from mmaccel.core.decoding.worker import Blob, Outbox, Worker
from mmaccel.core.errors import MmaccelWarning
from mmaccel.models.prompt_stream import PromptStreamModel
from mmaccel.policies.draft import Parallel, _remote_stream
from mmaccel.policies.draft._remote_stream import END
from tests.models.streams import FPS, asked_of_film, pair
from tests.policies.draft.test_remote_drafter import NAME, TIGHT, parallel, stop, target, watching  # noqa: F401
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


def test_what_another_sends_next_does_not_end_the_process(
    fast: mmaccel.Accelerated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences share it: one whose prompt is sent may go, though the next one's is on its way."""
    worker, going = worker_of(fast), threading.Event()

    def another() -> list[Blob]:
        assert going.wait(10)
        return []

    worker.post(END, 0, blob=list)
    with monkeypatch.context() as patched:
        heard(patched, Outbox, "wait", lambda *_: worker.post(END, 0, blob=another), after=True)
        worker.wait_until_sent(5.0)
    assert worker.alive and worker._outbox.is_sending
    going.set()


@dataclass(frozen=True, kw_only=True)
class Slow(Parallel):
    service: ClassVar[str] = "tests.policies.draft.toy_service:serve_slowly"


@pytest.mark.parametrize("collected", [False, True])
def test_a_film_that_is_abandoned_is_read_no_further(target: ModelView, collected: bool) -> None:  # noqa: F811
    """What is asked of the process next is done within a second, also where a stream's end is told with the next one."""
    inputs = dict(pair(NAME)[1].chat(asked_of_film(80), fps=FPS))
    film = replace(watching("recent"), processor=None, chunk=8, prompt=(PromptStreamModel, inputs))
    draft = Slow(model=f"{NAME}-draft", window=4)
    first: Any = draft.open_stream(target, film)
    first.prepare_question(inputs["input_ids"], 4)
    time.sleep(0.5)  # of some three seconds that it takes
    assert first._worker.receive(0.0) is None, "it is being read"
    first.close(collected)
    began = time.monotonic()
    with closing(draft.open_stream(target, watching("recent"))) as second:
        second.wait_until_done()  # type: ignore[attr-defined]
        assert time.monotonic() - began < 1
