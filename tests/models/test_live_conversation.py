"""A conversation with a stream: messages, history, images, and how the tokens of an answer are chosen."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mmaccel.core.errors import ModelError
from mmaccel.core.streams.asking import asked
from tests.models.streams import FPS, MODELS, QUESTION, every_stream, film, open_session, pair

WHOLE, TIGHT = every_stream(), every_stream(frames=4, window=6)
TURNS = [
    {"role": "user", "content": "what was shown ?"},
    {"role": "assistant", "content": "red star"},
    {"role": "user", "content": QUESTION},
]


def first(session: Any, question: Any) -> torch.Tensor:
    with asked(session._live, question, 4, beside=True) as turn:
        return turn.logits[0].clone()


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
    with open_session(name, WHOLE["full"]) as session:
        session.watch(film(6), fps=FPS)
        for messages in (TURNS, shown, [shown[-1]]):
            assert torch.allclose(first(session, messages), plainly(name, messages), atol=2e-4), messages
        assert torch.equal(first(session, QUESTION), first(session, [TURNS[-1]]))


def test_the_session_keeps_a_conversation() -> None:
    with open_session("tiny-ov", TIGHT["rekv"]) as session:
        session.watch(film(9), fps=FPS)
        one = session.ask(QUESTION, 6, chat=True)
        assert session.history == [
            {"role": "user", "content": QUESTION},
            {"role": "assistant", "content": one.text},
        ]
        given = session.ask([*session.history, {"role": "user", "content": "and then ?"}], 6)
        session.watch(film(9)[:0] if False else film(2, seed=5), fps=FPS)
        kept = session.ask("and then ?", 6, chat=True)
        assert len(session.history) == 4 and session.history[2]["content"] == "and then ?"
        assert session.ask(session.history[:3], 6).ids == kept.ids and given.ids
        session.history.clear()
        assert session.ask(QUESTION, 6, chat=True).text == session.history[-1]["content"]


def test_a_system_message_is_read_behind_the_video() -> None:
    adapter: Any = open_session("tiny-qwen", WHOLE["full"])._stream_adapter
    told = [{"role": "system", "content": "say red"}, {"role": "user", "content": QUESTION}]
    ids, (begin, end) = adapter.tail(told)
    text = adapter.processor.decode(ids)
    assert text.index("say red") < text.index("what colour")
    assert adapter.processor.decode(ids[begin:end]).strip() == QUESTION.strip()


@pytest.mark.parametrize(
    ("question", "words"),
    [
        ([{"role": "assistant", "content": "red"}], "its turns are of ['assistant']"),
        ([{"role": "user", "content": " "}], "it is empty"),
        ([{"role": "user", "content": [{"type": "video", "video": "a.mp4"}]}], "it shows a video"),
        ([], "is an empty list"),
        (3, "3"),
    ],
)
def test_what_is_no_question(question: Any, words: str) -> None:
    with open_session("random-ov", TIGHT["rekv"]) as session:
        session.watch(film(3), fps=FPS)
        with pytest.raises(ModelError) as caught:
            session.ask(question)
        assert words in str(caught.value) and str(caught.value).endswith(".")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"temperatur": 1.0},
            "temperatur: it is no setting of an answer; the nearest that is, is 'temperature'",
        ),
        ({"temperature": 0.5}, "temperature: it acts where tokens are drawn; set do_sample=True too."),
        ({"seed": 3}, "seed: it acts where tokens are drawn"),
        ({"do_sample": True, "temperature": -1.0}, "temperature"),
    ],
)
def test_settings_that_cannot_be(settings: Any, words: str) -> None:
    with open_session("random-ov", TIGHT["rekv"]) as session:
        session.watch(film(3), fps=FPS)
        with pytest.raises(ModelError) as caught:
            session.ask(QUESTION, 3, **settings)
        assert words in str(caught.value)


def test_settings_are_those_of_generate() -> None:
    """Greedy with a penalty, and allowed tokens: the plain model's `generate` says the same after the same words."""
    with open_session("random-ov", WHOLE["full"]) as session:
        session._stream_adapter.ends = frozenset  # type: ignore[method-assign]
        session.watch(film(6), fps=FPS)
        plain = session.ask(QUESTION, 12)
        drawn = {"do_sample": True, "temperature": 5.0, "top_k": 40, "seed": 4}
        one, two = (session.ask(QUESTION, 12, **drawn) for _ in range(2))
        assert (
            one.ids == two.ids != plain.ids
            and session.ask(QUESTION, 12, **{**drawn, "seed": 5}).ids != one.ids
        )
        assert session.ask(QUESTION, 12, do_sample=True, top_k=1).ids == plain.ids
        unlike = session.ask(QUESTION, 12, no_repeat_ngram_size=1)
        assert len(set(unlike.ids)) == len(unlike.ids) == 12
        only = session.ask(QUESTION, 5, prefix_allowed_tokens_fn=lambda batch, ids: [7, 9])
        assert set(only.ids) <= {7, 9} and only.finish_reason == "length"
        word = session._stream_adapter.decode(torch.tensor(plain.ids[3:4])).strip()
        stopped = session.ask(QUESTION, 12, stop_strings=[word])
        assert stopped.finish_reason == "stop" and len(stopped.ids) <= 4 and word in stopped.text
