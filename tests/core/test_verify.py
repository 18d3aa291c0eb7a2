"""The accept rule: what is committed does not depend on the proposal, greedy or in distribution."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mmaccel.core.decoding.draft import Proposal, accept, resize_vocab, sample_index, verify_chain
from mmaccel.core.errors import DraftError
from tests import sentence
from tests.core.toy import count_triples, g_test
from tests.spies import product

V = 4
RUNS = 200_000
SURE = 1e-4


def heat(temperature: float) -> Callable[[Tensor], Tensor]:
    return lambda logits: torch.softmax(logits / temperature, -1)


def nucleus(share: float) -> Callable[[Tensor], Tensor]:
    """Keep the likeliest tokens up to `share` of the mass: distributions with zeros."""

    def shape(logits: Tensor) -> Tensor:
        p = torch.softmax(logits, -1)
        order = p.argsort(-1, descending=True)
        ranked = p.gather(-1, order)
        ranked = torch.where(ranked.cumsum(-1) - ranked < share, ranked, 0)
        kept = torch.zeros_like(p).scatter(-1, order, ranked)
        return kept / kept.sum(-1, keepdim=True)

    return shape


class Pair:
    """Target and draft on V tokens: each depends on the two before it, in tables [V + 1, V + 1, V]; V is "none yet"."""

    def __init__(self, shape: Callable[[Tensor], Tensor], seed: int = 0) -> None:
        g = torch.Generator().manual_seed(seed)
        self.p = shape(1.5 * torch.randn(V + 1, V + 1, V, generator=g))
        self.q = shape(1.5 * torch.randn(V + 1, V + 1, V, generator=g))

    def joint(self) -> Tensor:
        none = V
        p = self.p.double()
        p = p / p.sum(-1, keepdim=True)
        return p[none, none, :, None, None] * p[none, :V, :, None] * p[:V, :V, :]


Judge = Callable[[Tensor, Tensor, "Tensor | None", Tensor], tuple[Tensor, Tensor]]


def first_three(
    pair: Pair, kind: str, verdict: Judge = verify_chain, reuse: bool = False, window: int = 2
) -> Tensor:
    """[RUNS, 3]: the first three tokens of many runs at once, decoded in rounds of a drafted window each.

    kind: the draft is "drawn" from q, "greedy" (a point mass), "foreign" (drawn, but told as a point mass) or
    "liar" (greedy, but told as drawn from q). `reuse` judges with the draft's own random numbers.
    """
    g = torch.Generator().manual_seed(7)
    every = torch.arange(RUNS)
    tokens = torch.full((RUNS, 3 + window + 1 + 2), V)  # two columns of "no token yet" in front
    end = torch.full((RUNS,), 2)
    for _ in range(3):
        trail = [tokens[every, end - 2], tokens[every, end - 1]]
        ids, qs, us = [], [], []
        for _ in range(window):
            q = pair.q[trail[-2], trail[-1]]
            u = torch.rand(RUNS, generator=g)
            drawn = (q.cumsum(-1) / q.sum(-1, keepdim=True) <= u[:, None]).sum(-1).clamp(max=V - 1)
            ids.append(drawn if kind in ("drawn", "foreign") else q.argmax(-1))
            qs.append(q)
            us.append(u)
            trail.append(ids[-1])
        p = torch.stack([pair.p[trail[i], trail[i + 1]] for i in range(window + 1)], 1)
        u = torch.stack(us, 1) if reuse else torch.rand(RUNS, window, generator=g)
        drafted = torch.stack(ids, 1)
        kept, rest = verdict(drafted, p, torch.stack(qs, 1) if kind in ("drawn", "liar") else None, u)
        last = torch.multinomial(rest, 1, generator=g)
        new = torch.cat([drafted, last], 1).scatter(1, kept[:, None], last)
        at = end[:, None] + torch.arange(window + 1)
        fits = (torch.arange(window + 1) <= kept[:, None]) & (at < tokens.shape[1])
        tokens[every[:, None].expand_as(at)[fits], at[fits]] = new[fits]
        end = torch.minimum(end + kept + 1, torch.tensor(5))
    return tokens[:, 2:5]


SHAPES = {"hot": heat(1.3), "cold": heat(0.7), "plain": heat(1.0), "nucleus": nucleus(0.8)}


@pytest.mark.parametrize(("shape", "kind"), product(SHAPES, ["drawn", "greedy", "foreign"]))
def test_three_tokens_have_the_targets_joint_distribution(shape: str, kind: str) -> None:
    pair = Pair(SHAPES[shape])
    assert g_test(count_triples(first_three(pair, kind), V), pair.joint()) > SURE


def always(ids: Tensor, p: Tensor, q: Tensor | None, u: Tensor) -> tuple[Tensor, Tensor]:
    return verify_chain(ids, p, q, torch.zeros_like(u) - 1)


def careless_residual(ids: Tensor, p: Tensor, q: Tensor | None, u: Tensor) -> tuple[Tensor, Tensor]:
    kept, _ = verify_chain(ids, p, q, u)
    return kept, p.gather(1, kept[:, None, None].expand(-1, 1, V))[:, 0]


def upside_down(ids: Tensor, p: Tensor, q: Tensor | None, u: Tensor) -> tuple[Tensor, Tensor]:
    assert q is not None
    kept, _ = verify_chain(ids, torch.cat([q, p[:, -1:]], 1), p[:, :-1], u)
    _, rest = verify_chain(ids, p, q, u)
    return kept, rest


def no_bonus_row(ids: Tensor, p: Tensor, q: Tensor | None, u: Tensor) -> tuple[Tensor, Tensor]:
    return verify_chain(ids, torch.cat([p[:, :-1], p[:, -2:-1]], 1), q, u)


@pytest.mark.parametrize(
    ("kind", "verdict", "reuse"),
    [
        ("drawn", always, False),
        ("greedy", always, False),
        ("drawn", careless_residual, False),
        ("greedy", careless_residual, False),
        ("drawn", upside_down, False),
        ("drawn", no_bonus_row, False),
        ("drawn", verify_chain, True),
        ("liar", verify_chain, False),
    ],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_the_statistical_test_sees_planted_faults(kind: str, verdict: Judge, reuse: bool) -> None:
    pair = Pair(heat(1.0))
    assert g_test(count_triples(first_three(pair, kind, verdict, reuse), V), pair.joint()) < SURE


def test_acceptance_is_the_overlap_of_the_distributions() -> None:
    pair = Pair(heat(1.0))
    p, q = pair.p[V, V].double(), pair.q[V, V]
    g = torch.Generator().manual_seed(3)
    ids = torch.multinomial(q, RUNS, replacement=True, generator=g)[:, None]
    rows = torch.stack([pair.p[V, V], pair.p[V, 0]])[None].expand(RUNS, -1, -1)
    kept, _ = verify_chain(ids, rows, q.expand(RUNS, 1, V), torch.rand(RUNS, 1, generator=g))
    share = torch.minimum(p, q.double()).sum()
    spread = (share * (1 - share) / RUNS).sqrt()
    assert abs(kept.double().mean() - share) < 4 * spread


@given(st.data())
def test_greedy_keeps_the_longest_agreeing_prefix(data: st.DataObject) -> None:
    n = data.draw(st.integers(0, 6))
    g = torch.Generator().manual_seed(data.draw(st.integers(0, 999)))
    logits = torch.randint(0, 3, (n + 1, V), generator=g).float()  # ties are common: the first maximum counts
    best = [row.index(max(row)) for row in logits.tolist()]
    ids = [b if data.draw(st.booleans()) else data.draw(st.integers(0, V + 2)) for b in best[:n]]
    committed, kept = accept(Proposal(torch.tensor(ids, dtype=torch.long)), logits, torch.tensor([0]))
    expected = 0
    while expected < n and ids[expected] == best[expected]:
        expected += 1
    assert (committed.tolist(), kept) == (best[: expected + 1], expected)


def rows_warp(ids: Tensor, logits: Tensor) -> Tensor:
    return torch.softmax(logits, -1)


def test_warp_gets_each_row_with_the_tokens_before_it() -> None:
    asked = []

    def warp(ids: Tensor, logits: Tensor) -> Tensor:
        asked.append((ids.tolist(), logits.tolist()))
        return torch.softmax(logits, -1)

    logits = torch.arange(12.0).view(3, 4)
    accept(Proposal(torch.tensor([1, 2])), logits, torch.tensor([3, 0]), warp)
    assert [ids for ids, _ in asked] == [[3, 0], [3, 0, 1], [3, 0, 1, 2]]
    assert [row for _, row in asked] == logits.tolist()


def test_a_draft_of_the_same_distribution_is_always_kept() -> None:
    g = torch.Generator().manual_seed(0)
    for _ in range(300):
        logits = 3 * torch.randn(4, V, generator=g)
        p = torch.softmax(logits, -1)
        ids = torch.multinomial(p[:3], 1, generator=g)[:, 0]
        committed, kept = accept(Proposal(ids, q=p[:3]), logits, torch.tensor([0]), rows_warp, g)
        assert kept == 3 and committed[:3].tolist() == ids.tolist()


def test_equal_rows_and_rows_with_zeros_leave_no_empty_residual() -> None:
    p = torch.tensor([[[0.5, 0.5, 0.0, 0.0], [0.25, 0.25, 0.25, 0.25]]])
    for q in (p[:, :1], torch.tensor([[[0.0, 0.0, 0.5, 0.5]]])):
        for token in range(V):
            kept, rest = verify_chain(torch.tensor([[token]]), p, q, torch.tensor([[0.999]]))
            assert rest.sum() > 0 and bool((rest >= 0).all())
            if int(kept) == 0:
                assert rest[0, 2:].sum() == 0


def test_a_token_the_target_cannot_say_is_refused_even_by_the_smallest_random_number() -> None:
    p = torch.tensor([[[0.5, 0, 0, 0.5], [1.0, 0, 0, 0]]])
    for token in (1, V, V + 7, -1):
        kept, rest = verify_chain(torch.tensor([[token]]), p, None, torch.tensor([[0.0]]))
        assert int(kept) == 0 and rest[0].tolist() == [0.5, 0, 0, 0.5]


@pytest.mark.parametrize("token", [-1, V, V + 7])
def test_processors_see_no_token_the_target_does_not_have(token: int) -> None:
    """A penalty looks up the tokens before; what is refused in any case must not make it fail."""

    def penalty(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return torch.softmax(logits.scatter(0, ids, logits.gather(0, ids) - 1), -1)

    committed, kept = accept(Proposal(torch.tensor([token, 0])), torch.zeros(3, V), ONE, penalty)
    assert kept == 0 and committed.numel() == 1
    with pytest.raises(DraftError, match="probability zero"):
        accept(Proposal(torch.tensor([token]), q=FAIR), torch.zeros(2, V), ONE, penalty)


def test_a_certain_token_is_always_kept() -> None:
    p = torch.tensor([[[0, 1.0, 0, 0], [0, 0, 1.0, 0]]])
    kept, rest = verify_chain(torch.tensor([[1]]), p, None, torch.tensor([[1 - 2**-24]]))
    assert int(kept) == 1 and rest[0].tolist() == [0, 0, 1, 0]


@pytest.mark.parametrize("width", [V - 1, V + 3])
def test_q_over_a_vocabulary_of_another_padding(width: int) -> None:
    """The missing columns hold no mass on either side, so the outcome is that of equal widths."""
    g = torch.Generator().manual_seed(0)
    q = torch.softmax(torch.randn(2, V - 1, generator=g), -1)
    logits = torch.randn(3, V, generator=g)
    ids = torch.tensor([0, 2])
    outcomes = []
    for seed in range(40):
        for w in (V, width):
            proposal, g = Proposal(ids, q=resize_vocab(q, w, 0.0)), torch.Generator().manual_seed(seed)
            outcomes.append(accept(proposal, logits, ids[:1], rows_warp, g))
    for one, other in zip(outcomes[::2], outcomes[1::2], strict=True):
        assert one[1] == other[1] and one[0].tolist() == other[0].tolist()
    assert {kept for _, kept in outcomes} == {0, 1, 2}


def test_resize() -> None:
    x = torch.arange(6.0).view(2, 3)
    assert resize_vocab(x, 2, 0.0).tolist() == [[0, 1], [3, 4]]
    assert resize_vocab(x, 4, -1.0).tolist() == [[0, 1, 2, -1], [3, 4, 5, -1]]
    assert resize_vocab(x, 3, 0.0).tolist() == x.tolist()


ONE = torch.tensor([1])
FAIR = torch.full((1, V), 0.25)


@pytest.mark.parametrize(
    ("proposal", "word"),
    [
        (Proposal(ONE, parents=torch.tensor([-1])), "accept_tree"),
        (Proposal(ONE, parents=torch.tensor([0])), "before its parent"),
        (Proposal(ONE, parents=torch.tensor([-1, 0])), "Proposal.parents"),
        (Proposal(ONE, parents=torch.tensor([-1]), q=FAIR), "tree"),
        (Proposal(ONE[None]), "Proposal.ids"),
        (Proposal(ONE.float()), "Proposal.ids"),
        (Proposal(ONE, q=FAIR[0]), "Proposal.q"),
        (Proposal(ONE, q=FAIR.repeat(2, 1)), "Proposal.q"),
        (Proposal(torch.tensor([1, 2, 3])), "rows of logits"),
        (Proposal(ONE, q=torch.tensor([[0.5, 0.1, 0.1, 0.1, 0.2]])), "beyond"),
        (Proposal(ONE, q=2 * FAIR), "sum to one"),
        (Proposal(ONE, q=torch.tensor([[1.5, 0.5, -0.5, -0.5]])), "sum to one"),
        (Proposal(ONE, q=FAIR * float("nan")), "sum to one"),
        (Proposal(ONE, q=torch.tensor([[1.0, 0.0, 0.0, 0.0]])), "probability zero"),
        (Proposal(torch.tensor([V - 1]), q=torch.tensor([[0.5, 0.3, 0.2]])), "probability zero"),
    ],
)
def test_a_wrong_proposal_is_told_in_one_sentence(proposal: Proposal, word: str) -> None:
    logits = torch.zeros(2, V)
    with sentence(DraftError, word):
        accept(proposal, logits, torch.tensor([0]), rows_warp)


@pytest.mark.parametrize("shape", [None, heat(1.0)])
def test_without_a_row_for_it_no_bonus_follows(shape: Callable[[Tensor], Tensor] | None) -> None:
    sure = torch.full((2, V), -50.0).scatter(1, torch.tensor([[2], [1]]), 50.0)
    warp = None if shape is None else lambda ids, logits: shape(logits)
    right, wrong = torch.tensor([2, 1]), torch.tensor([2, 3])
    committed, kept = accept(Proposal(right), sure, torch.tensor([0]), warp)
    assert committed.tolist() == [2, 1] and kept == 2
    committed, kept = accept(Proposal(wrong), sure, torch.tensor([0]), warp)
    assert committed.tolist() == [2, 1] and kept == 1
    with pytest.raises(DraftError, match="rows of logits"):
        accept(Proposal.empty(), sure[:0], torch.tensor([0]), warp)


def test_without_a_proposal_the_random_stream_is_that_of_plain_sampling() -> None:
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(5))
    torch.manual_seed(11)
    plain = [int(torch.multinomial(torch.softmax(logits, -1), 1)) for _ in range(20)]
    torch.manual_seed(11)
    ours = [int(accept(Proposal.empty(), logits, torch.tensor([0]), rows_warp)[0]) for _ in range(20)]
    assert ours == plain and len(set(plain)) > 3


def test_draw_follows_its_weights_and_never_takes_a_zero() -> None:
    g = torch.Generator().manual_seed(2)
    p = torch.tensor([0.0, 3.0, 0.0, 1.0])
    counts = torch.bincount(torch.cat([sample_index(p, g) for _ in range(4000)]), minlength=4)
    assert counts[0] == counts[2] == 0
    assert g_test(counts, p / p.sum()) > SURE
