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
    MEMORIES,
    files,
    frame_by_frame,
    opened,
    shots,
    told,
)

TOKENS = 120
WHOLE = ("full", "offload", "offload disk", "no_cache")
"""Memories that have nothing to do when a pass ends."""
CASES = [(name, False) for name in MEMORIES] + [(name, True) for name in ("mosaic", "rekv", "livevlm")]


class Meeting:
    """Frames come one by one while an answer lasts, and each token waits for so many `pieces` of their work. Counts tokens
    that come in the middle of a pass, which stands still meanwhile, and of these such as come while it is `ending`."""

    def __init__(
        self, session: mmaccel.VideoSession, frames: Any, monkeypatch: pytest.MonkeyPatch, pieces: int = 1
    ) -> None:
        self.turns, self.frames = session._stream_adapter.turns, frame_by_frame(session, frames)
        self.give_way, self.pieces, self.inside, self.ending, self.ends = (
            self.turns.give_way,
            pieces,
            0,
            0,
            False,
        )
        state: Any = session._live.state  # type: ignore[union-attr]
        end_pass = type(state).end_pass

        def ended(one: Any) -> None:
            self.ends = self.ends or one is state
            end_pass(one)
            self.ends = self.ends and one is not state

        monkeypatch.setattr(type(state), "end_pass", ended)
        monkeypatch.setattr(parts, "PATIENCE_S", 0.0)
        monkeypatch.setattr(self.turns, "give_way", self.meet)

    def meet(self, inside: bool = False) -> None:
        if inside:
            return
        still, over, end = self.turns._still is not None, object(), time.monotonic() + 20
        self.inside, self.ending = self.inside + still, self.ending + (still and self.ends)
        for _ in range(self.pieces):
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
    compared(name, kv, TOKENS, shots(name)[BEFORE:], 1, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("kv", MEMORIES)
@pytest.mark.parametrize("name", ["random-ov", "random-qwen", HYBRID])
def test_fifty_frames_within_an_answer(
    name: str, kv: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 200 tokens, each after seven pieces of the frames' work: after all of them in turn."""
    frames = shots(name)[BEFORE:].repeat(3, 1, 1, 1)[:50]
    compared(name, kv, 200, frames, 7, tmp_path, monkeypatch)


def compared(
    name: str,
    kv: str,
    tokens: int,
    frames: torch.Tensor,
    pieces: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An answer while `frames` come, and what is stored of these, with that of a stream where they come after it."""
    with opened(name, MEMORIES[kv]) as quiet:
        alone = quiet.ask(QUESTION, tokens)
        for frame in frames.split(1):
            quiet.watch(frame, fps=FPS)
        later = quiet.ask(QUESTION, 20)
        quiet.save(tmp_path / "quiet")
    assert len(alone.ids) == tokens
    with opened(name, MEMORIES[kv]) as session:
        with monkeypatch.context() as patched:
            meeting = Meeting(session, frames, patched, pieces)
            busy = session.ask(QUESTION, tokens)
            assert pieces == 1 or session.frames == BEFORE + len(frames), "they come within the answer"
        for _ in meeting.frames:
            time.sleep(1e-3)
        assert session.frames == BEFORE + len(frames)
        assert told(busy) == told(alone)
        # That keeps frames, and runs no pass of them.
        assert (meeting.inside > 10) == (kv != "no_cache"), meeting.inside
        assert pieces > 1 or (meeting.ending > 5) == (kv not in WHOLE), meeting.ending
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
        assert late and not any(late), late
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
