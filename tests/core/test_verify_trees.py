"""Trees are judged as chains are: from the root down, whatever was proposed; and both compile."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from mmaccel.core.decoding.draft import Proposal, verify_chain
from mmaccel.core.decoding.trees import accept_tree, accepted_tree_tokens, mask_repeated_siblings
from tests.core.test_verify import SHAPES, SURE, Pair, V
from tests.core.toy import g_test


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_judges_compile_without_a_graph_break(backend: str) -> None:
    """A chain with and without probabilities, greedy too, and a tree, in one graph."""
    torch._dynamo.reset()
    g = torch.Generator().manual_seed(0)
    p, q = (torch.softmax(torch.randn(5, n, V, generator=g), -1) for n in (3, 2))
    parents = torch.tensor([-1, -1, 0, 0, 2, 4])
    sees = Proposal(parents, parents=parents).branches.sees

    def judged(ids: Tensor, u: Tensor, tokens: Tensor, best: Tensor) -> tuple[Tensor, ...]:
        tree = accepted_tree_tokens(mask_repeated_siblings(tokens, parents), parents, sees, best)
        return *verify_chain(ids, p, q, u), *verify_chain(ids, p, None, u), tree

    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(judged, fullgraph=True, backend=counter)
    for _ in range(20):
        ids, u = torch.randint(0, V, (5, 2), generator=g), torch.rand(5, 2, generator=g)
        tokens, best = (torch.randint(0, 2, (n,), generator=g) for n in (6, 7))
        for ours, theirs in zip(compiled(ids, u, tokens, best), judged(ids, u, tokens, best), strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-7, rtol=0)
    assert counter.frame_count == 1
    torch._dynamo.reset()


@given(st.data())
def test_a_tree_is_walked_from_its_root(data: st.DataObject) -> None:
    count = data.draw(st.integers(0, 9))
    tokens = data.draw(st.lists(st.integers(0, 2), min_size=count, max_size=count))
    parents = [data.draw(st.integers(-1, node - 1)) for node in range(count)]
    best = data.draw(st.lists(st.integers(0, 2), min_size=count + 1, max_size=count + 1))
    node, path = -1, list[int]()
    while True:
        below = [n for n in range(count) if parents[n] == node and tokens[n] == best[node + 1]]
        if not below:
            break
        node = below[0]
        path.append(node)
    above = torch.tensor(parents, dtype=torch.long)
    proposal = Proposal(torch.tensor(tokens, dtype=torch.long), parents=above)
    logits = torch.nn.functional.one_hot(torch.tensor(best), 3).float()
    committed, found = accept_tree(proposal, logits, torch.tensor([0]))
    assert found.tolist() == path
    assert committed.tolist() == [*(tokens[n] for n in path), best[node + 1]]


def tree_runs(shape: Callable[[Tensor], Tensor], runs: int, wrong: bool = False) -> float:
    """p-value of the first three tokens when each round offers a tree whose children depend on the prefix alone."""
    pair, g = Pair(shape), torch.Generator().manual_seed(11)
    parents = torch.tensor([-1, -1, 0, 0, 1])
    counts = torch.zeros(V, V, V, dtype=torch.long)
    for _ in range(runs):
        tokens = [V, V]
        while len(tokens) < 5:
            first = pair.q[tokens[-2], tokens[-1]].topk(2).indices.tolist()
            below = [
                pair.q[tokens[-1], first[0]].topk(2).indices.tolist(),
                [int(pair.q[tokens[-1], first[1]].argmax())],
            ]
            proposal = Proposal(torch.tensor([*first, *below[0], *below[1]]), parents=parents)
            trails = [tokens] + [[*tokens, *branch] for branch in _branches(proposal)]
            logits = torch.stack([pair.p[t[-2], t[-1]].clamp(min=1e-30).log() for t in trails])
            if wrong:
                logits[2] = logits[1]
            committed, path = accept_tree(
                proposal, logits, torch.tensor([0]), lambda ids, row: torch.softmax(row, -1), g
            )
            assert committed.numel() == path.numel() + 1
            assert [int(proposal.ids[n]) for n in path] == committed.tolist()[:-1]
            tokens += committed.tolist()
        counts[tuple(tokens[2:5])] += 1
    return g_test(counts, pair.joint())


def _branches(proposal: Proposal) -> list[list[int]]:
    branches: list[list[int]] = []
    for token, parent in zip(proposal.ids.tolist(), proposal.parents.tolist(), strict=True):
        branches.append([*([] if parent < 0 else branches[parent]), token])
    return branches


@pytest.mark.parametrize("shape", ["plain", "nucleus"])
def test_a_tree_leaves_the_targets_joint_distribution(shape: str) -> None:
    assert tree_runs(SHAPES[shape], 2_500) > SURE


def test_the_tree_s_test_sees_a_wrong_row() -> None:
    assert tree_runs(SHAPES["plain"], 2_500, wrong=True) < SURE


def test_rows_of_a_tree_see_their_branch() -> None:
    proposal = Proposal(torch.tensor([2, 3, 0, 1]), parents=torch.tensor([-1, -1, 0, 2]))
    branches = proposal.branches
    assert branches.depth.tolist() == [0, 1, 1, 2, 3]
    assert branches.sees.int().tolist() == [
        [1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 1, 0, 1, 0], [1, 1, 0, 1, 1]
    ]  # fmt: skip
