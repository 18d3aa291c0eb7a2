"""Tokens that a pipelined draft draws: kept as often as by drafting in turns, and sent with what they were drawn from."""

import random

import pytest
import torch

from mmaccel.core.decoding.worker import READY, Worker
from mmaccel.core.errors import MmaccelWarning
from mmaccel.policies.draft import _remote_drafter, parallel
from mmaccel.policies.draft._draft_decoder import DraftDecoder, DraftedTokens, TokenDistribution
from mmaccel.policies.draft.sequential import Drafter, Sequential
from tests.core.test_generate import limit, run
from tests.core.toy import ToyRunner, Triples, bigram, toy_prompt, view
from tests.policies.draft.toy_service import VOCAB, table

from .test_parallel import V, pipeline, sampled
from .test_remote import SERVICE, TARGET, Toy, slowly


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


class Softmax:
    """Sampling that another process can have."""

    def __call__(self, ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return torch.softmax(logits, -1)


def test_what_a_token_was_drawn_from_crosses_the_wire() -> None:
    """The process draws what a writer here draws with its seed, from the same distributions."""
    here = DraftDecoder(ToyRunner(bigram(table(1))), "cpu", VOCAB)
    here.read_prompt({"input_ids": torch.tensor([[1, 0]])}, None, False, Softmax(), 9)
    worker = Worker(SERVICE, {"model": "1"}, silence_s=20.0)
    try:
        worker.wait(READY, 20.0)
        engine = _remote_drafter.RemoteDrafter(worker, VOCAB)
        engine.begin({"input_ids": torch.tensor([[1, 0]])}, Softmax(), False, False, 9)
        for length, fix in ((0, []), (3, [5])):
            engine.request_tokens(length, fix, 4)
            there, mine = engine.collect_tokens(20.0), here.draft_tokens(length, fix, 4)
            assert there is not None and there.ids == mine.ids and len(there.odds) == 4
            for one, other in zip(there.odds, mine.odds, strict=True):
                assert torch.equal(one.ids, other.ids) and torch.equal(one.weights, other.weights)
        q = TokenDistribution.dense(mine.odds, VOCAB, torch.device("cpu"))
        rows = [table(1)[token] for token in here.line[3:7]]
        assert torch.allclose(q, torch.softmax(torch.stack(rows), -1), atol=1e-6)
        engine.close()
    finally:
        worker.close()


def test_a_distribution_without_its_token_is_nonsense() -> None:
    choice, target = Toy(model="1:odds:2", window=3, timeout_s=20.0), view(TARGET, VOCAB)
    with pytest.warns(MmaccelWarning, match="malformed"):
        _, _, meter = slowly(target, choice, warp=Softmax())
    assert len(meter.failures) == 1
    target.release()
