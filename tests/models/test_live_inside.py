"""Tokens in the middle of a pass of frames change nothing of it, and it nothing of them: every memory, bit for bit."""

from __future__ import annotations

import copy
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import mmaccel
from mmaccel.core.decoding import replay
from mmaccel.core.decoding.replay import Replays
from mmaccel.core.report import Meter
from mmaccel.core.streams import parts
from mmaccel.models import step
from tests.models.streams import FPS, QUESTION, pair
from tests.models.test_live_snapshot import (
    BEFORE,
    HYBRID,
    MEANWHILE,
    MEMORIES,
    files,
    frame_by_frame,
    opened,
    shots,
    told,
)

TOKENS = 120
CASES = [(name, False) for name in MEMORIES] + [(name, True) for name in ("mosaic", "rekv", "livevlm")]


class Meeting:
    """Frames come one by one while an answer lasts, and each token waits until the next piece of their work is due."""

    def __init__(self, session: mmaccel.VideoSession, frames: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.turns, self.frames = session._stream_adapter.turns, frame_by_frame(session, frames)
        self.inside, self.give_way = 0, self.turns.give_way
        monkeypatch.setattr(parts, "PATIENCE_S", 0.0)
        monkeypatch.setattr(self.turns, "give_way", self.meet)

    def meet(self, inside: bool = False) -> None:
        """Counts tokens that come in the middle of a pass, which stands still meanwhile."""
        if inside:
            return
        self.inside += self.turns._still is not None
        over, end = object(), time.monotonic() + 20
        while next(self.frames, over) is not over and not self.turns._waiting:
            assert time.monotonic() < end
            time.sleep(2e-4)
        self.give_way()


@pytest.mark.parametrize(("kv", "captured"), CASES)
@pytest.mark.parametrize(
    "name", ["random-ov", *(pytest.param(n, marks=pytest.mark.slow) for n in ("random-qwen", HYBRID))]
)
def test_tokens_in_the_middle_of_passes(
    name: str, kv: str, captured: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if captured:
        monkeypatch.setattr(step, "DEVICES", ("cpu",))
    with opened(name, MEMORIES[kv]) as quiet:
        alone = quiet.ask(QUESTION, TOKENS)
        for frame in shots(name)[BEFORE:].split(1):
            quiet.watch(frame, fps=FPS)
        later = quiet.ask(QUESTION, 20)
        quiet.save(tmp_path / "quiet")
    with opened(name, MEMORIES[kv]) as session:
        with monkeypatch.context() as patched:
            meeting = Meeting(session, shots(name)[BEFORE:], patched)
            busy = session.ask(QUESTION, TOKENS)
        for _ in meeting.frames:
            time.sleep(1e-3)
        assert session.frames == BEFORE + MEANWHILE
        assert told(busy) == told(alone)
        assert (meeting.inside > 10) == (kv != "no_cache"), (
            meeting.inside
        )  # which keeps frames, and runs no pass of them
        assert told(session.ask(QUESTION, 20)) == told(later)
        session.save(tmp_path / "busy")
    one, other = files(tmp_path / "quiet"), files(tmp_path / "busy")
    assert one.keys() == other.keys() and [name for name in one if one[name] != other[name]] == []


def test_nothing_but_tokens_comes_inside_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another question waits until the pass is through: half of it is not a stream."""
    with opened("random-ov", MEMORIES["mosaic"]) as session, opened("random-ov", MEMORIES["rekv"]) as other:
        turns, seen, over = session._stream_adapter.turns, list[bool](), threading.Event()
        snapshot = type(other._live.state).snapshot

        def noted(*given: Any) -> Any:
            seen.append(turns._still is None)
            return snapshot(*given)

        def ask() -> None:
            while not over.is_set():
                other.ask(QUESTION, 1)

        monkeypatch.setattr(type(other._live.state), "snapshot", noted)
        with monkeypatch.context() as patched:
            meeting = Meeting(session, shots("random-ov")[BEFORE:], patched)
            asking = threading.Thread(target=ask)
            asking.start()
            session.ask(QUESTION, 60)
        over.set()
        for _ in meeting.frames:
            time.sleep(1e-3)
        asking.join()
        assert meeting.inside > 5 and len(seen) > 5 and all(seen)


@pytest.mark.parametrize("kv", ["mosaic", "full", "recent"])
def test_steps_are_made_ready_before_the_first_token(kv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is computed for that leaves no trace in the answer, nor in the memory."""
    monkeypatch.setattr(step, "DEVICES", ("cpu",))
    with opened("random-ov", MEMORIES[kv]) as session:
        plain, length = session.ask(QUESTION, 8), session._live.state.length()
        ran = list[int]()
        monkeypatch.setattr(Replays, "ready", lambda *given: len(ran) >= 2)
        run = step.StreamSteps.run
        monkeypatch.setattr(
            step.StreamSteps, "run", lambda self, *given: (ran.append(len(given[1])), run(self, *given))[1]
        )
        assert told(session.ask(QUESTION, 8)) == told(plain)
        # Of a memory without slots no step is captured.
        assert ran[1:3] == [1, 1] if kv != "full" else len(ran) == 8
        assert session._live.state.length() == length


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kv", ["mosaic", "rekv", "full"])
def test_on_a_gpu(kv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same tokens; and no step of an answer is captured once its first token is there."""
    model, processor = copy.deepcopy(pair("random-ov")[0]).to("cuda", torch.bfloat16), pair("random-ov")[1]

    def opened_there() -> mmaccel.VideoSession:
        session = mmaccel.VideoSession(model, processor, None, kv=MEMORIES[kv])
        session._stream_adapter.ends = frozenset  # type: ignore[method-assign]
        session.watch(shots("random-ov")[:BEFORE], fps=FPS)
        return session

    late, captured, token = list[int](), replay.captured, Meter.token
    tokens = [0]
    monkeypatch.setattr(replay, "captured", lambda *given: (late.append(tokens[0]), captured(*given))[1])
    monkeypatch.setattr(
        Meter, "token", lambda self, n=1: (tokens.__setitem__(0, tokens[0] + n), token(self, n))[1]
    )
    with opened_there() as quiet:
        alone = quiet.ask(QUESTION, TOKENS)
        assert not any(late) and bool(late) == (kv != "full"), late
        for frame in shots("random-ov")[BEFORE:].split(1):
            quiet.watch(frame, fps=FPS)
        later = quiet.ask(QUESTION, 20)
    with opened_there() as session:
        with monkeypatch.context() as patched:
            meeting = Meeting(session, shots("random-ov")[BEFORE:], patched)
            busy = session.ask(QUESTION, TOKENS)
        for _ in meeting.frames:
            time.sleep(1e-3)
        assert busy.ids == alone.ids and meeting.inside > 10
        assert session.ask(QUESTION, 20).ids == later.ids
