"""The four ways in which mosaic takes frames together, each switched off alone: less at a time, and the same stream."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mmaccel.core import attention
from tests.models.streams import FPS, QUESTION, film, logits, open_session

BASE = {"name": "mosaic", "frames": 4, "window": 6, "local": 2, "init": 8}


def watched(monkeypatch: pytest.MonkeyPatch, **fields: Any) -> tuple[torch.Tensor, dict[str, int]]:
    """Logits of a question after 25 frames, and the most frames of a call: vision, attention, feed-forward."""
    most = {"vision": 0, "attention": 0, "feed": 0}
    with open_session("random-ov", {**BASE, **fields}) as session, monkeypatch.context() as patch:
        seam = session._seam
        features, attend = seam.features, attention.ops.attend_now
        block = seam.family.layers(seam.model)[0].mlp
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

        patch.setattr(seam, "features", seen)
        patch.setattr(attention.ops, "attend_now", attended)
        patch.setitem(block.gate_proj.__dict__, "forward", fed)
        session.watch(film(25), fps=FPS)
        live: Any = session._live
        unit = live.film.unit
        told = {
            "vision": most["vision"],
            "attention": most["attention"] // unit,
            "feed": most["feed"] // unit,
        }
    with open_session("random-ov", {**BASE, **fields}) as session:
        session.watch(film(25), fps=FPS)
        return logits(session), told


@pytest.mark.parametrize(
    ("fields", "single"),
    [
        ({"clip": 1, "batch_layers": True}, ("vision", "attention", "feed")),
        ({"batch_layers": False}, ("attention", "feed")),
        ({"batch_attention": False}, ("attention",)),
        ({"batch_feed": False}, ("feed",)),
        ({"batch_match": False}, ()),
    ],
    ids=str,
)
def test_switched_off_it_takes_one_at_a_time(
    fields: dict[str, Any], single: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Where passes retrieve, what is stored depends on how many frames go in one.
    alone = {"encode_frames": 0} if {"clip", "batch_layers"} & set(fields) else {}
    whole, together = watched(monkeypatch, **alone)
    found, most = watched(monkeypatch, **fields, **alone)
    assert min(together.values()) > 1
    for name, count in most.items():
        assert count == 1 if name in single else count == together[name], (name, count)
    torch.testing.assert_close(found, whole, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["tiny-ov", "tiny-qwen"])
def test_what_is_fetched_ahead_changes_no_bit(name: str) -> None:
    """On trained models, whose layers' queries the predictors see: questions of one token and of several, one after the
    other, so that caches and drifts of earlier ones count."""
    found = []
    for fields in ({}, {"prefetch": False}, {"predictor": "query"}, {"predictor": "frames"}, {"slack": 3.0}):
        with open_session(name, {**BASE, "frames": 8, "cache": 4, **fields}) as session:
            session.watch(film(25).repeat(2, 1, 1, 1), fps=FPS)
            answers = [session.ask(question, 6) for question in (QUESTION, "how many shapes were shown ?")]
            told = answers[-1].counters
            assert (told["fetch_guessed"] > 0) == (fields.get("prefetch") is not False)
            assert told["fetch_missing"] > 0 and told["visual_clusters"] > 0 and told["host_bytes_in"] > 0
            found.append((logits(session), [(one.ids, one.evidence) for one in answers]))
    for bits, said in found[1:]:
        assert torch.equal(bits, found[0][0]) and said == found[0][1]
