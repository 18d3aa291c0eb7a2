"""Retrieval in two stages: exact budgets, and the same as plain loops over sets."""

from __future__ import annotations

import pytest
import torch

from mmaccel.policies.kv.mosaic.hierarchy import Hierarchy
from mmaccel.policies.kv.mosaic.index import FEWEST, STAGE, Found, Index
from tests.policies.kv.mosaic.scenes import WIDTH, feed, plant, runs, tree_of


def index_of(tree: Hierarchy, cosine: bool = False) -> Index:
    for level in (tree.semantic, tree.visual):
        level.dirty = level.size > 0
    index = Index(tree, WIDTH, torch.float32, torch.device("cpu"), "mean", cosine)
    index.refresh()
    return index


def rest(
    index: Index, layer: int, found: Found, budget: int, most: int, end: int, everyone: bool
) -> tuple[torch.Tensor, ...]:
    """Keys, values, times and sizes of what stands for clusters around a search."""
    index.prepare(end, budget)
    rows = torch.full((2, 1, index.left(layer, budget, most, everyone), WIDTH), torch.nan)
    # What is added to the score of one that stands for n entries of a token each is log(n).
    time, added = index.rest(layer, found, rows, 0, None, 1)
    return rows[0, 0], rows[1, 0], time, added.exp().round().long()


def query(seed: int) -> torch.Tensor:
    return torch.randn(WIDTH, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module", params=[1, 2])
def tree(request: pytest.FixtureRequest) -> Hierarchy:
    tree = tree_of(parts=request.param, visual=3)
    feed(tree, plant(runs(70), parts=request.param), 8)
    return tree


def plain(tree: Hierarchy, layer: int, q: torch.Tensor, budget: int, end: int) -> list[int]:
    """What the two stages retrieve, from the definition."""
    parts, key = tree.summaries.parts, tree.summaries.key[:, layer].float()

    def inside(level: object, at: int, scale: int) -> dict[int, list[int]]:
        held: dict[int, list[int]] = {}
        for entry in range(end):
            held.setdefault(int(level.owner[at, entry // scale]), []).append(entry)  # type: ignore[attr-defined]
        return held

    every = {
        one: [
            u * parts + t
            for u in range(tree.units)
            for t in range(parts)
            if int(tree.visual.owner[0, u]) == one
        ]
        for one in tree.visual.size[0].nonzero()[:, 0].tolist()
    }
    visual = inside(tree.visual, 0, parts)
    chosen: list[int] = []
    held = 0
    for one in sorted(visual, key=lambda v: (-float(key[every[v]].mean(0) @ q), v)):
        if held >= STAGE * budget and len(chosen) >= FEWEST:
            break
        chosen.append(one)
        held += len(visual[one])
    semantic = inside(tree.semantic, layer, 1)
    whole = {c: (tree.semantic.owner[layer] == c).nonzero()[:, 0] for c in semantic}
    among = [c for c in semantic if int(tree.semantic.parent[layer, c]) in chosen]
    found: list[int] = []
    for c in sorted(among, key=lambda c: (-float(key[whole[c]].mean(0) @ q), c)):
        left = budget - len(found)
        members = sorted(semantic[c], key=lambda e: (-float(key[e] @ q), e))
        found += members[:left]
    return sorted(found)


@pytest.mark.parametrize("budget", [1, 5, 12, 33])
@pytest.mark.parametrize("local", [0, 6])
def test_the_budget_is_exact_and_the_choice_is_the_definition_s(
    tree: Hierarchy, budget: int, local: int
) -> None:
    end = (tree.units - local) * tree.summaries.parts
    index = index_of(tree)
    for layer in range(tree.layers):
        for seed in range(4):
            found = index.search(layer, query(seed), budget, end)
            assert found.entries.tolist() == plain(tree, layer, query(seed), budget, end)
            assert found.entries.numel() == budget and int(found.entries.max()) < end


def test_a_budget_just_below_the_stream_looks_up_no_entry_that_is_not_there(tree: Hierarchy) -> None:
    """Whatever room there is behind those that are: on a device nothing would say so."""
    asked, rows = [], tree.summaries.key_rows
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            tree.summaries, "key_rows", lambda layer, some: asked.append(int(some.max())) or rows(layer, some)
        )
        for end in range(20 * tree.summaries.parts, tree.units * tree.summaries.parts, 3):
            index = index_of(tree)
            found = index.search(0, query(end), end - 1, end)
            assert found.entries.tolist() == plain(tree, 0, query(end), end - 1, end)
            assert asked[-1] < end


def test_a_budget_above_the_stream_retrieves_all(tree: Hierarchy) -> None:
    end = tree.units * tree.summaries.parts
    found = index_of(tree).search(1, query(0), end, end)
    assert torch.equal(found.entries, torch.arange(end))
    for everyone in (False, True):
        assert rest(index_of(tree), 1, found, end, 99, end, everyone)[0].shape[0] == 0


def test_the_rest_are_the_means_of_other_clusters(tree: Hierarchy) -> None:
    """Of as many as are left whatever is retrieved, those of the largest scores."""
    end = (tree.units - 3) * tree.summaries.parts
    index = index_of(tree)
    # A budget for which the first stage takes all visual clusters.
    budget = end // STAGE + 1
    found = index.search(0, query(1), budget, end)
    key, value, time, size = rest(index, 0, found, budget, 999, end, False)
    means = {}
    for c in range(tree.semantic.size.shape[1]):
        members = (tree.semantic.owner[0] == c).nonzero()[:, 0]
        near = int((members < end).sum())
        if near and c not in found.clusters.tolist():
            rows = (
                tree.summaries.key[members, 0].float().mean(0),
                tree.summaries.value[members, 0].float().mean(0),
            )
            means[c] = (float(members.float().mean()), near, *rows)
    small = sorted(size for size in there(tree, 0, end) if size)
    needed = next(n for n in range(len(small) + 1) if sum(small[:n]) >= budget)
    assert len(key) == len(small) - needed > 5 and len(key) <= len(means)
    order = sorted(means, key=lambda c: -float(found.scores[c]))
    wanted = sorted((means[c] for c in order[: len(key)]), key=lambda m: m[:2])
    told = sorted(zip(time.tolist(), size.tolist(), key, value, strict=True), key=lambda m: m[:2])
    for (at, near, k, v), (when, held, mean_k, mean_v) in zip(told, wanted, strict=True):
        assert at == pytest.approx(when) and near == held
        torch.testing.assert_close(k, mean_k, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(v, mean_v, atol=1e-4, rtol=1e-4)
    few = rest(index, 0, found, budget, 4, end, False)
    assert sorted(few[2].tolist()) == pytest.approx(sorted(means[c][0] for c in order[:4]))


def test_all_clusters_have_one_and_retrieved_ones_come_last(tree: Hierarchy) -> None:
    end = (tree.units - 3) * tree.summaries.parts
    index, budget = index_of(tree), end // STAGE + 1
    found = index.search(0, query(1), budget, end)
    near = {c: n for c, n in enumerate(there(tree, 0, end)) if n}
    assert sum(c not in near for c in found.clusters.tolist()) == 0 < len(found.clusters)
    left = [c for c in near if c not in found.clusters.tolist()]
    held = rest(index, 0, found, budget, 999, end, True)[3].tolist()
    assert sorted(held) == sorted([near[c] for c in left] + [0] * len(found.clusters))
    few = rest(index, 0, found, budget, len(left), end, True)
    middles = [float((tree.semantic.owner[0] == c).nonzero().float().mean()) for c in left]
    assert sorted(few[2].tolist()) == pytest.approx(sorted(middles))


def there(tree: Hierarchy, layer: int, end: int) -> list[int]:
    """Sizes of the clusters of a layer, counting entries below `end`."""
    return tree.semantic.owner[layer, :end].bincount().tolist()


def test_cosine_knows_no_length() -> None:
    tree = tree_of(visual=3)
    feed(tree, plant(runs(70)), 8)
    a, b = (index_of(tree, cosine=True).search(0, query(2) * s, 7, 70) for s in (1, 50))
    assert torch.equal(a.entries, b.entries)


def test_forgotten_entries_are_not_found(tree: Hierarchy) -> None:
    end = tree.units * tree.summaries.parts
    index = index_of(tree)
    before = index.search(0, query(0), 8, end).entries
    index.forget(before.tolist())
    after = index.search(0, query(0), 8, end).entries
    assert after.numel() == 8 and not set(after.tolist()) & set(before.tolist())
    assert index.search(0, query(0), end, end).entries.numel() == end - 8


def test_before_there_are_clusters_units_are_retrieved_one_by_one() -> None:
    tree = tree_of()
    feed(tree, plant(runs(10)), 4)
    found = index_of(tree).search(0, query(0), 3, 9)
    score = tree.summaries.key[:9, 0].float() @ query(0)
    assert found.entries.tolist() == sorted(score.topk(3).indices.tolist())


def test_the_index_follows_what_changes() -> None:
    tree = tree_of()
    data = plant(runs(70))
    feed(tree, tuple(rows[:30] for rows in data), 5)
    index = index_of(tree)
    feed(tree, data, 5)
    tree.touch(0, (tree.semantic.size[0] > 0).nonzero()[:, 0])
    index.refresh()
    fresh = index_of(tree)
    for seed in range(5):
        a, b = (one.search(0, query(seed), 9, 70) for one in (index, fresh))
        assert torch.equal(a.entries, b.entries)


def test_guessing_by_frames_takes_the_clusters_that_hold_them(tree: Hierarchy) -> None:
    index, end = index_of(tree), tree.units * tree.summaries.parts
    found = index.search(0, query(0), 6, end)
    guessed = index.guess(1, found.entries, end)
    guessed = guessed[guessed >= 0]
    owners = tree.semantic.owner[1]
    assert set(guessed.tolist()) == set(torch.isin(owners, owners[found.entries]).nonzero()[:, 0].tolist())
    assert index.guess(1, found.entries, 3).numel() == 3


def test_a_medoid_is_one_of_its_cluster_s_entries() -> None:
    tree = tree_of()
    feed(tree, plant(runs(60)), 8)
    for level in (tree.semantic, tree.visual):
        level.dirty = level.size > 0
    index = Index(tree, WIDTH, torch.float32, torch.device("cpu"), "medoid", False)
    index.refresh()
    found = index.search(1, query(1), 9, 60)
    key, value, time, size = rest(index, 1, found, 9, 999, 60, False)
    assert key.shape[0] == len(size) > 5
    for row, entry in enumerate(time.long().tolist()):
        assert torch.equal(key[row], tree.summaries.key[entry, 1].float())
        assert torch.equal(value[row], tree.summaries.value[entry, 1].float())
        own = tree.semantic.owner[1, entry]
        members = (tree.semantic.owner[1] == own).nonzero()[:, 0]
        near = tree.summaries.key_points(torch.tensor([1]), members[None])[0] @ tree.semantic.centroid[1, own]
        # Members of a pair may be equally near.
        assert float(near[members == entry]) >= float(near.max()) - 1e-6


@pytest.mark.parametrize("count", [1, 99])
@pytest.mark.parametrize("reps", ["mean", "medoid"])
def test_a_cluster_that_is_taken_back_is_found_no_more(reps: str, count: int) -> None:
    """Nothing else has changed: of all that the index is told, nothing has entries, and it may have room for less."""
    tree = tree_of()
    feed(tree, plant(runs(60)), 8)
    index = Index(tree, WIDTH, torch.float32, torch.device("cpu"), reps, False)  # type: ignore[arg-type]
    index.refresh()
    mark, zero = tree.checkpoint(), torch.zeros(1, dtype=torch.long)
    for _ in range(count):
        new = tree.open(zero, 0)
        tree.semantic.dirty[zero, new] = True
    tree.restore(mark)
    index.refresh()
    assert not bool(index.search(0, query(0), 9, 60).picked[new:].any())
    assert len(index.search(0, query(0), 9, 60).entries) == 9
