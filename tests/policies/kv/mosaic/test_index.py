"""Retrieval in two stages, and what the device is told of clusters; k-means, bisection and halves against brute force."""

import itertools
import random

import pytest
import torch
from torch import Tensor

from mmaccel.backends.ops.clusters import WordQueries, score_by_words, score_keys
from mmaccel.policies.kv._index import Index, SearchResult
from mmaccel.policies.kv.mosaic import FEWEST, STAGE, ClusterIndex
from mmaccel.policies.kv.mosaic.maintain import ClusterHierarchy
from mmaccel.policies.kv.mosaic.split import bisect, kmeans, split_in_half, unit_length
from tests.policies.kv.mosaic.scenes import LOOK, WIDTH, feed, index_of, plant, runs, tree_of
from tests.spies import heard


def clusters(found: SearchResult) -> list[int]:
    return found.picked.nonzero()[:, 0].tolist()  # type: ignore[no-any-return]


def rest(
    index: ClusterIndex, layer: int, found: SearchResult, budget: int, most: int, end: int
) -> tuple[torch.Tensor, ...]:
    """Keys, values and times of the summary tokens around a search."""
    index.prepare(end)
    rows = torch.full((2, 1, index.summary_count(layer, budget, most), WIDTH), torch.nan)
    time, added = index.summarise(layer, found, rows, 0, None)
    assert not added.any()
    return rows[0, 0], rows[1, 0], time


def query(seed: int) -> torch.Tensor:
    return torch.randn(WIDTH, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def tree() -> ClusterHierarchy:
    tree = tree_of(visual=3)
    feed(tree, plant(runs(70)), 8)
    return tree


def plain(tree: ClusterHierarchy, layer: int, q: torch.Tensor, budget: int, end: int) -> list[int]:
    """What the two stages retrieve, from the definition."""
    key = tree.means.keys[:, layer].float()

    def inside(level: object, at: int) -> dict[int, list[int]]:
        held: dict[int, list[int]] = {}
        for unit in range(end):
            held.setdefault(int(level.owner[at, unit]), []).append(unit)  # type: ignore[attr-defined]
        return held

    every = {
        one: [u for u in range(tree.units) if int(tree.visual.owner[0, u]) == one]
        for one in tree.visual.size[0].nonzero()[:, 0].tolist()
    }
    visual = inside(tree.visual, 0)
    chosen: list[int] = []
    held = 0
    for one in sorted(visual, key=lambda v: (-float(key[every[v]].mean(0) @ q), v)):
        if held >= STAGE * budget and len(chosen) >= FEWEST:
            break
        chosen.append(one)
        held += len(visual[one])
    semantic = inside(tree.semantic, layer)
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
    tree: ClusterHierarchy, budget: int, local: int
) -> None:
    end = tree.units - local
    index = index_of(tree)
    for layer in range(tree.layers):
        for seed in range(4):
            found = index.search(layer, query(seed), budget, end)
            assert found.entries.tolist() == plain(tree, layer, query(seed), budget, end)
            assert found.entries.numel() == budget and int(found.entries.max()) < end


def test_a_budget_just_below_the_stream_looks_up_no_entry_that_is_not_there(tree: ClusterHierarchy) -> None:
    """Whatever room there is behind those that are: on a device nothing would say so."""
    asked, rows = [], tree.means.key_rows
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            tree.means, "key_rows", lambda layer, some: asked.append(int(some.max())) or rows(layer, some)
        )
        for end in range(20, tree.units, 3):
            index = index_of(tree)
            found = index.search(0, query(end), end - 1, end)
            assert found.entries.tolist() == plain(tree, 0, query(end), end - 1, end)
            assert asked[-1] < end


def test_a_budget_above_the_stream_retrieves_all(tree: ClusterHierarchy) -> None:
    end = tree.units
    found = index_of(tree).search(1, query(0), end, end)
    assert torch.equal(found.entries, torch.arange(end))
    assert rest(index_of(tree), 1, found, end, 99, end)[0].shape[0] == 0


def test_all_clusters_have_a_summary_and_retrieved_ones_come_last(tree: ClusterHierarchy) -> None:
    """Means of all their units, at their mean time; of few, those of the largest scores."""
    end = tree.units - 3
    index, budget = index_of(tree), end // STAGE + 1
    found = index.search(0, query(1), budget, end)
    near = {c: n for c, n in enumerate(there(tree, 0, end)) if n}
    assert set(clusters(found)) <= set(near)
    left = sorted(set(near) - set(clusters(found)), key=lambda c: -float(found.scores[c]))
    key, value, time = rest(index, 0, found, budget, 999, end)
    assert len(key) == len(near) > len(left) > 5
    for at, c in enumerate(left):
        members = (tree.semantic.owner[0] == c).nonzero()[:, 0]
        assert float(time[at]) == pytest.approx(float(members.float().mean()))
        for row, rows in ((key[at], tree.means.keys), (value[at], tree.means.values)):
            torch.testing.assert_close(row, rows[members, 0].float().mean(0), atol=1e-4, rtol=1e-4)
    few = rest(index, 0, found, budget, 4, end)
    torch.testing.assert_close(few[2], time[:4])


def there(tree: ClusterHierarchy, layer: int, end: int) -> list[int]:
    """Sizes of the clusters of a layer, counting entries below `end`."""
    return tree.semantic.owner[layer, :end].bincount().tolist()


def test_cosine_knows_no_length() -> None:
    tree = tree_of(visual=3)
    feed(tree, plant(runs(70)), 8)
    a, b = (index_of(tree, similarity="cosine").search(0, query(2) * s, 7, 70) for s in (1, 50))
    assert torch.equal(a.entries, b.entries)


def test_forgotten_entries_are_not_found(tree: ClusterHierarchy) -> None:
    end = tree.units
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
    score = tree.means.keys[:9, 0].float() @ query(0)
    assert found.entries.tolist() == sorted(score.topk(3).indices.tolist())


@pytest.mark.parametrize("count", [1, 99])
def test_a_cluster_that_is_taken_back_is_found_no_more(count: int) -> None:
    """Nothing else has changed: of all that the index is told, nothing has entries, and it may have room for less."""
    tree = tree_of()
    feed(tree, plant(runs(60)), 8)
    index = index_of(tree)
    mark, zero = tree.checkpoint(), torch.zeros(1, dtype=torch.long)
    for _ in range(count):
        new = tree.semantic.allocate_ids(zero, zero)
        tree.semantic.dirty[zero, new] = True
    tree.restore(mark)
    index.refresh()
    assert not bool(index.search(0, query(0), 9, 60).picked[new:].any())
    assert len(index.search(0, query(0), 9, 60).entries) == 9


def test_the_first_stage_may_go_by_looks(tree: ClusterHierarchy) -> None:
    """As the paper has it: whole visual clusters by the angle of their mean look, whatever the layer's query is."""
    index = index_of(tree, first_stage="look")
    for seed in range(5):
        look = torch.randn(LOOK, generator=torch.Generator().manual_seed(seed))
        index.set_visual_query(look)
        found, end, budget = index.search(1, query(seed), 3, tree.units), tree.units, 3
        means = {
            v: tree.means.visuals[tree.visual.members_of(torch.tensor([0]), torch.tensor([v]))[0]]
            .mean(0)
            .float()
            for v in tree.visual.size[0].nonzero()[:, 0].tolist()
        }
        order = sorted(means, key=lambda v: -float(torch.cosine_similarity(means[v], look, 0)))
        sizes, chosen = tree.visual.size[0].tolist(), list[int]()
        while sum(sizes[v] for v in chosen) < STAGE * budget or len(chosen) < FEWEST:
            chosen.append(order[len(chosen)])
        assert len(chosen) < len(means) and set(tree.visual.owner[0, found.entries].tolist()) <= set(chosen)
        assert len(found.entries) == budget and int(found.entries.max()) < end


def test_words_ask_each_for_itself(tree: ClusterHierarchy) -> None:
    """Clusters by how far they are above others for their best word, less the mean over words, from the definition."""
    index, end, budget, layer = index_of(tree, ask_by="words"), tree.units, 12, 1
    assert index.by_words
    rows = torch.stack([query(seed) for seed in range(3)])
    index.prepare(end)
    asked = WordQueries(rows[None], torch.tensor([3]))
    found = index.search_ahead(layer, rows.mean(0)[None], budget, 0, words=asked)[0]
    for level, at in ((tree.visual, 0), (tree.semantic, layer)):
        used = [one for one in range(level.id_bound) if level.size[at, one] > 0]
        inside = [(level.owner[at, :end] == one).nonzero()[:, 0] for one in used]
        mean = torch.stack([tree.means.keys[some, layer].float().mean(0) for some in inside])
        score = mean @ rows.T
        score = (score - score.mean(0)) / score.std(0, correction=0)
        score = score.max(1).values - score.sum(1) / 4
        ranked = sorted(zip(score.tolist(), used, inside, strict=True), reverse=True, key=lambda one: one[0])
        if level is tree.visual:
            held, chosen = 0, list[int]()
            for _, one, some in ranked:
                if held < STAGE * budget or len(chosen) < FEWEST:
                    chosen.append(one)
                    held += len(some)
    units = list[int]()
    for _, one, some in ranked:
        if int(tree.semantic.parent[layer, one]) in chosen and len(units) < budget:
            own = tree.means.keys[some, layer].float() @ rows.mean(0)
            units += some[own.argsort(descending=True, stable=True)][: budget - len(units)].tolist()
    assert found.entries.tolist() == sorted(units)


def test_a_frame_that_one_word_is_about_is_found() -> None:
    """Many clusters answer most words; one answers a single word. The mean query does not find it; the words do."""
    common, rare = torch.eye(WIDTH)[0], torch.eye(WIDTH)[1]
    key = torch.stack([10 * common] * 30 + [8 * common + 3 * rare])[None]
    key = key + 0.01 * torch.randn(key.shape, generator=torch.Generator().manual_seed(0))
    words = torch.stack([common] * 5 + [rare])
    size = torch.ones(1, 31, dtype=torch.long)
    assert int(score_keys(key, words.mean(0)[None], False).argmax()) != 30
    assert int(score_by_words(key, WordQueries(words[None], torch.tensor([6])), size, False).argmax()) == 30


def check(index: ClusterIndex, tree: ClusterHierarchy, end: int) -> None:
    """All that searches among the entries below `end` are told, from the definition."""
    there = index.prepare(end)
    present = [e for e in range(end) if not (e < len(index.absent) and index.absent[e])]
    assert there.entries.tolist() == present
    lists, count = there.lists, there.lists.size.shape[1]
    whole = [tree.visual.owner[0, e].item() for e in present] if tree.has_clusters else []
    if there.visual is not None:
        assert [whole.count(v) for v in range(len(there.visual))] == there.visual.tolist()
    for layer in range(tree.layers):
        of = {e: int(tree.semantic.owner[layer, e]) if tree.has_clusters else e for e in present}
        own = lists.owner[layer].tolist()
        assert [own[e] for e in present] == [of[e] for e in present]
        assert all(owner >= count for e, owner in enumerate(own) if e not in of)
        members = [[e for e in present if of[e] == c] for c in range(count)]
        assert lists.size[layer].tolist() == [len(some) for some in members]
        assert max(map(len, members), default=0) <= lists.largest
        line = [e for some in members for e in some]
        assert lists.flat[layer, : len(line)].tolist() == line
        for some, first in zip(members, lists.first[layer].tolist(), strict=True):
            assert lists.flat[layer, first : first + len(some)].tolist() == some
            assert lists.within[layer, some].tolist() == list(range(len(some)))
        assert there.alive[layer] == sum(map(bool, members))
        assert (there.parent is not None) == tree.has_clusters == there.ready
        if there.parent is not None and there.visual is not None:
            up, none = tree.semantic.parent[layer], len(there.visual)
            assert there.parent[layer].tolist() == [int(up[c]) if members[c] else none for c in range(count)]


@pytest.mark.parametrize("seed", range(4))
def test_it_is_what_counting_anew_finds(seed: int) -> None:
    """Units come, are forgotten, split, and are taken back: from before there are clusters on, until most are forgotten."""
    draw, tree = random.Random(seed), tree_of(visual=3)
    data = plant(runs(90))
    index = index_of(tree, fresh=True)

    def come(more: int) -> None:
        look, key, value = (rows[: tree.units + more] for rows in data)
        feed(tree, (look, key, value), 5)

    while tree.units < 90:
        broken = draw.random() < 0.3
        mark = tree.checkpoint()
        come(draw.randint(1, 9))
        if tree.has_clusters and draw.random() < 0.5:
            ids = (tree.semantic.size[layer := draw.randrange(tree.layers)] > 0).nonzero()[:, 0]
            tree.split_deferred(torch.full_like(ids, layer), ids)
        index.refresh()
        have = tree.units
        index.forget(draw.sample(range(have), draw.randint(0, 3)))
        check(index, tree, draw.randint(have // 2, have))
        if broken:
            tree.restore(mark)
            index.forget_from(tree.units)
            index.refresh()
            check(index, tree, tree.units)
    index.forget(range(tree.units - 30))
    check(index, tree, tree.units - 4)
    tree.clear()
    index.refresh()
    index.forget_from(0)
    come(40)
    index.refresh()
    check(index, tree, 30)


@pytest.mark.usefixtures("small_rooms")
def test_of_entries_a_survey_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for those that are forgotten, there is a word for each cluster: a long stream has many more entries."""
    told: list[int] = heard(monkeypatch, Index, "_sent", lambda index, x, *_: x.shape[-1])
    tree, data = tree_of(), plant(runs(400))
    # A device of which nothing can be read back.
    index = index_of(tree, "meta", fresh=True)
    feed(tree, data, 5)
    index.refresh()
    told.clear()
    index.prepare(396)
    assert tree.has_clusters and 0 < max(told) <= tree.semantic.size.shape[1] < 396


def cohesion(x: Tensor, label: Tensor, k: int) -> float:
    """What k-means by direction makes as large as it can: the lengths of the clusters' sums."""
    return float(sum(x[label == one].sum(0).norm() for one in range(k)))


def groups(n: int, k: int, noise: float, seed: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    centre = torch.eye(5, dtype=torch.float64)[:k]
    at = torch.arange(n) * k // n
    return unit_length(centre[at] + noise * torch.randn(n, 5, generator=g, dtype=torch.float64)), at


@pytest.mark.parametrize("seed", range(12))
def test_groups_in_order_are_found_as_brute_force_finds_them(seed: int) -> None:
    x, _ = groups(8, 2, 0.15, seed)
    halves = [label for label in itertools.product((0, 1), repeat=8) if 0 < sum(label) < 8]
    best = max(cohesion(x, torch.tensor(label), 2) for label in halves)
    found = kmeans(x[None], 2)[0]
    assert cohesion(x, found, 2) == pytest.approx(best, abs=1e-9)
    assert cohesion(x, bisect(x[None], torch.ones(1, 8, dtype=torch.bool))[0], 2) == pytest.approx(
        best, abs=1e-9
    )


def test_sets_of_a_batch_and_absent_points_do_not_meet() -> None:
    sets = [groups(n, 3, 0.4, n)[0] for n in (12, 7, 9)]
    x = torch.full((3, 14, 5), 7.0, dtype=torch.float64)
    present = torch.zeros(3, 14, dtype=torch.bool)
    for row, own in enumerate(sets):
        place = torch.arange(14)[row % 2 :: 1][: len(own)]
        x[row, place], present[row, place] = own, True
    together, halves = kmeans(x, 3, present=present), bisect(x, present)
    assert torch.equal(together >= 0, present) and torch.equal(halves >= 0, present)
    for row, own in enumerate(sets):
        everyone = torch.ones(1, len(own), dtype=torch.bool)
        assert torch.equal(together[row][present[row]], kmeans(own[None], 3)[0])
        assert torch.equal(halves[row][present[row]], bisect(own[None], everyone)[0])


def test_each_point_is_with_its_nearest_centre_once_nothing_moves() -> None:
    x, _ = groups(40, 5, 0.5, 3)
    label = kmeans(x[None], 5, iterations=100, tolerance=0)[0]
    centre = unit_length(torch.stack([x[label == one].sum(0) for one in range(5)]))
    assert torch.equal((x @ centre.T).argmax(1), label)


def test_the_first_centres_are_at_equal_steps_of_time() -> None:
    x, _ = groups(12, 3, 0.3, 5)
    one = kmeans(x[None], 3, iterations=1)[0]
    assert torch.equal(one, (x @ x[[2, 6, 10]].T).argmax(1))


def test_no_label_stays_empty_and_the_farthest_point_fills_it() -> None:
    x = unit_length(
        torch.tensor([[1, 0], [1, 0.01], [1, 0.02], [1, 0.03], [1, 0.3], [1, 0.04]], dtype=torch.float64)
    )
    seeds = unit_length(torch.tensor([[[1.0, 0.0], [-1.0, 0.0], [-1.0, 0.1]]], dtype=torch.float64))
    label = kmeans(x[None], 3, seeds=seeds, iterations=1)[0]
    assert label[4] == 1 and sorted(label.unique().tolist()) == [0, 1, 2]
    same = torch.ones(1, 6, 2, dtype=torch.float64) / 2**0.5
    assert torch.bincount(kmeans(same, 4)[0], minlength=4).min() == 1


def test_ties_go_to_the_lowest_label_and_nothing_is_random() -> None:
    x = unit_length(torch.tensor([[[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]], dtype=torch.float64))
    seeds = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]], dtype=torch.float64)
    assert kmeans(x, 2, seeds=seeds, iterations=1)[0].tolist() == [0, 1, 0]
    y = torch.randn(2, 30, 5, generator=torch.Generator().manual_seed(0))
    assert torch.equal(kmeans(unit_length(y), 4), kmeans(unit_length(y), 4))


def test_halves_by_order() -> None:
    present = torch.tensor([[True, False, True, True, True, True], [True, True, False, False, False, False]])
    assert split_in_half(present).tolist() == [[0, -1, 0, 0, 1, 1], [0, 1, -1, -1, -1, -1]]


def test_a_row_of_zeros_stays_zero() -> None:
    assert unit_length(torch.zeros(2, 3)).abs().sum() == 0
    assert kmeans(torch.zeros(1, 4, 3), 2)[0].max() == 1
