"""ReKV: what it recalls is what its authors' formula says, and how it comes back changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mmaccel.policies.kv import ReKV
from mmaccel.policies.kv._stored import MeanKeys
from tests.models.streams import FPS, QUESTION, film, logits, open_session

HEADS, GROUPS, SIZE, TOKENS = 6, 2, 8, 3


def keys(units: int, seed: int = 0) -> Tensor:
    return torch.randn(1, GROUPS, units * TOKENS, SIZE, generator=torch.Generator().manual_seed(seed))


def by_the_paper(key: Tensor, query: Tensor, cosine: bool) -> Tensor:
    """[units]: mean keys with the heads of a group repeated, against the mean query, all heads as one vector."""
    mean = key[0].view(GROUPS, -1, TOKENS, SIZE).mean(2)
    one = mean.repeat_interleave(HEADS // GROUPS, 0).transpose(0, 1).flatten(1)
    asked = query.flatten()
    score = one @ asked
    return score / (one.norm(dim=1) * asked.norm()) if cosine else score


@pytest.mark.parametrize("similarity", ["dot", "cosine"])
def test_scores_are_those_of_the_paper(similarity: str) -> None:
    index = MeanKeys(2, similarity)
    key = keys(400)
    for first, count in ((0, 5), (5, 1), (6, 394)):
        for layer in range(2):
            index.add(
                layer, first, key[:, :, first * TOKENS : (first + count) * TOKENS] * (1 + layer), TOKENS
            )
    query = torch.randn(HEADS, SIZE, generator=torch.Generator().manual_seed(1))
    for end in (400, 7):
        want = by_the_paper(key[:, :, : end * TOKENS], query, similarity == "cosine")
        torch.testing.assert_close(index.score(0, query, end), want, rtol=1e-4, atol=1e-4)
        order = index.score(1, query, end).argsort().tolist()
        assert order == want.argsort().tolist()
    best = index.best(index.score(0, query, 400), 9).tolist()
    assert best == sorted(by_the_paper(key, query, similarity == "cosine").topk(9).indices.tolist())


def test_ties_go_to_the_older_unit_and_forgotten_ones_are_not_found() -> None:
    index = MeanKeys(1, "dot")
    index.add(0, 0, torch.ones(1, GROUPS, 6 * TOKENS, SIZE), TOKENS)
    score = index.score(0, torch.ones(HEADS, SIZE), 6)

    def best(count: int) -> list[int]:
        return index.best(score, count).tolist()

    assert best(2) == [0, 1] and best(9) == list(range(6))
    index.forget([0, 3])
    assert best(2) == [1, 2] and best(9) == [1, 2, 4, 5]
    assert index.best(torch.zeros(0), 3).tolist() == []


def test_a_planted_frame_is_recalled() -> None:
    """A unit whose mean key is the question's own direction is found at its place."""
    fields = {"name": "rekv", "frames": 2, "window": 4}
    with open_session("random-ov", fields) as session:
        session.watch(film(20), fps=FPS)
        state: Any = session._live.state  # type: ignore[union-attr]
        queries: dict[int, Tensor] = {}
        recall = state._recall

        def planted(layer: int, query: Tensor, end: int) -> Any:
            queries[layer] = query
            held = state.index._held[layer]
            held[0, :, 3 + layer] = 100 * query.view(held.shape[1], -1, held.shape[3]).sum(1)
            return recall(layer, query, end)

        state._recall = planted
        seen = {one.frames[0]: one for one in session.ask(QUESTION, 1).evidence}
        assert set(queries) == {0, 1} and seen[3].recalled >= 0.5 and seen[4].recalled >= 0.5


def test_faithful_copies_and_coalesced_ones_bring_the_same() -> None:
    found, told = [], []
    for copies in ("frame", "coalesced"):
        with open_session("random-ov", ReKV(frames=6, window=4, copies=copies)) as session:
            session.watch(film(25), fps=FPS)
            found.append(logits(session))
            told.append(session.counters())
    assert torch.equal(*found)
    gone = 25 - 4
    frames = told[0]["host_bytes_in"] / (2 * GROUPS * 16 * 64 * 4)
    assert told[0]["host_copies_in"] == 2 * frames and frames <= 2 * min(6, gone)
    assert told[1]["host_copies_in"] < told[0]["host_copies_in"]
    assert told[0]["host_bytes_in"] == told[1]["host_bytes_in"]


def test_the_budget_is_in_frames() -> None:
    with open_session("random-qwen", {"name": "rekv", "frames": 6, "window": 8}) as session:
        session.watch(film(20), fps=FPS)
        answer = session.ask(QUESTION, 1)
        frames = sum(one.recalled * (one.frames[1] - one.frames[0] + 1) for one in answer.evidence)
        assert frames == pytest.approx(6)
        assert session.counters()["window"] == 4
