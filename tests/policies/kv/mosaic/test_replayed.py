"""What is replayed does what it did when it was captured, to what its inputs and its fixed places hold now."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from mmaccel.core.decoding import replay
from tests.core.test_replay import Repeated
from tests.policies.kv.mosaic.driven import Driven
from tests.products import product


class Replayed(Repeated):
    """Counts those that are made."""

    made = 0

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        Replayed.made += 1


@pytest.mark.parametrize(
    ("positions", "reps"),
    product(["original", "compact"], [{"reps": 0}, {}, {"reps": 5}, {"reps": None, "index": "frames"}]),
    ids=str,
)
def test_a_replayed_question_sees_what_one_launched_by_one_sees(
    positions: str, reps: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between questions the stream grows, clusters are split, and what the index holds is moved now and then."""
    monkeypatch.setattr(replay, "_Replay", Replayed)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    Replayed.made = 0
    fields: dict[str, Any] = {"positions": positions, "cache": 6, **reps}
    both = [Driven(**fields), Driven(**fields)]
    both[1].state._keeps = both[1].state.replays.works = True
    for step in range(16):
        for driven in both:
            driven.watch(3 if step else 14)
            driven.told = torch.stack([driven.ask(kind) for kind in (step % 5, 4, step % 5)])  # type: ignore[attr-defined]
        # A replay has places for pseudo tokens that are not there, and hides them.
        torch.testing.assert_close(both[0].told, both[1].told, atol=1e-9, rtol=0)  # type: ignore[attr-defined]
        plain, replayed = (driven.evidence for driven in both)
        assert plain.keys() == replayed.keys()
        for number, seen in plain.items():
            # Shares are sums over more columns where some are hidden: in float32 they may round otherwise.
            told = replayed[number]
            assert (seen.share, seen.retrieved) == (told.share, told.retrieved)
            assert seen.score == pytest.approx(told.score, rel=1e-5, abs=1e-7)
    # Captures have been given up when something was moved, and made anew; not at every question, of which there are 48.
    # There are three a layer.
    assert 2 * 9 <= Replayed.made <= 6 * 9


def test_kinds_of_questions_asked_in_turns_keep_their_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one stream, of other budgets, and with other local units."""
    monkeypatch.setattr(replay, "_Replay", Replayed)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    driven = Driven(buffer=0)
    state = driven.state
    state._keeps = state.replays.works = True
    driven.watch(60)
    kinds: list[dict[str, Any]] = [{}, {"frames": 6}, {"local": 1}]
    policies, made = [replace(driven.policy, **kind) for kind in kinds], []
    for number in range(6):
        Replayed.made = 0
        for policy in policies:
            state.set_query_fields(policy)
            driven.ask(number % 3)
        made.append(Replayed.made)
    # The first question of a kind runs as it is written, the second captures.
    assert made[0] == 0 < made[1] and made[3:] == [0, 0, 0]
