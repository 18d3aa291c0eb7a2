"""Draft, then verify: exact bookkeeping, the target's output and distribution, and clear words about a wrong draft."""

import random
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mmaccel.core.decoding.draft import Prompt
from mmaccel.core.decoding.generate import Speculation
from mmaccel.core.errors import DraftError, RecipeError
from mmaccel.models import decode
from mmaccel.policies.draft import parallel, sequential
from mmaccel.policies.draft._draft_decoder import DraftedTokens
from mmaccel.policies.draft._draft_model import check_vocabulary
from mmaccel.policies.draft.sequential import Sequential, SequentialDraftState
from tests import sentence
from tests.core import test_generate as core
from tests.core.test_generate import limit
from tests.core.toy import (
    Rule,
    ToyModel,
    ToyRunner,
    Triples,
    bigram_rule,
    count_triples,
    decode_greedily,
    g_test,
    toy_prompt,
    toy_view,
)

from .test_parallel import V, pipeline, sampled


def run(rule: Rule, small: Rule, said: Prompt, length, window, vocab, theirs=0, **more: float) -> tuple:
    model = ToyModel(small, theirs or vocab)
    draft = Sequential(model=model, window=window, **more).open(toy_view(rule, vocab))
    ids, _, meter = core.run(rule, draft, limit(length), said)
    assert not meter.failures
    return ids, meter, model.runners[0], draft


def random_table(vocab: int, seed: int) -> Tensor:
    return torch.randint(0, 5, (vocab, vocab), generator=torch.Generator().manual_seed(seed)).float()


@given(st.integers(0, 9999), st.integers(1, 6), st.integers(4, 40), st.integers(0, 2), st.booleans())
def test_greedy_output_is_the_targets(seed: int, window: int, length: int, changes: int, known: bool) -> None:
    table = random_table(6, seed)
    small = table.clone()
    small[:changes] = random_table(6, seed + 1)[:changes]
    rule, said = bigram_rule(table), toy_prompt([4, 2, 5], max_new_tokens=(length - 3) * known)
    ids, meter, runner, _ = run(rule, bigram_rule(small), said, length, window, 6)
    assert ids == decode_greedily(rule, [4, 2, 5], limit(length))
    # The draft has run the committed ids, then its own last guesses but one: no token twice, none left out.
    before = 4 + sum(accepted + 1 for _, accepted in meter.rounds[:-1])
    if meter.rounds and meter.rounds[-1][0]:
        assert runner.tokens[:before] == ids[:before]
        assert len(runner.tokens) == before + meter.rounds[-1][0] - 1
    else:
        assert runner.tokens == ids[: len(runner.tokens)]
    if known:
        left = length - 4
        for proposed, accepted in meter.rounds:
            assert proposed == min(window, left - 1), "nothing is drafted beyond the limit"
            left -= accepted + 1


@pytest.mark.parametrize("window", [1, 3, 5])
@pytest.mark.parametrize("sampling", [False, True])
def test_a_draft_with_the_targets_weights_is_accepted_whole(window: int, sampling: bool) -> None:
    rule = bigram_rule(torch.randn(6, 6, generator=torch.Generator().manual_seed(2)))
    g = torch.Generator().manual_seed(0)
    warp = (lambda ids, logits: torch.softmax(logits / 1.2, -1)) if sampling else None
    said = toy_prompt([1], warp=warp, generator=g, max_new_tokens=61)
    _, meter, _, draft = run(rule, rule, said, 62, window, 6)
    assert all(accepted == proposed for proposed, accepted in meter.rounds)
    assert len(meter.rounds) == -(-60 // (window + 1))
    assert sum(proposed + 1 for proposed, _ in meter.rounds) == 60, "nothing is drafted beyond the limit"
    counted = draft.counters()
    # Each round feeds its committed tokens at once, then one drafted token a step.
    assert counted["drafted"] == counted["draft_steps"] == sum(proposed for proposed, _ in meter.rounds)


def test_the_draft_sees_all_of_the_prompt() -> None:
    rule, pixels = bigram_rule(random_table(5, 0)), torch.randn(2, 3)
    said = toy_prompt([0, 3], inputs={"pixel_values_videos": pixels, "fps": 2.0})
    _, _, runner, _ = run(rule, rule, said, 6, 2, 5)
    assert torch.equal(runner.inputs["pixel_values_videos"], pixels) and runner.inputs["fps"] == 2.0
    assert runner.inputs["input_ids"].tolist() == [[0, 3]]


def test_the_prompt_is_read_after_the_targets_first_token_is_out() -> None:
    rule = bigram_rule(torch.eye(5).roll(1, 1))
    drafting = ToyRunner(rule)
    draft, read = SequentialDraftState(drafting, torch.device("cpu"), Sequential(window=2), 5), []
    core.run(rule, draft, limit(9), emit=lambda new: read.append(len(drafting.tokens)))
    assert read[0] == 0 and read[1] > 2


def test_what_was_said_while_it_rested_is_run_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequential, "ROWS", 2)
    rule, said = bigram_rule(random_table(6, 3)), toy_prompt([4, 2, 5])
    target, drafting, meter = ToyRunner(rule), ToyRunner(rule), core.Meter()
    draft = SequentialDraftState(drafting, torch.device("cpu"), Sequential(window=3), 6)
    draft.begin(said)
    one = Speculation(target, draft, said, target.prefill(said.inputs), stop=limit(40), meter=meter)
    core.take(one, *[0] * 8, 3)
    assert meter.rounds[-1] == (3, 3) and drafting.steps == 3 + 3
    assert drafting.tokens == one.ids[0, :13].tolist()


def test_pieces_are_no_wider_than_captured_steps() -> None:
    assert max(decode.ROWS) >= sequential.ROWS


def test_penalties_see_the_drafted_tokens() -> None:
    """A warp that forbids what was said already: the draft's q and the target's p must be taken after the same tokens."""

    def warp(ids: Tensor, logits: Tensor) -> Tensor:
        return torch.softmax(logits.index_fill(0, ids[-4:], float("-inf")), -1)

    rule = bigram_rule(torch.zeros(6, 6))
    said = toy_prompt([0], warp=warp, generator=torch.Generator().manual_seed(0))
    ids, meter, _, _ = run(rule, rule, said, 60, 3, 6)
    assert all(len(set(ids[i : i + 5])) == 5 for i in range(len(ids) - 4))
    assert all(accepted == proposed for proposed, accepted in meter.rounds)


@pytest.mark.parametrize("theirs", [198, 200, 202])
@pytest.mark.parametrize("sampling", [False, True])
def test_a_draft_of_another_padding(theirs: int, sampling: bool) -> None:
    vocab = 200
    g = torch.Generator().manual_seed(0)
    table = 3 * torch.randn(vocab, vocab, generator=g)
    small = torch.randn(theirs, theirs, generator=g)
    small[:198, :198] = table[:198, :198]
    small[:, 200:] = 40.0  # padding tokens the draft would like best
    small -= 50.0  # and where it has no token at all, that one would be liked better than any other

    def known(tokens: list[int]) -> Tensor:
        return small[min(tokens[-1], theirs - 1)]

    warp = (lambda ids, logits: torch.softmax(logits, -1)) if sampling else None
    rule, said = bigram_rule(table), toy_prompt([3], warp=warp, generator=g)
    ids, meter, _, _ = run(rule, known, said, 80, 4, vocab, theirs)
    assert len(ids) == 80 and max(ids) < vocab
    if not sampling:
        assert ids == decode_greedily(rule, [3], limit(80))
    assert sum(accepted for _, accepted in meter.rounds) > 0.7 * sum(proposed for proposed, _ in meter.rounds)


@pytest.mark.always
@pytest.mark.parametrize("confidence", [0.0, 0.5])
def test_sampled_triples_have_the_targets_joint_distribution(confidence: float) -> None:
    def warp(ids: Tensor, logits: Tensor) -> Tensor:
        return torch.softmax(logits / 0.7, -1)

    vocab, chunk, g = 4, 200, torch.Generator().manual_seed(9)
    large, small = Triples(vocab, 5), Triples(vocab, 6)
    counts = torch.zeros(vocab, vocab, vocab, dtype=torch.long)
    for _ in range(10):
        said = toy_prompt([0], warp=warp, generator=g)
        ids, *_ = run(large, small, said, 1 + 3 * chunk, 2, vocab, confidence=confidence)
        counts += count_triples(torch.tensor(ids[1:]).view(-1, 3), vocab)
    assert g_test(counts, large.joint(lambda logits: torch.softmax(logits / 0.7, -1))) > 1e-4


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        *(("model", model, ("sequential", "model", "folder")) for model in (None, "", 3)),
        ("window", 0, ("window", "at least 1")),
        *(("confidence", wrong, ("confidence is ", "; give a probability")) for wrong in (-0.1, 1.5)),
        ("confidence", True, ("confidence is True; give a number",)),
    ],
)
def test_a_wrong_field_is_told_at_birth(field: str, value: object, told: tuple[str, ...]) -> None:
    with sentence(RecipeError, *told):
        Sequential(**{"model": "x", field: value})


def test_a_folder_is_loaded_once(tmp_path: Path) -> None:
    target = toy_view(bigram_rule(torch.eye(4)), 4)
    strategy = Sequential(model=str(tmp_path))
    for _ in range(3):
        strategy.open(target)
    assert target.adapter.loads == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        (151_936, 152_064, True),  # Qwen2.5-VL 3B and 7B
        (151_936, 151_936, True),
        (151_936, 128_256, False),
        (32_000, 32_064, True),
        (32_000, 32_768, False),
        (300_000, 301_024, False),
        (96, 97, False),
        (200, 202, True),
    ],
)
def test_the_vocabulary_rule(a: int, b: int, same: bool) -> None:
    for ours, theirs in ((a, b), (b, a)):
        with nullcontext() if same else pytest.raises(DraftError, match="tokenizer"):
            check_vocabulary(ours, theirs)


def test_a_closed_draft_says_so() -> None:
    draft = Sequential(model=ToyModel(bigram_rule(torch.eye(4)), 4)).open(
        toy_view(bigram_rule(torch.eye(4)), 4)
    )
    draft.begin(toy_prompt([0]))
    draft.close()
    draft.observe_committed(torch.tensor([1]), 0)
    with pytest.raises(DraftError, match="closed"):
        draft.propose()


@given(st.integers(0, 9999), st.integers(1, 4))
def test_what_nobody_judged_is_forgotten(seed: int, window: int) -> None:
    """A round whose proposal was never judged leaves the draft as it was before."""
    found = []
    for again in (False, True):
        draft = Sequential(model=ToyModel(bigram_rule(random_table(6, seed)), 6), window=window)
        state = draft.open(toy_view(bigram_rule(random_table(6, seed)), 6))
        state.begin(toy_prompt([0, 3]))
        state.observe_committed(torch.tensor([1]), 0)
        seen = list[Any]()
        for kept in (0, window, 1):
            proposal = state.propose()
            if again:
                assert torch.equal(state.propose().ids, proposal.ids)
            seen.append(proposal.ids.tolist())
            state.observe_committed(torch.cat([proposal.ids[:kept], torch.tensor([2])]), kept)
        found.append((seen, state._open().length()))
    assert found[0] == found[1]


@given(st.integers(0, 9999), st.floats(0.05, 1.0))
def test_a_window_ends_where_the_draft_is_not_sure(seed: int, confidence: float) -> None:
    table, small = random_table(6, seed), random_table(6, seed + 1)
    small[:3] = table[:3]
    said = toy_prompt([4, 2, 5])
    ids, meter, _, draft = run(bigram_rule(table), bigram_rule(small), said, 30, 4, 6, confidence=confidence)
    assert ids == decode_greedily(bigram_rule(table), [4, 2, 5], limit(30))
    sure, at = small.softmax(-1).amax(-1) >= confidence, 3
    for proposed, accepted in meter.rounds[:-1]:
        token, want = ids[at], 1
        token = int(small[token].argmax())
        while want < 4 and sure[token]:
            token, want = int(small[token].argmax()), want + 1
        assert proposed == want
        at += accepted + 1
    assert draft.counters()["drafted"] == sum(proposed for proposed, _ in meter.rounds)


@pytest.mark.parametrize("heat", [1.5, pytest.param(0.7, marks=pytest.mark.slow)])
def test_as_many_drawn_tokens_are_kept_as_by_drafting_in_turns(heat: float) -> None:
    """Random logits, so that the draft is often wrong: with its likeliest token instead, half as many would be kept."""
    large, small = Triples(V, 0), Triples(V, 1)
    length, kept = 4_000, []
    in_turns = SequentialDraftState(ToyRunner(small), torch.device("cpu"), Sequential(window=1), V)
    for state in (pipeline(large, small, V, window=1), in_turns):
        g = torch.Generator().manual_seed(5)
        said = toy_prompt([0], warp=lambda ids, logits: torch.softmax(logits / heat, -1), generator=g)
        _, _, meter = core.run(large, state, limit(1 + length), said)
        assert not meter.failures
        kept.append(sum(two for _, two in meter.rounds) / sum(one for one, _ in meter.rounds))
    assert kept[0] == pytest.approx(kept[1], abs=0.02) and 0.3 < kept[0] < 0.95


def test_sampled_triples_of_a_late_draft_have_the_targets_joint_distribution(monkeypatch) -> None:
    """Windows that come when the target has gone on by itself: refused, or agreed with by chance and judged from there."""
    dice, late = random.Random(2), []  # type: random.Random, list[bool]

    class Late(parallel.LocalDrafter):
        def collect_tokens(self, limit_s: float) -> DraftedTokens | None:
            late.append(dice.random() < 0.3)
            return None if late[-1] else super().collect_tokens(limit_s)

    monkeypatch.setattr(parallel, "LocalDrafter", Late)
    assert sampled("plain", 1_500) > 1e-4 and sum(late) > 300
