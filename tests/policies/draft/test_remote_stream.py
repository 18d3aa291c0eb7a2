"""A draft's stream in the draft's process does what one in this process does."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

import mmaccel
from mmaccel.core.adapter import ModelView
from mmaccel.core.attach import adapter_for
from mmaccel.core.decoding.watching import DraftStream, Watching
from mmaccel.core.errors import DraftError, MmaccelWarning
from mmaccel.core.registry import policy
from mmaccel.core.streams.draft_stream import LocalDraftStream
from mmaccel.policies.draft import Parallel
from mmaccel.policies.draft._draft_decoder import DraftDecoder
from mmaccel.policies.draft._remote_drafter import Remote
from mmaccel.policies.draft._remote_stream import RemoteDraftStream
from tests.models.streams import FPS, QUESTION, every_stream, film, open_session, pair

COUNT = 8
TIGHT = every_stream(frames=6, window=8)
NAME = "tiny-ov"


@pytest.fixture(scope="module")
def target() -> Iterator[ModelView]:
    model, _ = pair(NAME)
    view = ModelView(model, adapter_for(model), adapter_for)
    yield view
    view.release()


def parallel(process: bool) -> Parallel:
    return Parallel(model=f"{NAME}-draft", window=4, process=process)


def watching(kv: str = "mosaic") -> Watching:
    return Watching(pair(NAME)[1], policy("kv", TIGHT[kv]), None)


def take(stream: DraftStream, frames: torch.Tensor, start: float) -> None:
    times = [start + i / FPS for i in range(len(frames))]
    stream.take(frames, times, FPS, False)


def written(stream: DraftStream, target: ModelView) -> list[int]:
    """What a draft says to a question, after its first token is fixed."""
    stream.ask(QUESTION, COUNT)
    inputs: Any = {"input_ids": torch.tensor([[1, 0]])}
    if isinstance(stream, RemoteDraftStream):
        with closing(Remote(stream._worker, target.geometry.vocab)) as remote:
            remote.begin(inputs, None, False, False, 0, stream)
            remote.ask(0, [7], COUNT)
            found = remote.collect(60.0)
    else:
        assert isinstance(stream, LocalDraftStream)
        writer = DraftDecoder(target.runner(), "cpu", target.geometry.vocab)
        writer.read(inputs, None, False, None, 0, stream)
        found = writer.write(0, [7], COUNT)
    stream.done()
    assert found is not None
    return found.ids


@pytest.mark.parametrize("kv", ["mosaic", "no_cache"])
@torch.no_grad()
def test_it_says_what_a_stream_here_says(target: ModelView, tmp_path: Path, kv: str) -> None:
    told = []
    for process in (False, True):
        said, folder = [], tmp_path / str(process)
        folder.mkdir()
        with closing(parallel(process).watch(target, watching(kv))) as stream:
            assert isinstance(stream, RemoteDraftStream) == process
            frames = film(20).clone()
            take(stream, frames[:9], 0.0)
            frames.zero_()  # what was sent may be written over
            said.append(written(stream, target))
            mark = stream.mark()
            take(stream, film(20, seed=4)[:8], 4.5)
            said.append(written(stream, target))
            stream.back(mark)
            said.append(written(stream, target))
            stream.save(folder)
            take(stream, film(20)[9:], 4.5)
            said.append(written(stream, target))
        with closing(parallel(process).watch(target, watching(kv))) as stream:
            stream.load(folder)
            take(stream, film(20)[9:], 4.5)
            said.append(written(stream, target))
        assert said[0] == said[2] and said[3] == said[4]
        told.append(said)
    assert told[0] == told[1]
    assert len({tuple(one) for one in told[0]}) > 1, "what is said depends on what was seen"


def drafted(session: mmaccel.VideoSession) -> tuple[int, ...]:
    """An answer that the draft took part in: it may still be reading while the first ones are given."""
    until = time.monotonic() + 60
    while True:
        answer = session.ask("Describe the video.", 60)
        if answer.counters.get("accepted"):
            return answer.ids
        assert time.monotonic() < until, "the draft takes part in no answer"


def test_a_session_drafts_in_the_process(tmp_path: Path) -> None:
    with open_session(NAME, TIGHT["mosaic"]) as quiet:
        quiet.watch(film(20), fps=FPS)
        want = quiet.ask("Describe the video.", 60)
    with open_session(NAME, TIGHT["mosaic"], draft=parallel(True)) as session:
        session.watch(film(20)[:9], fps=FPS)
        session.save(tmp_path / "saved")
        session.watch(film(20)[9:], fps=FPS)
        assert drafted(session) == want.ids
    with mmaccel.VideoSession.resume(*pair(NAME), tmp_path / "saved") as session:
        session.watch(film(20)[9:], fps=FPS)
        assert drafted(session) == want.ids
        live = session._live
        assert live is not None and isinstance(live.beside.stream, RemoteDraftStream)
        live.beside.stream._worker.process.kill()
        live.beside.stream._worker.process.wait()
        with pytest.warns(MmaccelWarning, match="goes on without a draft"):
            session.watch(film(20, seed=4), fps=FPS)
        assert len(session) == 40 and session.ask("Describe the video.", 9).ids


def test_what_the_process_cannot_do_ends_the_stream(target: ModelView, tmp_path: Path) -> None:
    with (
        closing(parallel(True).watch(target, watching())) as stream,
        pytest.raises(DraftError, match="saved without this draft's stream"),
    ):
        stream.load(tmp_path / "draft")


def test_a_processor_that_cannot_travel_costs_the_draft() -> None:
    model, processor = pair(NAME)
    held = processor.__dict__
    held["unsent"] = lambda: None
    try:
        with mmaccel.VideoSession(
            model, processor, None, kv=TIGHT["recent"], draft=parallel(True)
        ) as session:
            with pytest.warns(MmaccelWarning, match="goes on without a draft"):
                session.watch(film(9), fps=FPS)
            assert session.ask(QUESTION, 4).ids
    finally:
        del held["unsent"]
