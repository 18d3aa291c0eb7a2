"""Attaching and detaching, beside calls of other threads and wherever an interrupt comes, leaves nothing behind."""

import functools
import gc
import importlib
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LogitsProcessor

import mmaccel
from mmaccel.core.attach import adapter_for
from mmaccel.core.errors import MmaccelWarning
from mmaccel.models import install
from mmaccel.models.attention import KVCache
from mmaccel.models.install import Hooks, shared_hooks
from mmaccel.models.modules import batched_tower
from mmaccel.models.recurrent import add_input_hooks, close_hooks_in_finalizer, make_rollback_cache
from tests import python
from tests.models.streams import FPS, QUESTION, every_stream, film, open_session
from tests.models.tiny_random import BUILD, EVERY, PROMPTS, prompt
from tests.spies import Pause, beside, crossed, finish, heard, until

FILES = {install.__file__, nn.modules.module.__file__}


def hooks_of(module: nn.Module) -> list[list[Any]]:
    """What each table of hooks of the module has, those of the keyword arguments included."""
    return [list(value) for name, value in vars(module).items() if name.startswith("_forward_")]


def test_hooks_may_be_removed_by_a_finalizer_while_others_are_installed() -> None:
    """A garbage collection runs finalizers anywhere, also inside `shared_hooks`, which must not wait for itself."""
    old, new = nn.Identity(), nn.Identity()
    kept = ExitStack()
    kept.enter_context(shared_hooks(old, "one", lambda hooks: hooks.set_attribute(old, "told", True)))

    def enter() -> None:
        with shared_hooks(new, "one", lambda _: kept.close()):
            done.set()

    done = threading.Event()
    threading.Thread(target=enter, daemon=True).start()
    assert done.wait(10.0) and "told" not in vars(old)


@pytest.mark.parametrize("kind", ["before", "prepended", "after"])
def test_an_interrupt_at_any_instruction_leaves_no_hook(kind: str) -> None:
    """Each bytecode instruction of ours and of torch's registration is interrupted in turn; a user's hook remains."""
    module = nn.Identity()
    module.register_forward_pre_hook(lambda module, args, kwargs: None, with_kwargs=True)
    module.register_forward_hook(lambda module, args, kwargs, out: None, with_kwargs=True)
    plain, step, registered = hooks_of(module), 0, 0

    def ours(*_: Any) -> None:
        return None

    def run(step: int) -> bool:
        """Register, with an interrupt at instruction `step`; whether there was one."""
        nonlocal registered
        left = step

        def instruction(frame: FrameType, event: str, arg: Any) -> Callable[..., Any] | None:
            nonlocal left, registered
            if event == "opcode":
                left -= 1
                if not left:
                    registered += hooks_of(module) != plain
                    raise KeyboardInterrupt
            return instruction

        def call(frame: FrameType, event: str, arg: Any) -> Callable[..., Any] | None:
            if frame.f_code.co_filename not in FILES or left <= 0:
                return None
            frame.f_trace_opcodes = True
            return instruction

        trace = sys.gettrace()
        try:
            with Hooks() as hooks:
                sys.settrace(call)
                try:
                    if kind == "after":
                        hooks.add_hook(module, ours, with_kwargs=True)
                    else:
                        hooks.add_pre_hook(module, ours, prepend=kind == "prepended")
                finally:
                    sys.settrace(trace)
                assert hooks_of(module) != plain
        except KeyboardInterrupt:
            return True
        return False

    # Python 3.12 reports instructions only if this is set before settrace.
    sys._getframe().f_trace_opcodes = True
    interrupted = True
    while interrupted:
        step += 1
        interrupted = run(step)
        assert hooks_of(module) == plain, f"instruction {step}"
    assert registered > 3, "some interrupts come after the hook is in the table"


def noted(module: nn.Module, install: Any) -> Any:
    """Shared hooks as a cache has them, and the call of its finalizer."""
    heard = ExitStack()
    heard.enter_context(shared_hooks(module, "noted", install))
    return functools.partial(close_hooks_in_finalizer, heard.close)


def test_a_finalizer_in_an_import_waits_for_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread imports what another imports in the middle of its change; a collection there lets hooks go."""
    (tmp_path / "slowly_imported.py").write_text("import tests.models.test_install as t; t.during()")
    monkeypatch.syspath_prepend(tmp_path)
    old, new = nn.Identity(), nn.Identity()
    collect = noted(old, lambda hooks: hooks.set_attribute(old, "told", True))
    begun, inside = threading.Event(), threading.Event()

    def during() -> None:
        begun.set()
        inside.wait(5.0)
        collect()

    def install(hooks: Hooks) -> None:
        inside.set()
        importlib.import_module("slowly_imported")

    def enter() -> None:
        begun.wait(5.0)
        with shared_hooks(new, "one", install):
            pass

    monkeypatch.setattr(sys.modules[__name__], "during", during, raising=False)
    finish(beside(enter, lambda: importlib.import_module("slowly_imported")), 10)
    until(lambda: "told" not in vars(old), 10)


def test_a_hook_that_goes_while_the_hooks_of_its_module_run_records_nothing() -> None:
    """torch calls it all the same, and without what it was registered for: the arguments by keyword."""
    module = nn.Identity()
    module.norm = nn.Identity()
    module.register_forward_pre_hook(lambda *_: collect())
    collect = noted(module, lambda hooks: add_input_hooks(hooks, [module]))
    assert module(torch.ones(1)) == 1 and len(module._forward_pre_hooks) == 1


def test_hooks_that_close_in_another_order_leave_nothing() -> None:
    """Those of a cache close when it is collected, here within a recipe that came later."""
    model = EVERY["qwen3_5"]()
    cache = make_rollback_cache(model, adapter_for(model).recurrent_layers(model))
    fast = mmaccel.accelerate(model, "dense")
    del cache
    gc.collect()
    fast.detach()
    assert not [module for module in model.modules() if "forward" in vars(module)]


@pytest.mark.parametrize("first", [False, True])
def test_a_tower_runs_in_parts_until_the_last_has_left(first: bool) -> None:
    """Of a stream and of a prompt; only the latter fuses kernels."""
    model = BUILD["qwen"]()
    family: Any = adapter_for(model)
    one, other = (ExitStack() for _ in range(2))
    one.enter_context(batched_tower(family, model, fuse=first))
    other.enter_context(batched_tower(family, model, fuse=not first))
    one.close()
    assert getattr(family.multimodal(model).get_video_features, "by_parts", False)
    other.close()
    assert not getattr(family.multimodal(model).get_video_features, "by_parts", False)


GREEDY: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}


@pytest.fixture(scope="module", params=sorted(BUILD))
def family(request: pytest.FixtureRequest) -> tuple[dict[str, Any], Any]:
    model = BUILD[request.param]()
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
        finish(beside(self.call), 20)  # else the call within waits for the change, which waits for the call
        return scores


@crossed("family", what=["attach", "detach"], inner=["forward", "generate"], family=sorted(BUILD), together=2)
def test_a_call_that_waits_for_a_helper_and_a_change(family: Any, what: str, inner: str) -> None:
    inputs, model = family
    plain = model.generate(**inputs, **GREEDY)
    helped = Helped(
        (lambda: model(**inputs)) if inner == "forward" else (lambda: model.generate(**inputs, **GREEDY))
    )
    fast, out, made = mmaccel.accelerate(model) if what == "detach" else None, [], []
    work = beside(lambda: out.append(model.generate(**inputs, **GREEDY, logits_processor=[helped])))
    assert helped.begun.wait(20)
    finish(work + beside(lambda: made.append(fast.detach() if fast else mmaccel.accelerate(model))))
    if fast is None:
        made[0].detach()
    assert helped.steps == 4 and torch.equal(out[0], plain) and mmaccel.attached(model) is None


def test_calls_that_overlap_for_ever_do_not_keep_a_change_waiting(family: Any, monkeypatch) -> None:
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

    threads = beside(lambda: work(0), lambda: work(0.07))
    began = time.monotonic()
    until(lambda: len(running) >= 4, 20)
    for _ in range(2):
        mmaccel.accelerate(model).detach()
    assert time.monotonic() < began + 20
    over.set()
    finish(threads, 20)
    slow.remove()


def test_a_change_says_which_call_it_waits_for(family: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, model = family
    monkeypatch.setattr(install, "LONG_S", 0.2)
    hold = Pause()
    hook = model.model.language_model.layers[0].register_forward_pre_hook(hold)
    for change in (lambda: mmaccel.accelerate(model), lambda: mmaccel.attached(model).detach()):
        work = threading.Thread(target=lambda: model(**inputs), name="serves-questions")
        work.start()
        assert hold.reached.wait(20)
        with pytest.warns(
            MmaccelWarning, match=r"has waited .* for a call .* thread 'serves-questions'"
        ) as told:
            end = beside(lambda told=told: (until(lambda: told.list), hold.go_on.set()))
            change()
        finish([work, *end], 20)
        assert len(told) == 1 and told[0].filename == __file__
        hold.reached.clear()
        hold.go_on.clear()
    hook.remove()


COLLECTS = """
import gc, threading
from mmaccel.models.install import current_stack_frames

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
print(len(current_stack_frames()), gc.isenabled())
"""


def test_frames_are_read_while_the_collector_is_due() -> None:
    assert python("-c", COLLECTS).stdout == "21 True\n"


TIGHT = every_stream(frames=4, window=6)


@pytest.mark.parametrize("name", sorted(TIGHT))
def test_a_closed_session(name: str, uncollected: None) -> None:
    session = open_session("random-ov", TIGHT[name])
    session.watch(film(12), fps=FPS)
    session.ask(QUESTION, 2)
    state = weakref.ref(session._live.state)  # type: ignore[union-attr]
    session.close()
    assert state() is None


@pytest.mark.parametrize(
    "recipe",
    [
        {},
        {"kv": "window"},
        {"draft": "prompt_lookup"},
        {"prune": {"name": "fastv", "retention": 0.5}},
        {"sparse": {"name": "a_shape", "block": 16}},
    ],
    ids=str,
)
def test_an_answer(recipe: dict[str, Any], uncollected: None, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = heard(monkeypatch, KVCache, "__init__", lambda cache, state, *_: weakref.ref(state))
    model = BUILD["qwen"](layers=3)
    with mmaccel.accelerate(model, **recipe) as fast:
        fast.generate(**prompt("qwen", [("text", 9)]), max_new_tokens=3, do_sample=False)
        assert opened and all(one() is None for one in opened)
        assert fast.last_kv_state is None and fast.report().kv["bytes"] > 0, "what it counted is still told"
