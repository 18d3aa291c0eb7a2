"""Attaching and detaching beside calls that wait for calls of other threads."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor

import mmaccel
from mmaccel.core.errors import MmaccelWarning
from mmaccel.models import install
from tests import SOURCES
from tests.models.tiny_random import BUILD, PROMPTS, prompt
from tests.products import product

pytestmark = pytest.mark.in_turn("family", 1)

GREEDY: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}


@pytest.fixture(scope="module", params=sorted(BUILD))
def family(request: pytest.FixtureRequest) -> tuple[dict[str, Any], Any]:
    model = BUILD[request.param]()
    model.generation_config.eos_token_id = None
    inputs = prompt(request.param, PROMPTS["text"])
    model.generate(**inputs, **GREEDY)
    return inputs, model


class Helped(LogitsProcessor):
    """At each step another thread runs the model, and the step waits for it."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.call, self.begun, self.steps = call, threading.Event(), 0

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        if self.steps == 2:
            self.begun.set()
            time.sleep(0.1)  # the other thread asks for the change
        helper = threading.Thread(target=self.call, daemon=True)
        helper.start()
        helper.join(20)
        assert not helper.is_alive(), "the call within waits for the change, which waits for the call"
        return scores


@pytest.mark.parametrize(
    ("what", "inner", "family"),
    product(["attach", "detach"], ["forward", "generate"], sorted(BUILD), together=2),
    indirect=["family"],
)
def test_a_call_that_waits_for_a_helper_and_a_change(family: Any, what: str, inner: str) -> None:
    inputs, model = family
    plain = model.generate(**inputs, **GREEDY)
    helped = Helped(
        (lambda: model(**inputs)) if inner == "forward" else (lambda: model.generate(**inputs, **GREEDY))
    )
    fast, out, made = mmaccel.accelerate(model) if what == "detach" else None, [], []
    work = threading.Thread(
        target=lambda: out.append(model.generate(**inputs, **GREEDY, logits_processor=[helped])), daemon=True
    )
    change = threading.Thread(
        target=lambda: made.append(fast.detach() if fast else mmaccel.accelerate(model)), daemon=True
    )
    work.start()
    assert helped.begun.wait(20)
    change.start()
    for thread in (work, change):
        thread.join(30)
        assert not thread.is_alive()
    if fast is None:
        made[0].detach()
    assert helped.steps == 4 and torch.equal(out[0], plain) and mmaccel.attached(model) is None


def test_calls_that_overlap_for_ever_do_not_keep_a_change_waiting(
    family: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two threads, each of whose calls lasts longer than a new call waits at first."""
    inputs, model = family
    monkeypatch.setattr(install, "FIRST_S", 0.01)
    slow = model.model.language_model.layers[0].register_forward_pre_hook(lambda *_: time.sleep(0.03))
    over, running = threading.Event(), []

    def work(wait: float) -> None:
        time.sleep(wait)
        while not over.is_set():
            running.append(None)
            model.generate(**inputs, **GREEDY)

    threads = [threading.Thread(target=work, args=(wait,), daemon=True) for wait in (0, 0.07)]
    for thread in threads:
        thread.start()
    until = time.monotonic() + 20
    while len(running) < 4:
        time.sleep(0.01)
    for _ in range(2):
        mmaccel.accelerate(model).detach()
    assert time.monotonic() < until
    over.set()
    for thread in threads:
        thread.join(20)
    slow.remove()


def go_on_when(go_on: threading.Event, told: list[Any]) -> None:
    """Set the event once something is told."""
    late = time.monotonic() + 15
    while not told and time.monotonic() < late:
        time.sleep(0.01)
    go_on.set()


def test_a_change_says_which_call_it_waits_for(family: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, model = family
    monkeypatch.setattr(install, "LONG_S", 0.2)
    reached, go_on = threading.Event(), threading.Event()

    def hold(*_: Any) -> None:
        reached.set()
        go_on.wait(20)

    hook = model.model.language_model.layers[0].register_forward_pre_hook(hold)
    for change in (lambda: mmaccel.accelerate(model), lambda: mmaccel.attached(model).detach()):
        work = threading.Thread(target=lambda: model(**inputs), name="serves-questions")
        work.start()
        assert reached.wait(20)
        with pytest.warns(
            MmaccelWarning, match=r"has waited .* for a call .* thread 'serves-questions'"
        ) as told:
            end = threading.Thread(target=go_on_when, args=(go_on, told.list))
            end.start()
            change()
        work.join(20)
        end.join()
        assert len(told) == 1 and told[0].filename == __file__
        reached.clear()
        go_on.clear()
    hook.remove()


COLLECTS = """
import gc, threading
from mmaccel.models.install import stacks

stop = threading.Event()
threads = [threading.Thread(target=stop.wait, daemon=True) for _ in range(20)]
[thread.start() for thread in threads]
gc.collect(), gc.disable()
for _ in range(50):
    one = threading.local()
    one.me = one
    del one
gc.set_threshold(gc.get_count()[0] + 10)  # the collector runs at the tenth frame
gc.enable()
print(len(stacks()), gc.isenabled())
"""


def test_stacks_are_read_while_the_collector_is_due() -> None:
    done = subprocess.run(
        [sys.executable, "-c", COLLECTS],
        env={**os.environ, "PYTHONPATH": SOURCES},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout == "21 True\n", done.stderr
