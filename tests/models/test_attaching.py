"""Attaching is all or nothing, beside calls under way, and what it cannot do is one sentence."""

import copy
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LogitsProcessor

import mmaccel
from mmaccel.core.errors import ModelError
from mmaccel.models.install import ModelReadWriteLock, model_lock
from mmaccel.policies.draft import Sequential
from mmaccel.policies.prune import UVPrune
from tests.models.tiny_random import BUILD, PROMPTS, prompt
from tests.spies import Pause, beside, crossed, finish, until

TOLD: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}


@pytest.fixture(scope="module", params=sorted(BUILD))
def family(request: pytest.FixtureRequest) -> tuple[str, Any]:
    model = BUILD[request.param]()
    # transformers lays hooks of its own at the first call.
    model.generate(**prompt(request.param, PROMPTS["video"]), **TOLD)
    return request.param, model


def picture(model: nn.Module) -> dict[str, Any]:
    """All that instances hold: attributes by identity, and how many hooks there are; without what each prompt leaves."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        for key, value in module.__dict__.items():
            if key == "rope_deltas":
                continue
            hooks = key.endswith("_hooks") or key.startswith(("_forward_", "_backward_"))
            found[f"{name}.{key}"] = len(value) if hooks and hasattr(value, "__len__") else id(value)
        config = getattr(module, "config", None)
        found[f"{name}.attention"] = getattr(config, "_attn_implementation", None)
    return found


class Stop(Exception):
    pass


@contextmanager
def failing_at(step: int) -> Iterator[list[str]]:
    """While inside, the `step`-th line of mmaccel/models that runs raises `Stop` in its place; gives where that was."""
    left, where = [step], []

    def line(frame: FrameType, event: str, arg: Any) -> Callable[..., Any] | None:
        if event == "line":
            left[0] -= 1
            if not left[0]:
                where.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
                raise Stop
        return line

    def call(frame: FrameType, event: str, arg: Any) -> Callable[..., Any] | None:
        path = frame.f_code.co_filename
        inside = "/mmaccel/models/" in path and not path.endswith(("install.py", "loading.py"))
        return line if inside and not where else None

    before = sys.gettrace()
    sys.settrace(call)
    try:
        yield where
    finally:
        sys.settrace(before)


RECIPES: dict[str, dict[str, Any]] = {
    "a pruner between layers": {"prune": {"name": "fastv", "layer": 1}},
    "a pruner of the tower, and a draft that listens": {
        "prune": "visionzip",
        "draft": UVPrune(retention=0.5, layer=1),
    },
}


@crossed("family", name=RECIPES, family=sorted(BUILD))
def test_wherever_attaching_fails_the_model_is_as_it_was(
    family: tuple[str, Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each line of the attachment fails in turn."""
    from mmaccel.models.hf import ModelAttachment

    kind, model = family
    recipe = dict(RECIPES[name])
    if "draft" in recipe:
        recipe["draft"] = Sequential(model=copy.deepcopy(model), prune=recipe["draft"])
    inputs = prompt(kind, PROMPTS["video"])
    plain, before, lay = model.generate(**inputs, **TOLD), picture(model), ModelAttachment._lay
    step, failed = 0, 0
    while True:
        step += 1

        def laid(self: ModelAttachment, step: int = step) -> None:
            with failing_at(step) as seen:
                lay(self)
            assert not seen

        with monkeypatch.context() as patch:
            patch.setattr(ModelAttachment, "_lay", laid)
            try:
                fast = mmaccel.accelerate(model, **recipe)
            except Stop:
                failed += 1
                assert picture(model) == before, f"step {step}"
                assert mmaccel.attached(model) is None
                continue
        break
    assert failed > 30, "the lines of the attachment"
    with fast:
        model.generate(**inputs, **TOLD)
    assert picture(model) == before and torch.equal(model.generate(**inputs, **TOLD), plain)


def test_models_that_share_a_language_model_are_accelerated_one_at_a_time(family: tuple[str, Any]) -> None:
    kind, model = family
    other = copy.copy(model)
    other._modules = dict(model._modules)
    inputs, before = prompt(kind, PROMPTS["video"]), picture(model)
    plain = model.generate(**inputs, **TOLD)
    with mmaccel.accelerate(model):
        inside = picture(model)
        with pytest.raises(ModelError, match="shares its language model with one that is accelerated"):
            mmaccel.accelerate(other)
        assert picture(model) == inside and mmaccel.attached(other) is None
        assert torch.equal(model.generate(**inputs, **TOLD), plain)
    assert picture(model) == before
    with mmaccel.accelerate(other):
        assert torch.equal(other.generate(**inputs, **TOLD), plain)
    assert picture(model) == before


@pytest.mark.parametrize("where", ["generate", "forward", "the text model's forward", "a block's forward"])
def test_a_wrapper_that_came_after_the_recipe_stays(family: tuple[str, Any], where: str) -> None:
    kind, model = family
    inputs, before, calls = prompt(kind, PROMPTS["video"]), picture(model), []
    plain = model.generate(**inputs, **TOLD)
    text = model.model.language_model
    module = {"generate": model, "forward": model.model, "a block's forward": text.layers[0].mlp}.get(
        where, text
    )
    name = "generate" if where == "generate" else "forward"
    fast = mmaccel.accelerate(model)
    inner = getattr(module, name)

    def mine(*args: Any, **kwargs: Any) -> Any:
        calls.append(where)
        return inner(*args, **kwargs)

    setattr(module, name, mine)
    try:
        fast.detach()
        assert module.__dict__[name] is mine
        assert torch.equal(model.generate(**inputs, **TOLD), plain) and calls
    finally:
        delattr(module, name)
    assert picture(model) == before


def test_a_handle_that_was_left_cannot_be_entered(family: tuple[str, Any]) -> None:
    _, model = family
    fast = mmaccel.accelerate(model)
    fast.detach()
    fast.detach()
    with pytest.raises(ModelError, match="detached; call accelerate again"), fast:
        pass


def test_inside_a_call_of_its_own_the_model_is_not_changed(family: tuple[str, Any]) -> None:
    kind, model = family
    inputs, told = prompt(kind, PROMPTS["text"]), []

    class Change(LogitsProcessor):
        def __init__(self, do: Callable[[], Any]) -> None:
            self.do = do

        def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            with pytest.raises(ModelError, match="a call of the model is under way in this thread") as caught:
                self.do()
            told.append(str(caught.value))
            return scores

    plain = model.generate(**inputs, **TOLD, logits_processor=[Change(lambda: mmaccel.accelerate(model))])
    with mmaccel.accelerate(model) as fast:
        got = model.generate(**inputs, **TOLD, logits_processor=[Change(fast.detach)])
        assert torch.equal(got, plain)
    assert len(told) == 12 and told[0].startswith("accelerate: ") and told[-1].startswith("detach: ")


@crossed(
    "family",
    what=["attach", "detach"],
    call=["generate", "forward", "a pass of a stream"],
    family=sorted(BUILD),
    where=lambda what, call, _: (what, call) != ("detach", "a pass of a stream"),
)
def test_changes_wait_for_calls_under_way(family: tuple[str, Any], what: str, call: str) -> None:
    """A call stops inside a layer; the change is not made before it went on."""
    kind, model = family
    inputs, before = prompt(kind, PROMPTS["text"]), picture(model)
    plain = model.generate(**inputs, **TOLD)
    hold = Pause()
    hook = model.model.language_model.layers[0].register_forward_pre_hook(hold)
    fast = mmaccel.accelerate(model) if what == "detach" else None
    out: list[Any] = []

    def work() -> None:
        if call == "generate":
            out.append(model.generate(**inputs, **TOLD))
        elif call == "forward":
            out.append(model(**inputs).logits)
        else:
            with model_lock(model.model.language_model).call_without_recipe():
                hold()

    def change() -> None:
        handles.append(mmaccel.accelerate(model) if fast is None else fast.detach())

    handles: list[Any] = []
    threads = beside(work)
    assert hold.reached.wait(20)
    hook.remove()
    threads += beside(change)
    time.sleep(0.1)
    assert not handles, "it was made in the middle of a call"
    hold.go_on.set()
    finish(threads, 20)
    assert len(handles) == 1
    if handles[0] is not None:
        handles[0].detach()
    assert call != "generate" or torch.equal(out[0], plain)
    assert picture(model) == before


def test_a_generation_that_meets_the_first_wrapper_ends_plain(family: tuple[str, Any], monkeypatch) -> None:
    """Its next pass comes when the forward is wrapped and nobody looked for generations under way yet."""
    kind, model = family
    inputs, before, passes = prompt(kind, PROMPTS["text"]), picture(model), []
    plain = model.generate(**inputs, **TOLD)
    pause, drain = Pause(), ModelReadWriteLock.wait_for_running_calls

    def hold(*_: Any) -> None:
        passes.append(None)
        if len(passes) == 2:
            pause()

    def drained(self: ModelReadWriteLock, *args: Any) -> None:
        pause.go_on.set()
        until(lambda: self._waiting)  # the generation, to enter
        drain(self, *args)

    hook = model.model.language_model.layers[0].register_forward_pre_hook(hold)
    out: list[Any] = []
    threads = beside(lambda: out.append(model.generate(**inputs, **TOLD)))
    assert pause.reached.wait(20)
    monkeypatch.setattr(ModelReadWriteLock, "wait_for_running_calls", drained)
    with mmaccel.accelerate(model, kv={"name": "window", "sinks": 2, "window": 64}):
        finish(threads, 20)
        assert len(out) == 1 and torch.equal(out[0], plain)
    hook.remove()
    assert picture(model) == before


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_forked_process_waits_for_no_thread_of_its_parent(family: tuple[str, Any]) -> None:
    """Another thread is in a call, and holds the gate's lock, when the process forks."""
    _, model = family
    gate = model_lock(model.model.language_model)
    pause = Pause()

    def work() -> None:
        with gate.call_without_recipe(), gate._state:
            pause()

    fast = mmaccel.accelerate(model)
    threads = beside(work)
    assert pause.reached.wait(20)
    child = os.fork()
    if not child:
        signal.alarm(10)
        try:
            fast.detach()
            os._exit(0)
        finally:
            os._exit(1)
    status = os.waitpid(child, 0)[1]
    pause.go_on.set()
    finish(threads, 20)
    fast.detach()
    assert os.waitstatus_to_exitcode(status) == 0


@pytest.mark.parametrize("family", ["llava"], indirect=True)
def test_a_second_of_attaching_beside_two_threads_that_generate(family: tuple[str, Any]) -> None:
    kind, model = family
    inputs, before = prompt(kind, PROMPTS["video"]), picture(model)
    plain = model.generate(**inputs, **TOLD)
    logits = model(**inputs).logits
    stop = time.monotonic() + 1

    def run(do: Callable[[], bool]) -> None:
        done = 0
        while time.monotonic() < stop or done < 4:
            assert do(), "another text"
            done += 1

    def change() -> bool:
        with mmaccel.accelerate(model, draft="prompt_lookup"):
            time.sleep(0.005)
        return True

    work = [
        lambda: torch.equal(model.generate(**inputs, **TOLD), plain),
        lambda: bool((model(**inputs).logits - logits).abs().max() < 1e-5),
        change,
    ]
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(run, work, timeout=30))
    assert picture(model) == before


def test_threads_that_want_a_change_for_a_while_leave_nothing(family: tuple[str, Any]) -> None:
    """A draft's model is read by many threads, each of which lets its tower see a prompt in parts."""
    from mmaccel.core.attach import adapter_for
    from mmaccel.models.modules import batched_tower

    _, model = family
    before, adapter = picture(model), adapter_for(model)
    inside = threading.Barrier(2)

    def work(_: int) -> None:
        for _ in range(20):
            with batched_tower(adapter, model):  # type: ignore[arg-type]
                inside.wait(20)
                assert "get_video_features" in model.model.__dict__
            inside.wait(20)
            assert "get_video_features" not in model.model.__dict__
            inside.wait(20)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, range(2)))
    assert picture(model) == before
