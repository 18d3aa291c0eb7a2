"""Every memory of streams merges, keeps and forgets the same, whether frames come one a call or sixteen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mmaccel
from tests.models.streams import FPS, QUESTION, every_stream, film, logits, open_session, pair
from tests.products import product

pytestmark = pytest.mark.in_turn("kv", 4)

TIGHT = every_stream(frames=6, window=8)
NAMES = sorted(TIGHT)
HOW = ("host_", "fetch_", "prefetch_", "bytes", "index_bytes", "summary_bytes")
"""Counters of how keys cross the wire and where they lie, which may hang on the calls."""


def stills(count: int = 48) -> Tensor:
    """Frames of a world, each shown one to four times."""
    frames = torch.cat([film(25), film(25, 4)])
    times = torch.tensor([1, 3, 2, 4, 1, 2])[torch.arange(len(frames)) % 6]
    return frames.repeat_interleave(times, 0)[:count]


def fields(kv: str) -> dict[str, Any]:
    """A memory with small budgets, its other fields as they are by default; where passes retrieve, what they store hangs on
    them by design."""
    own = {name: value for name, value in TIGHT[kv].items() if name != "similar"}
    return {**own, **({"encode_frames": 0} if kv == "mosaic" else {})}


def watched(session: mmaccel.VideoSession, frames: Tensor, call: int) -> mmaccel.VideoSession:
    for part in frames.split(call):
        session.watch(part, fps=FPS)
    return session


def kept(session: mmaccel.VideoSession) -> dict[str, Any]:
    """What a session tells of what it keeps."""
    live = session._live
    assert live is not None
    told = {name: n for name, n in session.counters().items() if not name.startswith(HOW)}
    columns = [one.column.tolist() for one in getattr(live.state, "_held", []) if hasattr(one, "column")]
    picked = [number for number, _ in live.state.pick({})] if hasattr(live.state, "pick") else []
    return {
        **told,
        "spans": list(live.info.spans),
        "columns": columns,
        "picked": picked,
        "shown": session.shown,
    }


@pytest.mark.parametrize(("kv", "name"), product(NAMES, ["random-ov", "random-qwen"]))
def test_one_frame_a_call_keeps_what_sixteen_do(name: str, kv: str) -> None:
    """In passes of another size, too."""
    frames = stills()
    with open_session(name, fields(kv), chunk=64) as one, open_session(name, fields(kv)) as many:
        watched(one, frames, 1), watched(many, frames, 16)
        assert kept(one) == kept(many)
        assert (logits(one) - logits(many)).abs().max() <= 1e-4
        answers = [session.ask(QUESTION, 3) for session in (one, many)]
        assert answers[0].ids == answers[1].ids
        assert [e.frames for e in answers[0].evidence] == [e.frames for e in answers[1].evidence]
        told = kept(many)
    if kv == "streammem":
        assert told["merged"] > 8 and told["pruned"] > 0 and told["prototypes"] > 0


@pytest.mark.parametrize("name", ["random-ov", "random-qwen"])
def test_frames_that_wait_to_be_merged_are_seen_saved_and_taken_back(name: str, tmp_path: Path) -> None:
    """In the middle of a run of frames that look alike."""
    model, processor = pair(name)
    frames = torch.cat([film(11), film(11)[-1:].expand(6, -1, -1, -1), film(25)[12:]])
    kv = {"name": "streammem", "frames": 64}
    with open_session(name, kv) as session, open_session(name, kv) as other:
        watched(session, frames[:14], 5)
        waiting = session._live.state.waiting()  # type: ignore[union-attr]
        assert waiting is not None and waiting.shape[0] == 1 and session.frames == 14
        blind = frames[:14].clone()
        blind[10:] = 0
        watched(other, blind, 5)
        assert (logits(session) - logits(other)).abs().max() > 1e-3, "a question sees the frames that wait"
        before = logits(session)
        session.save(tmp_path / "stream")
        with pytest.raises(mmaccel.core.errors.ModelError, match="times"):
            session.watch(frames[14:17], times=[100.0, 101.0])
        assert torch.equal(logits(session), before)
        with mmaccel.VideoSession.resume(model, processor, tmp_path / "stream") as again:
            assert torch.equal(logits(again), before)
            for one in (session, again):
                watched(one, frames[14:], 1)
            assert kept(again) == kept(session) and torch.equal(logits(again), logits(session))
