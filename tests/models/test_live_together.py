"""Questions of several sessions of one model at once: their answers share steps, and each is what its session says alone.
Several questions to one memory: decoded as one batch, and each answer is the one that is given alone."""

import copy
import gc
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import mmaccel
from mmaccel.core.decoding.generate import Speculation
from mmaccel.core.errors import ModelError
from mmaccel.core.streams import intake
from mmaccel.core.streams import session as session_module
from mmaccel.core.streams.asking import QuestionRunner
from mmaccel.models import step
from mmaccel.models.stream import HFStreamAdapter
from tests.models.streams import FPS, QUESTION, SEARCHES, every_stream, film, logits, open_session, pair, told
from tests.spies import broken, crossed, heard, nth, until

MEMORIES: dict[str, Any] = {**every_stream(frames=4, window=6), "mosaic": SEARCHES["mosaic"]}
SESSIONS, TOKENS = 3, 20


def opened(name: str, kv: Any, number: int) -> mmaccel.VideoSession:
    session = open_session(name, kv)
    session._stream_adapter.end_token_ids = frozenset  # type: ignore[method-assign]
    session.watch(film(9 + 3 * number, seed=3 + number), fps=FPS)
    return session


@contextmanager
def several(kv: Any, *numbers: int) -> Iterator[tuple[list[mmaccel.VideoSession], list[Any]]]:
    """Sessions of one model with these numbers, and what each of them says alone."""
    alone = []
    for number in numbers:
        with opened("random-ov", kv, number) as session:
            alone.append(told(session.ask(QUESTION, TOKENS)))
    with ExitStack() as stack:
        yield [stack.enter_context(opened("random-ov", kv, number)) for number in numbers], alone


def at_once(works: list[Callable[[], Any]]) -> list[Any]:
    """What each of `works` gives in a thread of its own, or raises."""
    with ThreadPoolExecutor(len(works)) as pool:
        futures = [pool.submit(work) for work in works]
    return [one.exception() or one.result() for one in futures]


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[int]]:
    """Of a model: how many answers shared each step from now on, each of which lasts, so that others come meanwhile."""

    def of(name: str) -> list[int]:
        session, seen = open_session(name, "full"), list[int]()
        batch = session._stream_adapter.turns.batch
        monkeypatch.setattr(batch, "_told", lambda count: (seen.append(count), time.sleep(0.01)))
        session.close()
        return seen

    return of


@pytest.mark.always
@crossed(name=["random-ov", "random-qwen"], kv=MEMORIES, captured=[False, True])
def test_answers_are_those_of_each_alone(
    name: str, kv: str, captured: bool, sizes: Callable[[str], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while frames come; what is asked afterwards is as without the others."""
    if captured:
        monkeypatch.setattr(step, "DEVICES", ("cpu",))
    asked = [QUESTION, "where is the ball ?", "is it red ?"]
    how: list[dict[str, Any]] = [{}, {"do_sample": True, "temperature": 1.5, "seed": 5}, {"evidence": False}]
    alone, later = [], []
    for number in range(SESSIONS):
        with opened(name, MEMORIES[kv], number) as session:
            alone.append(told(session.ask(asked[number], TOKENS, **how[number])))
            for frame in film(4, seed=8).split(1):
                session.watch(frame, fps=FPS)
            later.append(told(session.ask(QUESTION, 12)))
    seen = sizes(name)
    sessions = [opened(name, MEMORIES[kv], number) for number in range(SESSIONS)]
    try:

        def ask(number: int) -> Any:
            return told(sessions[number].ask(asked[number], TOKENS, **how[number]))

        def watch(number: int) -> None:
            for frame in film(4, seed=8).split(1):
                sessions[number].watch(frame, fps=FPS)

        parts = [
            *(lambda n=n: ask(n) for n in range(SESSIONS)),
            *(lambda n=n: watch(n) for n in range(SESSIONS)),
        ]
        if captured:  # one after the other: a question sees the frames that came before it
            works = at_once(parts[:SESSIONS])
            at_once(parts[SESSIONS:])
            assert works == alone
        else:
            assert at_once(parts[:SESSIONS]) == alone
            for number in range(SESSIONS):
                watch(number)
        assert [told(one.ask(QUESTION, 12)) for one in sessions] == later
        assert max(seen) > 1 or not MEMORIES[kv].get("shares", True)
    finally:
        for one in sessions:
            one.close()


def test_frames_come_between_two_steps(sizes: Callable[[str], list[int]]) -> None:
    seen, during = sizes("random-ov"), list[int]()
    with several(MEMORIES["rekv"], *range(SESSIONS)) as (sessions, alone):

        def watch() -> None:
            while not len(sessions[0]._stream_adapter.turns.batch):
                time.sleep(0.001)
            for frame in film(6, seed=8).split(1):
                sessions[1].watch(frame, fps=FPS)
                during.append(len(sessions[0]._stream_adapter.turns.batch))

        found = at_once([*(lambda one=one: told(one.ask(QUESTION, TOKENS)) for one in sessions), watch])
    assert found == [*alone, None] and len(during) == 6 and max(seen) == SESSIONS
    assert during[0], "the first frame is in while answers go on, however busy the machine is"


def test_a_shared_step_that_breaks_off_leaves_nothing_behind(
    sizes: Callable[[str], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The passes are over when there is no room for the logits: each answer takes its step again."""
    seen = sizes("random-ov")
    first, broke = nth(1, 2, 3), list[int]()

    def several_rows(self: Any, hidden: torch.Tensor) -> bool:
        broke.extend([len(hidden)] * (fails := len(hidden) > 1 and first()))
        return fails

    offer, begins, behind = Speculation.rows_to_verify, dict[int, int](), list[bool]()

    def offering(self: Any, most: int | None = None) -> Any:
        offered = yield from offer(self, most)
        begins[id(self.target)] = self.target.length()
        return offered

    def again(self: Any, *given: Any) -> None:
        if id(self) in begins:
            behind.append(self.length() == begins[id(self)])

    with several(MEMORIES["rekv"], *range(SESSIONS)) as (sessions, alone):
        broken(monkeypatch, HFStreamAdapter, "logits", RuntimeError("no room"), several_rows)
        monkeypatch.setattr(Speculation, "rows_to_verify", offering)
        heard(monkeypatch, QuestionRunner, "step", again)
        assert at_once([lambda one=one: told(one.ask(QUESTION, TOKENS)) for one in sessions]) == alone
        assert len(broke) == 3 and max(seen) > 1 and behind and all(behind)


def test_what_fails_in_one_memory_leaves_the_other_answers(
    sizes: Callable[[str], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = sizes("random-ov")
    with several(MEMORIES["rekv"], 0, 0) as ((good, bad), (alone, _)):
        kind: Any = type(bad._live.state)  # type: ignore[union-attr]
        late, full = nth(*range(3, 999)), torch.OutOfMemoryError("no room")

        def fails(state: Any) -> bool:
            return getattr(state, "_main", None) is bad._live.state and late()  # type: ignore[union-attr]

        with monkeypatch.context() as patch:
            broken(patch, kind, "new_kv_slots", full, fails)
            found = at_once([lambda: told(good.ask(QUESTION, TOKENS)), lambda: bad.ask(QUESTION, TOKENS)])
        assert found[0] == alone and isinstance(found[1], torch.OutOfMemoryError)
        assert max(seen) == 2
        assert told(bad.ask(QUESTION, TOKENS)) == alone == told(good.ask(QUESTION, TOKENS))


def test_a_model_goes_with_its_last_session() -> None:
    model, processor = pair("random-ov")
    own = copy.deepcopy(model)
    sessions = [mmaccel.VideoSession(own, processor, None, kv=MEMORIES["rekv"]) for _ in range(2)]
    for one in sessions:
        one.watch(film(9), fps=FPS)
    at_once([lambda one=one: one.ask(QUESTION, 8) for one in sessions])
    gone = weakref.ref(own)
    for one in sessions:
        one.close()
    del own, sessions, one
    gc.collect()
    assert gone() is None


QUESTIONS, TOKENS = [QUESTION, "where is the ball ?", "is it red ?", "what colour was the cup ?"], 24
WHOLE = ("full", "offload")
"""Memories whose question would need a copy of all that they hold."""


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Callable[[mmaccel.VideoSession], list[int]]:
    """Of a session's model: how many answers had a part in each pass from now on."""

    def of(session: mmaccel.VideoSession) -> list[int]:
        seen, alone = list[int](), QuestionRunner.step
        monkeypatch.setattr(
            session._stream_adapter.turns.batch,
            "_told",
            lambda count: count > 1 and seen.append(count),
        )
        monkeypatch.setattr(
            QuestionRunner, "step", lambda *given, **how: (seen.append(1), alone(*given, **how))[1]
        )
        return seen

    return of


def together(session: mmaccel.VideoSession, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """From now on no answer begins by itself, and no round of the batch, before so many are there."""
    turns = session._stream_adapter.turns
    batch, advance = turns.batch, Speculation.commit_next_tokens
    holding = batch._holding

    def come(there: Callable[[], int]) -> Callable[[], None]:
        all_there = list[bool]()
        return lambda: until(lambda: all_there or (there() == count and all_there.append(True)), 20)

    begun, joined = come(lambda: turns.answers), come(lambda: len(batch))

    def advancing(self: Any) -> None:
        with turns.release_temporarily():
            begun()
        advance(self)

    monkeypatch.setattr(Speculation, "commit_next_tokens", advancing)
    monkeypatch.setattr(batch, "_holding", lambda: (joined(), holding())[1])


@crossed(name=["random-ov", "random-qwen"], kv=MEMORIES, captured=[False, True])
def test_they_are_decoded_in_as_many_passes_as_the_longest(
    name: str,
    kv: str,
    captured: bool,
    passes: Callable[[mmaccel.VideoSession], list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if captured:
        monkeypatch.setattr(step, "DEVICES", ("cpu",))
    want = []
    for question in QUESTIONS:
        with opened(name, MEMORIES[kv], 0) as session:
            want.append(told(session.ask(question, TOKENS)))
    with opened(name, MEMORIES[kv], 0) as session, opened(name, MEMORIES[kv], 0) as still:
        if kv not in WHOLE:
            together(session, monkeypatch, len(QUESTIONS))
        seen = passes(session)
        found = [told(one) for one in session.ask_all(QUESTIONS, TOKENS)]
        assert found == want
        longest, whole = max(len(ids) for ids, *_ in want), sum(len(ids) - 1 for ids, *_ in want)
        assert sum(seen) == whole
        if kv in WHOLE:
            assert len(seen) == whole, "one after another"
        else:
            # Whose first token came before the others has one pass more, alone.
            assert longest - 1 <= len(seen) <= longest and max(seen) == len(QUESTIONS)
        monkeypatch.undo()
        for one in (session, still):
            one.watch(film(4, seed=8), fps=FPS)
        assert (logits(session) == logits(still)).all(), "the stream is as if nothing had been asked"


@pytest.mark.parametrize("kv", ["rekv", "mosaic", "streammem"])
def test_frames_and_questions_come_meanwhile(kv: str) -> None:
    """Each sees the stream as it is when its turn comes, also in the middle of others' answers."""
    with opened("random-ov", MEMORIES[kv], 0) as session, opened("random-ov", MEMORIES[kv], 0) as still:
        want = [told(one) for one in still.ask_all(QUESTIONS, TOKENS)]
        replies = []
        for question in QUESTIONS:
            replies.append(session.ask(question, TOKENS, stream=True))
            next(replies[-1])
        for frame in film(6, seed=8).split(1):
            session.watch(frame, fps=FPS)
            still.watch(frame, fps=FPS)
        late = session.ask(QUESTION, TOKENS, stream=True)
        for one in (*replies, late):
            list(one)
        assert [told(one.answer) for one in replies if one.answer is not None] == want
        assert late.answer is not None and told(late.answer) == told(still.ask(QUESTION, TOKENS))
        counted = session.counters()
        assert counted.get("questions", 5.0) == 5.0


def test_questions_with_settings_stretches_and_faults() -> None:
    with opened("random-ov", MEMORIES["rekv"], 0) as session:
        how: list[Any] = [{}, {"do_sample": True, "seed": 3}, {"between": (1.0, 2.5)}, {"evidence": False}]
        alone = [told(session.ask(QUESTION, TOKENS, **one)) for one in how]
        session.tell("red star", 1.0)
        lines = told(session.ask(QUESTION, TOKENS))
        found = at_once(
            [lambda one=one: told(session.ask(QUESTION, TOKENS, **one)) for one in ({}, how[1], {})]
        )
        assert found[0] == found[2] == lines != alone[0]
        with pytest.raises(ModelError, match="is one text; give a list of questions, or call ask"):
            session.ask_all("what colour was the star ?")
        with pytest.raises(ModelError, match="question"):
            session.ask_all([QUESTION, ""], TOKENS)
        assert session.ask_all([]) == []
        assert [told(one) for one in session.ask_all([QUESTION] * 3, TOKENS)] == [lines] * 3
        cut = session.ask_all([QUESTION] * 2, TOKENS, timeout=1e-9)
        assert [one.finish_reason for one in cut] == ["timeout"] * 2


def test_a_conversation_goes_turn_by_turn() -> None:
    with opened("random-ov", MEMORIES["rekv"], 0) as session:
        found = session.ask_all(QUESTIONS[:3], 6, chat=True)
        said = [one["content"] for one in session.history]
        assert sorted(said[::2]) == sorted(QUESTIONS[:3])
        assert said[1::2] == [found[QUESTIONS.index(question)].text for question in said[::2]]


@pytest.mark.parametrize("most", [16, 2])
def test_who_needs_the_session_alone_waits_for_all_answers(most: int, monkeypatch) -> None:
    monkeypatch.setattr(intake, "AT_ONCE", most)
    with opened("random-ov", MEMORIES["rekv"], 0) as session:
        want = told(session.ask(QUESTION, TOKENS))
        replies = [session.ask(QUESTION, TOKENS, stream=True) for _ in range(4)]
        next(replies[0])
        with session._asking.hold():
            assert session._asking._left == 0
            running = sum(one.answer is None and one._thread.is_alive() for one in replies)
        for one in replies:
            list(one)
            assert one.answer is not None and told(one.answer) == want
        assert running < 4
    with pytest.raises(ModelError, match="the session is closed"):
        session.ask_all([QUESTION])


def test_what_is_old_goes_although_answers_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes once so many have begun, when all have ended; but not while a clip is taken in."""
    monkeypatch.setattr(intake, "AT_ONCE", 0)
    monkeypatch.setattr(intake, "FORGET_S", 0.1)
    with opened("random-ov", {**MEMORIES["mosaic"], "keep_seconds": 6.0}, 0) as session:
        with monkeypatch.context() as patch:
            patch.setattr(session, "_let_go", lambda: None)  # as while an answer goes on
            session.watch(film(20, seed=5), fps=FPS)
        held: Any = session._live.state.store.units if session._live is not None else None
        before = len(held(0))
        with session._stream.hold():
            at_once([lambda: session.ask(QUESTION, 2)])
            assert len(held(0)) == before
        session.ask(QUESTION, 2)
        assert len(held(0)) < before and session.counters()["let_go"] > 0


def test_one_deadline_and_one_cancel_are_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of those that have not begun; and the first error is raised when all have ended."""
    monkeypatch.setattr(session_module, "AT_ONCE", 1)
    with opened("random-ov", MEMORIES["rekv"], 0) as session:
        answer, ended = session._answer, list[Any]()

        def answering(question: str, *given: Any) -> Any:
            if not ended:
                session.cancel()
            try:
                return answer(question, *given)
            finally:
                ended.append(question)

        monkeypatch.setattr(session, "_answer", answering)
        assert [one.finish_reason for one in session.ask_all(QUESTIONS, TOKENS)] == ["cancelled"] * 4
        ended[:] = ["begun"]
        with pytest.raises(ModelError, match="question: it is empty"):
            session.ask_all(["", *QUESTIONS], TOKENS)
        assert len(ended) == 6


@pytest.mark.parametrize("call", ["close", "ingest", "load"])
def test_an_answer_does_not_wait_for_itself(call: str, tmp_path: Path) -> None:
    with opened("random-ov", MEMORIES["rekv"], 0) as session:
        session.save(tmp_path / "s")
        given = {"close": (), "ingest": (film(2),), "load": (tmp_path / "s",)}[call]

        def within(ids: Any, scores: Any) -> Any:
            getattr(session, call)(*given)
            return scores

        want = told(session.ask(QUESTION, TOKENS))
        with pytest.raises(ModelError, match="an answer cannot wait for its own end; call this when"):
            session.ask(QUESTION, TOKENS, logits_processor=[within])
        assert told(session.ask(QUESTION, TOKENS)) == want
