"""The pipelined draft in one process: Algorithm 1 step by step, and nothing of it changes what is said."""

import random
from collections.abc import Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mmaccel.core.decoding import generate
from mmaccel.core.decoding.draft import Proposal
from mmaccel.core.errors import DraftError, RecipeError
from mmaccel.policies.draft import _draft_model, parallel
from mmaccel.policies.draft._draft_decoder import DraftDecoder, DraftedTokens
from mmaccel.policies.draft._window_model import (
    ASSUMED,
    TOKENS_KNOWN,
    PipelineTimes,
    best_window,
    tokens_per_round,
)
from mmaccel.policies.draft.parallel import Parallel, ParallelDraftState
from tests import sentence
from tests.core.test_generate import limit, run
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

WORDS = ["<s>", "The", "video", "uses", "Parallel", "VLM", "for", "speedup", ".", "method", "with", "a", "b"]


def telling(*tales: str) -> Rule:
    """Each word is followed by the word that follows it in a tale."""
    table = torch.zeros(len(WORDS), len(WORDS))
    for tale in tales:
        for one, other in pairwise(tale.split()):
            table[WORDS.index(one), WORDS.index(other)] = 9
    return bigram_rule(table)


def pipeline(target: Rule, small: Rule, vocab: int, **choices: Any) -> ParallelDraftState:
    state = Parallel(model=ToyModel(small, vocab), process=False, **choices).open(toy_view(target, vocab))
    assert isinstance(state, ParallelDraftState)
    return state


def test_figure_8() -> None:
    """Window 3: seven tokens in three verifications, five drafted ones in a row, and the modes of the figure."""
    target = telling("<s> The video uses Parallel VLM for speedup .")
    small = telling("<s> The video uses Parallel VLM method with", "for a b")
    state = pipeline(target, small, len(WORDS), window=3)
    offered: list[str] = []

    def heard(real: Any) -> Any:
        def propose() -> Proposal:
            proposal = real()
            offered.append(" ".join(WORDS[i] for i in proposal.ids))
            return proposal

        return propose

    state.propose = heard(state.propose)  # type: ignore[method-assign]
    ids, runner, meter = run(target, state, limit(8), toy_prompt([0]))
    assert [WORDS[i] for i in ids[1:]] == WORDS[1:8]
    assert runner.steps == 3
    # Post-verify of the rest of the start-up window and the first of the next; of the rest of that; pre-verify of "a".
    assert offered == ["video uses", "VLM method", ""]
    assert meter.rounds == [(3, 3), (3, 1), (1, 0)]
    told = state.counters()
    assert told["streak_max"] == 5 and told["ready_at_start"] == 3
    assert told["post_verify"] == 2


@given(st.integers(0, 10_000), st.integers(3, 6), st.integers(3, 40), st.integers(1, 6), st.floats(0.0, 1.0))
def test_greedy_is_the_target_alone(seed: int, vocab: int, length: int, window: int, likeness: float) -> None:
    g = torch.Generator().manual_seed(seed)
    table = torch.randint(0, 6, (vocab, vocab), generator=g).float()
    other = torch.where(torch.rand(vocab, 1, generator=g) < likeness, table, table.roll(1, 1))
    target, stop = bigram_rule(table), limit(length, 0)
    said = toy_prompt([1], max_new_tokens=length - 1)
    state = pipeline(target, bigram_rule(other), vocab, window=window)
    ids, runner, meter = run(target, state, stop, said)
    assert ids == decode_greedily(target, [1], stop) and not meter.failures
    assert runner.tokens == ids[:-1]
    assert all(proposed <= window for proposed, _ in meter.rounds)


@pytest.mark.parametrize(("quiet", "told"), [(0.0, True), (60.0, False)])
def test_a_draft_that_falls_silent_is_told_of(quiet: float, told: bool, monkeypatch) -> None:
    """The target says the rest, and what is owed when the answer ends is a failure if it is owed for long."""
    monkeypatch.setattr(parallel, "QUIET_S", quiet)
    target = bigram_rule(torch.eye(5).roll(1, 1))
    state = pipeline(target, target, 5, window=4)
    collect, heard = state._engine.collect_tokens, [3]

    def silent(limit_s: float) -> DraftedTokens | None:
        heard[0] -= 1
        return collect(limit_s) if heard[0] >= 0 else None

    monkeypatch.setattr(state._engine, "collect_tokens", silent)
    warns = "had said nothing for" if told else None
    ids, _, meter = run(target, state, limit(34), toy_prompt([0], max_new_tokens=33), warns)
    assert ids == decode_greedily(target, [0], limit(34))
    counters = state.counters()
    assert counters["late"] == 1 and counters["alone"] > 10
    note = (
        f"{int(counters['alone'])} target steps without it, while it read the prompt, paused or said nothing"
    )
    assert state.report_notes() == [note]
    assert ["had said nothing for" in why for why in meter.failures] == [True] * told


def test_a_draft_of_more_tokens_than_the_target_has_never_says_them() -> None:
    target = bigram_rule(torch.eye(5).roll(1, 1))
    padded = torch.nn.functional.pad(torch.eye(5).roll(1, 1), (0, 3), value=50.0)
    state = pipeline(target, bigram_rule(padded), 5, window=3)
    _, _, meter = run(target, state, limit(20), toy_prompt([0]))
    assert all(proposed == kept for proposed, kept in meter.rounds)


def test_after_a_refusal_the_draft_goes_on_from_what_was_said() -> None:
    """Each token follows from all before it: a draft that kept a wrong one, or lost a right one, is never right again."""

    def target(tokens: Sequence[int]) -> Tensor:
        place = 1
        for token in tokens:
            place = (place * 31 + token + 7) % 10_007
        return torch.nn.functional.one_hot(torch.tensor(place % 7), 7).float()

    def small(tokens: Sequence[int]) -> Tensor:
        return target(tokens).roll(1) if len(tokens) % 9 == 0 else target(tokens)

    state = pipeline(target, small, 7, window=4)
    ids, _, meter = run(target, state, limit(100), toy_prompt([1], max_new_tokens=99))
    lies = sum(len(ids[:n]) % 9 == 0 for n in range(2, 100))
    assert ids == decode_greedily(target, [1], limit(100))
    assert sum(proposed > kept for proposed, kept in meter.rounds) == lies
    writer = state._engine._writer  # type: ignore[attr-defined]
    assert [1, *writer.line][: len(ids) - 9] == ids[: len(ids) - 9]
    assert writer._runner.tokens == [1, *writer.line][: len(writer._runner.tokens)]


def test_a_writer_goes_back_to_any_token() -> None:
    writer = DraftDecoder(ToyRunner(bigram_rule(torch.eye(7).roll(1, 1))), "cpu", 7)
    writer.read_prompt({"input_ids": torch.tensor([[3, 1]])}, None, False, None, 0)
    for length, fix, count, line in (
        (0, [], 4, [2, 3, 4, 5]),
        (2, [0, 0, 6], 2, [2, 3, 0, 0, 6, 0, 1]),
        (7, [], 1, [2, 3, 0, 0, 6, 0, 1, 2]),
        (3, [], 2, [2, 3, 0, 1, 2]),
        (0, [5], 1, [5, 6]),
        (0, [], 2, [2, 3]),
    ):
        written = writer.draft_tokens(length, fix, count)
        assert writer.line == line and written.ids == line[-count:]
        run = writer._runner.tokens  # type: ignore[attr-defined]
        assert run == [3, 1, *line][: len(run)] and len(run) == 2 + len(line) - 1


class Sluggish(parallel.LocalDrafter):
    """A draft in this process that is not always there in time."""

    def __init__(self, writer: DraftDecoder, dice: random.Random) -> None:
        self._writer, self._dice = writer, dice
        self._stream = None

    def collect_tokens(self, limit_s: float) -> DraftedTokens | None:
        return super().collect_tokens(limit_s) if self._dice.random() < 0.4 else None


@given(st.integers(0, 10_000), st.integers(1, 5))
def test_a_draft_that_is_late_changes_no_token(seed: int, window: int) -> None:
    g = torch.Generator().manual_seed(seed)
    table = torch.randint(0, 6, (5, 5), generator=g).float()
    other = torch.where(torch.rand(5, 1, generator=g) < 0.8, table, table.roll(1, 1))
    target, stop = bigram_rule(table), limit(40)
    engine = Sluggish(DraftDecoder(ToyRunner(bigram_rule(other)), "cpu", 5), random.Random(seed))
    choice = Parallel(model=ToyModel(bigram_rule(other), 5), window=window, process=False)
    draft = ParallelDraftState(engine, choice, [torch.device("cpu")], 5)
    ids, _, meter = run(target, draft, stop, toy_prompt([1], max_new_tokens=39))
    assert ids == decode_greedily(target, [1], stop) and not meter.failures


@pytest.mark.parametrize("window", [1, 3])
def test_a_window_that_comes_too_late_is_no_refusal(window: int) -> None:
    """A draft that is always right, and now and then late: nothing it said was refused."""
    rule = bigram_rule(torch.eye(7).roll(1, 1))
    engine = Sluggish(DraftDecoder(ToyRunner(rule), "cpu", 7), random.Random(0))
    choice = Parallel(model=ToyModel(rule, 7), window=window, process=False)
    state = ParallelDraftState(engine, choice, [torch.device("cpu")], 7)
    run(rule, state, limit(60), toy_prompt([0], max_new_tokens=59))
    told = state.counters()
    assert told["late"] > 3 and told["pre_verify"] + told["post_verify"] > 1 and told["alone"] > 3
    refused = state._pace.judged - state._pace.kept
    assert told["keep_rate"] > ASSUMED and refused == pytest.approx(TOKENS_KNOWN * (1 - ASSUMED))


def test_the_second_process_takes_a_device_that_the_target_leaves_free(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    for taken, place in (
        ("cpu", "cpu"),
        ("cuda:0", "cuda:1"),
        ("cuda:3", "cuda:0"),
        ("cuda:0 cuda:1", "cuda:2"),
        ("cuda:2 cuda:3 cuda:0", "cuda:1"),
        ("cuda:1 cuda:2 cuda:3 cuda:0", "cuda:1"),
    ):
        assert _draft_model.free_device([torch.device(name) for name in taken.split()]) == place


V = 3


def _nucleus(p: Tensor) -> Tensor:
    p = torch.where(p >= p.max() / 3, p, 0)
    return p / p.sum()


SHAPES = {
    "cold": lambda logits: torch.softmax(logits / 0.7, -1),
    "plain": lambda logits: torch.softmax(logits, -1),
    "hot": lambda logits: torch.softmax(logits / 1.3, -1),
    "nucleus": lambda logits: _nucleus(torch.softmax(logits, -1)),
}


def sampled(shape: str, triples: int = 2_500, window: int = 2) -> float:
    """p-value of the triples of pipelined generations, windows straddling them in every way and through every mode."""
    warp = SHAPES[shape]
    large, small, g = Triples(V, 0, sharp=0.8), Triples(V, 1), torch.Generator().manual_seed(4)
    # A draft that is right often enough for every mode to follow every other.
    small.one, small.two = large.one, large.two + 0.3 * small.two
    counts = torch.zeros(V, V, V, dtype=torch.long)
    chunk = 250
    for _ in range(triples // chunk):
        said = toy_prompt([0], warp=lambda ids, logits: warp(logits), generator=g)
        state = pipeline(large, small, V, window=window)
        ids, _, meter = run(large, state, limit(1 + 3 * chunk), said)
        assert not meter.failures
        modes = state.counters()
        assert min(modes["pre_verify"], modes["post_verify"]) > 20
        counts += count_triples(torch.tensor(ids[1:]).view(-1, 3), V)
    return g_test(counts, large.joint(warp))


@pytest.mark.parametrize(
    ("shape", "triples"),
    [("nucleus", 2_500), *(pytest.param(shape, 100_000, marks=pytest.mark.slow) for shape in SHAPES)],
)
def test_sampled_triples_have_the_targets_joint_distribution(shape: str, triples: int) -> None:
    assert sampled(shape, triples) > 1e-4


def test_the_sampled_test_sees_uniforms_shared_between_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tokens in a row are judged by one random number, as where a generator is seeded by the round."""
    held: dict[int, Tensor] = {}

    def shared(proposal: Proposal, logits: Tensor, ids: Tensor, warp: Any, generator: Any) -> Any:
        if ids.numel() <= 2:
            held.clear()
        tokens, q = proposal.ids, proposal.distributions(V)
        p = torch.stack([warp(torch.cat([ids, tokens[:i]]), row) for i, row in enumerate(logits)])
        for i, token in enumerate(tokens.tolist()):
            place = (ids.numel() + i) // 2
            if place not in held:
                held[place] = torch.rand((), generator=generator)
            if held[place] * q[i, token] >= p[i, token]:
                last = torch.multinomial((p[i] - q[i]).clamp(min=0), 1, generator=generator)
                return torch.cat([tokens[:i], last]), i
        if len(p) == len(tokens):
            return tokens, len(tokens)
        last = torch.multinomial(p[-1], 1, generator=generator)
        return torch.cat([tokens, last]), len(tokens)

    monkeypatch.setattr(generate, "accept", shared)
    assert sampled("plain") < 1e-4


def test_tokens_per_round_by_hand() -> None:
    assert tokens_per_round(1.0, 5) == 5 and tokens_per_round(0.0, 5) == pytest.approx(1.0)
    assert tokens_per_round(0.7, 1) == pytest.approx(1.0)
    # Window 2, keep 1/2: post-verify commits 1 or 2 tokens, 1.5 on average; shares of rounds 3/5 and 2/5.
    assert tokens_per_round(0.5, 2) == pytest.approx(0.6 * 1 + 0.4 * 1.5)


def test_rounding_goes_the_way_that_gains_more() -> None:
    assert best_window(5.0, 1.0, 0.8, 16)[0] == 5
    assert best_window(5.9, 1.0, 0.5, 16)[0] == 5, "short windows are lost sooner: waiting does not pay"
    assert best_window(1.7, 1.0, 0.98, 16)[0] == 2, "self-speculation: rounding up"
    assert best_window(1.0, 1.0, 0.9, 16) == (1, pytest.approx(1.0))
    assert best_window(0.5, 1.0, 0.9, 16)[1] < 1
    assert best_window(40.0, 1.0, 0.99, 16)[0] == 16


def test_a_pace_follows_what_it_is_told() -> None:
    pace = PipelineTimes()
    assert not pace.is_measured and pace.keep == pytest.approx(0.8)
    for _ in range(60):
        pace.record_target_step(2.0)
        pace.record_draft_steps(1.5, 3)
        pace.record_verification(1, True)
    assert pace.is_measured and pace.step_s == pytest.approx(2.0) and pace.draft_s == pytest.approx(0.5)
    assert pace.keep == pytest.approx(0.5, abs=0.02)


def test_a_pace_forgets_steps_that_were_compiled_and_captured() -> None:
    """Two slow steps, then even ones; and later a slow one again, after which the window would be of another size."""
    pace = PipelineTimes()
    for seconds in (3.0, 0.06, 0.02, 0.02, 0.02):
        pace.record_target_step(seconds)
        pace.record_draft_steps(seconds, 1)
    assert pace.step_s == pytest.approx(0.02) and pace.draft_s == pytest.approx(0.02)
    pace.record_target_step(3.0)
    assert pace.step_s == pytest.approx(0.024)
    for _ in range(20):
        pace.record_target_step(0.04)
    assert pace.step_s == pytest.approx(0.04, rel=0.02), "a step that takes longer from now on is believed"


def test_the_window_follows_the_measured_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    target = bigram_rule(torch.eye(5).roll(1, 1))
    state = pipeline(target, target, 5, most=9)
    monkeypatch.setattr(state._pace, "record_target_step", lambda s: setattr(state._pace, "step_s", 7.2e-3))
    monkeypatch.setattr(state._pace, "record_draft_steps", lambda s, n: setattr(state._pace, "draft_s", 1e-3))
    _, _, meter = run(target, state, limit(80), toy_prompt([0]))
    assert state.counters()["window"] in (7, 8) and meter.rounds[-2][0] in (7, 8)


def test_a_draft_that_cannot_gain_rests_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    target = bigram_rule(torch.eye(5).roll(1, 1))
    state = pipeline(target, bigram_rule(torch.eye(5)), 5)
    monkeypatch.setattr(state._pace, "record_draft_steps", lambda s, n: setattr(state._pace, "draft_s", 1.0))
    waited: list[Any] = []
    stream = SimpleNamespace(synchronize=lambda: waited.append(1))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda at: stream)
    state._waited = [torch.device("cuda")]
    ids, _, _ = run(target, state, limit(60), toy_prompt([0]))
    told = state.counters()
    # The host waits for a step only while a window is being drafted.
    assert 0 < len(waited) < 20 < told["alone"]
    assert ids == decode_greedily(target, [0], limit(60))
    assert told["pauses"] >= 1 and told["expected_gain"] <= 1 and told["drafted"] < 40
    why = state.report_notes()[-1]
    assert why.startswith(f"paused {told['pauses']:.0f} time")
    assert f"is worth {told['expected_gain']:.2f} x" in why


@pytest.mark.parametrize(
    ("choice", "word"),
    [
        ({"model": None}, "model"),
        ({"model": "x", "window": 0}, "window"),
        ({"model": "x", "most": 0}, "most"),
        ({"model": "x", "threads": 0}, "threads"),
        ({"model": "x", "timeout_s": 0.0}, "timeout_s"),
        ({"model": ToyModel(bigram_rule(torch.eye(2)), 2)}, "process"),
        ({"model": "x", "prune": "fastv"}, "fastv"),
    ],
)
def test_wrong_choices_are_told_in_one_sentence(choice: dict[str, Any], word: str) -> None:
    with sentence(RecipeError, word):
        Parallel(**choice)


def test_another_vocabulary_is_refused_when_attached() -> None:
    target = bigram_rule(torch.eye(5))
    with pytest.raises(DraftError, match="embeddings"):
        draft = ToyModel(bigram_rule(torch.eye(9)), 9)
        Parallel(model=draft, process=False).check_target(toy_view(target, 5))
