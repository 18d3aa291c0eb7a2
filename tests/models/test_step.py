"""Steps computed without modules: five operators a layer, whoever runs it, the same words, and only where that is sound."""

import copy
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from transformers import DynamicCache

import mmaccel
from mmaccel.backends.ops import layer_ops
from mmaccel.core.attach import adapter_for
from mmaccel.core.decoding import replay
from mmaccel.core.memory.kv import CacheSlot
from mmaccel.core.prefill.attention import ForwardPass
from mmaccel.core.streams.asking import run_question
from mmaccel.models import step
from mmaccel.models.runner import HFRunner
from tests.core.test_replay import MADE, Recorded, Repeated
from tests.models.streams import FPS, QUESTION, every_stream, film, logits, open_session, pair
from tests.models.tiny_random import BUILD, PROMPTS, prompt
from tests.policies.kv.mosaic.test_replays import Replayed
from tests.policies.kv.test_fields import VIEWS
from tests.spies import beside, crossed, finish, heard, until

EACH = "qkv_rope_rows_each", "rope_rows_each", "decode_attend_each"
FREE = {*VIEWS, "split", "split_with_sizes", "_reshape_alias"}
"""What launches nothing."""


class Calls(TorchDispatchMode):
    """Counts the operators called by replayed work, and all others that the host launches. `on` is False at first."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.captured, self.launched = Counter[str](), Counter[str]()
        self._inside = self.on = False
        again = Repeated.__call__

        def noted(one: Any) -> Any:
            self._inside = True
            try:
                return again(one)
            finally:
                self._inside = False

        monkeypatch.setattr(Repeated, "__call__", noted)
        for name in EACH:
            counted: Any = partial(self._each, name, own := getattr(layer_ops, name))
            counted.call_directly = own.call_directly
            monkeypatch.setattr(layer_ops, name, counted)

    def _each(self, name: str, operator: Any, *given: Any) -> Any:
        """An operator on several caches, which torch does not know."""
        if self.on:
            (self.captured if self._inside else self.launched)[name] += 1
        with _disable_current_modes():
            return operator(*given)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if self.on:
            (self.captured if self._inside else self.launched)[name] += name not in FREE
        # What an operator of ours is made of is its own affair.
        with _disable_current_modes():
            return func(*args, **(kwargs or {}))

    def of(self, work: Callable[[], Any]) -> tuple[Counter[str], Counter[str]]:
        """What the third call of `work` calls: the first runs as it is written, the second captures."""
        for _ in range(2):
            work()
        self.captured, self.launched = Counter(), Counter()
        self.on = True
        with self:
            work()
        self.on = False
        return +self.captured, +self.launched


LAYER = {"qkv_rope_rows": 1, "decode_attend": 1, "residual_linear": 2, "project_rows": 1}
ANSWERS = {"qkv_rope_rows": "qkv_rope_rows_each", "decode_attend": "decode_attend_each"}


@pytest.mark.usefixtures("repeated")
@pytest.mark.parametrize("count", [1, 3])
@torch.no_grad()
def test_a_layer_of_a_decode_step_is_five_operators(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, found = Calls(monkeypatch), []
    for layers in (2, 5):
        model = BUILD["qwen"](layers=layers)
        runner = HFRunner(model, adapter_for(model), DynamicCache(), (1, 4))
        runner.prefill(prompt("qwen", PROMPTS["text"]))
        ids = torch.full((1, count), 7)
        found.append(calls.of(lambda runner=runner, ids=ids: runner.step(ids)))
    (few, host), (many, same) = found
    assert many - few == {name: 3 * number for name, number in LAYER.items()}
    # The embedding, the columns, the angles, the head; ids, the length, and the logits.
    assert not few - many and sum(few.values()) - 2 * 5 <= 5
    assert host == same == {"copy_": 1, "fill_": 1, "clone": 1}


@pytest.mark.usefixtures("repeated")
def test_a_layer_of_a_question_is_six_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its queries are shown to the memory before attention; one launch leaves rows and the next layer's queries. All layers
    of a token of the answer are one function, and what is launched for it does not grow with the layers."""
    monkeypatch.setattr(step, "DEVICES", ("cpu",))
    calls, passes = Calls(monkeypatch), list[tuple[Counter[str], Counter[str]]]()
    model, processor = pair("random-qwen")
    kv = every_stream(frames=6, window=8)["rekv"]
    with mmaccel.VideoSession(copy.deepcopy(model), processor, None, kv=kv) as session:
        session.watch(film(25), fps=FPS)
        live: Any = session._live
        live.state._keeps = True
        layers, run = (
            len(list(live.adapter.family.layers(live.adapter.model))),
            step.CapturedStreamSteps.run_step,
        )

        def noted(steps: Any, *given: Any) -> Any:
            calls.captured, calls.launched, calls.on = Counter(), Counter(), True
            with calls:
                out = run(steps, *given)
            calls.on = False
            passes.append((+calls.captured, +calls.launched))
            return out

        monkeypatch.setattr(step.CapturedStreamSteps, "run_step", noted)
        for _ in range(4):
            session.ask(QUESTION, 3)
    captured, _ = passes[-3]
    own = {"rope_rows_each": 1, "decode_attend_each": 1, "residual_linear": 2, "project_rows": 1}
    assert captured["rope_rows_each"] == layers == 2
    # After the last layer no norm follows, and nothing is asked of the next one. The rest is the memory's.
    made = Counter({name: layers * number for name, number in own.items()})
    made += Counter({"project_rows": layers + 1, "_foreach_copy_": layers - 1})
    made["residual_linear"] -= 1
    assert {name: captured[name] for name in made} == made
    captured, launched = passes[-1]
    each = {ANSWERS.get(name, name): number for name, number in LAYER.items()}
    assert captured == Counter({name: layers * number for name, number in each.items()}) + Counter(
        {"add": 1, "copy_": 1, "project_rows": 1}
    ) - Counter({"residual_linear": 1})
    # The last norm is launched by itself.
    assert launched["copy_"] <= 4 and sum(launched.values()) <= 12


@pytest.mark.usefixtures("repeated")
def test_what_is_captured_serves_every_stream_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """By tables of where caches lie: a second stream captures nothing, alone or in a batch, and says the same."""
    monkeypatch.setattr(step, "DEVICES", ("cpu",))
    model, processor = copy.deepcopy(pair("random-ov")[0]), pair("random-ov")[1]
    with ExitStack() as stack:
        open_one = partial(mmaccel.VideoSession, model, processor, None, kv=KV["mosaic"])
        first, second = (stack.enter_context(open_one()) for _ in range(2))
        first.watch(film(25), fps=FPS)
        second.watch(film(25).flip(0), fps=FPS)
        steps: Any = first._live.adapter._few  # type: ignore[union-attr]
        steps._graphs[0].works = steps._graphs[1].works = False
        wanted = second.ask(QUESTION, 6).ids
        steps._graphs[0].works = steps._graphs[1].works = True
        for _ in range(2):
            first.ask(QUESTION, 6)
        captured = [{name: set(ways) for name, ways in one._held.items()} for one in steps._graphs]
        assert len(captured[0]) > 2 and len(captured[1]) and steps is second._live.adapter._few  # type: ignore[union-attr]
        assert second.ask(QUESTION, 6).ids == wanted
        assert [{name: set(ways) for name, ways in one._held.items()} for one in steps._graphs] == captured


KV = every_stream(frames=6, window=8)
LONGER = "what was shown before the star and after it ?"


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody wrote is not a number, so that nothing may depend on it: not even with a weight of zero."""

    def nowhere(make: Any) -> Any:
        def made(*args: Any, **kwargs: Any) -> torch.Tensor:
            out = make(*args, **kwargs)
            return out.fill_(torch.nan) if out.is_floating_point() else out

        return made

    monkeypatch.setattr(torch, "empty", nowhere(torch.empty))
    monkeypatch.setattr(torch.Tensor, "new_empty", nowhere(torch.Tensor.new_empty))


def opened(name: str, kv: Any) -> mmaccel.VideoSession:
    model, processor = pair(name)
    session = mmaccel.VideoSession(copy.deepcopy(model), processor, None, kv=kv)
    session.watch(film(25), fps=FPS)
    return session


def scores_of(answer: mmaccel.core.decoding.generate.Answer) -> dict[tuple[int, int], float | None]:
    """What part of what reached an answer came from each moment that a layer looked at."""
    return {one.frames: one.score for one in answer.evidence if one.share}


@pytest.mark.usefixtures("poisoned")
@crossed(kv=["mosaic", "rekv", "full", "livevlm"], name=["random-ov", "random-qwen"])
def test_steps_say_what_the_modules_say(name: str, kv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A question, its answer, and rows behind it one by one and several at a time, some taken back: the logits of each."""

    def behind(session: mmaccel.VideoSession) -> list[torch.Tensor]:
        live: Any = session._live
        with run_question(live, QUESTION, 16) as turn:
            said = [turn.step(torch.tensor([[7, 9, 11]]))]
            turn.truncate(turn.length() - 2)
            said += [turn.step(torch.tensor([[token]])) for token in (5, 6)]
            return [*said, turn.step(torch.tensor([[8, 4, 3, 12, 5]]))]

    passes = heard(
        monkeypatch, step.CapturedStreamSteps, "run_step", lambda adapter, run, embeds, *_: len(embeds)
    )
    with opened(name, KV[kv]) as session:
        wanted, said = [logits(session), *behind(session)], session.ask(QUESTION, 6)
        assert not passes
        monkeypatch.setattr(step, "DEVICES", ("cpu",))
        found, again = [logits(session)], session.ask(QUESTION, 6)
        # A question, twice, and the words of an answer one by one.
        assert len(passes) >= 3 and max(passes) <= step.WIDTHS[-1] and min(passes) == 1
        calls = heard(monkeypatch, step.CapturedStreamSteps, "_answer", lambda *_: 1)
        found += behind(session)
    assert len(calls) == 4 * (kv != "full") and again.ids == said.ids
    assert all((one - right).abs().max() <= 1e-4 for one, right in zip(found, wanted, strict=True))
    assert len(scores_of(said)) >= 4 and scores_of(said) == pytest.approx(scores_of(again), abs=1e-4)


@pytest.mark.usefixtures("poisoned")
@crossed(kv=["mosaic", "rekv"], name=["random-ov", "random-qwen"])
def test_replayed_layers_say_what_layers_launched_one_by_one_say(name: str, kv: str, monkeypatch) -> None:
    """Questions of several lengths and their answers, while the stream grows."""
    monkeypatch.setattr(step, "DEVICES", ("cpu",))
    monkeypatch.setattr(replay, "_Replay", Replayed)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    Replayed.made = 0
    said = []
    for works in (False, True):
        model, processor = pair(name)
        with mmaccel.VideoSession(copy.deepcopy(model), processor, None, kv=KV[kv]) as session:
            for part in film(25).repeat(2, 1, 1, 1).split(10):
                session.watch(part, fps=FPS)
                live: Any = session._live
                of_questions, of_answers = live.adapter._few._graphs
                live.state._keeps = of_questions.works = of_answers.works = works
                if hasattr(live.state, "replays"):
                    live.state.replays.works = works
                for question in (QUESTION, QUESTION, LONGER, QUESTION):
                    said.append((logits(session, question), session.ask(question, 4)))
                    if question is not QUESTION:
                        # What follows lies elsewhere.
                        live.state._kept.clear()
    half = len(said) // 2
    for (plain, words), (replayed, again) in zip(said[:half], said[half:], strict=True):
        assert (plain - replayed).abs().max() <= 1e-5 and words.ids == again.ids
        assert scores_of(words) == pytest.approx(scores_of(again), abs=1e-5)
    assert Replayed.made >= 4


def test_replayed_passes_of_two_streams_are_those_launched_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of one frame and of two, in turns on one model: what the streams share is written anew for each."""
    monkeypatch.setattr(step, "DEVICES", ("cpu",))
    monkeypatch.setattr(replay, "_Replay", Recorded)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    model, processor = pair("random-ov")
    kv, said = {"name": "mosaic", "window": 4, "local": 2, "frames": 6, "encode_frames": 2}, []
    for works in (False, True):
        MADE.clear()
        with ExitStack() as stack:
            open_one = partial(mmaccel.VideoSession, model, processor, None, kv=kv)
            both: list[Any] = [stack.enter_context(open_one()) for _ in range(2)]
            for turn in range(13):
                for number, session in enumerate(both):
                    session.watch(film(1 + turn % 2 if turn else 9, seed=number + 2 * turn), fps=FPS)
                    session._live.state.pass_replays.works = works
            said.append([logits(session) for session in both])
    assert all(torch.equal(plain, replayed) for plain, replayed in zip(*said, strict=True))
    assert len(MADE) >= 4


def test_rooms_that_come_to_lie_where_others_lay_are_written_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """When weights were moved, rooms are given up; an allocator may make the next ones of the same memory."""
    monkeypatch.setattr(step, "DEVICES", ("cpu",))
    with opened("random-ov", KV["rekv"]) as session:
        few: Any = session._stream_adapter._few  # type: ignore[attr-defined]
        made: dict[Any, torch.Tensor] = {}

        def room(name: Any, shape: Any, dtype: Any) -> torch.Tensor:
            return made.setdefault((name, shape, dtype), torch.zeros(shape, dtype=dtype))

        monkeypatch.setattr(few._replays, "get_buffer", room)
        wanted = logits(session)
        # Other tensors of the same memory, with what is in new ones.
        made.update({name: one.zero_().view(one.shape) for name, one in made.items()})
        assert torch.equal(logits(session), wanted)


def test_captures_do_not_outlive_what_they_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that is exchanged, and be it for one that computes the same, makes the steps of layers anew."""
    monkeypatch.setattr(step, "DEVICES", ("cpu",))
    with opened("random-ov", KV["rekv"]) as session:
        few: Any = session._stream_adapter._few  # type: ignore[attr-defined]
        wanted = logits(session)
        steps, rooms = few._layers, dict(few._replays._buffers._rooms)
        assert torch.equal(logits(session), wanted) and few._layers is steps
        layer: Any = session._stream_adapter.family.layers(session._stream_adapter.model)[0]
        layer.mlp.__class__ = type("Same", (type(layer.mlp),), {})
        assert torch.equal(logits(session), wanted) and few._layers is not steps
        assert all(few._replays._buffers._rooms[name] is not room for name, room in rooms.items())


def test_a_model_that_was_once_asked_for_its_attention_is_served_as_any(monkeypatch) -> None:
    """transformers installs hooks at such a call and leaves them: they act only where a call asks again."""
    model, processor = copy.deepcopy(pair("random-ov")[0]), pair("random-ov")[1]
    with torch.no_grad():
        model(input_ids=torch.tensor([[3, 4, 5]]), output_attentions=True)
    assert any(layer._forward_hooks for layer in model.model.language_model.layers)
    monkeypatch.setattr(step, "DEVICES", ("cpu",))
    passes = heard(monkeypatch, step.CapturedStreamSteps, "run_step", lambda *_: 1)
    with mmaccel.VideoSession(model, processor, None, kv=KV["rekv"]) as session:
        session.watch(film(25), fps=FPS)
        session.ask(QUESTION, 2)
    assert passes


def test_listeners_and_long_questions_go_through_the_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "DEVICES", ("cpu",))
    monkeypatch.setattr(step.CapturedStreamSteps, "run_step", Mock(side_effect=AssertionError))
    with opened("random-ov", KV["rekv"]) as session:
        with pytest.raises(AssertionError):
            logits(session)
        heard = []
        layer: Any = session._stream_adapter.family.layers(session._stream_adapter.model)[0]
        hook = layer.register_forward_pre_hook(lambda *_: heard.append(1))
        logits(session)
        hook.remove()
        assert heard
        monkeypatch.setattr(step, "WIDTHS", (1, 4))
        logits(session)


@pytest.mark.usefixtures("repeated")
@torch.no_grad()
def test_captures_of_answers_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each question of a stream may have another number of summary tokens, and each of these a capture of all layers."""
    monkeypatch.setattr(step, "DEVICES", ("cpu",))
    model, processor = pair("random-qwen")
    with mmaccel.VideoSession(copy.deepcopy(model), processor, None, kv=every_stream()["full"]) as session:
        session.watch(film(4), fps=FPS)
        session.ask(QUESTION, 2)
        live: Any = session._live
        steps, shape = live.adapter._few, live.adapter.view.geometry
        replays = steps._replays
        replays.drop_if_moved("a stream")
        key = torch.zeros(1, shape.kv_heads, 400, shape.head_dim)
        angles = torch.ones(1, 1, 1, shape.head_dim), torch.zeros(1, 1, 1, shape.head_dim)
        for few in range(1, 3 * replay.KEPT):
            slots = [CacheSlot(key, key, 300, angles, torch.zeros(few))] * shape.layers
            for _ in range(2):
                steps._answer([slots], torch.zeros(1, shape.hidden), [1], None)
        # One for all that share a power of two.
        assert len(replays._held) == 6 == sum(name == "biases" for name, *_ in replays._buffers._rooms)


@pytest.mark.parametrize(("kv", "how"), [("full", {}), ("rekv", {"between": (0.0, 6.0)})])
def test_no_pass_comes_into_the_middle_of_a_question(
    kv: str, how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its layers work in buffers that all streams of a model share. These memories have no slots: they attend themselves."""
    monkeypatch.setattr(step, "DEVICES", ("cpu",))
    with ExitStack() as stack:
        first, second = (stack.enter_context(open_session("random-ov", KV[kv])) for _ in range(2))
        first.watch(film(9, seed=3), fps=FPS)
        second.watch(film(12, seed=6), fps=FPS)
        alone = first.ask(QUESTION, 6, **how).ids, second.ask(QUESTION, 6).ids
        turns, attend, here = first._stream_adapter.turns, ForwardPass.attend, threading.current_thread()
        found, begun = list[Any](), list[threading.Thread]()

        def interrupted(self: Any, layer: int, *given: Any) -> Any:
            if not begun and threading.current_thread() is here and layer == 1:
                begun.extend(beside(lambda: found.append(second.ask(QUESTION, 6).ids)))
                until(lambda: bool(turns._waiting))
            return attend(self, layer, *given)

        monkeypatch.setattr(ForwardPass, "attend", interrupted)
        assert first.ask(QUESTION, 6, **how).ids == alone[0]
        finish(begun)
        assert begun and found == [alone[1]]
