"""Answers in JSON by a schema: whatever the model would say, drawn or not, drafted or not."""

from __future__ import annotations

import builtins
import json
import pickle
from typing import Any

import pytest
import torch

import mmaccel
from mmaccel.core.errors import ModelError
from mmaccel.models.schema import LONGEST, by_schema
from tests.models.streams import FPS, QUESTION, every_stream, film, open_session, pair
from tests.products import product

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
TIGHT = every_stream(frames=4, window=6)["rekv"]


def fits(text: str) -> bool:
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.validate(found := json.loads(text), SCHEMA)
    return list(found) == ["colour", "seen", "times"]


@pytest.fixture
def library() -> Any:
    return pytest.importorskip("llguidance")


@pytest.mark.parametrize("name", ["tiny-ov", "tiny-qwen", "random-ov"])
def test_an_answer_is_json_of_the_schema(library: Any, name: str) -> None:
    with open_session(name, TIGHT) as session:
        session.watch(film(12), fps=FPS)
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


@pytest.mark.parametrize(
    ("draft", "sample"), product(["prompt_lookup", "sequential", "tree", "parallel"], [False, True])
)
def test_drafts_say_the_same(library: Any, draft: str, sample: bool) -> None:
    model, processor = pair("tiny-ov")
    fields = {"name": draft} | ({} if draft == "prompt_lookup" else {"model": "tiny-ov-draft"})
    how: dict[str, Any] = {"do_sample": True, "seed": 3, "temperature": 1.5} if sample else {}
    with open_session("tiny-ov", TIGHT) as session:
        session.watch(film(12), fps=FPS)
        want = session.ask(QUESTION, 80, schema=SCHEMA).text
    with mmaccel.VideoSession(model, processor, None, kv=TIGHT, draft=fields) as session:
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
    from mmaccel.models.schema import by_schema

    model, processor = pair("tiny-ov")
    said = json.dumps({"colour": "red", "seen": True, "times": [1, 2]})
    ids = [
        token
        for char in said
        for token in processor.tokenizer.convert_tokens_to_ids([char.replace(" ", "Ġ")])
    ]
    parts = model, processor.tokenizer, SCHEMA, {2}, 3
    one, scores = by_schema(*parts), torch.zeros(1, 512)
    prompt = [5, 6, 7]

    def allowed(which: Any, answer: list[int]) -> list[int]:
        return torch.isfinite(which(torch.tensor([prompt + answer]), scores))[0].nonzero()[:, 0].tolist()

    order = torch.randperm(len(ids) + 1, generator=torch.Generator().manual_seed(0)).tolist()
    for count in order:
        fresh = by_schema(*parts)
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
    with open_session("random-ov", TIGHT) as session:
        session.watch(film(4), fps=FPS)
        with pytest.raises(ModelError, match=says):
            session.ask(QUESTION, 4, schema=schema)
        assert session.ask(QUESTION, 4).ids


def test_without_the_library_a_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def absent(name: str, *rest: Any) -> Any:
        if name.startswith("llguidance"):
            raise ImportError(name)
        return real(name, *rest)

    with open_session("random-ov", TIGHT) as session:
        session.watch(film(4), fps=FPS)
        monkeypatch.setattr(builtins, "__import__", absent)
        with pytest.raises(
            ModelError, match=r"it needs llguidance; install it with pip install 'mmaccel\[json\]'"
        ):
            session.ask(QUESTION, 4, schema={"type": "object"})


def test_a_schema_as_deep_as_one_may_be_ends_no_process(library: Any) -> None:
    """Which is compiled by recursion: nested arrays, and a chain of references."""
    model, processor = pair("random-ov")
    chain = {f"d{n}": {"type": "array", "items": {"$ref": f"#/$defs/d{n + 1}"}} for n in range(1000)}
    deep: dict[str, Any] = {"$defs": {**chain, "d1000": {"type": "integer"}}, "$ref": "#/$defs/d0"}
    assert len(json.dumps(deep)) <= LONGEST
    by_schema(model, processor.tokenizer, deep, (2,), 0)
    with pytest.raises(ModelError, match="characters; give one of 65536 at most"):
        by_schema(model, processor.tokenizer, {"const": "x" * LONGEST}, (2,), 0)
