"""The decoding loop: with any draft, also a failing one, the output is the target's."""

import random
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mmaccel.core.decoding import generate
from mmaccel.core.decoding.draft import DraftState, Prompt, Proposal, accept, run_draft
from mmaccel.core.decoding.generate import GuardedDraft, Speculation, decode_speculatively
from mmaccel.core.errors import MmaccelWarning
from tests.core.toy import (
    Meter,
    Rule,
    Scripted,
    ToyRunner,
    Triples,
    bigram_rule,
    count_triples,
    decode_greedily,
    g_test,
    toy_prompt,
)

START = [1, 0]


def run(
    rule: Rule,
    draft: DraftState,
    stop: Callable[[Tensor], bool],
    said: Prompt | None = None,
    warns: str | None = None,
    **choices: Any,
) -> tuple[list[int], ToyRunner, Meter]:
    """All ids, the target's runner and the meter of one generation, which warns once of `warns`, or of nothing."""
    said, target, meter = said or toy_prompt(START), ToyRunner(rule), Meter()
    draft.begin(said)
    first = target.prefill(said.inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("error", MmaccelWarning)
        with pytest.warns(MmaccelWarning, match=warns) if warns else nullcontext() as told:
            ids = decode_speculatively(target, draft, said, first, stop=stop, meter=meter, **choices)
    assert told is None or len(told) == 1
    assert ids.shape[0] == 1 and ids.dtype == torch.long
    return ids[0].tolist(), target, meter


def limit(length: int, *ends: int) -> Callable[[Tensor], bool]:
    return lambda ids: ids.shape[1] >= length or int(ids[0, -1]) in ends


def wild(rule: Rule, vocab: int, seed: int) -> tuple[Scripted, list[list[int]]]:
    """A draft, now right, now wrong, now out of its mind, with changing windows and tails; and the list of its offers."""
    dice = random.Random(seed)

    def guess(tokens: list[int], count: int) -> list[int]:
        tokens = list(tokens)
        for _ in range(count):
            right = dice.random() < 0.8
            tokens.append(int(rule(tokens).argmax()) if right else dice.randrange(vocab))
        return tokens[len(tokens) - count :]

    offers: list[list[int]] = []

    def propose(tokens: list[int]) -> Proposal:
        last = guess(tokens, dice.randrange(6))
        if last and dice.random() < 0.1:
            last[-1] = vocab + dice.randrange(3)
        offers.append(last)
        return Proposal(torch.tensor(last, dtype=torch.long))

    def tail(tokens: list[int]) -> int | None:
        if dice.random() < 0.5:
            return None
        offers[-1] = offers[-1] + guess(tokens + [min(t, vocab - 1) for t in offers[-1]], 1)
        return offers[-1][-1]

    return Scripted(propose, tail), offers


@given(st.integers(0, 10_000), st.integers(4, 6), st.integers(3, 30), st.sets(st.integers(0, 5), max_size=1))
def test_greedy_is_the_target_alone_whatever_the_draft(
    seed: int, vocab: int, length: int, ends: set[int]
) -> None:
    g = torch.Generator().manual_seed(seed)
    rule = bigram_rule(torch.randint(0, 6, (vocab, vocab), generator=g).float())
    (draft, offers), stop, asked, shown = wild(rule, vocab, seed), limit(length, *ends), [], []

    def asking(ids: Tensor) -> bool:
        asked.append(ids[0].tolist())
        return stop(ids)

    ids, target, meter = run(rule, draft, asking, emit=lambda new: shown.extend(new.tolist()))
    assert ids == decode_greedily(rule, START, stop)
    assert asked == [ids[:n] for n in range(len(START) + 1, len(ids) + 1)], (
        "stop is asked once for each token"
    )
    assert shown == ids[len(START) :]
    assert target.tokens == ids[:-1], "the target has run all ids but the last"
    assert draft.closed == 1 and not meter.failures
    assert len(meter.rounds) == target.steps
    assert [proposed for proposed, _ in meter.rounds] == [len(offer) for offer in offers]
    # All rounds but the last, in which the sequence stopped, were told: `kept` is the longest agreeing beginning.
    assert len(draft.fates) == len(offers) and draft.fates[:1] in ([], [(shown[:1], 0)])
    for (committed, kept), offer, (_, accepted) in zip(draft.fates[1:], offers, meter.rounds, strict=False):
        agreed = 0
        while agreed < min(len(offer), len(committed)) and offer[agreed] == committed[agreed]:
            agreed += 1
        assert kept == accepted == agreed
    assert draft.tokens == ids[: len(draft.tokens)]


def counting(tokens: list[int]) -> list[int]:
    return [(tokens[-1] + 1 + i) % 5 for i in range(4)]


def test_a_stop_at_the_first_token_asks_the_draft_nothing() -> None:
    draft = Scripted(lambda tokens: pytest.fail("asked"))
    ids, target, meter = run(bigram_rule(torch.eye(5)), draft, limit(1))
    assert ids == [1, 0, 0] and target.steps == 0 and not meter.rounds and draft.closed == 1


def take(one: Speculation, *lengths: int) -> list[bool]:
    """Rounds with drafts of these lengths; whether, after each, the draft has much to read before it drafts again."""
    late = []
    for most in lengths:
        offered = run_draft(one.rows_to_verify(most))
        one.verify_logits(None if offered is None else one.target.step(*offered)[0])
        late.append(one.needs_draft_prefill)
    return late


def test_a_draft_that_rests_hears_what_was_said_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """When it drafts again; and at the end, for a later turn."""
    monkeypatch.setattr(generate, "LATE", 1)
    said, target, meter = toy_prompt(START), ToyRunner(bigram_rule(torch.eye(5).roll(1, 1))), Meter()
    draft = Scripted(lambda tokens: Proposal(torch.tensor(counting(tokens)[:2])))
    draft.begin(said)
    given = target, GuardedDraft(meter, draft, lasts=True), said, target.prefill(said.inputs)
    one = Speculation(*given, stop=limit(14), meter=meter)
    assert take(one, 0, 0, 2, 0, 0, 2, 0, 0) == [False, True, False, False, True, False, False, False]
    assert one.ended and draft.tokens == one.ids[0].tolist()
    assert [(len(new), kept) for new, kept in draft.fates] == [(2, 0), (3, 2), (2, 0), (3, 2), (2, 0)]


def test_a_right_tail_saves_the_verification_of_a_window() -> None:
    """What a pipelined draft does: propose nothing at first, and from then on verify the window's rest beside its tail."""
    rule = bigram_rule(torch.eye(5).roll(1, 1))
    sizes = iter([0, 3, 3, 3, 3])
    now: list[int] = []

    def propose(tokens: list[int]) -> Proposal:
        now[:] = counting(tokens)[: next(sizes)]
        return Proposal(torch.tensor(now, dtype=torch.long))

    draft = Scripted(propose, lambda tokens: ([*tokens, *now][-1] + 1) % 5)
    ids, _, meter = run(rule, draft, limit(15))
    assert ids == decode_greedily(rule, START, limit(15))
    assert meter.rounds == [(1, 1), (4, 4), (4, 4), (4, 4)]


class Dying(Exception):
    pass


def dying(method: str, after: int, error: Exception) -> Scripted:
    """A good draft of which one method raises at its call number `after`."""
    calls = iter(range(10_000))

    def perhaps(name: str) -> None:
        if name == method and next(calls) >= after:
            raise error

    class Mortal(Scripted):
        def observe_committed(self, committed: Tensor, kept: int) -> None:
            perhaps("observe")
            super().observe_committed(committed, kept)

        def close(self) -> None:
            super().close()
            perhaps("close")

    def propose(tokens: list[int]) -> Proposal:
        perhaps("propose")
        return Proposal(torch.tensor(counting(tokens)))

    def tail(tokens: list[int]) -> int | None:
        perhaps("tail")
        return None

    return Mortal(propose, tail)


@pytest.mark.parametrize("method", ["propose", "tail", "observe"])
@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_draft_that_dies_loses_no_token(method: str, after: int) -> None:
    table = torch.eye(5).roll(1, 1)
    table[3] = torch.tensor([0, 0, 1.0, 0, 0])  # now and then the draft is wrong
    rule, draft = bigram_rule(table), dying(method, after, Dying("out of cheese"))
    ids, target, meter = run(rule, draft, limit(30), warns="out of cheese")
    assert ids == decode_greedily(rule, START, limit(30)) and meter.failures == ["Dying: out of cheese"]
    assert draft.closed == 1 and meter.rounds[-1] == (0, 0) and target.tokens == ids[:-1]


def test_a_draft_that_cannot_close_loses_no_token() -> None:
    rule = bigram_rule(torch.eye(5).roll(1, 1))
    ids, _, meter = run(rule, dying("close", 0, Dying("cannot")), limit(12), warns="cannot")
    assert ids == decode_greedily(rule, START, limit(12)) and meter.failures == ["Dying: cannot"]


WRONG = {
    "tree": (Proposal(torch.tensor([2, 3]), parents=torch.tensor([1, -1])), None, "DraftError"),
    "floats": (Proposal(torch.tensor([2.0, 3.0])), None, "DraftError"),
    "uneven": (Proposal(torch.tensor([2, 3]), q=torch.ones(2, 5)), None, "DraftError"),
    "short": (Proposal(torch.tensor([2, 3]), q=torch.ones(1, 5)), None, "DraftError"),
    "a tail of another vocabulary": (
        Proposal(torch.tensor([2, 3]), q=torch.full((2, 5), 0.2)),
        Proposal(torch.tensor([4]), q=torch.full((1, 6), 1 / 6)),
        "a q over 6 tokens and the proposal one over 5",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_draft_that_proposes_nonsense_is_dropped(what: str) -> None:
    proposal, tail, told = WRONG[what]
    rule = bigram_rule(5 * torch.eye(5).roll(1, 1))
    draft = Scripted(lambda tokens: proposal, lambda tokens: tail)
    said = toy_prompt(START, warp=lambda ids, logits: (logits == logits.max()).float())
    ids, target, meter = run(rule, draft, limit(12), said, warns=told)
    assert ids == decode_greedily(rule, START, limit(12))
    assert len(meter.failures) == 1 and draft.closed == 1 and target.tokens == ids[:-1]


def test_the_first_token_is_shown_before_its_draft_hears_of_it() -> None:
    """A draft in the target's process may read its prompt only then; later tokens are told first to a draft."""
    said: list[tuple[str, int]] = []
    shown = 0

    class Heard(Scripted):
        def observe_committed(self, committed: Tensor, kept: int) -> None:
            said.append(("heard", len(committed)))
            super().observe_committed(committed, kept)

    def emit(new: Tensor) -> None:
        nonlocal shown
        shown += len(new)
        said.append(("shown", len(new)))

    draft = Heard(lambda tokens: Proposal(torch.tensor(counting(tokens))))
    run(bigram_rule(torch.eye(5).roll(1, 1)), draft, limit(12), emit=emit)
    assert said[:2] == [("shown", 1), ("heard", 1)] and shown == 12 - len(START)
    assert [who for who, _ in said[2:4]] == ["heard", "shown"]


@pytest.mark.parametrize("culprit", ["target", "stop", "emit"])
def test_the_draft_is_closed_when_something_else_fails(culprit: str) -> None:
    def fail(*_: object) -> bool:
        raise Dying(culprit)

    draft = Scripted(lambda tokens: Proposal(torch.tensor(counting(tokens))))
    rule = bigram_rule(torch.eye(5).roll(1, 1))
    target, said = ToyRunner(rule), toy_prompt(START)
    first = target.prefill(said.inputs)
    if culprit == "target":
        target.rule = fail  # type: ignore[assignment]
    stop = fail if culprit == "stop" else limit(9)
    with pytest.raises(Dying, match=culprit):
        decode_speculatively(
            target, draft, said, first, stop=stop, emit=fail if culprit == "emit" else None, meter=Meter()
        )
    assert draft.closed == 1


V = 4
SAMPLED = 1_200
WINDOW = 2


def warp(ids: Tensor, logits: Tensor) -> Tensor:
    return torch.softmax(logits / 0.8, -1)


def drawn(ids: Tensor, logits: Tensor, g: torch.Generator) -> tuple[int, Tensor]:
    q = warp(ids, logits)
    return int(torch.multinomial(q, 1, generator=g)), q


def sampling_draft(small: Triples, kind: str, g: torch.Generator) -> Scripted:
    """Draws from `small`; "point" tells no q; "tail" adds a guess behind the window, "drawn tail" one with its q."""
    last: list[int] = []

    def write(tokens: list[int], count: int) -> tuple[list[int], list[Tensor]]:
        tokens, rows = list(tokens), []
        for _ in range(count):
            token, q = drawn(torch.empty(0), small(tokens), g)
            tokens.append(token)
            rows.append(q)
        return tokens[len(tokens) - count :], rows

    def propose(tokens: list[int]) -> Proposal:
        last[:], rows = write(tokens, WINDOW)
        return Proposal(torch.tensor(last), q=None if kind == "point" else torch.stack(rows))

    def tail(tokens: list[int]) -> int | Proposal | None:
        if not kind.endswith("tail"):
            return None
        (token,), rows = write([*tokens, *last], 1)
        return token if kind == "tail" else Proposal(torch.tensor([token]), q=torch.stack(rows))

    return Scripted(propose, tail)


def sampled(kind: str) -> float:
    """p-value of the triples of a sampled generation; the windows straddle the triples in every way."""
    large, small, g = Triples(V, 0), Triples(V, 1), torch.Generator().manual_seed(4)
    counts = torch.zeros(V, V, V, dtype=torch.long)
    chunk = 400
    for _ in range(SAMPLED // chunk):
        said = toy_prompt([0], warp=warp, generator=g)
        ids, _, _ = run(large, sampling_draft(small, kind, g), limit(1 + 3 * chunk), said)
        counts += count_triples(torch.tensor(ids[1:]).view(-1, 3), V)
    return g_test(counts, large.joint(lambda logits: torch.softmax(logits / 0.8, -1)))


@pytest.mark.always
@pytest.mark.parametrize("kind", ["drawn", "point", "tail", "drawn tail"])
def test_sampled_triples_have_the_targets_joint_distribution(kind: str) -> None:
    assert sampled(kind) > 1e-4


def test_the_sampled_test_sees_a_loop_that_keeps_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    def lenient(proposal: Proposal, logits: Tensor, *rest: Any) -> tuple[Tensor, int]:
        committed, kept = accept(proposal, logits, *rest)
        if proposal.ids.numel() and kept == 0:
            return torch.cat([proposal.ids[:1], accept(Proposal.empty(), logits[1:2], *rest)[0]]), 1
        return committed, kept

    monkeypatch.setattr(generate, "accept", lenient)
    assert sampled("drawn") < 1e-4
