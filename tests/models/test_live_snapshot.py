"""Frames that come while a question is read and answered change nothing of the answer, and the question nothing of what is
kept of them: every memory, bit for bit, also in the middle of a pass of frames."""

import copy
import functools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import mmaccel
from mmaccel.core.decoding import replay
from mmaccel.core.decoding.replay import CudaGraphCache
from mmaccel.core.memory.split import MultiDeviceStreamState
from mmaccel.core.report import Meter
from mmaccel.core.streams import fair_lock
from mmaccel.models import step
from tests.models import test_stream_families
from tests.models.streams import FPS, QUESTION, SEARCHES, every_stream, film, open_session, pair, told
from tests.spies import beside, finish, heard

BEFORE, MEANWHILE, TOKENS = 14, 12, 40
HYBRID = "qwen3_5"
"""A model some of whose layers carry states."""
LONG = " ".join([QUESTION] * 12)
MEMORIES: dict[str, dict[str, Any]] = {
    **every_stream(frames=4, window=6),
    **SEARCHES,
    "rekv reps": {**SEARCHES["rekv reps"], "encode_frames": 2},
    "offload disk": {"name": "offload", "store": {"host_bytes": 4096, "spill": "disk"}},
    "drop_oldest": {
        "name": "rekv",
        "window": 6,
        "frames": 4,
        "store": {"host_bytes": 1 << 19, "spill": "drop_oldest"},
    },
}


@functools.cache
def shots(name: str) -> torch.Tensor:
    """Frames watched before the question, and meanwhile."""
    if name == HYBRID:
        return test_stream_families.film(BEFORE + MEANWHILE, name)[: BEFORE + MEANWHILE]
    return torch.cat([film(BEFORE, seed=4), film(MEANWHILE)])


def opened(name: str, kv: Any) -> mmaccel.VideoSession:
    session = test_stream_families.session(name, kv) if name == HYBRID else open_session(name, kv)
    session._stream_adapter.end_token_ids = frozenset  # type: ignore[method-assign]
    session.watch(shots(name)[:BEFORE], fps=FPS)
    return session


def frame_by_frame(session: mmaccel.VideoSession, frames: torch.Tensor) -> Iterator[None]:
    """Takes in `frames` one by one in other threads, each until it is taken in."""
    for frame in frames.split(1):
        with ThreadPoolExecutor(1) as pool:
            taken = pool.submit(session.watch, frame, fps=FPS)
            while not taken.done():
                yield
        taken.result()


def files(folder: Path) -> dict[str, bytes]:
    """What a save wrote but for its list, which names the time and place of nothing."""
    data = next(folder.glob("data-*"))
    return {str(one.relative_to(data)): one.read_bytes() for one in sorted(data.rglob("*")) if one.is_file()}


LONG_TOKENS = 60
WHOLE = ("full", "offload", "offload disk", "no_cache")
"""Memories that have nothing to do when a pass ends."""
CASES = [(name, False) for name in MEMORIES] + [(name, True) for name in ("mosaic", "rekv", "livevlm")]


class Often:
    """A frame comes, until it is taken in, at each layer of a question, and at every third token."""

    def __init__(self, session: mmaccel.VideoSession, frames: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.session, self.turns = session, session._stream_adapter.turns
        self.frames, self.ways = frame_by_frame(session, frames), [0, 0]
        self.yield_lock = self.turns.yield_lock
        monkeypatch.setattr(self.turns, "yield_lock", self.meet)

    def meet(self, inside: bool = False) -> None:
        self.ways[inside] += 1
        before, over = self.session.frames, object()
        if not inside and self.ways[0] % 3:
            return self.yield_lock(inside)
        while self.session.frames == before and next(self.frames, over) is not over:
            self.yield_lock(inside)
        return None


class Meeting(Often):
    """Frames come one by one while an answer lasts, and each token waits for so many `pieces` of their work. Counts tokens
    that come in the middle of a pass, which stands still meanwhile, and of these such as come while it is `ending`."""

    def __init__(
        self, session: mmaccel.VideoSession, frames: Any, monkeypatch: pytest.MonkeyPatch, pieces: int = 1
    ) -> None:
        super().__init__(session, frames, monkeypatch)
        self.pieces, self.inside, self.ending, self.ends = pieces, 0, 0, False
        state: Any = session._live.state  # type: ignore[union-attr]
        end_pass = type(state).end_pass

        def ended(one: Any) -> None:
            self.ends = self.ends or one is state
            end_pass(one)
            self.ends = self.ends and one is not state

        monkeypatch.setattr(type(state), "end_pass", ended)
        monkeypatch.setattr(fair_lock, "PATIENCE_S", 0.0)

    def meet(self, inside: bool = False) -> None:
        if inside:
            return
        still, over, end = self.turns._still is not None, object(), time.monotonic() + 20
        self.inside, self.ending = self.inside + still, self.ending + (still and self.ends)
        for _ in range(self.pieces):
            while next(self.frames, over) is not over and not self.turns._waiting:
                assert time.monotonic() < end
                time.sleep(2e-4)
            self.yield_lock()


def compared(
    name: str,
    kv: str,
    frames: torch.Tensor,
    coming: Callable[[mmaccel.VideoSession, torch.Tensor, pytest.MonkeyPatch], Any],
    folder: Path,
    tokens: int = LONG_TOKENS,
    question: str = QUESTION,
) -> tuple[Any, int]:
    """An answer while `frames` come, and what is stored of these, with those of a stream where they come later."""
    with opened(name, MEMORIES[kv]) as quiet:
        alone = quiet.ask(question, tokens)
        assert len(alone.ids) == tokens and quiet.ask(question, 4).ids == alone.ids[:4]
        for frame in frames.split(1):
            quiet.watch(frame, fps=FPS)
        later = quiet.ask(question, 20)
        quiet.save(folder / "quiet")
    with opened(name, MEMORIES[kv]) as session:
        with pytest.MonkeyPatch.context() as patched:
            met = coming(session, frames, patched)
            busy = session.ask(question, tokens)
        within = session.frames - BEFORE
        for _ in met.frames:
            time.sleep(1e-3)
        assert session.frames == BEFORE + len(frames)
        assert told(busy) == told(alone)
        assert told(session.ask(question, 20)) == told(later)
        session.save(folder / "busy")
    one, other = files(folder / "quiet"), files(folder / "busy")
    assert one.keys() == other.keys() and [name for name in one if one[name] != other[name]] == []
    return met, within


NAMES = ["random-ov", *(pytest.param(name, marks=pytest.mark.slow) for name in ("random-qwen", HYBRID))]


@pytest.mark.always
@pytest.mark.parametrize(
    "question", [QUESTION, pytest.param(LONG, marks=pytest.mark.slow)], ids=["short", "long"]
)
@pytest.mark.parametrize("kv", MEMORIES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_frames_meanwhile(name: str, kv: str, question: str, tmp_path: Path) -> None:
    met, within = compared(name, kv, shots(name)[BEFORE:], Often, tmp_path, TOKENS, question)
    assert within == MEANWHILE
    assert (met.ways[1] > 0) == (kv != "drop_oldest"), "frames come between two layers of a question"


@pytest.mark.parametrize(("kv", "captured"), CASES)
@pytest.mark.parametrize("name", NAMES)
def test_tokens_in_the_middle_of_passes(
    name: str, kv: str, captured: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if captured:
        monkeypatch.setattr(step, "DEVICES", ("cpu",))
    met, _ = compared(name, kv, shots(name)[BEFORE:], Meeting, tmp_path)
    # That keeps frames, and runs no pass of them.
    assert (met.inside > 10) == (kv != "no_cache"), met.inside
    assert (met.ending > 5) == (kv not in WHOLE), met.ending


@pytest.mark.slow
@pytest.mark.parametrize("kv", MEMORIES)
@pytest.mark.parametrize("name", ["random-ov", "random-qwen", HYBRID])
def test_fifty_frames_within_an_answer(name: str, kv: str, tmp_path: Path) -> None:
    """Of 200 tokens, each after seven pieces of the frames' work: after all of them in turn."""
    frames = shots(name)[BEFORE:].repeat(5, 1, 1, 1)[:50]
    met, within = compared(name, kv, frames, functools.partial(Meeting, pieces=7), tmp_path, 200)
    assert within == 50 and (met.inside > 10) == (kv != "no_cache"), met.inside


def test_nothing_but_tokens_comes_inside_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another question waits until the pass is through: half of it is not a stream."""
    with opened("random-ov", MEMORIES["mosaic"]) as session, opened("random-ov", MEMORIES["rekv"]) as other:
        turns, over = session._stream_adapter.turns, threading.Event()

        def ask() -> None:
            while not over.is_set():
                other.ask(QUESTION, 1)

        seen = heard(monkeypatch, type(other._live.state), "snapshot", lambda *_: turns._still is None)
        with monkeypatch.context() as patched:
            meeting = Meeting(session, shots("random-ov")[BEFORE:], patched)
            asking = beside(ask)
            session.ask(QUESTION, 60)
        over.set()
        for _ in meeting.frames:
            time.sleep(1e-3)
        finish(asking)
        assert meeting.inside > 5 and len(seen) > 5 and all(seen)


@pytest.mark.parametrize("kv", ["mosaic", "full", "recent"])
def test_steps_are_made_ready_before_the_first_token(kv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is computed for that leaves no trace in the answer, nor in the memory."""
    monkeypatch.setattr(step, "DEVICES", ("cpu",))
    with opened("random-ov", MEMORIES[kv]) as session:
        plain, length = session.ask(QUESTION, 8), session._live.state.length()
        ran = heard(
            monkeypatch, step.CapturedStreamSteps, "run_step", lambda steps, given, embeds, *_: len(embeds)
        )
        monkeypatch.setattr(CudaGraphCache, "is_captured", lambda *given: len(ran) >= 2)
        assert told(session.ask(QUESTION, 8)) == told(plain)
        assert ran[1:] == [1] * 8  # one of them before the answer, of which the prompt gives the first token
        assert session._live.state.length() == length


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kv", ["mosaic", "rekv", "full"])
def test_on_a_gpu(kv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same tokens; and no step of an answer is captured once its first token is there."""
    model, processor = copy.deepcopy(pair("random-ov")[0]).to("cuda", torch.bfloat16), pair("random-ov")[1]

    def opened_there() -> mmaccel.VideoSession:
        session = mmaccel.VideoSession(model, processor, None, kv=MEMORIES[kv])
        session._stream_adapter.end_token_ids = frozenset  # type: ignore[method-assign]
        session.watch(shots("random-ov")[:BEFORE], fps=FPS)
        return session

    tokens = heard(monkeypatch, Meter, "count_tokens", lambda self, n=1: n)
    late = heard(monkeypatch, replay, "capture_graph", lambda *given: sum(tokens))
    with opened_there() as quiet:
        alone = quiet.ask(QUESTION, LONG_TOKENS)
        assert late and not any(late), late
        for frame in shots("random-ov")[BEFORE:].split(1):
            quiet.watch(frame, fps=FPS)
        later = quiet.ask(QUESTION, 20)
    with opened_there() as session:
        with monkeypatch.context() as patched:
            meeting = Meeting(session, shots("random-ov")[BEFORE:], patched)
            busy = session.ask(QUESTION, LONG_TOKENS)
        for _ in meeting.frames:
            time.sleep(1e-3)
        assert busy.ids == alone.ids and meeting.inside > 10
        assert session.ask(QUESTION, 20).ids == later.ids


DEVICES_KV = every_stream(frames=6, window=4)
CPU, OTHER = torch.device("cpu"), torch.device("cpu:0")


@pytest.mark.parametrize("kv", ["full", "mosaic", "livevlm"])
def test_a_memory_on_each_device_and_a_stretch_of_time(kv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with mmaccel.VideoSession(*pair("random-ov", 4), None, kv=DEVICES_KV[kv]) as session:
        adapter: Any = session._stream_adapter
        adapter.layer_devices, adapter.end_token_ids = [CPU, CPU, OTHER, OTHER], frozenset
        session.watch(film(14), fps=FPS)
        assert session._live is not None and isinstance(session._live.state, MultiDeviceStreamState)
        alone, rest = session.ask(QUESTION, 12), iter(film(25)[14:].split(1))
        early = session.ask(QUESTION, 4, between=(1.0, 3.0))
        assert all(1.0 <= one.seconds <= 3.0 for one in early.evidence)
        way = adapter.turns.yield_lock

        def often(inside: bool = False) -> None:
            """A frame comes, in this thread, for its turn is held already."""
            if (frame := next(rest, None)) is not None and not inside:
                session.watch(frame, fps=FPS)
            way(inside)

        monkeypatch.setattr(adapter.turns, "yield_lock", often)
        busy = session.ask(QUESTION, 12)
        monkeypatch.undo()
        assert session.frames > 14 and (busy.ids, busy.evidence) == (alone.ids, alone.evidence)
