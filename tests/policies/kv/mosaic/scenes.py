"""Planted streams: units that belong to scenes, and a check of a hierarchy against everything recomputed."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from mmaccel.core.adapter import Geometry
from mmaccel.policies.kv.mosaic import ClusterIndex, Clusters
from mmaccel.policies.kv.mosaic.clusters import mean_variance_and_size
from mmaccel.policies.kv.mosaic.maintain import ClusterHierarchy
from mmaccel.policies.kv.mosaic.split import Params, UnitMeans

LOOK, WIDTH = 6, 8

SMALL: dict[str, Any] = dict(init=12, visual=4, semantic=2, smallest=3, largest=6, buffer=4, alpha=2)


def plant(
    scenes: list[int], layers: int = 2, noise: float = 0.3, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Looks [n, E] and keys, values [n, L, d] in float64 of units of the given scenes; unit i is always the same."""
    g = torch.Generator().manual_seed(seed)
    kinds = 16
    look = torch.randn(kinds, LOOK, generator=g, dtype=torch.float64)
    key = torch.randn(kinds, layers, WIDTH, generator=g, dtype=torch.float64)
    noises = torch.randn(len(scenes), LOOK, generator=g, dtype=torch.float64)
    own = torch.Generator().manual_seed(seed + 1)
    shake = torch.randn(len(scenes), layers, WIDTH, generator=own, dtype=torch.float64)
    at = torch.tensor(scenes, dtype=torch.long)
    keys = key[at] + noise * shake
    # What all keys have in common, as a model's bias gives it.
    return look[at] + noise * noises, keys + 5.0, keys.flip(0) * 0.5


def runs(units: int, seed: int = 0, kinds: int = 7, hold: int = 7) -> list[int]:
    """Scenes that hold for some units, cut and return."""
    g = torch.Generator().manual_seed(seed)
    found: list[int] = []
    while len(found) < units:
        scene = int(torch.randint(kinds, (1,), generator=g))
        found += [scene] * int(torch.randint(1, hold + 1, (1,), generator=g))
    return found[:units]


def tree_of(layers: int = 2, lift: float = 0.5, **rules: Any) -> ClusterHierarchy:
    means = UnitMeans(layers, LOOK, WIDTH, torch.float64, torch.device("cpu"), lift)
    return ClusterHierarchy(Params(**{**SMALL, **rules}), means)


def index_of(tree: ClusterHierarchy, device: str = "cpu", fresh: bool = False, **how: Any) -> ClusterIndex:
    """The index of a tree, brought up to date, or `fresh`."""
    for level in (tree.semantic, tree.visual):
        level.dirty = level.size > 0
    geometry = Geometry(layers=tree.layers, heads=1, kv_heads=1, head_dim=WIDTH, hidden=LOOK, vocab=1)
    stream: Any = SimpleNamespace(tokens_per_unit=1, units=int, dtype=torch.float32)
    index = ClusterIndex(Clusters(**how), stream, geometry, torch.device(device), 4, True)
    index.tree = tree
    if not fresh:
        index.refresh()
    return index


def feed(
    tree: ClusterHierarchy,
    data: tuple[Tensor, Tensor, Tensor],
    chunk: int,
    window: int = 4,
    retrieved: Tensor | None = None,
) -> None:
    """Insert units in chunks."""
    for a in range(tree.means.units, len(data[0]), chunk):
        tree.means.append(*(rows[a : a + chunk] for rows in data))
        tree.assign_units(window, retrieved)


def partition(tree: ClusterHierarchy) -> tuple[list[list[frozenset[int]]], frozenset[frozenset[int]]]:
    """The semantic clusters of each layer and the visual ones, as sets without their numbers."""

    def sets(owner: Tensor) -> frozenset[frozenset[int]]:
        held: dict[int, set[int]] = {}
        for entry, one in enumerate(owner.tolist()):
            held.setdefault(one, set()).add(entry)
        return frozenset(frozenset(members) for members in held.values())

    semantic = [sorted(sets(row[: tree.units]), key=min) for row in tree.semantic.owner]
    return semantic, sets(tree.visual.owner[0, : tree.units])


def audit(tree: ClusterHierarchy, tolerance: float = 1e-9) -> None:
    """Raise unless the hierarchy is what its invariants say, with everything recomputed from the units."""
    if not tree.has_clusters:
        return
    count = tree.units
    for level, points in ((tree.visual, tree.means.centred_looks), (tree.semantic, tree.means.centred_keys)):
        bounds = tree.bounds[level is tree.semantic]
        owner = level.owner[:, :count]
        assert (owner >= 0).all(), "a unit is in no cluster"
        assert (level.owner[:, count:] < 0).all(), "a unit that is not there has a cluster"
        assert (level.size.sum(1) == count).all()
        layer, one = (level.size > 0).nonzero(as_tuple=True)
        n, members = level.size[layer, one], level.members_of(layer, one)
        present = torch.arange(members.shape[1]) < n[:, None]
        assert torch.equal(present, members >= 0)
        assert (level.members[layer, one, members.shape[1] :] == -1).all()
        held = level.owner[layer[:, None], members.clamp_min(0)]
        assert torch.equal(held[present], one[:, None].expand_as(held)[present])
        c, s2, _ = mean_variance_and_size(points(layer, members), present)
        torch.testing.assert_close(level.centroid[layer, one], c, atol=tolerance, rtol=0)
        torch.testing.assert_close(level.variance[layer, one], s2, atol=tolerance, rtol=0)
        torch.testing.assert_close(s2, 1 - c.square().sum(1), atol=tolerance, rtol=0)
        facts = (row.numpy() for row in (layer, n, s2 - tolerance, level.limit[layer, one]))
        too = torch.from_numpy(bounds.exceeds_threshold(*facts))
        assert not bool((too & (level.home[layer, one] < 0)).any()), "a cluster should have been split"
        x = points(torch.arange(level.layers), torch.arange(count).expand(level.layers, -1))
        mean = x.mean(1)
        parts_of = n * s2 + n * (c - mean[layer]).square().sum(1)
        scatter = torch.zeros(level.layers, dtype=x.dtype).index_add(0, layer, parts_of)
        torch.testing.assert_close(scatter, (x - mean[:, None]).square().sum((1, 2)), atol=1e-7, rtol=0)
    _audit_nest(tree)
    _audit_buffers(tree)


def _audit_nest(tree: ClusterHierarchy) -> None:
    level, units = tree.semantic, torch.arange(tree.units)
    for layer in range(tree.layers):
        above = level.parent[layer, level.owner[layer, units]]
        assert torch.equal(above, tree.visual.owner[0, units]), "a cluster lies in two visual ones"
        for one in tree.visual.size[0].nonzero()[:, 0].tolist():
            told = level.children(one)[layer]
            assert (
                told[told >= 0].tolist()
                == ((level.parent[layer] == one) & (level.size[layer] > 0)).nonzero()[:, 0].tolist()
            )


def _audit_buffers(tree: ClusterHierarchy) -> None:
    level = tree.semantic
    for layer, ids in enumerate(tree.buffer):
        assert sorted(ids) == (level.home[layer] >= 0).nonzero()[:, 0].tolist()
        homes = level.home[layer, ids]
        assert (level.size[layer, homes] > 0).all() and (level.home[layer, homes] < 0).all()
        assert torch.equal(level.parent[layer, homes], level.parent[layer, ids])
        assert set(homes.tolist()) == set(level.lazy[layer].nonzero()[:, 0].tolist())
        assert int(level.size[layer, ids].sum()) <= tree.rules.buffer
