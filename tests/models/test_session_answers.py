"""Answers of a session: how they end (finish reason, positions, deadlines), and what they rest on, against planted truth."""

import functools
import threading
import time
import warnings
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import mmaccel
from mmaccel.core.decoding import generate
from mmaccel.core.decoding.generate import MAX_NEW_TOKENS
from mmaccel.core.errors import MmaccelWarning, ModelError
from mmaccel.policies.kv._retrieval import ArchivedMemory
from mmaccel.policies.kv._window import QuestionRows, attention
from mmaccel_lab.eval.footage import Footage, Viewing
from mmaccel_lab.world import World
from tests.models.streams import FPS, QUESTION, every_stream, film, inputs_of, open_session, pair
from tests.spies import Pause, beside, crossed, finish, heard, returned

TIGHT = every_stream(frames=4, window=6)
DRAFTS = ({"name": "off"}, {"name": "prompt_lookup"})


@pytest.mark.parametrize("draft", DRAFTS, ids=lambda draft: draft["name"])
def test_an_answer_says_why_it_ends(draft: dict[str, Any]) -> None:
    with open_session("tiny-ov", TIGHT["rekv"], 14, draft=draft) as session:
        whole = session.ask(QUESTION)
        assert whole.finish_reason == "stop" and len(whole.ids) < MAX_NEW_TOKENS
        cut = session.ask("describe the video .", 5)
        assert cut.finish_reason == "length" and len(cut.ids) == 5
        told = f"Answer({cut.text!r}, finish_reason='length', 5 tokens, the first after {cut.ttft_s:.3f} s"
        assert repr(cut).startswith(told) and len(repr(cut)) < len(told) + 30 and cut.counters
        just = session.ask(QUESTION, len(whole.ids))
        assert (just.ids, just.finish_reason) == (whole.ids, "length"), "the end of the answer was not said"
        reply = session.ask("describe the video .", 5, stream=True)
        assert "".join(reply).strip() == cut.text and reply.answer.finish_reason == "length"  # type: ignore[union-attr]


def limited(monkeypatch: pytest.MonkeyPatch, name: str, most: int) -> None:
    """Give the model so many positions."""
    monkeypatch.setattr(pair(name)[0].model.language_model.config, "max_position_embeddings", most)


@pytest.mark.parametrize("name", ["random-ov", "random-qwen"])
def test_a_question_and_its_answer_end_with_the_positions(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `generate` ends, with the same tokens, where everything is kept."""
    model, inputs = pair(name)[0], inputs_of(name, 8)
    count = inputs["input_ids"].shape[1]
    monkeypatch.setattr(model.generation_config, "eos_token_id", None)
    last = int(mmaccel.core.attach.adapter_for(model).positions(model, inputs)[..., -1].max())
    limited(monkeypatch, name, last + 1 + 6)
    with mmaccel.accelerate(model), pytest.warns(MmaccelWarning, match="positions"):
        want = model.generate(**inputs, max_new_tokens=40, do_sample=False)[0, count:].tolist()
    with open_session(name, "full") as session:
        monkeypatch.setattr(model.generation_config, "eos_token_id", [])
        assert session._stream_adapter.end_token_ids() == frozenset(), (
            "no token ends an answer, whatever the text model's config says"
        )
        session.watch(film(8), fps=FPS)
        with pytest.warns(MmaccelWarning, match="no position left"):
            answer = session.ask(QUESTION, 40)
        assert (list(answer.ids), answer.finish_reason) == (want, "positions") and len(want) == 6
        with warnings.catch_warnings(action="error", category=MmaccelWarning):
            assert session.ask(QUESTION, 6).finish_reason == "length", "what just fits is nothing to tell of"


@pytest.mark.parametrize("kv", TIGHT)
def test_a_question_past_the_positions_is_refused_before_it_is_run(kv: str, monkeypatch) -> None:
    limited(monkeypatch, "random-ov", 400)
    with open_session("random-ov", TIGHT[kv], 8) as session:
        before = session.ask(QUESTION, 2)
        with monkeypatch.context() as quick:
            quick.setattr(
                session._stream_adapter, "run_layers", Mock(side_effect=AssertionError("a pass was run"))
            )
            with pytest.raises(
                ModelError, match=r"^question: .* take \d{5,} of the model's 400 positions .*\.$"
            ):
                session.ask("what was it ? " * 20_000)
        assert session.ask(QUESTION, 2).ids == before.ids


def test_a_memory_that_keeps_little_answers_where_all_of_the_stream_would_not_fit(monkeypatch) -> None:
    limited(monkeypatch, "random-ov", 400)
    long = "what was it ? " * 30
    for kv in ({**TIGHT["rekv"], "positions": "original"}, TIGHT["mosaic"], TIGHT["streammem"]):
        with open_session("random-ov", kv, 20) as session:
            assert session.ask(long, 2).finish_reason == "length", "units are closed up to make room"
            with pytest.raises(ModelError, match="positions"):
                session.ask(long * 4, 2)
    with open_session("random-ov", "full") as session:
        with warnings.catch_warnings(action="error", category=MmaccelWarning):
            session.watch(film(20), fps=FPS)
        with pytest.raises(ModelError, match="positions"):
            session.ask(long, 2)
        with pytest.warns(MmaccelWarning, match="kv 'full' cannot answer questions from now on") as told:
            session.watch(film(20), fps=FPS)
            session.watch(film(3), fps=FPS)
        assert len(told) == 1


@pytest.mark.parametrize("kv", TIGHT)
def test_evidence_can_be_left_out(kv: str) -> None:
    with open_session("random-ov", TIGHT[kv], 14) as session:
        whole = session.ask(QUESTION, 3)
        rows = getattr(session._live.state, "_rows", None)  # type: ignore[union-attr]
        bare = session.ask(QUESTION, 3, evidence=False)
        assert bare.ids == whole.ids and bare.evidence == () and bare.top() == []
        assert rows is None or not rows._rows
        assert session.ask(QUESTION, 3).evidence == whole.evidence != ()


class Clock:
    """What deadlines go by."""

    now = 0.0

    def spend(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(generate, "monotonic", lambda: made.now)
    return made


@pytest.mark.parametrize("draft", DRAFTS, ids=lambda draft: draft["name"])
def test_a_timeout_ends_an_answer_with_what_was_said(
    draft: dict[str, Any], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_session("tiny-ov", TIGHT["rekv"], 14, draft=draft) as session:
        whole = session.ask("describe the video .", 24)
        with monkeypatch.context() as patch:
            heard(patch, session._stream_adapter, "logits", lambda *_: clock.spend(1.0))
            answer = session.ask("describe the video .", 24, timeout=6.5)
        assert answer.finish_reason == "timeout"
        assert 6 < len(answer.ids) < len(whole.ids) == 24 and whole.ids[: len(answer.ids)] == answer.ids
        assert whole.text.startswith(answer.text) and answer.evidence == whole.evidence
        assert session.ask("describe the video .", 24).ids == whole.ids


def test_a_timeout_holds_inside_a_long_question(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_session("tiny-ov", TIGHT["rekv"], 14) as session:
        before = session.ask(QUESTION, 3)
        with monkeypatch.context() as patch:  # what comes before the layers uses the time up
            calls = heard(patch, session._stream_adapter, "embed_tokens", lambda *_, **__: clock.spend(3.0))
            answer = session.ask("what was it ? " * 100, timeout=2.0)
        assert (answer.ids, answer.text, answer.ttft_s, answer.finish_reason) == ((), "", 0.0, "timeout")
        assert len(calls) == 1 and answer.evidence == ()
        assert session.ask(QUESTION, 3).ids == before.ids


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_is_cancelled_from_another_thread(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_session("tiny-ov", TIGHT["rekv"], 14) as session:
        whole = session.ask("describe the video .", 10)
        began = threading.Event()
        heard(monkeypatch, session._stream_adapter, "logits", lambda *_: (began.set(), time.sleep(0.05)))

        def cancel() -> None:
            assert began.wait(20)
            session.cancel()

        threads = beside(cancel)
        if stream:
            reply = session.ask("describe the video .", 200, stream=True)
            said = "".join(reply)
            assert reply.answer is not None and said.strip() == reply.answer.text
            answer = reply.answer
        else:
            answer = session.ask("describe the video .", 200)
        finish(threads)
        assert answer.finish_reason == "cancelled" and 0 < len(answer.ids) <= 10
        assert whole.ids[: len(answer.ids)] == answer.ids
        assert session.ask("describe the video .", 3).finish_reason == "length", "later calls are not touched"


@crossed(name=["random-ov", "random-qwen"], how=["timeout", "cancel"], kv=["rekv", "mosaic", "no_cache"])
def test_a_watch_that_is_ended_keeps_the_frames_that_are_through(
    name: str, how: str, kv: str, clock: Clock
) -> None:
    model = pair(name)[0]
    pace = mmaccel.core.attach.adapter_for(model).frames_per_unit(model)  # type: ignore[attr-defined]
    frames = torch.cat([film(25), film(25, 4)])
    with open_session(name, TIGHT[kv], chunk=64) as session, open_session(name, TIGHT[kv], chunk=64) as other:
        session.watch(frames[:3], fps=FPS)
        step, held = session._live._step * pace, 3 % pace  # type: ignore[union-attr]
        calls: list[int] = []

        def progress(done: int, total: int | None) -> None:
            calls.append(done)
            if len(calls) == 2:
                session.cancel() if how == "cancel" else setattr(clock, "now", 2.0)

        with pytest.warns(
            MmaccelWarning, match="reached its timeout" if how == "timeout" else "was cancelled"
        ) as told:
            done = session.watch(frames[3:], fps=FPS, progress=progress, timeout=1.0)
        assert done == 2 * step - held == calls[-1] and f"took in {done} frames" in str(told[0].message)
        assert len(session) == 3 + done
        other.watch(frames[:3], fps=FPS)  # for what passes retrieve hangs on how they are cut
        other.watch(frames[3 : 3 + done], fps=FPS)
        assert session.shown == other.shown and session.ask(QUESTION, 3).ids == other.ask(QUESTION, 3).ids
        rest = frames[3 + done :]
        assert session.watch(rest, fps=FPS) == len(rest) and len(session) == 50


def test_a_call_that_waits_for_another_has_its_timeout_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_session("random-ov", TIGHT["rekv"], 4) as session:
        pause = Pause()
        heard(monkeypatch, session._stream_adapter, "features", pause)
        threads = beside(lambda: session.watch(film(4), fps=FPS))
        assert pause.reached.wait(20)
        answer = session.ask(QUESTION, timeout=0.2)
        with pytest.warns(MmaccelWarning, match="took in 0 frames"):
            assert session.watch(film(2), fps=FPS, timeout=0.2) == 0
        assert answer.finish_reason == "timeout" and threads[0].is_alive()
        pause.go_on.set()
        finish(threads)
        assert len(session) == 8


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan"), float("inf"), "soon", True])
def test_a_timeout_is_a_positive_number(timeout: Any) -> None:
    with open_session("random-ov", TIGHT["rekv"]) as session:
        for call in (
            lambda: session.watch(film(2), timeout=timeout),
            lambda: session.ask(QUESTION, timeout=timeout),
        ):
            with pytest.raises(
                ModelError, match=r"^timeout: .*; give a positive number of seconds, or None\.$"
            ):
                call()


FIELDS = {"livevlm": {"frames": 16}, **{kv: {"frames": 16, "window": 16} for kv in ("mosaic", "rekv")}}
WHOLE = every_stream()


@functools.cache
def footage(name: str, seed: int) -> tuple[World, Footage]:
    world = World.generate(seed, 128)
    return world, Footage(*pair(name), world, 0.3)


@crossed(memory=FIELDS, name=["tiny-ov", "tiny-qwen"])
def test_the_first_moments_told_are_what_was_asked_about(name: str, memory: str) -> None:
    """Of answers that are right, nine in ten name a true frame, or the one beside, among the first three: of 216 on four
    worlds 213 did; ordered by how many layers retrieved them 30 of 46 (mosaic and rekv, tiny-ov, these two worlds)."""
    model, processor = pair(name)
    named = []
    for seed in (1, 3):
        world, shown = footage(name, seed)
        with Viewing(model, processor, {"kv": {"name": memory, **FIELDS[memory]}}) as session:
            session.show(shown, 1.0)
            for question in world.questions(["needle", "order", "scene", "combine"]):
                answer = session.ask(question.text, 8)
                if answer.text == question.answer:
                    first = [one.frames[0] for one in answer.top(3)]
                    named.append(any(abs(n - true) <= 1 for n in first for true in question.frames))
    assert len(named) >= 6 and sum(named) >= 0.9 * len(named)


@pytest.mark.parametrize("kv", WHOLE)
def test_before_the_first_unit_is_whole_there_is_nothing_to_tell(kv: str) -> None:
    """The random Qwen takes two frames a unit."""
    with open_session("random-qwen", WHOLE[kv], 1, fps=1.0) as session:
        answer = session.ask(QUESTION, 2)
    assert len(answer.ids) and answer.evidence == ()


def test_of_a_question_s_rows_the_words_alone_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before them may come all rows of a unit that is not complete, at each of many layers."""

    def kept(_: None, rows: QuestionRows) -> list[int]:
        queries = [row.query for row in rows._rows.values()]
        return [query.untyped_storage().nbytes() // query[:, 0].nbytes for query in queries]

    held = returned(monkeypatch, QuestionRows, "copy_queries", kept)
    with open_session("random-qwen", WHOLE["rekv"], 7, fps=1.0) as session:
        session.ask(QUESTION, 1)
        ids, words = session._stream_adapter.question_ids(QUESTION)
        assert session._live is not None and session._live.info.pending is not None
    assert held == [[len(ids) - words[0]] * 2]


def test_units_are_weighed_for_the_last_row_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row of a long question by every unit of a long stream is gigabytes."""
    asked = heard(monkeypatch, ArchivedMemory, "_units_of", lambda memory, layer, shares: len(shares))
    with open_session("random-ov", WHOLE["mosaic"], 9, fps=1.0) as session:
        session.ask(QUESTION, 1)
    assert asked == [1, 1]


def test_attention_is_that_of_each_row_to_the_columns_before_it() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(4, 3, 8, generator=generator), torch.randn(2, 9, 8, generator=generator)
    bias = torch.tensor([0.0, 1.0, -torch.inf])
    expected = torch.zeros(3, 9)
    for row in range(3):
        for head in range(4):
            score = key[head // 2, : 7 + row] @ query[head, row] * 8**-0.5
            score[:3] += bias
            expected[row, : 7 + row] += score.softmax(0) / 4
    torch.testing.assert_close(attention(query, key, bias), expected)
