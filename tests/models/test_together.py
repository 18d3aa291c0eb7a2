"""Several sequences in one step: each gets what it gets alone, whoever comes and goes beside it."""

import threading
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial

import pytest
import torch

import mmaccel
from mmaccel.core.attach import adapter_for
from mmaccel.core.decoding.batch import Batch, BatchSlot
from mmaccel.core.decoding.generate import Deadline
from mmaccel.models import modules, step
from mmaccel.models.together import BatchedDecodeSteps, copy_sharing_weights, why_not_batchable
from tests.models.tiny_random import PROMPTS, prompt
from tests.models.tiny_random import model as tiny

FAMILIES = ("qwen", "llava", "glm4v", "internvl", "qwen3_vl", "qwen3_5", "qwen3_vl_moe")
BUILD = {name: partial(tiny, name) for name in FAMILIES}
KINDS = ["text", "video", "interleaved", "long", "image"]
pytestmark = pytest.mark.numeric(by="torch")


@pytest.fixture(scope="module", params=sorted(BUILD))
def family(request):
    model = BUILD[request.param](layers=3)
    return request.param, model


def opened(stack, model, kinds, name):
    """A runner of each prompt on a copy of the model, after its prompt, and its logits; and the same of the plain model."""
    ours, theirs = [], []
    for number, kind in enumerate(kinds):
        inputs = prompt(name, PROMPTS[kind], number)
        fast = stack.enter_context(mmaccel.accelerate(copy_sharing_weights(model)))
        for some, runner in ((ours, fast.view.runner()), (theirs, adapter_for(model).runner(model))):
            some.append((runner, runner.prefill(inputs)))
    return ours, theirs


@torch.no_grad()
def test_ragged_rows_of_several_sequences(family):
    """Rows of unlike lengths after unlike prompts; some are taken back, memories grow, sequences come and go."""
    name, model = family
    with ExitStack() as stack:
        ours, theirs = opened(stack, model, KINDS, name)
        together = BatchedDecodeSteps.find_or_create(ours[0][0])
        draw = torch.Generator().manual_seed(3)
        for round_ in range(14):
            some = [n for n in range(len(KINDS)) if (round_ + n) % 4]
            ids = [
                torch.randint(3, 90, (1, 1 if round_ % 3 else 1 + (n + round_) % 5), generator=draw)
                for n in some
            ]
            found = together([ours[n][0] for n in some], ids)
            for n, own, logits in zip(some, ids, found, strict=True):
                torch.testing.assert_close(logits, theirs[n][0].step(own), atol=2e-4, rtol=1e-4)
                if own.shape[1] > 2:
                    for runner in (ours[n][0], theirs[n][0]):
                        runner.truncate(runner.length() - 2)
                assert ours[n][0].length() == theirs[n][0].length()
        # By itself again, through the model's own modules.
        own = torch.tensor([[7, 9]])
        for (runner, _), (plain, _) in zip(ours, theirs, strict=True):
            torch.testing.assert_close(runner.step(own), plain.step(own), atol=2e-4, rtol=1e-4)


def test_memories_grow_and_are_given_back(family, monkeypatch):
    monkeypatch.setattr("mmaccel.core.memory.buffers.ROOM_MIN", 3)
    name, model = family
    with ExitStack() as stack:
        ours, theirs = opened(stack, model, ["text", "video"], name)
        together = BatchedDecodeSteps.find_or_create(ours[0][0])
        for token in range(12):
            ids = [torch.tensor([[token + 3]]), torch.tensor([[token + 5]])]
            for logits, own, (plain, _) in zip(
                together([one for one, _ in ours], ids), ids, theirs, strict=True
            ):
                torch.testing.assert_close(logits, plain.step(own), atol=2e-4, rtol=1e-4)
        held = weakref.ref(ours[0][0].laid)
        ours.clear()
        assert held() is None


def test_copies_over_the_same_weights_share_a_step(family):
    name, model = family
    with ExitStack() as stack:
        (first, _), (second, _) = opened(stack, model, ["text", "video"], name)[0]
        together = BatchedDecodeSteps.find_or_create(first)
        assert BatchedDecodeSteps.find_or_create(second, [together]) is together
        other = stack.enter_context(mmaccel.accelerate(BUILD[name](layers=3, seed=1))).view.runner()
        assert BatchedDecodeSteps.find_or_create(other, [together]) is not together


CALLS = [
    ("text", {"do_sample": False}),
    ("video", {"do_sample": True, "temperature": 1.2, "top_k": 20}),
    ("interleaved", {"do_sample": False, "repetition_penalty": 1.3}),
    ("long", {"do_sample": True, "temperature": 0.9}),
    ("two videos", {"do_sample": False}),
    ("image", {"do_sample": True, "top_p": 0.8}),
]


def answers(
    model, name, batch, calls, at_once=True, drafts=("off",), tokens=lambda n: 9 + 3 * n, abreast=False
):
    """What each of `calls` generates, with a draft of its own, and its report: in threads that begin one after the other, or
    all `abreast`, or one at a time. Without a batch by torch's own random numbers."""
    begun, ready = threading.Semaphore(1), threading.Barrier(len(calls))

    def call(number):
        kind, how = calls[number]
        try:
            with mmaccel.accelerate(copy_sharing_weights(model), draft=drafts[number % len(drafts)]) as fast:
                if batch is not None:
                    joined = (lambda: ready.wait(60)) if abreast else begun.release
                    fast.seat = BatchSlot(batch, torch.Generator().manual_seed(number), joined)
                    begun.acquire(not abreast)
                torch.manual_seed(number)
                inputs = prompt(name, PROMPTS[kind], number)
                out, told = fast.generate(**inputs, max_new_tokens=tokens(number), **how), fast.report()
                assert (batch is None or not fast.seat.alone) and told.new_tokens == tokens(number)
                return out, told
        except BaseException:
            begun.release()
            ready.abort()
            raise

    with ThreadPoolExecutor(len(calls) if at_once else 1) as pool:
        return [list(some) for some in zip(*pool.map(call, range(len(calls))), strict=True)]


def test_calls_decoded_together_give_what_each_gives_alone(family):
    """Greedy ones are the plain model's, token for token; sampled ones draw their own random numbers."""
    name, model = family
    sizes = []
    together, _ = answers(model, name, batch := Batch(sizes.append), CALLS)
    assert max(sizes) > 1 and len(batch) == 0
    alone, _ = answers(model, name, Batch(), CALLS, at_once=False)
    for number, (kind, how) in enumerate(CALLS):
        assert torch.equal(together[number], alone[number]), (kind, how)
        more = {"max_new_tokens": 9 + 3 * number, **how}
        torch.manual_seed(number)  # a generator of that seed draws the same
        assert torch.equal(model.generate(**prompt(name, PROMPTS[kind], number), **more), together[number])


@pytest.mark.parametrize("family", ["llava"], indirect=True)
def test_an_error_ends_one_call_alone(family, monkeypatch):
    """One that fails in its step, in its own criterion, or while its memory grows, leaves the others theirs."""
    monkeypatch.setattr("mmaccel.core.memory.buffers.ROOM_MIN", 3)
    name, model = family
    calls = CALLS[:3]
    want, _ = answers(model, name, Batch(), calls, at_once=False)

    class Full(Exception):
        pass

    def bad(ids, scores, **_):
        if ids.shape[1] > prompt(name, PROMPTS["image"], 9)["input_ids"].shape[1] + 4:
            raise Full("a criterion")
        return torch.zeros(1, dtype=torch.bool)

    batch, failed = Batch(), []

    def fails(kind, number, **how):
        with mmaccel.accelerate(copy_sharing_weights(model)) as fast:
            fast.seat = BatchSlot(batch)
            if not how:
                opened = fast.open_kv_state

                def tight():
                    state = opened()
                    buffers, left = state.layer_buffers, [4]

                    def grown(room):
                        left[0] -= 1
                        if left[0] <= 0:
                            raise torch.OutOfMemoryError("no room")
                        return buffers(room)

                    state.layer_buffers = grown
                    return state

                fast.open_kv_state = tight
            try:
                fast.generate(**prompt(name, PROMPTS[kind], number), max_new_tokens=300, **how)
            except (Full, torch.OutOfMemoryError) as error:
                failed.append(type(error))

    with ThreadPoolExecutor(2) as pool:
        pool.submit(fails, "image", 9, stopping_criteria=[bad])
        pool.submit(fails, "text", 3)
        found, _ = answers(model, name, batch, calls)
    assert sorted(one.__name__ for one in failed) == ["Full", "OutOfMemoryError"]
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True)) and len(batch) == 0


@pytest.mark.parametrize("part", ["tower", "layers"])
def test_a_call_that_is_cancelled_leaves_the_model_within_its_prompt(part, monkeypatch):
    """Between two calls of the vision tower, or two layers; nothing is generated, and no warning blames the time."""
    model, deadline, runs = BUILD["llava"](layers=3), Deadline(), []
    inputs = prompt("llava", PROMPTS["video"])
    monkeypatch.setattr(modules, "PATCHES", 1)
    watched = model.model.vision_tower if part == "tower" else model.model.language_model.layers

    def cancels(*_):
        runs.append(None)
        deadline.cancel()

    for one in watched if part == "layers" else [watched]:
        one.register_forward_hook(cancels)
    with mmaccel.accelerate(model) as fast, warnings.catch_warnings(action="error"):
        fast.seat = BatchSlot(Batch(), deadline=deadline)
        assert torch.equal(fast.generate(**inputs, max_new_tokens=8), inputs["input_ids"])
        assert len(runs) == 1
        fast.seat = BatchSlot(Batch(), deadline=Deadline(1e6))
        assert fast.generate(**inputs, max_new_tokens=2).shape[1] == inputs["input_ids"].shape[1] + 2


@pytest.mark.parametrize(
    ("choice", "why"),
    [
        ({"draft": {"name": "tree", "model": BUILD["llava"](layers=3)}}, "draft 'tree'"),
        ({"kv": "rekv"}, "kv 'rekv'"),
        ({"kv": {"name": "window", "window": 64}}, "memory"),
        ({"prune": "fastv"}, "pruned"),
    ],
)
def test_what_cannot_share_a_step_is_decoded_alone_and_says_why(choice, why):
    model = BUILD["llava"](layers=3)
    inputs = prompt("llava", PROMPTS["video"])
    with mmaccel.accelerate(model, **choice) as fast:
        want = fast.generate(**inputs, max_new_tokens=8, do_sample=False)
        fast.seat = BatchSlot(Batch(lambda count: pytest.fail("it shared a step")))
        assert torch.equal(fast.generate(**inputs, max_new_tokens=8, do_sample=False), want)
        assert why in fast.seat.alone


def test_layers_of_another_kind_are_decoded_alone(family):
    name, model = family
    with mmaccel.accelerate(copy_sharing_weights(model)) as fast:
        runner = fast.view.runner()
        runner.prefill(prompt(name, PROMPTS["text"]))
        assert why_not_batchable(fast.model, adapter_for(model), runner.cache) is None
        adapter_for(model).layers(fast.model)[1].mlp.register_forward_hook(lambda *_: None)
        assert "layers" in why_not_batchable(fast.model, adapter_for(model), runner.cache)
    assert step.DEVICES == ("cuda",)
