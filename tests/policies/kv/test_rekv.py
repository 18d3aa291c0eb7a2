"""ReKV: what it recalls is what its authors' formula says, and how it comes back changes nothing."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mmaccel.core.adapter import Geometry
from mmaccel.core.errors import RecipeError
from mmaccel.policies.kv._index import IndexPolicy
from mmaccel.policies.kv.rekv import FrameIndex, Frames
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


def index_of(layers: int, similarity: str = "dot") -> FrameIndex:
    geometry = Geometry(layers=layers, heads=HEADS, kv_heads=GROUPS, head_dim=SIZE, hidden=9, vocab=9)
    stream: Any = SimpleNamespace(unit=TOKENS, dtype=torch.float32)
    policy: Any = Frames(similarity=similarity)  # type: ignore[arg-type]
    return FrameIndex(policy, stream, geometry, torch.device("cpu"), 0, False)


def folded(query: Tensor) -> Tensor:
    """The heads of a group share their keys."""
    return query.view(GROUPS, -1, SIZE).sum(1).flatten()


@pytest.mark.parametrize("similarity", ["dot", "cosine"])
def test_scores_are_those_of_the_paper(similarity: str) -> None:
    index, key = index_of(2, similarity), keys(400)
    for first, count in ((0, 5), (5, 1), (6, 394)):
        some = key[:, :, first * TOKENS : (first + count) * TOKENS]
        index.arrived(None, [(some, some), (2 * some, some)], None)
    query = torch.randn(HEADS, SIZE, generator=torch.Generator().manual_seed(1))
    for layer in range(2):
        for end in (400, 12):
            want = by_the_paper(key[:, :, : end * TOKENS], query, similarity == "cosine")
            for budget in (1, 9):
                found = index.search(layer, folded(query), budget, end)
                assert found.entries.tolist() == sorted(want.topk(budget).indices.tolist())
        scale = 1 if similarity == "cosine" else 1 + layer
        score = found.scores[:12]
        if similarity == "cosine":  # the folded query has another length
            score = score / score.abs().max() * want.abs().max()
        torch.testing.assert_close(score, scale * want, rtol=1e-4, atol=1e-4)


def test_ties_go_to_the_older_unit_and_forgotten_ones_are_not_found() -> None:
    index, ones = index_of(1), torch.ones(1, GROUPS, 6 * TOKENS, SIZE)
    assert index.search(0, folded(torch.ones(HEADS, SIZE)), 3, 0).entries.tolist() == []
    index.arrived(None, [(ones, ones)], None)

    def best(count: int) -> list[int]:
        return index.search(0, folded(torch.ones(HEADS, SIZE)), count, 6).entries.tolist()

    assert best(2) == [0, 1] and best(9) == list(range(6))
    index.forget([0, 3])
    assert best(2) == [1, 2] and best(9) == [1, 2, 4, 5]


def test_an_index_that_opens_nothing_is_told_at_birth() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Bare(IndexPolicy):
        name = "bare"

    with pytest.raises(RecipeError, match="bare: the index opens nothing; set opens"):
        Bare()


def test_a_planted_frame_is_recalled() -> None:
    """A unit whose mean key is the question's own direction is found at its place."""
    fields = {"name": "rekv", "frames": 2, "window": 4}
    with open_session("random-ov", fields) as session:
        session.watch(film(20), fps=FPS)
        state: Any = session._live.state  # type: ignore[union-attr]
        asked, search = set[int](), state.index.search_ahead

        def planted(layer: int, queries: Tensor, *rest: Any) -> Any:
            asked.add(layer)
            state.index.key[layer, 3 + layer] = 100 * queries[0]
            return search(layer, queries, *rest)

        state.index.search_ahead = planted
        seen = {one.frames[0]: one for one in session.ask(QUESTION, 1).evidence}
        assert asked == {0, 1} and seen[3].recalled >= 0.5 and seen[4].recalled >= 0.5


def test_what_lies_in_files_is_brought_like_what_lies_in_memory() -> None:
    found, told = [], []
    for more in ({}, {"host_bytes": 0, "spill": "disk"}):
        with open_session("random-ov", {"name": "rekv", "frames": 6, "window": 4, **more}) as session:
            session.watch(film(25), fps=FPS)
            found.append(logits(session))
            told.append(session.counters())
    assert torch.equal(*found) and told[0]["host_bytes_in"] == told[1]["host_bytes_in"]
    frames = told[0]["host_bytes_in"] / (2 * GROUPS * 16 * 64 * 4)
    assert frames <= 2 * min(6, 25 - 4) and told[0]["host_gathers"] == told[0]["host_copies_in"]
    assert told[1]["host_disk_in"] == frames and told[1]["host_gathers"] == 0 < told[1]["host_copies_in"]


def test_the_budget_is_in_frames() -> None:
    with open_session("random-qwen", {"name": "rekv", "frames": 6, "window": 8}) as session:
        session.watch(film(20), fps=FPS)
        answer = session.ask(QUESTION, 1)
        frames = sum(one.recalled * (one.frames[1] - one.frames[0] + 1) for one in answer.evidence)
        assert frames == pytest.approx(6)
        assert session.counters()["window"] == 4
