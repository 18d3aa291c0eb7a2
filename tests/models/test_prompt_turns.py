"""Later turns of `generate` on a memory of streams, on the turn before: the text of one whole prompt."""

import copy
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, LogitsProcessorList

import mmaccel
from mmaccel.core.errors import MmaccelWarning, ModelError
from mmaccel.core.streams.stream_runner import StreamRunner
from mmaccel.models import drafting, step
from mmaccel.models.stream import StreamForwardPasses
from mmaccel.policies.draft import Sequential
from mmaccel.policies.prune import DyCoke, FastV, UVPrune, VisionZip
from tests.models.streams import FPS, QUESTION, every_stream, film, pair
from tests.models.test_second_turns import said
from tests.models.tiny_random import BUILD, prompt
from tests.spies import crossed, heard, refusal

FRAMES, TOKENS = 24, 8
TIGHT = {name: kv for name, kv in every_stream(4, 4).items() if name not in ("full", "window")}
KVS = ("mosaic", "rekv", "streammem", "livevlm", "recent", "no_cache", "offload")
DRAFTS: dict[str, dict[str, Any]] = {
    "off": {},
    "prompt_lookup": {"draft": "prompt_lookup"},
    "sequential": {"draft": {"name": "sequential"}},
    "tree": {"draft": {"name": "tree"}},
    "parallel": {"draft": {"name": "parallel", "process": False}},
}
PACE = {"random-ov": 1, "random-qwen": 2}
ASKED = (QUESTION, "and what did the green circle do ?", "where was it then ?")
HOW: dict[str, Any] = {"max_new_tokens": TOKENS, "do_sample": False, "return_dict_in_generate": True}


def choices(name: str, draft: str) -> dict[str, Any]:
    """The recipe's draft; a draft model is a copy of the target."""
    made = copy.deepcopy(DRAFTS[draft])
    if isinstance(made.get("draft"), dict):
        made["draft"]["model"] = copy.deepcopy(pair(name)[0])
    return made


def turn(name: str, answers: list[str], number: int, pixels: bool = False) -> dict[str, Any]:
    """The prompt of question `number` behind these `answers`, as the processor makes it; without pixels if it is later."""
    messages = [{"role": "user", "content": [{"type": "video", "video": film(FRAMES)}, words(ASKED[0])]}]
    for answer, question in zip(answers, ASKED[1:], strict=False):
        messages.append({"role": "assistant", "content": [words(answer)]})
        messages.append({"role": "user", "content": [words(question)]})
    made = pair(name)[1].chat(messages, fps=FPS)
    assert len(answers) == number
    return {key: x for key, x in made.items() if pixels or not number or not key.startswith("pixel")}


def words(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def answered(name: str, out: Any, inputs: dict[str, Any]) -> tuple[list[int], str]:
    """Ids without an end, and text, of the answer in `out`."""
    model, processor = pair(name)
    ids = out.sequences[0, inputs["input_ids"].shape[1] :].tolist()
    ids = [token for token in ids if token != model.generation_config.eos_token_id]
    return ids, str(processor.decode(ids)).strip()


def drafted(told: Any) -> list[int]:
    return [told.draft[one] for one in ("rounds", "proposed", "accepted")]


def talk(name: str, fast: Any, turns: int = 3) -> tuple[list[list[int]], list[str], list[list[int]]]:
    """Ids, texts and drafted tokens of the answers of a conversation, each turn on the cache of the one before."""
    ids, texts, figures, out = list[list[int]](), list[str](), list[list[int]](), None
    for number in range(turns):
        inputs = turn(name, texts, number)
        out = fast.generate(**inputs, **HOW, past_key_values=None if out is None else out.past_key_values)
        mine, text = answered(name, out, inputs)
        ids.append(mine)
        texts.append(text)
        figures.append(drafted(fast.report()))
        told = fast.report()
        assert told.draft["failed"] is None and told.video_units == FRAMES // PACE[name]
        assert all("it proposed nothing" in note for note in told.notes)
        live = out.past_key_values.live
        assert getattr(getattr(live.draft_stream.stream, "_adapter", None), "inputs", {}) == {}, (
            "pixels are let go"
        )
    return ids, texts, figures


@crossed(kv=KVS, draft=DRAFTS, name=("random-ov", "random-qwen"))
def test_a_later_turn_is_the_session_s(kv: str, draft: str, name: str) -> None:
    """Token for token, though the video is read once; a draft's tokens too, but of `parallel`, which goes by the clock."""
    model, processor = pair(name)
    with mmaccel.VideoSession(model, processor, None, kv=TIGHT[kv], **choices(name, draft)) as session:
        session.ingest(film(FRAMES), fps=FPS)
        want, rounds = [], []
        for question in ASKED:
            want.append(session.ask(question, TOKENS, chat=True))
            rounds.append(drafted(session.report()))
    assert len({one.ids for one in want}) == 3, "the answers must differ"
    with mmaccel.accelerate(model, kv=TIGHT[kv], **choices(name, draft)) as fast:
        ids, texts, figures = talk(name, fast)
    assert texts == [one.text for one in want] and ids == [list(one.ids) for one in want]
    if draft == "parallel":
        assert figures[0][1] > 0
    elif draft != "prompt_lookup":  # which finds the first turn's words in the prompt
        assert figures == rounds, "its own stream reads what a session's does"
    if draft == "sequential" and kv == "offload":
        assert figures[0][2] == figures[0][1] > 0, "a twin that sees the same is right"


@crossed(kv=KVS, name=("random-ov", "random-qwen"))
def test_a_later_turn_is_one_whole_prompt_and_reads_no_video(kv: str, name: str, monkeypatch) -> None:
    """The scores of the whole prompt, given without a cache; the tower runs for `no_cache` alone, which has only frames."""
    how = {**HOW, "output_logits": True}
    with mmaccel.accelerate(pair(name)[0], kv=TIGHT[kv]) as fast:
        first = turn(name, [], 0)
        out = fast.generate(**first, **how)
        texts = [answered(name, out, first)[1]]
        want = fast.generate(**turn(name, texts, 1, pixels=True), **how)
        towers = heard(
            monkeypatch, StreamForwardPasses, "encode_prompt_video", lambda self, inputs, units, unit: units
        )
        kinds = heard(
            monkeypatch, StreamRunner, "run_pass", lambda self, state, one, *_, **__: (self.state is state, one.kind)
        )  # fmt: skip
        got = fast.generate(**turn(name, texts, 1), **how, past_key_values=out.past_key_values)
        assert torch.equal(got.sequences, want.sequences)
        torch.testing.assert_close(torch.stack(got.logits), torch.stack(want.logits), rtol=0.0, atol=1e-5)
        assert got.past_key_values is out.past_key_values
        assert {kind for mine, kind in kinds if mine} <= {"question", "answer"}
        assert towers if kv == "no_cache" else not towers


def test_another_question_on_the_same_video(monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversation that parts from the one before in words alone goes on too. A draft is told what both share."""
    name = "random-ov"
    processor = pair(name)[1]
    wholes = [
        processor.chat([{"type": "video", "video": film(FRAMES)}, words(question)], fps=FPS)
        for question in ASKED
    ]
    with mmaccel.accelerate(pair(name)[0], kv=TIGHT["rekv"], draft="prompt_lookup") as fast:
        want = [fast.generate(**whole, **HOW).sequences for whole in wholes]
        cache = fast.generate(**wholes[0], **HOW).past_key_values
        prompts = heard(monkeypatch, drafting, "Prompt", lambda **given: (given["past"], given["inputs"]))
        before = want[0]
        for number in (1, 0, 0, 2):
            ids = wholes[number]["input_ids"]
            assert torch.equal(fast.generate(ids, past_key_values=cache, **HOW).sequences, want[number])
            most = min(ids.shape[1], before.shape[1]) - 1
            same = int((ids[0, :most] == before[0, :most]).long().cumprod(0).sum())
            past, given = prompts[-1]
            assert past.layout.length == same and torch.equal(given["input_ids"], ids[:, same:])
            assert bool((past.layout.modality != 0).any())
            before = want[number]


PARTS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "fastv": lambda model: {"prune": FastV(layer=1)},
    "visionzip": lambda model: {"prune": VisionZip(retention=0.5)},
    "dycoke": lambda model: {"prune": DyCoke(drop=0.6, forget=0.0)},
    "pruned draft": lambda model: {
        "draft": Sequential(model=copy.deepcopy(model), prune=UVPrune(retention=0.5))
    },
}


def check_later_turn(model: Any, family: str, frames: int, **recipe: Any) -> mmaccel.Report:
    """Assert that a later turn, which has the memory of the turn before, is the whole prompt; the report of that turn."""
    first, how = prompt(family, [("text", 6), ("video", frames), ("text", 9)]), {**HOW, "output_logits": True}
    kv = {"name": "rekv", "frames": 2, "window": 2, "local": 1}
    with mmaccel.accelerate(model, kv=kv, **recipe) as fast:
        out = fast.generate(**first, **how)
        later, whole = said(family, first, out.sequences, prompt(family, [("text", 8)], seed=1))
        want = fast.generate(**whole, **how)
        got = fast.generate(**later, **how, past_key_values=out.past_key_values)
        told = fast.report()
    assert torch.equal(got.sequences, want.sequences)
    torch.testing.assert_close(torch.stack(got.logits), torch.stack(want.logits), rtol=0.0, atol=1e-5)
    return told


@crossed(together=2, family=BUILD, part=PARTS)
def test_turns_of_other_recipes_are_one_whole_prompt(family: str, part: str) -> None:
    """Pruners, and a draft that reads what the question attends to."""
    model = BUILD[family]()
    told = check_later_turn(model, family, 14, **PARTS[part](model))
    assert told.draft["failed"] is None and (told.draft["rounds"] > 0 or part != "pruned draft")


@pytest.mark.parametrize(
    ("name", "images"), [("random-ov", True), ("random-qwen", True), ("random-ov", False)]
)
def test_a_prompt_with_images_goes_on_and_one_without_video(name: str, images: bool) -> None:
    """Images of the first turn stay visible. Without any pixels the later turn is given all its inputs."""
    model, processor = pair(name)
    image = {"type": "image", "image": film(25)[24]}
    shown = [image, {"type": "video", "video": film(8)}, image] if images else []
    messages: list[dict[str, Any]] = [{"role": "user", "content": [*shown, words(QUESTION)]}]
    with mmaccel.accelerate(model, kv=TIGHT["mosaic"] if images else "mosaic") as fast:
        first = processor.chat(messages, fps=FPS)
        out = fast.generate(**first, **HOW)
        messages.append({"role": "assistant", "content": [words(answered(name, out, first)[1])]})
        messages.append({"role": "user", "content": [words(ASKED[1])]})
        whole = processor.chat(messages, fps=FPS)
        want = fast.generate(**whole, **HOW).sequences
        later = {key: x for key, x in whole.items() if not key.startswith("pixel")}
        assert torch.equal(fast.generate(**later, **HOW, past_key_values=out.past_key_values).sequences, want)


def test_what_cannot_go_on_is_refused_and_the_memory_serves_on() -> None:
    name = "random-ov"
    model, processor = pair(name)
    with mmaccel.accelerate(model, kv=TIGHT["mosaic"]) as fast:
        first = turn(name, [], 0)
        out = fast.generate(**first, **HOW)
        cache, texts = out.past_key_values, [answered(name, out, first)[1]]
        later = turn(name, texts, 1)
        want = fast.generate(**later, **HOW, past_key_values=cache).sequences
        other = later["input_ids"].clone()
        other[0, 1] = 5
        short = processor.chat([{"type": "video", "video": film(8)}, words(QUESTION)], fps=FPS)
        moved = copy.deepcopy(later)
        moved["input_ids"] = torch.nn.functional.pad(later["input_ids"][:, :-1], (1, 0), value=5)
        twice = {"input_ids": later["input_ids"].expand(2, -1)}
        wrong: list[tuple[dict[str, Any], str, str]] = [
            ({"input_ids": other}, "input_ids", "give the whole conversation"),
            ({"input_ids": later["input_ids"][:, :6]}, "input_ids", "give the whole conversation"),
            ({"input_ids": short["input_ids"]}, "input_ids", "give the whole conversation"),
            (moved, "input_ids", "give the whole conversation"),
            (turn(name, texts, 1, pixels=True), "pixel_values_videos", "leave"),
            ({**later, "pixel_values": torch.zeros(1, 3, 42, 70)}, "pixel_values", "leave"),
            (twice, "past_key_values", "one by one"),
            ({**later, "do_sample": True, "num_return_sequences": 2}, "past_key_values", "one by one"),
        ]  # fmt: skip
        for given, field, mend in wrong:
            told = refusal(lambda given=given: fast.generate(**{**HOW, **given}, past_key_values=cache))
            assert told.startswith(f"{field}: ") and mend in told and told.endswith("."), told
            assert torch.equal(fast.generate(**later, **HOW, past_key_values=cache).sequences, want), told


def test_a_cache_serves_the_model_that_returned_it() -> None:
    name = "random-ov"
    model = pair(name)[0]
    first = turn(name, [], 0)
    with mmaccel.accelerate(model, kv=TIGHT["mosaic"]) as fast:
        cache = fast.generate(**first, **HOW).past_key_values
        for strange in (DynamicCache(), (1, 2)):
            with pytest.raises(ModelError, match=r"^past_key_values: kv 'mosaic' goes on with what"):
                fast.generate(**first, **HOW, past_key_values=strange)
        with pytest.raises(ModelError, match=r"^past_key_values: "):
            pickle.dumps(cache)
        assert copy.deepcopy(cache) is cache and cache, "no call changes it"
    ids = first["input_ids"]
    with pytest.raises(ModelError, match=r"^past_key_values: "):
        model.generate(ids, past_key_values=cache, max_new_tokens=2)
    for kv in (TIGHT["mosaic"], "full", {"name": "window", "window": 64}):
        with mmaccel.accelerate(model, kv=kv) as fast, pytest.raises(ModelError, match=r"^past_key_values: "):
            fast.generate(ids, past_key_values=cache, max_new_tokens=2)


@crossed(kv=KVS, captured=[False, True], close=[False, True])
def test_the_memory_goes_with_the_result(
    kv: str, captured: bool, close: bool, uncollected: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without waiting for Python to look for cycles: they would hold the device's memory."""
    name = "random-ov"
    inputs, later = turn(name, [], 0), turn(name, ["red star"], 1)
    if captured:
        monkeypatch.setattr(step, "DEVICES", ("cpu",))
    with mmaccel.accelerate(pair(name)[0], kv=TIGHT[kv]) as fast:
        out = fast.generate(**inputs, **HOW)
        frames = weakref.ref(inputs.pop("pixel_values_videos"))
        assert kv == "no_cache" or frames() is None, "they have been read"
        cache = out.past_key_values
        fast.generate(**later, **HOW, past_key_values=cache)
        held = [weakref.ref(one) for one in (cache.prompt, cache.live, cache.live.state)]
        assert None not in [one() for one in held[:3]]
        if close:
            cache.close()
            cache.close()
            with pytest.raises(ModelError, match=r"^past_key_values: it is closed"):
                fast.generate(**later, **HOW, past_key_values=cache)
        del out, cache
        assert [one() for one in held] == [None] * len(held)


def test_a_call_that_returns_no_cache_keeps_none(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "random-ov"
    inputs = turn(name, [], 0)
    closed = heard(monkeypatch, StreamRunner, "close", lambda self, *_: weakref.ref(self.state))
    plain = {"max_new_tokens": 3, "do_sample": False}
    with mmaccel.accelerate(pair(name)[0], kv=TIGHT["rekv"]) as fast:
        fast.generate(**inputs, **plain)
        assert len(closed) == 1 and closed[0]() is None and fast.last_kv_state is None
        out = fast.generate(**inputs, **plain, return_dict_in_generate=True, use_cache=False)
        assert len(closed) == 2 and closed[1]() is None and out.past_key_values is None
        with pytest.warns(MmaccelWarning, match="each sequence of this batch"):
            ids = {key: torch.cat([x, x]) for key, x in inputs.items()}
            out = fast.generate(**ids, **plain, return_dict_in_generate=True)
        assert len(closed) == 4 and out.past_key_values is None
        out = fast.generate(**inputs, **plain, return_dict_in_generate=True)
        assert len(closed) == 4 and fast.report().kv["units"] == FRAMES
        del out
        assert len(closed) == 5


def test_calls_that_fail_or_come_at_once_leave_the_memory_as_it_was() -> None:
    """Of two at once the second is refused."""
    name = "random-ov"
    with mmaccel.accelerate(pair(name)[0], kv=TIGHT["mosaic"]) as fast:
        cache, later = fast.generate(**turn(name, [], 0), **HOW).past_key_values, turn(name, ["red star"], 1)

        def again(**more: Any) -> Tensor:
            return fast.generate(**later, **HOW, past_key_values=cache, **more).sequences

        want = again()

        def breaks(ids: Tensor, scores: Tensor) -> Tensor:
            if ids.shape[1] > later["input_ids"].shape[1] + 2:
                raise ZeroDivisionError
            return scores

        def within(ids: Tensor, scores: Tensor) -> Tensor:
            for call in (again, cache.close):
                assert refusal(call, ModelError).startswith("past_key_values: another call is at work")
            return scores

        with pytest.raises(ZeroDivisionError):
            again(logits_processor=LogitsProcessorList([breaks]))
        with pytest.warns(MmaccelWarning, match="ran out before the prompt was read"):
            again(max_time=1e-9)
        assert torch.equal(again(logits_processor=LogitsProcessorList([within])), want)
        assert torch.equal(again(), want)


def test_a_later_turn_ends_where_the_positions_do(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "random-ov"
    model = pair(name)[0]
    first, later = turn(name, [], 0), turn(name, ["red star"], 1)
    most = later["input_ids"].shape[1] + 2
    monkeypatch.setattr(model.model.language_model.config, "max_position_embeddings", most)
    with mmaccel.accelerate(model, kv=TIGHT["offload"]) as fast:
        cache = fast.generate(**first, **HOW).past_key_values
        with pytest.warns(MmaccelWarning, match="has .* positions"):
            assert fast.generate(**later, **HOW, past_key_values=cache).sequences.shape[1] == most
