"""Questions of several sessions of one model at once: their answers share steps, and each is what its session says alone."""

import copy
import gc
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch

import mmaccel
from mmaccel.core.decoding.generate import Speculation
from mmaccel.core.streams.asking import QuestionRunner
from mmaccel.models import step
from mmaccel.models.stream import HFStreamAdapter
from tests.models.streams import FPS, QUESTION, SEARCHES, every_stream, film, open_session, pair, told
from tests.products import crossed
from tests.spies import broken, heard, nth

pytestmark = pytest.mark.in_turn("kv", 4)

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

    offer, begins, behind = Speculation.offer_rows, dict[int, int](), list[bool]()

    def offering(self: Any, most: int | None = None) -> Any:
        offered = yield from offer(self, most)
        begins[id(self.target)] = self.target.length()
        return offered

    def again(self: Any, *given: Any) -> None:
        if id(self) in begins:
            behind.append(self.length() == begins[id(self)])

    with several(MEMORIES["rekv"], *range(SESSIONS)) as (sessions, alone):
        broken(monkeypatch, HFStreamAdapter, "logits", RuntimeError("no room"), several_rows)
        monkeypatch.setattr(Speculation, "offer_rows", offering)
        heard(monkeypatch, QuestionRunner, "step", again)
        assert at_once([lambda one=one: told(one.ask(QUESTION, TOKENS)) for one in sessions]) == alone
        assert len(broke) == 3 and max(seen) > 1 and behind and all(behind)


def test_what_fails_in_one_memory_leaves_the_other_answers(
    sizes: Callable[[str], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = sizes("random-ov")
    with several(MEMORIES["rekv"], 0, 0) as ((good, bad), (alone, _)):
        kind: Any = type(bad._live.state)  # type: ignore[union-attr]
        late, full = nth(*range(11, 999)), torch.OutOfMemoryError("no room")

        def fails(state: Any, layer: int, *_: Any) -> bool:
            mine = getattr(state, "_main", None) is bad._live.state  # type: ignore[union-attr]
            return mine and layer == 1 and late()

        with monkeypatch.context() as patch:
            broken(patch, kind, "append", full, fails)
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
