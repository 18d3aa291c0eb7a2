"""Drafts on streams: under every memory the text is the one without a draft, and the draft proposes."""

from __future__ import annotations

from typing import Any

import pytest

from mmaccel.policies.draft import PromptLookup, TextOnly
from tests.models.streams import FPS, QUESTION, every_stream, film, open_session, pair

TIGHT = every_stream(frames=6, window=8)
FAMILIES = ("random-ov", "random-qwen")
TOKENS = 14


def drafts(name: str) -> dict[str, Any]:
    """Drafts that run on streams, by the model itself where they take one."""
    model = pair(name)[0]
    return {"prompt_lookup": PromptLookup(), "text_only": TextOnly(model=model, window=3)}


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
