"""Tokens that a pipelined draft draws: kept as often as by drafting in turns, and from the target's distribution."""

import random

import pytest
import torch

from mmaccel.policies.draft import parallel
from mmaccel.policies.draft._draft_decoder import DraftedTokens
from mmaccel.policies.draft.sequential import Drafter, Sequential
from tests.core.test_generate import limit, run
from tests.core.toy import ToyRunner, Triples, toy_prompt

from .test_parallel import V, pipeline, sampled


@pytest.mark.parametrize("heat", [1.5, pytest.param(0.7, marks=pytest.mark.slow)])
def test_as_many_drawn_tokens_are_kept_as_by_drafting_in_turns(heat: float) -> None:
    """Random logits, so that the draft is often wrong: with its likeliest token in the place of a drawn one, half as many
    would be kept."""
    large, small = Triples(V, 0), Triples(V, 1)
    length, kept = 4_000, []
    in_turns = Drafter(ToyRunner(small), torch.device("cpu"), Sequential(window=1), V)
    for state in (pipeline(large, small, V, window=1), in_turns):
        said = toy_prompt(
            [0],
            warp=lambda ids, logits: torch.softmax(logits / heat, -1),
            generator=torch.Generator().manual_seed(5),
        )
        _, _, meter = run(large, state, limit(1 + length), said)
        assert not meter.failures
        kept.append(sum(two for _, two in meter.rounds) / sum(one for one, _ in meter.rounds))
    assert kept[0] == pytest.approx(kept[1], abs=0.02) and 0.3 < kept[0] < 0.95


def test_sampled_triples_of_a_late_draft_have_the_targets_joint_distribution(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Windows that come when the target has gone on by itself: refused, or agreed with by chance and judged from there."""
    dice, late = random.Random(2), []  # type: random.Random, list[bool]

    class Late(parallel.LocalDrafter):
        def collect_tokens(self, limit_s: float) -> DraftedTokens | None:
            late.append(dice.random() < 0.3)
            return None if late[-1] else super().collect_tokens(limit_s)

    monkeypatch.setattr(parallel, "LocalDrafter", Late)
    assert sampled("plain", 1_500) > 1e-4 and sum(late) > 300
