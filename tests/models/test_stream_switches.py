"""Frames taken together or one at a time, and fetched ahead or not: the same stream."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mmaccel.core.prefill import attention
from tests.models.streams import FPS, QUESTION, film, logits, open_session

BASE = {"name": "mosaic", "frames": 4, "window": 6, "local": 2, "index": {"name": "clusters", "init": 8}}


def watched(monkeypatch: pytest.MonkeyPatch, **fields: Any) -> tuple[torch.Tensor, dict[str, int]]:
    """Logits of a question after 25 frames, and the most frames of a call: vision, attention, feed-forward."""
    most = {"vision": 0, "attention": 0, "feed": 0}
    chunk = fields.pop("chunk", None)
    with (
        open_session("random-ov", {**BASE, **fields}, chunk=chunk) as session,
        monkeypatch.context() as patch,
    ):
        stream_adapter = session._stream_adapter
        features, attend = stream_adapter.features, attention.dense_attend
        block = stream_adapter.family.layers(stream_adapter.model)[0].mlp
        gate = block.gate_proj.forward

        def seen(frames: torch.Tensor, size: Any) -> Any:
            most["vision"] = max(most["vision"], len(frames))
            return features(frames, size)

        def attended(query: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
            most["attention"] = max(most["attention"], query.shape[2])
            return attend(query, *rest, **named)

        def fed(hidden: torch.Tensor) -> torch.Tensor:
            most["feed"] = max(most["feed"], hidden.shape[1])
            return gate(hidden)

        patch.setattr(stream_adapter, "features", seen)
        patch.setattr(attention, "dense_attend", attended)
        patch.setitem(block.gate_proj.__dict__, "forward", fed)
        session.watch(film(25), fps=FPS)
        live: Any = session._live
        unit = live.info.unit
        told = {
            "vision": most["vision"],
            "attention": most["attention"] // unit,
            "feed": most["feed"] // unit,
        }
    with open_session("random-ov", {**BASE, **fields}, chunk=chunk) as session:
        session.watch(film(25), fps=FPS)
        return logits(session), told


@pytest.mark.parametrize(
    ("choices", "fewer", "few"),
    [({"chunk": 64}, ("vision", "attention", "feed"), 4), ({"encode_by": "frame"}, ("attention", "feed"), 1)],
    ids=str,
)
def test_few_at_a_time_it_is_the_same_stream(
    choices: dict[str, Any], fewer: tuple[str, ...], few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Where passes retrieve, what is stored depends on how many frames go in one.
    whole, together = watched(monkeypatch, encode_frames=0)
    found, most = watched(monkeypatch, encode_frames=0, **choices)
    assert min(together.values()) > few
    for name, count in most.items():
        assert count == (few if name in fewer else together[name]), (name, count)
    torch.testing.assert_close(found, whole, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["tiny-ov", "tiny-qwen"])
def test_what_is_fetched_ahead_changes_no_bit(name: str) -> None:
    """On trained models, whose layers' queries the predictors see: questions of one token and of several, one after the
    other, so that caches and drifts of earlier ones count."""
    found = []
    for fields in ({}, {"prefetch": "off"}, {"prefetch": "query"}):
        with open_session(name, {**BASE, "frames": 8, "cache": 4, **fields}) as session:
            session.watch(film(25).repeat(2, 1, 1, 1), fps=FPS)
            answers = [session.ask(question, 6) for question in (QUESTION, "how many shapes were shown ?")]
            told = answers[-1].counters
            assert (told["fetch_guessed"] > 0) == (fields.get("prefetch") != "off")
            assert told["fetch_missing"] > 0 and told["visual_clusters"] > 0 and told["host_bytes_in"] > 0
            found.append((logits(session), [(one.ids, one.evidence) for one in answers]))
    for bits, said in found[1:]:
        assert torch.equal(bits, found[0][0]) and said == found[0][1]
