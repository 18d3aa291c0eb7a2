"""`generate` on a memory of streams: the video goes into it, and the answer is a session's, and the plain model's."""

import copy
import functools
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

import mmaccel
from mmaccel.core.adapter import ModelView
from mmaccel.core.attach import Accelerated, adapter_for
from mmaccel.core.errors import MmaccelWarning, ModelError, RecipeError
from mmaccel.core.streams.stream_runner import StreamRunner
from mmaccel.models.prompt_stream import PromptStreamModel
from mmaccel.policies.draft import Sequential
from tests.models.streams import FPS, MODELS, QUESTION, every_stream, film, inputs_of, open_session, pair
from tests.models.streams import logits as session_logits
from tests.models.test_ingest import FEW
from tests.models.tiny_random import BUILD, PROMPTS, batch, prompt
from tests.spies import crossed, heard

ROOM = {name: kv for name, kv in every_stream().items() if name not in ("full", "window")}
TIGHT = {name: kv for name, kv in every_stream(4, 4).items() if name in ROOM}
CLOSE = {"rtol": 0.0, "atol": 1e-5}
MOSAIC = ROOM["mosaic"]


def ask(name: str, content: list[dict[str, Any]], **how: Any) -> dict[str, Any]:
    return pair(name)[1].chat(content, fps=FPS, **how)  # type: ignore[no-any-return]


@functools.cache
def filmed(name: str, frames: int) -> dict[str, Any]:
    return inputs_of(name, frames)


def said(name: str, kv: Any, inputs: dict[str, Any], tokens: int = 6, **options: Any) -> Any:
    """What `generate` gives with a memory; None: the plain model. New ids, and logits [n, V] of each."""
    model = pair(name)[0]
    how = {"max_new_tokens": tokens, "do_sample": False, **options}
    how |= {"return_dict_in_generate": True, "output_logits": True}
    if kv is None:
        out = model.generate(**inputs, **how)
    else:
        with mmaccel.accelerate(model, kv=kv) as fast:
            out = fast.generate(**inputs, **how)
    assert torch.equal(out.sequences[:, : inputs["input_ids"].shape[1]], inputs["input_ids"])
    return out.sequences[:, inputs["input_ids"].shape[1] :], torch.stack(out.logits, 1)


def same(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> None:
    assert torch.equal(one[0], other[0])
    torch.testing.assert_close(one[1], other[1], **CLOSE)  # type: ignore[arg-type]


@crossed(kv=ROOM, name=MODELS)
def test_with_room_for_all_it_is_the_plain_model(kv: str, name: str) -> None:
    inputs = filmed(name, 14)
    same(said(name, ROOM[kv], inputs), said(name, None, inputs))


@crossed(kv=TIGHT, name=("tiny-ov", "random-qwen"))
def test_it_is_the_session(kv: str, name: str) -> None:
    """Where a memory keeps little, too: both read the same units in the same passes, and search by the same words."""
    ids, logits = said(name, TIGHT[kv], filmed(name, 24))
    with open_session(name, TIGHT[kv]) as session:
        session.ingest(film(24), fps=FPS)
        torch.testing.assert_close(session_logits(session), logits[0, 0], **CLOSE)  # type: ignore[arg-type]
        answer = session.ask(QUESTION, 6)
    ends = pair(name)[0].generation_config.eos_token_id
    assert [token for token in ids[0].tolist() if token != ends] == list(answer.ids)


def test_merged_units_have_the_times_that_they_have_in_the_session() -> None:
    _, logits = said("random-qwen", "streammem", filmed("random-qwen", 24))
    with open_session("random-qwen", "streammem") as session:
        session.ingest(film(24), fps=FPS)
        assert len(session._live.info.spans) < 12  # type: ignore[union-attr]
        torch.testing.assert_close(session_logits(session), logits[0, 0], **CLOSE)  # type: ignore[arg-type]


def image() -> dict[str, Any]:
    return {"type": "image", "image": film(25)[24]}


def clip(frames: int, first: int = 0) -> dict[str, Any]:
    return {"type": "video", "video": film(first + frames)[first:]}


def words(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


CONTENTS: dict[str, list[dict[str, Any]]] = {
    "two videos and text between": [clip(4), words("then the room was red ."), clip(10, 4), words(QUESTION)],
    "the longest first": [clip(10), words("then the room was red ."), clip(4, 10), words(QUESTION)],
    "videos of one length": [clip(6), clip(6, 6), words(QUESTION)],
    "images around a video": [image(), words("a picture ."), clip(8), image(), words(QUESTION)],
    "images alone": [image(), image(), words(QUESTION)],
    "words alone": [words("the star was red . what colour was the star ?")],
    "the question first": [words(QUESTION), clip(8)],
    "a word": [clip(8), words("star")],
}


@crossed(content=CONTENTS, name=("random-ov", "random-qwen"))
def test_all_that_is_not_the_longest_video_stays_visible(content: str, name: str) -> None:
    """Videos of a batch of LLaVA-OneVision have one length; two in one prompt are taken as they come."""
    pieces = CONTENTS[content]
    lengths = {len(piece["video"]) for piece in pieces if piece["type"] == "video"}
    if name.endswith("ov") and len(lengths) > 1:
        pieces = [clip(6, 6) if piece["type"] == "video" else piece for piece in pieces]
    inputs = ask(name, pieces)
    for kv in ("mosaic", "offload", "livevlm", "streammem", "no_cache"):
        same(said(name, ROOM[kv], inputs), said(name, None, inputs))


def test_the_memory_has_the_longest_video_s_units() -> None:
    inputs = ask("random-qwen", CONTENTS["the longest first"])
    with mmaccel.accelerate(pair("random-qwen")[0], kv=MOSAIC) as fast:
        fast.generate(**inputs, max_new_tokens=2, do_sample=False)
        assert fast.report().kv["units"] == 5


@pytest.mark.parametrize("name", ("random-ov", "random-qwen"))
def test_a_conversation_s_last_words_search(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Earlier turns behind the video are visible, and the memory is searched by the last message."""
    inputs = dict(filmed(name, 16))
    ids = inputs["input_ids"][0].tolist()
    user, (end, start, assistant) = ids[1], ids[-3:]
    reply, question = ids[-6:-4], ids[-9:-3]
    more = [*reply, end, start, user, *question, end, start, assistant]
    inputs["input_ids"] = torch.tensor([ids + more])
    for field in ("attention_mask", "mm_token_type_ids"):
        if field in inputs:
            given = inputs[field]
            inputs[field] = torch.cat([given, given[:, -1:].expand(-1, len(more))], 1)
    passes = heard(
        monkeypatch, StreamRunner, "run_pass", lambda self, state, stream_pass, *_, **__: stream_pass
    )
    same(said(name, ROOM["rekv"], inputs), said(name, None, inputs))
    asked = next(one for one in passes if one.kind == "question")
    assert asked.words == (asked.rows - 3 - len(question), asked.rows - 3)


@pytest.mark.parametrize("kv", ["mosaic", "recent", "livevlm"])
def test_a_batch_holds_one_memory_at_a_time(kv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = BUILD["llava"]()
    prompts = [prompt("llava", [("text", 6), ("video", 12), ("text", 9)], seed) for seed in range(3)]
    opened, states = Accelerated.track_kv_state, list[weakref.ref[Any]]()

    def noted(self: Accelerated, state: Any, holder: object) -> Any:
        gc.collect()
        assert [one for one in states if one() is not None] == []
        states.append(weakref.ref(state))
        return opened(self, state, holder)

    monkeypatch.setattr(Accelerated, "track_kv_state", noted)
    with mmaccel.accelerate(model, kv=TIGHT[kv]):
        model.generate(**batch("llava", prompts), max_new_tokens=2, do_sample=False, pad_token_id=0)
    assert len(states) == 3


CALL = {"max_new_tokens": 5, "do_sample": False}


@pytest.fixture(scope="module")
def models() -> Any:
    """The plain model, and the same with a memory that keeps everything."""
    plain = BUILD["llava"]()
    plain.set_attn_implementation("eager")
    other = copy.deepcopy(plain)
    with mmaccel.accelerate(other, kv="offload"):
        yield plain, other


def test_a_forward_pass_by_itself_is_no_stream_and_a_tower_read_otherwise_is_refused(models: Any) -> None:
    call = prompt("llava", PROMPTS["video"])
    with pytest.raises(RecipeError, match="'offload' is a memory of streams; call"):
        models[1](**call)
    for name in ("vision_feature_layer", "vision_feature_select_strategy"):
        with pytest.raises(ModelError, match=f"^{name}: kv 'offload' takes a tower's features as"):
            models[1].generate(**call, **CALL, **{name: "full"})


def test_a_place_for_each_token_or_none(models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """True positions end with the model's; closed up, as many units as are shown have places."""
    plain, other = models
    call = prompt("llava", PROMPTS["video"])

    def limited(more: int) -> None:
        for one in models:
            most = call["input_ids"].shape[1] + more
            monkeypatch.setattr(one.model.language_model.config, "max_position_embeddings", most)

    limited(2)
    with pytest.warns(MmaccelWarning, match="has .* positions"):
        got = other.generate(**call, **CALL)
    assert got.shape[1] == call["input_ids"].shape[1] + 2
    limited(-4)
    with pytest.raises(ModelError, match="positions"):
        other.generate(**call, **CALL)
    closed = {"name": "rekv", "frames": 1, "window": 1, "local": 0, "positions": "compact"}
    with mmaccel.accelerate(plain, kv=closed) as fast:
        assert fast.generate(**call, **CALL).shape[1] == call["input_ids"].shape[1] + 5


def test_the_time_may_run_out_while_the_video_is_read(models: Any) -> None:
    call = prompt("llava", PROMPTS["video"])
    with pytest.warns(MmaccelWarning, match="ran out before the prompt was read"):
        got = models[1].generate(**call, **CALL, max_time=1e-9)
    assert torch.equal(got, call["input_ids"])
    assert models[1].generate(**call, **CALL).shape[1] == got.shape[1] + 5, "nothing is left of it"


@pytest.mark.parametrize("kv", ["full", "mosaic"])
@pytest.mark.parametrize("name", ["random-ov", "random-qwen"])
def test_frames_of_another_size_are_refused_before_the_tower_runs(kv: str, name: str, monkeypatch) -> None:
    model, inputs = pair(name)[0], filmed(name, 8)
    pixels = inputs["pixel_values_videos"]
    wrong = pixels[..., :-14, :] if pixels.ndim == 5 else pixels[:-4]
    told = r"^pixel_values_videos: it(?: has|s shape is) .*; build the inputs with the model's processor\.$"
    with mmaccel.accelerate(model, kv=TIGHT.get(kv, kv)) as fast:
        want = fast.generate(**inputs, max_new_tokens=2, do_sample=False)
        with monkeypatch.context() as fails:
            tower = model.model.visual if name == "random-qwen" else model.model.vision_tower
            fails.setattr(type(tower), "forward", None)
            for odd in (wrong, pixels.flatten(), pixels.flatten(0, -2)) if pixels.ndim == 5 else (wrong,):
                with pytest.raises(ModelError, match=told):
                    fast.generate(**{**inputs, "pixel_values_videos": odd}, max_new_tokens=2)
        # Patches under one axis more are as good to the tower.
        given = {**inputs, "pixel_values_videos": pixels if pixels.ndim == 5 else pixels[None]}
        assert torch.equal(fast.generate(**given, max_new_tokens=2, do_sample=False), want)


def test_a_video_without_pixels_is_refused() -> None:
    inputs = {name: x for name, x in filmed("random-ov", 8).items() if "pixel" not in name}
    with (
        mmaccel.accelerate(pair("random-ov")[0], kv=TIGHT["mosaic"]) as fast,
        pytest.raises(ModelError, match=r"^pixel_values_videos: input_ids show"),
    ):
        fast.generate(**inputs, max_new_tokens=4)


def test_inference_mode_changes_nothing(models: Any) -> None:
    call = {**prompt("llava", PROMPTS["video"]), **CALL}
    want = models[0].generate(**call)
    with torch.inference_mode():
        assert torch.equal(models[1].generate(**call), want)


def test_captured_steps_go_with_the_draft_that_another_replaces() -> None:
    """Those of the target stay, and one draft's serve all its prompts."""
    model = pair("random-ov")[0]
    view, inputs = ModelView(model, adapter_for(model), adapter_for), inputs_of("random-ov", 5)

    def steps(of: Any) -> Any:
        return PromptStreamModel(of, view.adapter, inputs, view)._few

    own, draft = steps(model), copy.deepcopy(model)
    assert steps(draft) is steps(draft) is not own
    gone = weakref.ref(steps(draft))
    steps(draft := copy.deepcopy(model))
    gc.collect()
    assert gone() is None and steps(model) is own


@pytest.mark.parametrize("frames", [2, 24])
def test_a_later_turn_counts_its_own_events_and_says_when_the_pattern_acted(frames: int) -> None:
    """Of a video that is too short for the pattern it says that this did nothing, in every turn."""
    model, processor = pair("random-ov")
    how: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True}
    told, cache, ids = [], None, filmed("random-ov", frames)["input_ids"]
    choices: dict[str, Any] = {"kv": TIGHT["mosaic"], "sparse": FEW["a_shape"], "backend": "reference"}
    with mmaccel.accelerate(model, **choices, draft=Sequential(model=model)) as fast:
        for number in range(3):
            given = {"input_ids": ids} if number else filmed("random-ov", frames)
            out = fast.generate(**given, **how, past_key_values=cache)
            cache, ids = out.past_key_values, processor.next_turn(out.sequences, QUESTION)
            told.append(fast.report())
    assert [one.kv["questions"] for one in told] == [1, 1, 1]
    assert [one.draft["counters"]["kv_questions"] for one in told] == [1, 1, 1], "the draft's memory, too"
    acted = frames == 24
    if acted:
        assert told[0].kept is not None and not told[0].notes
        assert [one.kv["recalled"] > 0 for one in told] == [True] * 3
        assert told[1].kv["recalled"] == told[2].kv["recalled"] and told[1].kv["host_bytes_in"] > 0
        assert told[0].kv["host_puts"] > 0 == told[1].kv["host_puts"] == told[1].kv["ingested"]
    for one in told[acted:]:
        assert (one.kv["units"], one.kv["seen"] > 0) == (frames, True), "what is held now is no event"
        (note,) = one.notes
        did = "acted in an earlier call, which read what this one goes on from, and acts on no part of this call"
        assert note.startswith(f"sparse: a_shape {did if acted else 'was asked for and did nothing'}: ")
    assert all("(a_shape acted on no part of it, see below)" in str(one) for one in told[1:])
