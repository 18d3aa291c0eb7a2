"""The hierarchy: however a stream is cut, under any sequence of calls, its clusters are the same and keep their bounds."""

from __future__ import annotations

import threading
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mmaccel.policies.kv.mosaic.clusters import one_thread
from mmaccel.policies.kv.mosaic.maintain import Hierarchy
from tests.policies.kv.mosaic.scenes import WIDTH, audit, feed, index_of, partition, plant, runs, tree_of
from tests.spies import heard

SCENES = runs(60)


@pytest.fixture(scope="module")
def stream() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return plant(SCENES)


@pytest.fixture(scope="module")
def grown(stream: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> Hierarchy:
    tree = tree_of()
    feed(tree, stream, 5)
    return tree


def test_a_stream_splits_defers_and_flushes(grown: Hierarchy) -> None:
    counters = grown.counters
    assert min(counters[name] for name in ("visual_splits", "deferred", "singletons", "flushed", "cuts")) > 0
    audit(grown)


@pytest.mark.parametrize("chunk", [1, 7, 60])
def test_clusters_do_not_depend_on_the_cut(
    chunk: int, stream: tuple[torch.Tensor, torch.Tensor, torch.Tensor], grown: Hierarchy
) -> None:
    tree = tree_of()
    feed(tree, stream, chunk)
    assert partition(tree) == partition(grown)
    assert tree.counters == grown.counters


def test_touching_everything_makes_all_owed_splits(
    stream: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    tree = tree_of(buffer=64)
    feed(tree, stream, 5)
    assert any(tree.buffer)
    for layer in range(tree.layers):
        tree.touch(layer, (tree.semantic.size[layer] > 0).nonzero()[:, 0])
    audit(tree)
    assert not any(tree.buffer) and not bool(tree.semantic.lazy.any())
    assert tree.counters["deferred_splits"] > 0 and tree.counters["resolved"] > 0


def test_what_is_on_the_device_is_split_at_once(
    stream: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
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
    """K-means of the first units has fewer clusters than scenes and leaves rare ones together, whose summary token would be
    the mean of strangers."""
    scenes = [0] * 16 + [1] * 24
    for kind, unit in enumerate(rare, start=2):
        scenes[unit] = kind
    tree = tree_of(init=32, visual=8, smallest=4, largest=32)
    feed(tree, plant(scenes, noise=0.05), 8)
    audit(tree)
    assert {frozenset([unit]) for unit in rare} <= partition(tree)[1]


def test_scenes_are_found() -> None:
    scenes = runs(80, seed=3, kinds=5)
    tree = tree_of(visual=8, largest=32)
    feed(tree, plant(scenes, noise=0.15, seed=3), 8)
    truth = torch.tensor(scenes)
    pure = sum(int(torch.bincount(truth[list(members)]).max()) for members in partition(tree)[1])
    assert pure == len(scenes)


def test_identical_units_are_clustered_without_end() -> None:
    still = tuple(torch.cat([rows[:30], rows[30:31].expand(40, *rows.shape[1:])]) for rows in plant(SCENES))
    tree = tree_of()
    feed(tree, still, 6)
    audit(tree)
    assert int(tree.semantic.size.max()) <= tree.rules.largest


def test_a_visual_split_parts_buffered_clusters_from_their_homes() -> None:
    tree = tree_of(buffer=64)
    data = plant(runs(60, seed=4, kinds=12), seed=4)
    for end in range(12, 61, 6):
        feed(tree, tuple(rows[:end] for rows in data), 6, window=1)
        audit(tree)
    assert tree.counters["visual_splits"] and tree.counters["singletons"]


def test_a_stream_that_begins_with_one_scene_still_tells_scenes_apart() -> None:
    scenes = [0] * 14 + [1 + scene for scene in runs(60, seed=3, kinds=5)]
    truth = torch.tensor(scenes)
    pure = {}
    for lift in (0.0, 4.0):
        tree = tree_of(visual=8, largest=32, lift=lift)
        feed(tree, plant(scenes, noise=0.15, seed=3), 8)
        found = partition(tree)[1]
        pure[lift] = sum(int(torch.bincount(truth[list(members)]).max()) for members in found)
    assert pure[4.0] == len(scenes) > pure[0.0] + 20


@pytest.fixture
def three_threads() -> object:
    """The clustering takes one, and leaves the others to whoever calls it."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_one_thread_inside_and_as_many_as_before_after(three_threads: object) -> None:
    seen: list[int] = []
    with pytest.raises(KeyError), one_thread():
        with one_thread():
            seen.append(torch.get_num_threads())
        seen.append(torch.get_num_threads())
        raise KeyError
    assert [*seen, torch.get_num_threads()] == [1, 1, 3]


def test_another_thread_keeps_its_own(three_threads: object) -> None:
    begun, done, seen = threading.Event(), threading.Event(), list[int]()

    def other() -> None:
        seen.append(torch.get_num_threads())
        begun.set()
        done.wait()
        seen.append(torch.get_num_threads())

    thread = threading.Thread(target=other)
    thread.start()
    begun.wait()
    with one_thread():
        done.set()
        thread.join()
    assert seen == [3, 3]


def test_inserting_and_splitting_take_one_thread(
    three_threads: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    placed, refined = (
        heard(monkeypatch, Hierarchy, name, lambda *_: torch.get_num_threads())
        for name in ("_place_look", "_refine")
    )
    tree = tree_of(buffer=64)
    feed(tree, plant(runs(40)), 5)
    assert {*placed, *refined} == {1} and torch.get_num_threads() == 3
    refined.clear()
    tree.touch(0, (tree.semantic.size[0] > 0).nonzero()[:, 0])
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

    @precondition(lambda self: self.tree.started)
    @rule(seed=st.integers(0, 50), layer=st.integers(0, 1), budget=st.integers(1, 12))
    def retrieve(self, seed: int, layer: int, budget: int) -> None:
        index = index_of(self.tree)
        query = torch.randn(WIDTH, generator=torch.Generator().manual_seed(seed))
        found = index.search(layer, query, budget, self.tree.units)
        clusters = found.picked.nonzero()[:, 0]
        lazy = self.tree.semantic.lazy[layer, clusters].sum()
        before = self.tree.counters["resolved"]
        self.tree.touch(layer, clusters)
        assert self.tree.counters["resolved"] == before + int(lazy)

    @rule()
    def checkpoint(self) -> None:
        self.mark = (
            self.tree.checkpoint(),
            len(self.scenes),
            partition(self.tree) if self.tree.started else None,
        )

    @precondition(lambda self: self.mark is not None)
    @rule()
    def restore(self) -> None:
        mark, units, before = self.mark  # type: ignore[misc]
        self.tree.restore(mark)
        self.scenes = self.scenes[:units]
        assert self.tree.started == (before is not None)
        if before is not None:
            assert partition(self.tree) == before
        self.mark = None

    @rule()
    def reload(self) -> None:
        tree = tree_of()
        with TemporaryDirectory() as folder:
            self.tree.save(Path(folder), {"absent": []})
            assert tree.load(Path(folder), len(self.scenes)) == []
        self.tree, self.mark = tree, None

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "tree"):
            assert self.tree.units == len(self.scenes)
            audit(self.tree)


TestHierarchy = Machine.TestCase
TestHierarchy.settings = settings(stateful_step_count=20)
