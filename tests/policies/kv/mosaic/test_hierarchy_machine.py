"""The hierarchy under any sequence of inserts, splits, merges and retrievals: all statistics recomputed."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.policies.kv.mosaic.scenes import WIDTH, audit, feed, index_of, partition, plant, tree_of


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
