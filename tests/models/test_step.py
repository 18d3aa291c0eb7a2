"""A layer of a step is five operators, whoever runs it, and what the host launches does not grow with the layers."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from transformers import DynamicCache

import mmaccel
from mmaccel.core.attach import adapter_for
from mmaccel.core.decoding import replay
from mmaccel.models import step
from mmaccel.models.runner import HFRunner
from tests.core.test_replay import Repeated
from tests.models.streams import FPS, QUESTION, every_stream, film, pair
from tests.models.tiny_random import BUILD, PROMPTS, prompt
from tests.policies.kv.test_question_reads import VIEWS

FREE = {*VIEWS, "split", "split_with_sizes", "_reshape_alias"}
"""What launches nothing."""


class Calls(TorchDispatchMode):
    """Counts the operators called by replayed work, and all others that the host launches. `on` is False at first."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.captured, self.launched = Counter[str](), Counter[str]()
        self._inside = self.on = False
        again, plain = Repeated.__call__, replay.Replays.__init__

        def noted(one: Any) -> Any:
            self._inside = True
            try:
                return again(one)
            finally:
                self._inside = False

        def works(one: Any, device: torch.device) -> None:
            plain(one, device)
            one.works = True

        monkeypatch.setattr(Repeated, "__call__", noted)
        monkeypatch.setattr(replay, "_Replay", Repeated)
        monkeypatch.setattr(replay.Replays, "__init__", works)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)

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


LAYER = {"enter_rows": 1, "decode_attend": 1, "pass_rows": 2, "project_rows": 1}


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
            step.StreamSteps.run,
        )

        def noted(steps: Any, *given: Any) -> Any:
            calls.captured, calls.launched, calls.on = Counter(), Counter(), True
            with calls:
                out = run(steps, *given)
            calls.on = False
            passes.append((+calls.captured, +calls.launched))
            return out

        monkeypatch.setattr(step.StreamSteps, "run", noted)
        for _ in range(4):
            session.ask(QUESTION, 3)
    captured, _ = passes[-3]
    own = {"rope_rows": 1, "decode_attend": 1, "pass_rows": 2, "project_rows": 1}
    assert captured["rope_rows"] == layers == 2
    # After the last layer no norm follows, and nothing is asked of the next one. The rest is the memory's.
    made = Counter({name: layers * number for name, number in own.items()})
    made += Counter({"project_rows": layers + 1, "_foreach_copy_": layers - 1})
    made["pass_rows"] -= 1
    assert {name: captured[name] for name in made} == made
    captured, launched = passes[-1]
    assert captured == Counter({name: layers * number for name, number in LAYER.items()}) + Counter(
        {"add": 1, "copy_": 1, "project_rows": 1}
    ) - Counter({"pass_rows": 1})
    # The last norm is launched by itself.
    assert launched["copy_"] <= 4 and sum(launched.values()) <= 12
