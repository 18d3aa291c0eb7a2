"""Steps of layers with a running state and of mixtures of experts: the model's own tokens, some of them taken back."""

import gc
from functools import cache
from typing import Any
from unittest.mock import Mock
from weakref import ref

import pytest
import torch

import mmaccel
from mmaccel.core.attach import adapter_for
from mmaccel.core.decoding import replay
from mmaccel.core.errors import ModelError
from mmaccel.models import decode, recurrent, step
from mmaccel.models.attention import wrap_kv_cache
from mmaccel.models.recurrent import RecurrentCacheLayer, StateSlots
from mmaccel.models.runner import HFRunner
from mmaccel.models.together import BatchedDecodeSteps
from mmaccel.policies.draft import Sequential, Tree
from mmaccel_lab import world
from mmaccel_lab.train import pixels
from tests.models.streams import logits
from tests.models.test_pruned_steps import PIECES, Echo
from tests.models.test_stream_families import CLOSE, FPS, QUESTION, TIGHT, film, session
from tests.models.test_stream_families import pair as stream_pair
from tests.models.tiny_random import prompt, sampler
from tests.spies import crossed, heard

KINDS = ["qwen3_5", "qwen3_5_moe", "qwen3_vl_moe", "glm4v_moe"]
pytestmark = pytest.mark.numeric(by="torch")


@cache
def model_of(kind: str, seed: int = 0) -> Any:
    """With gains, rates and routing that are not what they begin as; the last layer of a hybrid has a running state."""
    made = sampler(kind).model(5, seed=seed)
    draw = torch.Generator().manual_seed(seed + 5)
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if weight.ndim == 1 or "mlp.gate.weight" in name or "conv1d" in name:
                weight.add_(torch.randn(weight.shape, generator=draw) * 0.3)
    made.generation_config.eos_token_id = None
    return made


@pytest.fixture
def replays(request: Any) -> None:
    """As on a CPU, where no step is captured; or as on a device."""
    if request.param == "replayed":
        request.getfixturevalue("repeated")


REPLAYS = ["written", "replayed"]


def pair(kind: str, rows: tuple[int, ...] = (1, 4, 8)) -> tuple[HFRunner, HFRunner]:
    """A runner by modules and one by steps, after a prompt."""
    model = model_of(kind)
    family: Any = adapter_for(model)
    both = tuple(HFRunner(model, family, wrap_kv_cache(model, family), some) for some in ((), rows))
    for one in both:
        one.prefill(prompt(kind, PIECES))
    return both  # type: ignore[return-value]


@pytest.mark.parametrize("replays", REPLAYS, indirect=True)
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_steps_are_the_model_s_own(kind: str, replays: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Back by a few rows, by more than the state lags behind, and over a copy of it; then rows that go through modules."""
    monkeypatch.setattr(recurrent, "REACH", 12)
    monkeypatch.setattr(recurrent, "LAG", 3)
    plain, steps = pair(kind)
    draw = torch.Generator().manual_seed(1)
    seen = heard(monkeypatch, decode.DeviceDecodeStep, "__call__", lambda *_: 1)
    for back, counts in (
        *((0, (1, 1, 3, 1, 4)), (2, (2, 1)), (1, (1, 1, 1, 1, 1, 1, 1)), (5, (1, 7, 1)), (9, (5, 1))),
        *((12, (2, 8, 8, 6)), (3, (1, 1)), (0, (11, 1, 2)), (1, (9, 3)), (2, (1,))),
    ):
        for one in (plain, steps):
            one.truncate(one.length() - back)
        for count in counts:
            ids = torch.randint(3, 180, (1, count), generator=draw)
            assert torch.allclose(steps.step(ids), plain.step(ids), atol=2e-5)
            assert steps.length() == plain.length()
    assert len(seen) == 29  # all but the two of more than 8 rows


TOLD: dict[str, Any] = {"max_new_tokens": 14, "do_sample": False, "return_dict_in_generate": True}


@cache
def two_turns(kind: str) -> tuple[torch.Tensor, dict[str, Any], torch.Tensor]:
    """What the plain model says to a prompt, the turn that follows it, and what it says to that."""
    want = model_of(kind).generate(**prompt(kind, PIECES), **TOLD)
    more = torch.randint(3, 180, (1, 6), generator=torch.Generator().manual_seed(9))
    ids = torch.cat([want.sequences, more], 1)
    turn = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **TOLD}
    after = model_of(kind).generate(**turn, past_key_values=want.past_key_values)
    return want.sequences, turn, after.sequences


@crossed("replays", kind=KINDS, draft=["off", "echo", "model", "tree"], replays=REPLAYS, together=2)
def test_a_recipe_decodes_by_them(kind: str, draft: str, replays: None, monkeypatch) -> None:
    """Token for token; a draft with other weights is often wrong, and goes back itself. A later turn goes on from there."""
    model, (want, turn, after) = model_of(kind), two_turns(kind)
    monkeypatch.setattr(step, "DEVICES", ("cpu",))
    other = model_of(kind, seed=1)
    drafts = {"echo": Echo(), "model": Sequential(model=other, window=3), "tree": Tree(model=other)}
    with mmaccel.accelerate(model, **({} if draft == "off" else {"draft": drafts[draft]})) as fast:
        got = fast.generate(**prompt(kind, PIECES), **TOLD)
        told = fast.report().draft
        assert torch.equal(got.sequences, want)
        again = fast.generate(**turn, past_key_values=got.past_key_values)
        assert torch.equal(again.sequences, after)
    if draft != "off":
        assert told["failed"] is None and told["accepted"] < told["proposed"]


@pytest.mark.parametrize("draft", ["off", "prompt_lookup"])
def test_the_trained_hybrid_says_what_it_said(draft: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = mmaccel.load_model("tiny-hybrid", device="cpu")
    model.generation_config.eos_token_id = None
    pytest.importorskip("torchvision", reason="Qwen3-VL's processor needs torchvision")
    table = world.World.generate(3, 40).table()
    shown = world.render(table, pixels.NATIVE_HEIGHT, pixels.NATIVE_WIDTH)
    asked = "what colour was the star ? what colour was the star ?"
    inputs = dict(mmaccel.load_processor("tiny-hybrid").chat(asked, videos=shown, fps=1.0))
    told = {"max_new_tokens": 24, "do_sample": False}
    want = model.generate(**inputs, **told)
    monkeypatch.setattr(step, "DEVICES", ("cpu",))
    with mmaccel.accelerate(model, draft=draft):
        assert torch.equal(model.generate(**inputs, **told), want)


@torch.no_grad()
def test_a_slot_is_given_to_the_next_sequence() -> None:
    modules = [*adapter_for(model_of("qwen3_5")).recurrent_layers(model_of("qwen3_5")).values()]  # type: ignore[attr-defined]
    slots = StateSlots(modules)
    one, other = ([RecurrentCacheLayer(module) for module in modules] for _ in range(2))
    begun = [slots.begin_step(some, 2) for some in (one, other, one)]
    assert begun == [(0, 0, 0, 0), (0, 0, 0, 1), (2, 0, 2, 0)]
    assert len(slots.owners) == 2
    for layer in one:
        layer.move_out_of_slot()  # a pass of the model comes
    third = [RecurrentCacheLayer(module) for module in modules]
    assert slots.begin_step(third, 1)[3] == 0
    del other, layer
    gc.collect()
    assert slots.begin_step(one, 1) == (4, 4, 4, 1) and len(slots.owners) == 2


def test_the_state_slots_of_a_cache_go_with_it(uncollected: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who keeps what `generate` gave keeps its slots; who lets go of it need not wait for the collector of garbage."""
    monkeypatch.setattr(step, "DEVICES", ("cpu",))
    with mmaccel.accelerate(model_of("qwen3_5")) as fast:
        told: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True}
        out = fast.generate(**prompt("qwen3_5", PIECES), **told)
        slots = {ref(one.slots) for one in out.past_key_values.states.values()}
        assert len(slots) == 1 and all(one() is not None for one in slots)
        del out
        assert all(one() is None for one in slots)


@crossed(kind=["qwen3_vl", "internvl", "perception_lm", "glm46v", *KINDS], kv=["rekv", "streammem", "full"])
def test_captured_steps_answer_as_modules_do(kind: str, kv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gains are not one; a question that begins with frames goes through the modules, for these layers add to."""
    model, _ = stream_pair(kind)
    before = {}
    seen = heard(
        monkeypatch, step.CapturedStreamSteps, "run_step", lambda steps, given, embeds, *_: len(embeds)
    )
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name and weight.ndim == 1:
                before[name] = weight.clone()
                weight.uniform_(0.5, 1.5)
    try:
        with session(kind, TIGHT[kv]) as one:
            one.watch(film(12, kind), fps=FPS)
            by_modules = logits(one, QUESTION), one.ask(QUESTION, 6).ids
            assert not seen
            monkeypatch.setattr(step, "DEVICES", ("cpu",))
            assert (logits(one, QUESTION) - by_modules[0]).abs().max() <= 10 * CLOSE
            assert one.ask(QUESTION, 6).ids == by_modules[1] and 1 in seen and max(seen) > 1
    finally:
        with torch.no_grad():
            for name, weight in before.items():
                model.get_parameter(name).copy_(weight)


@crossed("replays", kv=["rekv", "full"], replays=REPLAYS)
def test_questions_in_turns_on_two_sessions(kv: str, replays: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The states of each are its own, with a draft that is often wrong, and after what was computed ahead of an answer."""
    kind, asked = "qwen3_5", ("a b a b a b?", "what moved?", "a b a b a b?")
    frames = film(20, kind)

    def said() -> list[Any]:
        with session(kind, TIGHT[kv]) as one, session(kind, TIGHT[kv], draft=Echo()) as other:
            told = []
            for at, question in enumerate(asked):
                for each, first in ((one, 8 * at), (other, 4 + 8 * at)):
                    each.watch(frames[first : first + 8], fps=FPS)
                    told.append(each.ask(question, 9).ids)
            return told

    by_modules = said()
    monkeypatch.setattr(step, "DEVICES", ("cpu",))
    assert said() == by_modules


@pytest.mark.parametrize("replays", REPLAYS, indirect=True)
@torch.no_grad()
def test_steps_compute_with_weights_as_they_are_now(replays: None) -> None:
    """They may change in place; a norm's gain may be one more than its weight. Seats outlive the call that made them."""
    (plain, steps), ids = pair("qwen3_5"), torch.tensor([[5]])
    for mode in (torch.inference_mode, torch.no_grad) * 2:
        with mode():
            assert torch.allclose(plain.step(ids), steps.step(ids), atol=2e-5)
    norms = [one for one in model_of("qwen3_5").modules() if type(one).__name__ == "Qwen3_5RMSNorm"]
    before = {one.weight: one.weight.clone() for one in norms}
    torch._foreach_mul_([*before], 1.5)
    try:
        for _ in range(2):
            assert torch.allclose(plain.step(ids), steps.step(ids), atol=2e-5)
    finally:
        torch._foreach_copy_([*before], [*before.values()])


@pytest.mark.parametrize("fails", ["the step", "the shared step", "states on their way to their slots"])
@torch.no_grad()
def test_a_step_that_fails_leaves_running_states_as_they_were(fails: str, monkeypatch) -> None:
    """Those who share it are stepped again, each alone. Slots are entered in the first step."""
    (plain, one), (_, other) = pair("qwen3_5"), pair("qwen3_5")
    together, ids, shared = BatchedDecodeSteps(one), torch.tensor([[5, 6]]), fails == "the shared step"

    def go() -> torch.Tensor:
        return together([one, other], [ids, ids])[0] if shared else one.step(ids)

    places = {
        "the step": (decode.DeviceDecodeStep, "run_layers"),
        "the shared step": (BatchedDecodeSteps, "_run"),
    }
    for _ in range(3 * (fails in places)):
        assert torch.allclose(go(), plain.step(ids), atol=2e-5)
    with monkeypatch.context() as patch:
        patch.setattr(
            *places.get(fails, (recurrent, "copy_tensors")), Mock(side_effect=torch.OutOfMemoryError("once"))
        )
        with pytest.raises(torch.OutOfMemoryError):
            go()
    one.truncate(length := plain.length())
    assert length == one.length()
    assert torch.allclose(go(), plain.step(ids), atol=2e-5)


@pytest.mark.parametrize("columns, back", [(40, 60), (140, 20)])
@torch.no_grad()
def test_what_is_too_far_back_is_refused_and_nothing_is_changed(columns: int, back: int) -> None:
    """Behind a short prompt, whose mark knows no row of the steps, and behind a long one, which has no mark."""
    draw = torch.Generator().manual_seed(7)
    model, ids = model_of("qwen3_5"), torch.randint(3, 180, (1, columns + 480), generator=draw)
    family: Any = adapter_for(model)
    both = [HFRunner(model, family, wrap_kv_cache(model, family), some) for some in ((), (8,))]
    for one in both:
        one.prefill({"input_ids": ids[:, :columns]})
        for rows in ids[:, columns:].split(8, 1):
            one.step(rows)
    plain, steps = both
    states = [*steps.cache.states.values()]
    with pytest.raises(ModelError, match="goes back at most"):
        for one in states:
            one.crop(one.length - columns - back)
    assert torch.allclose(steps.step(ids[:, :3]), plain.step(ids[:, :3]), atol=2e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_they_are_captured(kind: str, dtype: torch.dtype) -> None:
    """Each width once, and nothing is left to run as it is written."""
    model = model_of(kind).to("cuda", dtype)
    family: Any = adapter_for(model)
    inputs = {name: x.cuda() for name, x in prompt(kind, PIECES).items()}
    inputs = {name: x.to(dtype) if x.is_floating_point() else x for name, x in inputs.items()}
    plain, steps = (HFRunner(model, family, wrap_kv_cache(model, family), some) for some in ((), (1, 4)))
    assert torch.equal(plain.prefill(inputs), steps.prefill(inputs))
    wide = 2e-3 if dtype == torch.float32 else 0.15
    for round_ in range(4):
        for ids in ([[7]], [[9]], [[1, 2, 3]], [[4, 2]], [[5]]):
            given = torch.tensor(ids, device="cuda")
            assert torch.allclose(plain.step(given), steps.step(given), atol=wide)
        for one in (plain, steps):
            one.truncate(one.length() - 2 - round_)
    ways = [one for part in steps.steps.parts for one in part.replays._held.values()]  # type: ignore[union-attr]
    assert len(ways) == 2 and all(isinstance(one, replay._Replay) for each in ways for one in each.values())
    model.to("cpu", torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("draft", ["off", "echo", "model"])
@pytest.mark.parametrize("kind", KINDS)
def test_captured_they_give_the_plain_tokens(kind: str, draft: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, peer = model_of(kind).cuda(), model_of(kind, seed=1).cuda()
    inputs = {name: x.cuda() for name, x in prompt(kind, PIECES).items()}
    told = {"max_new_tokens": 40, "do_sample": False}
    want = model.generate(**inputs, **told)
    graphs = heard(monkeypatch, replay, "capture_graph", lambda *_: 1)
    drafts = {"echo": Echo(), "model": Sequential(model=peer, window=3)}
    with mmaccel.accelerate(model, **({} if draft == "off" else {"draft": drafts[draft]})) as fast:
        assert torch.equal(fast.generate(**inputs, **told), want)
    assert graphs
    for one in (model, peer):
        one.cpu()
