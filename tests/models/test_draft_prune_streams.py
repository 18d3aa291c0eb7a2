"""A draft's own pruner on streams: the draft reads a part of what it recalls, and the text stays."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import mmaccel
from mmaccel.core.attach import adapter_for
from mmaccel.core.decoding.watching import QuestionAttention
from mmaccel.core.errors import MmaccelWarning, ModelError, RecipeError
from mmaccel.core.prefill.prune import Signals, Stage
from mmaccel.core.registry import policy
from mmaccel.core.streams.asking import run_question as asked_of
from mmaccel.core.streams.draft_stream import LocalDraftStream
from mmaccel.core.streams.listening import AttentionRecording
from mmaccel.policies.draft import Sequential
from mmaccel.policies.kv.no_cache import _Frames
from tests.models.streams import FPS, QUESTION, every_stream, film, inputs_of, open_session, pair
from tests.models.tiny_random import DRAFTS
from tests.spies import crossed, returned

TIGHT = every_stream(frames=6, window=8)
ALL = every_stream()
TOKENS = 14
PRUNERS = ("attention", "uniform", "random", "uv")


def asked(kv: Any, draft: Any, frames: int = 18, name: str = "random-qwen", **choices: Any) -> Any:
    with open_session(name, kv, frames, draft=draft, **choices) as session:
        answer = session.ask(QUESTION, TOKENS)
        stream, told = session._live.draft_stream.stream, session.report()
        if isinstance(stream, LocalDraftStream):
            if told.recipe["draft"]["name"] != "parallel":
                assert told.draft["counters"]["kv_units"] == told.video_units > 0
            assert (f"its pruner left out {stream.pruned_tokens} visual" in str(told)) == (
                stream.pruned_tokens > 0
            )
        assert answer.counters.get("failed") is None and not session._live.draft_stream.failed
        return answer, dict(stream.counts) if isinstance(stream, LocalDraftStream) else {}


@crossed(kv=TIGHT, prune=PRUNERS, draft=("sequential", "parallel", "tree"))
def test_a_draft_reads_a_part_of_what_it_recalls(kv: str, prune: str, draft: str) -> None:
    given = {"name": prune, "retention": 0.25}
    answer, counts = asked(TIGHT[kv], DRAFTS[draft](pair("random-qwen")[0], prune=given))
    assert answer.ids == asked(TIGHT[kv], "off")[0].ids and answer.counters["drafted"] > 0
    assert counts["visual"] > 0 and counts["visual from layer 0"] == int(0.25 * counts["visual"])


@pytest.mark.parametrize("kv", ALL)
def test_a_pruner_that_keeps_everything_changes_nothing_of_the_draft(kv: str) -> None:
    model = pair("random-qwen")[0]
    found = []
    for prune in (None, {"name": "attention", "retention": 1.0}):
        found.append(asked(ALL[kv], Sequential(model=model, window=3, prune=prune))[0])  # type: ignore[arg-type]
    assert found[0].ids == found[1].ids
    assert found[0].counters["accepted"] == found[1].counters["accepted"] > 0


def heard_of(kv: Any, prune: Any = "attention", **choices: Any) -> QuestionAttention:
    """What a draft's pruner is told of the question to a session."""
    draft = Sequential(model=pair("random-ov")[0], prune=prune)
    with open_session("random-ov", kv, 18, draft=draft, **choices) as session:
        around = session._live.around
        assert isinstance(around, AttentionRecording)
        with asked_of(session._live, QUESTION, 4):
            heard = around.recorded_attention()
        assert heard is not None and around.recorded_attention() is None
        return heard


def test_what_is_heard_is_what_the_plain_model_attends_to() -> None:
    """With everything in view: attention of the question's rows to the video, from the eager model's own probabilities."""
    model, heard, inputs = pair("random-ov")[0], heard_of(ALL["mosaic"]), inputs_of("random-ov", 18)
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            rows = model(**inputs, output_attentions=True).attentions
    finally:
        model.set_attn_implementation("sdpa")
    video = (inputs["input_ids"][0] == model.config.video_token_id).nonzero()[:, 0]
    inside, after = video[: len(heard.tokens)], int(video[-1]) + 1
    want = torch.stack([one[0, :, after:].mean((0, 1)) for one in rows]).mean(0)[inside]
    assert heard.tokens.tolist() == list(range(18 * heard.tokens_per_unit))
    assert want.std() > 0 and (heard.paid[0] - want).abs().max() <= 1e-6


UV = {"name": "uv", "layer": 2, "base": 0}
"""Also reads what leaves the last layer."""


@pytest.mark.parametrize("kv", ALL)
def test_scores_by_states_are_those_of_the_plain_model(kv: str) -> None:
    """With everything in view: what the pruner makes of the states of a plain prompt, up to a number."""
    model, processor = pair("random-ov")
    heard = heard_of(ALL[kv], UV)
    inputs, states = inputs_of("random-ov", 18), []
    layers = model.model.language_model.layers
    hooks = [layers[0].register_forward_pre_hook(lambda module, args: states.append(args[0][0]))]
    hooks += [layers[1].register_forward_hook(lambda module, args, out: states.append(out[0]))]
    with torch.no_grad():
        model(**inputs)
    for hook in hooks:
        hook.remove()
    layout = adapter_for(model).layout(model, inputs)
    tail, (begin, end) = adapter_for(model).stream_adapter(model, processor).question_ids(QUESTION)
    column = torch.arange(layout.length)[None] - (layout.length - len(tail))
    layout = dataclasses.replace(layout, asked=(column >= begin) & (column < end))
    video = (inputs["input_ids"][0] == model.config.video_token_id).nonzero()[: len(heard.tokens), 0]
    hidden = torch.stack([one.view(layout.length, -1) for one in states])
    want = policy("prune", UV).score_candidates(Signals(hidden=hidden), layout, video)
    assert heard.tokens.tolist() == list(range(18 * heard.tokens_per_unit)) and want.std() > 0
    assert (heard.paid[0] - (want - want.amin() + 1)).abs().max() <= 1e-4


@pytest.mark.parametrize("kv", ["mosaic", "livevlm", "no_cache"])
def test_states_go_back_with_a_clip_and_are_saved(kv: str, tmp_path: Path) -> None:
    draft = Sequential(model=pair("random-ov")[0], prune=UV)  # type: ignore[arg-type]

    def scores(session: mmaccel.VideoSession) -> torch.Tensor:
        with asked_of(session._live, QUESTION, 4):
            return session._live.around.recorded_attention().paid

    with open_session("random-ov", TIGHT[kv], 10, draft=draft) as session:
        with pytest.raises(ModelError):
            session.watch(film(10), times=[float(n) for n in range(20, 31)])
        session.watch(film(18)[10:], fps=FPS)
        found = scores(session)
        session.save(tmp_path / "saved")
    with open_session("random-ov", TIGHT[kv], 10, draft=draft) as session:
        session.watch(film(18)[10:], fps=FPS)
        assert torch.equal(scores(session), found)
        session.load(tmp_path / "saved")
        assert torch.equal(scores(session), found)


def test_frames_that_were_not_heard_are_told_of(tmp_path: Path) -> None:
    model = pair("random-ov")[0]
    with open_session("random-ov", ALL["mosaic"], 10, draft=Sequential(model=model)) as session:
        session.save(tmp_path / "saved")
    with open_session("random-ov", ALL["mosaic"], draft=Sequential(model=model, prune=UV)) as session:  # type: ignore[arg-type]
        session.load(tmp_path / "saved")
        with pytest.warns(MmaccelWarning, match="prune 'uv' did not hear the frames that were read before"):
            session.ask(QUESTION, 4)


@pytest.mark.parametrize("kv", TIGHT)
def test_what_is_heard_is_of_units_that_were_seen(kv: str) -> None:
    heard = heard_of(TIGHT[kv])
    assert (heard.tokens[1:] > heard.tokens[:-1]).all() and heard.tokens.numel()
    assert int(heard.tokens[-1]) < 18 * heard.tokens_per_unit and (heard.paid > 0).all()
    assert 0 < float(heard.paid.sum()) < 1


def test_what_is_heard_goes_to_the_same_tokens_of_other_units() -> None:
    heard = QuestionAttention(Stage(0), 4, torch.tensor([4, 7, 12]), torch.tensor([[1.0, 2.0, 3.0]]))
    assert heard.attention_to(torch.tensor([1, 1, 3, 0]), torch.tensor([0, 3, 0, 0]), 4).tolist() == [
        [1, 2, 3, 0]
    ]
    # Units of half as many tokens: each stands where two stood.
    assert heard.attention_to(torch.tensor([1, 1, 3]), torch.tensor([0, 1, 0]), 2).tolist() == [[1, 0, 3]]
    none = QuestionAttention(Stage(0), 4, torch.zeros(0, dtype=torch.long), torch.zeros(1, 0))
    assert none.attention_to(torch.tensor([1]), torch.tensor([0]), 4).tolist() == [[0]]


def test_what_does_not_act_is_told() -> None:
    model = pair("random-qwen")[0]
    with pytest.raises(RecipeError, match="set compact to False"):
        given: Any = {"name": "uniform", "compact": True}
        open_session("random-qwen", "mosaic", draft=Sequential(model=model, prune=given))


def cheap(name: str, **frames: int) -> Sequential:
    """A draft that keeps frames, and reads those that the target's question attended to most."""
    kv, prune = {"name": "no_cache", **frames}, {"name": "attention", "retention": 1.0}
    return Sequential(model=pair(name)[0], window=3, kv=kv, prune=prune)  # type: ignore[arg-type]


@crossed(kv=TIGHT, name=["random-ov", "random-qwen"])
def test_a_draft_that_keeps_frames_reads_those_that_the_target_retrieved(
    name: str, kv: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    def told(found: Any, self: _Frames, paid: Any) -> tuple[dict[int, float], list[int]]:
        return dict(paid), [number for number, _ in found]

    every: list[tuple[dict[int, float], list[int]]] = returned(monkeypatch, _Frames, "choose_units", told)
    pace, want = (1 if name == "random-ov" else 2), asked(TIGHT[kv], "off", name=name)[0]
    with open_session(name, TIGHT[kv], 18, draft=cheap(name, frames=4)) as session:
        answer = session.ask(QUESTION, TOKENS)
        session.save(tmp_path / "saved")
        counters = session._live.draft_stream.stream._live.counters()
        assert counters["kept"] == counters["units"] == 18 / pace and counters["resident"] == 0
    assert answer.ids == want.ids and answer.counters["drafted"] > 0
    ((paid, numbers),) = (one for one in every if one[0])
    assert numbers == sorted(sorted(paid, key=lambda n: -paid[n])[: 4 // pace]) and len(paid) > 4 // pace
    with open_session(name, TIGHT[kv], draft=cheap(name, frames=4)) as session:
        session.load(tmp_path / "saved")
        assert session.ask(QUESTION, TOKENS).counters["accepted"] == answer.counters["accepted"]
    assert [picked for paid, picked in every if paid] == [numbers] * 2


def test_with_room_for_all_frames_it_reads_as_the_plain_model() -> None:
    """A draft by the target's own model then agrees with a target that keeps everything."""
    answer, _ = asked(ALL["full"], cheap("random-ov", frames=18), name="random-ov")
    assert answer.counters["accepted"] >= 0.9 * (len(answer.ids) - 1) * 3 / 4


def test_frames_that_are_held_stand_for_those_after_them() -> None:
    policy: Any = mmaccel.core.registry.policy("kv", {"name": "no_cache", "frames": 2, "kept": 4})
    stream: Any = SimpleNamespace(frames_per_unit=1)
    state: Any = policy.open_stream(stream, None, None, "cpu")
    state.store_frames(torch.arange(10, dtype=torch.uint8).view(10, 1, 1, 1).expand(-1, 3, 2, 2))
    assert list(state._held) == [0, 4, 8]
    for paid, numbers in (({}, [0, 8]), ({5: 0.2, 6: 0.2, 0: 0.3, 8: 0.1}, [0, 4]), ({9: 0.2}, [8])):
        found = state.choose_units(paid)
        assert [number for number, _ in found] == numbers
        assert [int(frames[0, 0, 0, 0]) for _, frames in found] == numbers
