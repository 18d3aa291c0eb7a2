"""Drafts on streams: under every memory the text is the one without a draft, and the draft proposes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import mmaccel
from mmaccel.core.errors import DraftError, MmaccelWarning, RecipeError
from mmaccel.core.streams.draft_stream import LocalDraftStream
from mmaccel.policies.draft import Parallel, PromptLookup, Sequential, TextOnly
from tests.models.streams import FPS, QUESTION, every_stream, film, open_session, pair

TIGHT = every_stream(frames=6, window=8)
FAMILIES = ("random-ov", "random-qwen")
TOKENS = 14


def drafts(name: str) -> dict[str, Any]:
    """Drafts that run on streams, by the model itself where they take one."""
    model = pair(name)[0]
    return {
        "prompt_lookup": PromptLookup(),
        "text_only": TextOnly(model=model, window=3),
        "sequential": Sequential(model=model, window=3),
        "parallel": Parallel(model=model, window=3, process=False),
    }


LOOKS = ("sequential", "parallel")
"""Those with a stream of their own: of the target's own model they agree with it."""


@pytest.mark.parametrize("draft", drafts("random-ov"))
@pytest.mark.parametrize("kv", TIGHT)
@pytest.mark.parametrize("name", FAMILIES)
def test_the_text_is_the_one_without_a_draft(name: str, kv: str, draft: str) -> None:
    frames, found = film(18), []
    for choice in ("off", drafts(name)[draft]):
        with open_session(name, TIGHT[kv], draft=choice) as session:
            session.watch(frames[:11], fps=FPS)
            first = session.ask(QUESTION, TOKENS)
            session.watch(frames[11:], fps=FPS)
            found.append((first.ids, session.ask(QUESTION, TOKENS)))
    (before, alone), (then, drafted) = found
    assert (then, drafted.ids) == (before, alone.ids) and len(alone.ids) > 4
    assert drafted.counters["drafted"] > 0 and "drafted" not in alone.counters
    if draft in LOOKS:
        assert agrees(drafted), "its draft saw what it saw"


def agreeing(**fields: Any) -> Sequential:
    """A draft by the target's own model, all of which is accepted as long as it sees what the target sees."""
    return Sequential(model=pair("random-qwen")[0], window=3, **fields)


def opened(kv: str, draft: Any = "off") -> mmaccel.VideoSession:
    return open_session("random-qwen", TIGHT[kv], draft=draft)


def agrees(answer: mmaccel.core.decoding.generate.Answer) -> bool:
    return answer.counters["accepted"] >= 0.9 * (len(answer.ids) - 1) * 3 / 4


@pytest.mark.parametrize("kv", ["mosaic", "no_cache"])
def test_the_draft_is_rolled_back_with_the_target(kv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    frames, take = film(18), LocalDraftStream.take

    def interrupted(self: LocalDraftStream, *given: Any) -> None:
        take(self, *given)
        raise KeyboardInterrupt

    with opened(kv, agreeing()) as session, opened(kv) as quiet:
        for first in (True, False):
            monkeypatch.setattr(LocalDraftStream, "take", interrupted)
            with pytest.raises(KeyboardInterrupt):
                session.watch(film(18, seed=4)[:7], fps=FPS)
            monkeypatch.setattr(LocalDraftStream, "take", take)
            for one in (session, quiet):
                one.watch(frames[:9] if first else frames[9:], fps=FPS)
            answer, alone = session.ask(QUESTION, TOKENS), quiet.ask(QUESTION, TOKENS)
            assert answer.ids == alone.ids and agrees(answer) and len(session) == len(quiet)


@pytest.mark.parametrize("kv", TIGHT)
def test_the_draft_is_saved_and_loaded_with_the_target(tmp_path: Path, kv: str) -> None:
    frames, recent = film(18), {"name": "recent", "window": 5, "local": 5}
    draft = agreeing(kv=recent) if kv == "rekv" else agreeing()
    with opened(kv, draft) as session:
        session.watch(frames[:11], fps=FPS)
        session.save(tmp_path / "saved")
        session.watch(frames[11:], fps=FPS)
        want = session.ask(QUESTION, TOKENS)
    with opened(kv, draft) as session:
        session.load(tmp_path / "saved")
        session.watch(frames[11:], fps=FPS)
        answer = session.ask(QUESTION, TOKENS)
        assert answer.ids == want.ids
        for name in ("drafted", "accepted"):
            assert answer.counters[name] == want.counters[name] > 0, name
    with opened(kv) as session:
        session.load(tmp_path / "saved")
        assert len(session) == 11


def test_a_session_saved_without_the_draft_goes_on_without_it(tmp_path: Path) -> None:
    with opened("mosaic") as session:
        session.watch(film(11), fps=FPS)
        session.save(tmp_path / "saved")
        want = session.ask(QUESTION, TOKENS)
    with opened("mosaic", agreeing()) as session:
        with pytest.warns(MmaccelWarning, match="goes on without a draft.*saved without this draft's stream"):
            session.load(tmp_path / "saved")
        assert session.ask(QUESTION, TOKENS).ids == want.ids
        assert "saved without this draft's stream" in str(session.report())


@pytest.mark.parametrize("method", ["take", "mark", "ask", "read", "done", "save", "idle"])
def test_a_failing_draft_loses_nothing_of_the_stream(
    tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    frames = film(18)

    def fails(self: LocalDraftStream, *given: Any) -> None:
        raise RuntimeError("out of cheese")

    with opened("mosaic", agreeing()) as session, opened("mosaic") as quiet:
        for one in (session, quiet):
            one.watch(frames[:9], fps=FPS)
        monkeypatch.setattr(LocalDraftStream, method, fails)
        with pytest.warns(MmaccelWarning, match="without.*out of cheese"):
            session.watch(frames[9:], fps=FPS)
            first = session.ask(QUESTION, TOKENS)
            session.save(tmp_path / "saved")
            second = session.ask(QUESTION, TOKENS)
        quiet.watch(frames[9:], fps=FPS)
        want = quiet.ask(QUESTION, TOKENS)
        assert first.ids == second.ids == want.ids
        assert "out of cheese" in str(session.report())
    with opened("mosaic") as again:
        again.load(tmp_path / "saved")
        assert again.ask(QUESTION, TOKENS).ids == want.ids


def test_what_cannot_draft_on_a_stream_is_told_in_one_sentence() -> None:
    model = pair("random-qwen")[0]
    with pytest.raises(RecipeError, match="leave the draft's prune out"):
        opened("mosaic", Sequential(model=model, prune="uv"))  # type: ignore[arg-type]
    with pytest.raises(RecipeError, match="before there is a question"):
        opened("full", "sparse_to_dense")
    for kv, why in (("nowhere", "nowhere"), ({"name": "recent", "window": 0}, "window")):
        with pytest.raises(RecipeError, match=why):
            Sequential(model=model, kv=kv)  # type: ignore[arg-type]
    with pytest.raises(RecipeError, match="it watches no stream"):
        TextOnly(model=model, kv="recent")  # type: ignore[arg-type]
    with pytest.raises(DraftError, match="beside"):
        opened("mosaic", "sequential")
