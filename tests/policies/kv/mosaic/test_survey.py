"""What the device knows of a stream's clusters is brought up to date by what has changed: it is what counting anew finds."""

from __future__ import annotations

import random

import pytest
from torch import Tensor

from mmaccel.policies.kv._index import Index
from mmaccel.policies.kv.mosaic import ClusterIndex
from mmaccel.policies.kv.mosaic.maintain import Hierarchy
from tests.policies.kv.mosaic.scenes import feed, index_of, plant, runs, tree_of


def check(index: ClusterIndex, tree: Hierarchy, end: int) -> None:
    """All that searches among the entries below `end` are told, from the definition."""
    there = index.prepare(end)
    present = [e for e in range(end) if not (e < len(index.absent) and index.absent[e])]
    assert there.entries.tolist() == present
    lists, count = there.lists, there.lists.size.shape[1]
    whole = [tree.visual.owner[0, e].item() for e in present] if tree.started else []
    if there.visual is not None:
        assert [whole.count(v) for v in range(len(there.visual))] == there.visual.tolist()
    for layer in range(tree.layers):
        of = {e: int(tree.semantic.owner[layer, e]) if tree.started else e for e in present}
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
        assert (there.parent is not None) == tree.started == there.ready
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
        if tree.started and draw.random() < 0.5:
            layer = draw.randrange(tree.layers)
            tree.touch(layer, (tree.semantic.size[layer] > 0).nonzero()[:, 0])
        index.refresh()
        have = tree.units
        index.forget(draw.sample(range(have), draw.randint(0, 3)))
        check(index, tree, draw.randint(have // 2, have))
        if broken:
            tree.restore(mark)
            index.cut(tree.units)
            index.refresh()
            check(index, tree, tree.units)
    index.forget(range(tree.units - 30))
    check(index, tree, tree.units - 4)
    tree.clear()
    index.refresh()
    index.cut(0)
    come(40)
    index.refresh()
    check(index, tree, 30)


def test_of_entries_a_survey_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for those that are forgotten, there is a word for each cluster: a long stream has many more entries."""
    told: list[int] = []
    plain = Index._sent

    def counted(self: Index, x: Tensor, like: Tensor | None = None) -> Tensor:
        told.append(x.shape[-1])
        return plain(self, x, like)

    monkeypatch.setattr(Index, "_sent", counted)
    tree, data = tree_of(), plant(runs(400))
    # A device of which nothing can be read back.
    index = index_of(tree, "meta", fresh=True)
    feed(tree, data, 5)
    index.refresh()
    told.clear()
    index.prepare(396)
    assert tree.started and 0 < max(told) <= tree.semantic.size.shape[1] < 396
