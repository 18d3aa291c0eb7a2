"""A conversation with a stream: messages, history, images, how tokens are chosen, and answers in JSON by a schema."""

import builtins
import json
import pickle
from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper

import mmaccel
from mmaccel.core.errors import ModelError
from mmaccel.models.sequences import SamplingDistribution
from mmaccel.models.token_choice import LONGEST, build_schema_logits_processor
from tests.models.streams import FPS, MODELS, QUESTION, every_stream, film, logits, open_session, pair
from tests.spies import broken, crossed, refusal

WHOLE, TIGHT = every_stream(), every_stream(frames=4, window=6)
TURNS = [
    {"role": "user", "content": "what was shown ?"},
    {"role": "assistant", "content": "red star"},
    {"role": "user", "content": QUESTION},
]


@torch.no_grad()
def plainly(name: str, messages: list[Any], count: int = 6) -> torch.Tensor:
    """[V] the plain model's logits for the first token, `messages` with the video where a stream has it."""
    model, processor = pair(name)
    head, *rest = [dict(one) for one in messages]
    pieces = (
        [{"type": "text", "text": head["content"]}] if isinstance(head["content"], str) else head["content"]
    )
    head["content"] = [{"type": "video", "video": film(count)}, *pieces]
    return model(**processor.chat([head, *rest], fps=FPS)).logits[0, -1]


@pytest.mark.parametrize("name", MODELS)
def test_messages_are_the_plain_models_prompt(name: str) -> None:
    image = {"type": "image", "image": film(25, seed=9)[4]}
    shown = [*TURNS[:-1], {"role": "user", "content": [image, {"type": "text", "text": QUESTION}, image]}]
    with open_session(name, WHOLE["full"], 6) as session:
        for messages in (TURNS, shown, [shown[-1]]):
            found = logits(session, messages, concurrent=True)
            assert torch.allclose(found, plainly(name, messages), atol=2e-4), messages
        assert torch.equal(logits(session, concurrent=True), logits(session, [TURNS[-1]], concurrent=True))


def test_the_session_keeps_a_conversation() -> None:
    with open_session("tiny-ov", TIGHT["rekv"], 9) as session:
        one = session.ask(QUESTION, 6, chat=True)
        assert session.history == [
            {"role": "user", "content": QUESTION},
            {"role": "assistant", "content": one.text},
        ]
        given = session.ask([*session.history, {"role": "user", "content": "and then ?"}], 6)
        session.watch(film(2, seed=5), fps=FPS)
        kept = session.ask("and then ?", 6, chat=True)
        assert len(session.history) == 4 and session.history[2]["content"] == "and then ?"
        assert session.ask(session.history[:3], 6).ids == kept.ids and given.ids
        session.history.clear()
        assert session.ask(QUESTION, 6, chat=True).text == session.history[-1]["content"]


def test_a_system_message_is_read_behind_the_video() -> None:
    adapter: Any = open_session("tiny-qwen", WHOLE["full"])._stream_adapter
    told = [{"role": "system", "content": "say red"}, {"role": "user", "content": QUESTION}]
    ids, (begin, end) = adapter.question_ids(told)
    text = adapter.processor.decode(ids)
    assert text.index("say red") < text.index("what colour")
    assert adapter.processor.decode(ids[begin:end]).strip() == QUESTION.strip()


def test_what_is_no_question_and_settings_that_cannot_be() -> None:
    nearest = "temperatur: it is no setting of an answer; the nearest that is, is 'temperature'"
    wrong: list[tuple[Any, dict[str, Any], str]] = [
        ([{"role": "assistant", "content": "red"}], {}, "its turns are of ['assistant']"),
        ([{"role": "user", "content": " "}], {}, "it is empty"),
        ([{"role": "user", "content": [{"type": "video", "video": "a.mp4"}]}], {}, "it shows a video"),
        ([], {}, "is an empty list"),
        (3, {}, "3"),
        (QUESTION, {"temperatur": 1.0}, nearest),
        (
            QUESTION,
            {"temperature": 0.5},
            "temperature: it acts where tokens are drawn; set do_sample=True too.",
        ),
        (QUESTION, {"seed": 3}, "seed: it acts where tokens are drawn"),
        (QUESTION, {"do_sample": True, "temperature": -1.0}, "temperature"),
    ]
    with open_session("random-ov", TIGHT["rekv"], 3) as session:
        for asked, settings, words in wrong:
            found = refusal(lambda asked=asked, more=settings: session.ask(asked, 3, **more), ModelError)
            assert words in found, (asked, settings)


def test_settings_are_those_of_generate() -> None:
    """Greedy with a penalty, and allowed tokens: the plain model's `generate` says the same after the same words."""
    with open_session("random-qwen", WHOLE["full"]) as session:
        session._stream_adapter.end_token_ids = frozenset  # type: ignore[method-assign]
        session.watch(film(6), fps=FPS)
        plain = session.ask(QUESTION, 12)
        drawn = {"do_sample": True, "temperature": 5.0, "top_k": 40, "seed": 4}
        one, two = (session.ask(QUESTION, 12, **drawn) for _ in range(2))
        assert one.ids == two.ids != plain.ids
        assert session.ask(QUESTION, 12, **{**drawn, "seed": 5}).ids != one.ids
        assert session.ask(QUESTION, 12, do_sample=True, top_k=1).ids == plain.ids
        for coldest in (1e-40, 1e-300):  # scores divided by it are infinite
            assert session.ask(QUESTION, 12, do_sample=True, temperature=coldest).ids == plain.ids
        unlike = session.ask(QUESTION, 12, no_repeat_ngram_size=1)
        assert len(set(unlike.ids)) == len(unlike.ids) == 12
        only = session.ask(QUESTION, 5, prefix_allowed_tokens_fn=lambda batch, ids: [7, 9])
        assert set(only.ids) <= {7, 9} and only.finish_reason == "length"
        words = [session._stream_adapter.decode(torch.tensor([one])).strip() for one in plain.ids]
        word = next(one for one in words if one.isalpha())
        stopped = session.ask(QUESTION, 12, stop_strings=[word])
        assert stopped.finish_reason == "stop" and word in stopped.text
        assert len(stopped.ids) <= words.index(word) + 1 < 12


def test_a_cold_warper_of_the_user_s_stays_as_it_is() -> None:
    own, logits = TemperatureLogitsWarper(1e-40), torch.tensor([1.0, 2.0])
    odds = SamplingDistribution(LogitsProcessorList([own]), True)
    assert odds(torch.zeros(1, dtype=torch.long), logits).tolist() == [0.0, 1.0] and own.temperature == 1e-40


SCHEMA = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "blue", "green"]},
        "seen": {"type": "boolean"},
        "times": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 3},
    },
    "required": ["colour", "seen", "times"],
    "additionalProperties": False,
}
REKV = every_stream(frames=4, window=6)["rekv"]


def fits(text: str) -> bool:
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.validate(found := json.loads(text), SCHEMA)
    return list(found) == ["colour", "seen", "times"]


@pytest.fixture
def library() -> Any:
    return pytest.importorskip("llguidance")


@pytest.mark.parametrize("name", ["tiny-ov", "tiny-qwen", "random-ov"])
def test_an_answer_is_json_of_the_schema(library: Any, name: str) -> None:
    with open_session(name, REKV, 12) as session:
        plain = session.ask(QUESTION, 10)
        answer = session.ask(QUESTION, 80, schema=SCHEMA)
        assert fits(answer.text) and answer.finish_reason == "stop" and answer.evidence
        assert session.ask(QUESTION, 80, schema=json.dumps(SCHEMA)).text == answer.text
        drawn = [
            session.ask(QUESTION, 80, schema=SCHEMA, do_sample=True, seed=n, temperature=2.0).text
            for n in range(2)
        ]
        assert all(map(fits, drawn)) and len(set(drawn)) > 1
        cut = session.ask(QUESTION, 7, schema=SCHEMA)
        assert cut.finish_reason == "length" and answer.text.startswith(cut.text)
        assert session.ask(QUESTION, 10).ids == plain.ids, "it leaves no trace"


@pytest.mark.always
@crossed(draft=["prompt_lookup", "sequential", "tree", "parallel"], sample=[False, True])
def test_drafts_say_the_same(library: Any, draft: str, sample: bool) -> None:
    model, processor = pair("tiny-ov")
    fields: dict[str, Any] = {"name": draft} | (
        {} if draft == "prompt_lookup" else {"model": "tiny-ov-draft"}
    )
    if draft == "parallel":
        fields["process"] = False
    how: dict[str, Any] = {"do_sample": True, "seed": 3, "temperature": 1.5} if sample else {}
    with open_session("tiny-ov", REKV, 12) as session:
        want = session.ask(QUESTION, 80, schema=SCHEMA).text
    with mmaccel.VideoSession(model, processor, None, kv=REKV, draft=fields) as session:
        session.watch(film(12), fps=FPS)
        answer = session.ask(QUESTION, 80, schema=SCHEMA, **how)
        assert fits(answer.text) and answer.finish_reason == "stop"
        if not sample:
            assert answer.text == want
        assert session.report().draft["failed"] is None
        if draft == "sequential":
            assert session.report().draft["accepted"] > 5


def test_the_processor_goes_by_the_ids_alone(library: Any) -> None:
    """Asked about prefixes in any order, also behind what is refused, it says of each what a fresh one says."""
    model, processor = pair("tiny-ov")
    said = json.dumps({"colour": "red", "seen": True, "times": [1, 2]})
    tokens_of = processor.tokenizer.convert_tokens_to_ids
    ids = [token for char in said for token in tokens_of([char.replace(" ", "Ġ")])]
    parts = model, processor.tokenizer, SCHEMA, {2}, 3
    one, scores = build_schema_logits_processor(*parts), torch.zeros(1, 512)
    prompt = [5, 6, 7]

    def allowed(which: Any, answer: list[int]) -> list[int]:
        return torch.isfinite(which(torch.tensor([prompt + answer]), scores))[0].nonzero()[:, 0].tolist()

    order = torch.randperm(len(ids) + 1, generator=torch.Generator().manual_seed(0)).tolist()
    for count in order:
        fresh = build_schema_logits_processor(*parts)
        found = allowed(one, ids[:count])
        assert found == allowed(fresh, ids[:count])
        assert found == [2] if count == len(ids) else ids[count] in found and 2 not in found
        if count % 3 == 0:
            assert len(allowed(one, [*ids[:count], 2, 2])) == 512, "behind an end nothing is looked at"
            assert len(allowed(one, [*ids[:count], ids[0], ids[0]])) == 512
    again = pickle.loads(pickle.dumps(one))
    assert allowed(again, ids[:4]) == allowed(one, ids[:4])


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ([1], "schema: it is no JSON object; give a JSON schema"),
        ("{", "schema: Expecting property name"),
        ({"a": {1}}, "schema: Object of type set is not JSON serializable"),
        ({"type": "objekt"}, "schema: Invalid type: objekt; give one that can be kept"),
    ],
)
def test_what_is_no_schema(library: Any, schema: Any, says: str) -> None:
    with open_session("random-ov", REKV, 4) as session:
        with pytest.raises(ModelError, match=says):
            session.ask(QUESTION, 4, schema=schema)
        assert session.ask(QUESTION, 4).ids


def test_without_the_library_a_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_session("random-ov", REKV, 4) as session:
        missing, asked = ImportError("llguidance"), lambda name, *_: name.startswith("llguidance")
        broken(monkeypatch, builtins, "__import__", missing, asked)
        with pytest.raises(
            ModelError, match=r"it needs llguidance; install it with pip install 'mmaccel\[json\]'"
        ):
            session.ask(QUESTION, 4, schema={"type": "object"})


@pytest.mark.parametrize("draft", ["off", "prompt_lookup"])
def test_a_schema_that_meets_a_limit_is_refused(library: Any, draft: str) -> None:
    """Where llguidance gives up in the middle of an answer, the answer ends with an error: nothing of it is free."""
    schema = {"type": "string", "pattern": "^(a?){3000}a{3000}$"}
    with open_session("tiny-ov", REKV, 4, draft={"name": draft}) as session:
        with pytest.raises(ModelError, match=r"schema: .*too many expressions"):
            session.ask(QUESTION, 8, schema=schema)
        assert session.ask(QUESTION, 4).ids


def test_a_schema_as_deep_as_one_may_be_ends_no_process(library: Any) -> None:
    """Which is compiled by recursion: nested arrays, and a chain of references."""
    model, processor = pair("random-ov")
    chain = {f"d{n}": {"type": "array", "items": {"$ref": f"#/$defs/d{n + 1}"}} for n in range(1000)}
    deep: dict[str, Any] = {"$defs": {**chain, "d1000": {"type": "integer"}}, "$ref": "#/$defs/d0"}
    assert len(json.dumps(deep)) <= LONGEST
    build_schema_logits_processor(model, processor.tokenizer, deep, (2,), 0)
    with pytest.raises(ModelError, match="characters; give one of 65536 at most"):
        build_schema_logits_processor(model, processor.tokenizer, {"const": "x" * LONGEST}, (2,), 0)
