"""Clusters of clusters: the hierarchy against a plain one, what splits a cluster and when, and halves that are exact."""

import math
import threading
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from mmaccel.core.memory.buffers import single_cpu_thread
from mmaccel.policies.kv.mosaic import maintain
from mmaccel.policies.kv.mosaic.clusters import ClusterTable, mean_variance_and_size, pooled_variance, union
from mmaccel.policies.kv.mosaic.maintain import ClusterHierarchy
from mmaccel.policies.kv.mosaic.split import CAP, FLOOR, Params, SplitBounds, UnitMeans, unit_length
from tests.policies.kv.mosaic.scenes import (
    SMALL,
    WIDTH,
    audit,
    feed,
    index_of,
    partition,
    plant,
    runs,
    tree_of,
)
from tests.spies import heard

SCENES = runs(60)
Planted = tuple[Tensor, Tensor, Tensor]
"""Looks, keys and values of units."""


@pytest.fixture(scope="module")
def stream() -> Planted:
    return plant(SCENES)


def test_a_stream_splits_defers_and_flushes(stream: Planted) -> None:
    grown = tree_of()
    feed(grown, stream, 5)
    counters = grown.counters
    assert min(counters[name] for name in ("visual_splits", "deferred", "singletons", "flushed", "cuts")) > 0
    audit(grown)
    tree = tree_of(buffer=64)
    feed(tree, stream, 5)
    assert any(tree.buffer)
    tree.split_deferred(*(tree.semantic.size > 0).nonzero(as_tuple=True))
    audit(tree)
    assert not any(tree.buffer) and not bool(tree.semantic.lazy.any())
    assert tree.counters["deferred_splits"] > 0 and tree.counters["resolved"] > 0


def test_work_in_parts_finds_the_same_clusters_and_pauses_between_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A scene that is cut in two has clusters at all layers, hundreds of them: answers come in between."""
    whole, parts, paused = tree_of(6), tree_of(6), list[tuple[int, ...]]()
    stream = plant(runs(90, 3), 6, seed=3)
    feed(whole, stream, 5)
    monkeypatch.setattr(maintain, "PART", 1)
    cut = heard(monkeypatch, ClusterHierarchy, "_cut_some", lambda _, layer, *rest: len(layer))
    split = heard(monkeypatch, maintain, "split_exceeding", lambda level, *_: level.layers)

    def pause() -> None:
        paused.append((len(cut), split.count(6), parts.units, int(parts.semantic.cluster_counts()[0])))

    parts.pause = pause
    feed(parts, stream, 5)
    audit(parts)
    assert partition(parts) == partition(whole) and parts.counters == whole.counters
    assert {*cut} == {1} and len(cut) > 6 * whole.counters["visual_splits"] > 0
    after_cuts, after_splits, after_units, _ = (set(some) for some in zip(*paused, strict=True))
    assert after_cuts >= {*range(1, len(cut))} and after_splits >= {*range(1, split.count(6))}
    assert after_units >= {*range(13, 91)}
    # While the first units are clustered, behind each cluster that is made of them.
    at_first = {clusters for *_, units, clusters in paused if units < 12}
    assert at_first >= {*range(1, max(at_first))} and len(at_first) > 3


def test_what_is_on_the_device_is_split_at_once(stream: Planted) -> None:
    tree = tree_of()
    feed(tree, stream, 5, window=60)
    assert tree.counters["eager_splits"] > 0 and tree.counters["deferred"] == 0
    retrieving = tree_of()
    for first in range(0, 60, 5):
        look, key, value = (rows[: first + 5] for rows in stream)
        # Each pass retrieves all that came before it.
        feed(retrieving, (look, key, value), 5, window=5, retrieved=torch.arange(first).expand(2, -1))
    assert partition(retrieving) == partition(tree)
    # Of the pass that brings a unit alone.
    feed(one := tree_of(), stream, 5, window=5)
    assert one.counters["deferred"] > 0


@pytest.mark.parametrize("rare", [(3, 12, 25), (1, 10, 19, 28)])
def test_what_is_seen_once_at_the_start_has_a_cluster_of_its_own(rare: tuple[int, ...]) -> None:
    """K-means of the first units leaves rare scenes together, whose summary token would be the mean of strangers."""
    scenes = [0] * 16 + [1] * 24
    for kind, at in enumerate(rare, start=2):
        scenes[at] = kind
    tree = tree_of(init=32, visual=8, smallest=4, largest=32)
    feed(tree, plant(scenes, noise=0.05), 8)
    audit(tree)
    assert {frozenset([unit]) for unit in rare} <= partition(tree)[1]


def pure(tree: ClusterHierarchy, scenes: list[int]) -> int:
    """Units that are of the scene of most of their visual cluster."""
    truth = torch.tensor(scenes)
    return sum(int(torch.bincount(truth[list(members)]).max()) for members in partition(tree)[1])


def test_scenes_are_found() -> None:
    scenes = runs(80, seed=3, kinds=5)
    tree = tree_of(visual=8, largest=32)
    feed(tree, plant(scenes, noise=0.15, seed=3), 8)
    assert pure(tree, scenes) == len(scenes)


def test_identical_units_are_clustered_without_end() -> None:
    still = tuple(torch.cat([rows[:30], rows[30:31].expand(40, *rows.shape[1:])]) for rows in plant(SCENES))
    tree = tree_of()
    feed(tree, still, 6)
    audit(tree)
    assert int(tree.semantic.size.max()) <= tree.rules.largest
    # Equal units are halved where they are too many, not split off one by one.
    tree = tree_of()
    feed(tree, tuple(rows[:1].expand(200, *rows.shape[1:]) for rows in plant(SCENES)), 6)
    audit(tree)
    most = tree.bounds[0].largest
    assert int(tree.visual.cluster_counts()) <= tree.rules.init // tree.rules.visual + 2 * 200 // most


def test_a_stream_that_begins_with_one_scene_still_tells_scenes_apart() -> None:
    scenes = [0] * 14 + [1 + scene for scene in runs(60, seed=3, kinds=5)]
    found = {}
    for lift in (0.0, 4.0):
        tree = tree_of(visual=8, largest=32, lift=lift)
        feed(tree, plant(scenes, noise=0.15, seed=3), 8)
        found[lift] = pure(tree, scenes)
    assert found[4.0] == len(scenes) > found[0.0] + 20


def test_what_the_type_rounds_away_is_no_scene() -> None:
    """A still camera, whose frames differ from the 64th on by a rounding error each, then moves."""
    tree = ClusterHierarchy(Params(**SMALL), UnitMeans(2, 96, 32, torch.bfloat16, torch.device("cpu")))
    g = torch.Generator().manual_seed(0)
    still, other = torch.randn(2, 96, generator=g)
    looks = still * (1 + 2**-9 * torch.randint(-1, 2, (400, 96), generator=g))
    looks[:64], looks[300:] = still, other
    keys = torch.ones(400, 2, 32, dtype=torch.bfloat16)
    feed(tree, (looks, keys, keys), 40)
    scenes = tree.visual.owner[0, :400]
    assert tree.counters["scenes"] == 1 and not set(scenes[:300].tolist()) & set(scenes[300:].tolist())


@pytest.fixture
def three_threads() -> object:
    """The clustering takes one, and leaves the others to whoever calls it."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_one_thread_inside_and_as_many_as_before_after(three_threads: object) -> None:
    seen: list[int] = []
    with pytest.raises(KeyError), single_cpu_thread():
        with single_cpu_thread():
            seen.append(torch.get_num_threads())
        seen.append(torch.get_num_threads())
        raise KeyError
    assert [*seen, torch.get_num_threads()] == [1, 1, 3]
    begun, done, seen = threading.Event(), threading.Event(), list[int]()

    def other() -> None:
        seen.append(torch.get_num_threads())
        begun.set()
        done.wait()
        seen.append(torch.get_num_threads())

    thread = threading.Thread(target=other)
    thread.start()
    begun.wait()
    with single_cpu_thread():
        done.set()
        thread.join()
    assert seen == [3, 3]


def test_inserting_and_splitting_take_one_thread(three_threads: object, monkeypatch) -> None:
    placed, refined = (
        heard(monkeypatch, ClusterHierarchy, name, lambda *_: torch.get_num_threads())
        for name in ("_place_look", "_refine")
    )
    tree = tree_of(buffer=64)
    feed(tree, plant(runs(40)), 5)
    assert {*placed, *refined} == {1} and torch.get_num_threads() == 3
    refined.clear()
    tree.split_deferred(*(tree.semantic.size > 0).nonzero(as_tuple=True))
    assert {*refined} == {1} and torch.get_num_threads() == 3


class Machine(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.tree = tree_of()
        self.scenes: list[int] = []
        self.mark: object = None

    @rule(scene=st.integers(0, 7), count=st.integers(1, 6), chunk=st.integers(1, 4), window=st.integers(1, 6))
    def insert(self, scene: int, count: int, chunk: int, window: int) -> None:
        # What is drawn must not depend on how many units there are, so that unit i stays the same.
        self.scenes += [scene] * count
        data = plant([*self.scenes, *[0] * (200 - len(self.scenes))])
        n = len(self.scenes)
        feed(self.tree, (data[0][:n], data[1][:n], data[2][:n]), chunk, window)

    @precondition(lambda self: self.tree.has_clusters)
    @rule(seed=st.integers(0, 50), layer=st.integers(0, 1), budget=st.integers(1, 12))
    def retrieve(self, seed: int, layer: int, budget: int) -> None:
        index = index_of(self.tree)
        query = torch.randn(WIDTH, generator=torch.Generator().manual_seed(seed))
        found = index.search(layer, query, budget, self.tree.units)
        clusters = found.picked.nonzero()[:, 0]
        lazy = self.tree.semantic.lazy[layer, clusters].sum()
        before = self.tree.counters["resolved"]
        self.tree.split_deferred(torch.full_like(clusters, layer), clusters)
        assert self.tree.counters["resolved"] == before + int(lazy)

    @rule()
    def checkpoint(self) -> None:
        own = partition(self.tree) if self.tree.has_clusters else None
        self.mark = self.tree.checkpoint(), len(self.scenes), own

    @precondition(lambda self: self.mark is not None)
    @rule()
    def restore(self) -> None:
        mark, units, before = self.mark  # type: ignore[misc]
        self.tree.restore(mark)
        self.scenes = self.scenes[:units]
        assert self.tree.has_clusters == (before is not None)
        if before is not None:
            assert partition(self.tree) == before
        self.mark = None

    @rule()
    def reload(self) -> None:
        tree = tree_of()
        with TemporaryDirectory() as folder:
            self.tree.save(Path(folder), {"absent": []})
            means = self.tree.means
            rows = {"look": means.visuals, "key": means.keys, "value": means.values}
            tree.load(Path(folder), len(self.scenes), rows)
        self.tree, self.mark = tree, None

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "tree"):
            assert self.tree.units == len(self.scenes)
            audit(self.tree)


TestHierarchy = Machine.TestCase
TestHierarchy.settings = settings(stateful_step_count=20)


def points(n: int, seed: int, d: int = 5) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, d, generator=g, dtype=torch.float64)


@given(a=st.integers(1, 20), b=st.integers(1, 20), seed=st.integers(0, 99))
def test_merging_equals_all_at_once_and_conserves_scatter(a: int, b: int, seed: int) -> None:
    x = points(a + b, seed)
    left, right = (
        mean_variance_and_size(rows, torch.ones(len(rows), dtype=torch.bool)) for rows in (x[:a], x[a:])
    )
    c, s2 = union(*left, *right)
    whole_c, whole_s2, n = mean_variance_and_size(x, torch.ones(a + b, dtype=torch.bool))
    assert torch.allclose(c, whole_c, atol=1e-12) and torch.allclose(s2, whole_s2, atol=1e-12)
    between = a * b / (a + b) * (left[0] - right[0]).square().sum()
    within = pooled_variance(left[1], left[2], right[1], right[2]) * n
    assert torch.allclose(within + between, whole_s2 * n, atol=1e-10)


def test_points_of_unit_length_need_only_their_centroid() -> None:
    x = unit_length(points(12, 0))
    c, s2, _ = mean_variance_and_size(x, torch.ones(12, dtype=torch.bool))
    assert torch.allclose(s2, 1 - c.square().sum(), atol=1e-12)
    none = mean_variance_and_size(x, torch.zeros(12, dtype=torch.bool))
    assert [float(part.abs().sum()) for part in none] == [0, 0, 0]


def test_the_threshold_moves_from_one_bound_to_the_other() -> None:
    small, large = torch.tensor([0.1, 0.2]), torch.tensor([0.3, 0.6])
    layer, n = torch.tensor([0, 1, 1]), torch.tensor([1, 1, 9])
    grown = 1 - math.exp(-8 / 8)
    found = SplitBounds(small, large, 8.0, 4, 32).threshold(layer.numpy(), n.numpy())
    assert found.tolist() == pytest.approx([0.1, 0.2, 0.2 + 0.4 * grown])


def test_few_units_are_split_where_they_are_strangers() -> None:
    small = torch.tensor([0.1])
    layer, n = torch.zeros(4, dtype=torch.long), torch.tensor([2, 2, 1, 4])
    s2 = torch.tensor([0.19, 0.21, 0, 0.11])
    rules = Params(visual=1, semantic=1, init=2, buffer=0)
    for visual, found in ((True, [False, True, False, True]), (False, [False, False, False, True])):
        bounds = rules.make_split_bounds(small, small, visual)
        told = bounds.exceeds_threshold(*(x.numpy() for x in (layer, n, s2, torch.zeros(4))))
        assert told.tolist() == found


def test_the_threshold_is_calibrated_layer_by_layer() -> None:
    s2 = torch.tensor([[0.1, 0.4], [0.0, 0.0], [0.9, 0.9]])
    n = torch.tensor([[3, 1], [2, 2], [4, 4]])
    level = ClusterTable(3, 1, torch.float32)
    level.variance, level.size = s2, n
    level._count_ids()
    floors = torch.tensor([FLOOR, 0.01, FLOOR])
    made = Params(visual=1, semantic=1, init=2, buffer=0).calibrate(level, False, floors)
    assert made.small.tolist() == pytest.approx([1.25 * 0.175, 0.01, CAP])
    assert made.large.tolist() == pytest.approx([2 * 0.175, 0.01, CAP])
