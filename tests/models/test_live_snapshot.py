"""Frames that come while a question is read and answered change nothing of the answer, and the question nothing of what is
kept of them: every memory, bit for bit."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import mmaccel
from tests.models import test_stream_families
from tests.models.streams import CLUSTERS, FPS, QUESTION, every_stream, film, open_session

pytestmark = pytest.mark.in_turn("kv", 4)

BEFORE, MEANWHILE, TOKENS = 14, 12, 40
HYBRID = "qwen3_5"
"""A model some of whose layers carry states."""
LONG = " ".join([QUESTION] * 12)
MEMORIES: dict[str, dict[str, Any]] = {
    **every_stream(frames=4, window=6),
    "mosaic": {"name": "mosaic", "window": 6, "local": 2, "frames": 4, "index": CLUSTERS, "encode_frames": 2},
    "rekv reps": {
        "name": "rekv",
        "window": 6,
        "local": 2,
        "frames": 4,
        "reps": 3,
        "encode_frames": 2,
        "cache": 4,
    },
    "offload disk": {"name": "offload", "host_bytes": 4096, "spill": "disk"},
    "drop_oldest": {"name": "rekv", "window": 6, "frames": 4, "host_bytes": 1 << 19, "spill": "drop_oldest"},
}


@functools.cache
def shots(name: str) -> torch.Tensor:
    """Frames watched before the question, and meanwhile."""
    if name == HYBRID:
        return test_stream_families.film(BEFORE + MEANWHILE, name)[: BEFORE + MEANWHILE]
    return torch.cat([film(BEFORE, seed=4), film(MEANWHILE)])


def opened(name: str, kv: Any) -> mmaccel.VideoSession:
    session = test_stream_families.session(name, kv) if name == HYBRID else open_session(name, kv)
    session._stream_adapter.ends = frozenset  # type: ignore[method-assign]
    session.watch(shots(name)[:BEFORE], fps=FPS)
    return session


def frame_by_frame(session: mmaccel.VideoSession, frames: torch.Tensor) -> Iterator[None]:
    """Takes in `frames` one by one in other threads, each until it is taken in."""
    for frame in frames.split(1):
        errors: list[BaseException] = []

        def watch(frame: Any = frame, errors: list[BaseException] = errors) -> None:
            try:
                session.watch(frame, fps=FPS)
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=watch)
        thread.start()
        while thread.is_alive():
            yield
        if errors:
            raise errors[0]


def told(answer: mmaccel.core.decoding.generate.Answer) -> tuple[Any, ...]:
    return answer.ids, answer.text, answer.evidence, answer.finish_reason


def files(folder: Path) -> dict[str, bytes]:
    """What a save wrote but for its list, which names the time and place of nothing."""
    data = next(folder.glob("data-*"))
    return {str(one.relative_to(data)): one.read_bytes() for one in sorted(data.rglob("*")) if one.is_file()}


@pytest.mark.parametrize(
    "question", [QUESTION, pytest.param(LONG, marks=pytest.mark.slow)], ids=["short", "long"]
)
@pytest.mark.parametrize("kv", MEMORIES, ids=str)
@pytest.mark.parametrize(
    "name", ["random-ov", *(pytest.param(n, marks=pytest.mark.slow) for n in ("random-qwen", HYBRID))]
)
def test_frames_meanwhile(
    name: str, kv: str, question: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(name, MEMORIES[kv]) as quiet:
        alone = quiet.ask(question, TOKENS)
        again = quiet.ask(question, 4)
        for frame in shots(name)[BEFORE:].split(1):
            quiet.watch(frame, fps=FPS)
        later = quiet.ask(question, 20)
        quiet.save(tmp_path / "quiet")
    assert len(alone.ids) == TOKENS and again.ids == alone.ids[:4]
    with opened(name, MEMORIES[kv]) as session:
        turns = session._stream_adapter.turns
        give_way, coming, ways = turns.give_way, frame_by_frame(session, shots(name)[BEFORE:]), [0, 0]

        def often(inside: bool = False) -> None:
            """A frame comes at each layer, and at every third token."""
            ways[inside] += 1
            before, over = session.frames, object()
            if not inside and ways[0] % 3:
                return give_way(inside)
            while session.frames == before and next(coming, over) is not over:
                give_way(inside)
            return None

        monkeypatch.setattr(turns, "give_way", often)
        busy = session.ask(question, TOKENS)
        monkeypatch.undo()
        assert session.frames == BEFORE + MEANWHILE
        assert told(busy) == told(alone)
        assert (ways[1] > 0) == (kv != "drop_oldest"), "frames come between two layers of a question"
        assert told(session.ask(question, 20)) == told(later)
        session.save(tmp_path / "busy")
    one, other = files(tmp_path / "quiet"), files(tmp_path / "busy")
    assert one.keys() == other.keys() and [name for name in one if one[name] != other[name]] == []
