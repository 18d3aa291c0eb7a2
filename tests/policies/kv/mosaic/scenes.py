"""Planted streams: units that belong to scenes, and a check of a hierarchy against everything recomputed."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from mmaccel.policies.kv.mosaic.hierarchy import Hierarchy
from mmaccel.policies.kv.mosaic.policy import Mosaic
from mmaccel.policies.kv.mosaic.statistics import summary
from mmaccel.policies.kv.mosaic.summaries import Summaries

LOOK, WIDTH = 6, 8

SMALL: dict[str, int] = dict(init=12, visual=4, semantic=2, smallest=3, largest=6, buffer=4, alpha=2)


def plant(
    scenes: list[int], layers: int = 2, parts: int = 1, noise: float = 0.3, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Looks [n, E] and keys, values [n * T, L, d] in float64 of units of the given scenes; unit i is always the same."""
    g = torch.Generator().manual_seed(seed)
    kinds = 16
    look = torch.randn(kinds, LOOK, generator=g, dtype=torch.float64)
    key = torch.randn(kinds, layers, WIDTH, generator=g, dtype=torch.float64)
    noises = torch.randn(len(scenes), LOOK, generator=g, dtype=torch.float64)
    own = torch.Generator().manual_seed(seed + 1)
    shake = torch.randn(len(scenes) * parts, layers, WIDTH, generator=own, dtype=torch.float64)
    at = torch.tensor(scenes, dtype=torch.long)
    keys = key[at].repeat_interleave(parts, 0) + noise * shake
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


def tree_of(layers: int = 2, parts: int = 1, lift: float = 0.5, **rules: object) -> Hierarchy:
    summaries = Summaries(layers, LOOK, WIDTH, parts, torch.float64, lift)
    chosen = replace(Mosaic().rules(SMALL["init"]), **{**SMALL, **rules})  # type: ignore[arg-type]
    return Hierarchy(chosen, summaries, layers, LOOK, WIDTH)


def feed(
    tree: Hierarchy, data: tuple[Tensor, Tensor, Tensor], chunk: int, window: int = 4, **how: object
) -> None:
    """Insert units in chunks."""
    look, key, value = data
    parts = tree.summaries.parts
    for a in range(tree.summaries.units, len(look), chunk):
        b = min(a + chunk, len(look))
        tree.summaries.append(look[a:b], key[a * parts : b * parts], value[a * parts : b * parts])
        tree.insert(window, **how)  # type: ignore[arg-type]


def partition(tree: Hierarchy) -> tuple[list[list[frozenset[int]]], frozenset[frozenset[int]]]:
    """The semantic clusters of each layer and the visual ones, as sets without their numbers."""

    def sets(owner: Tensor) -> frozenset[frozenset[int]]:
        held: dict[int, set[int]] = {}
        for entry, one in enumerate(owner.tolist()):
            held.setdefault(one, set()).add(entry)
        return frozenset(frozenset(members) for members in held.values())

    entries = tree.units * tree.summaries.parts
    semantic = [sorted(sets(row[:entries]), key=min) for row in tree.semantic.owner]
    return semantic, sets(tree.visual.owner[0, : tree.units])


def audit(tree: Hierarchy, tolerance: float = 1e-9) -> None:
    """Raise unless the hierarchy is what its invariants say, with everything recomputed from the units."""
    if not tree.started:
        return
    parts = tree.summaries.parts
    for level, count, points in (
        (tree.visual, tree.units, tree.summaries.look_points),
        (tree.semantic, tree.units * parts, tree.summaries.key_points),
    ):
        bounds = tree.bounds[level is tree.semantic]
        owner = level.owner[:, :count]
        assert (owner >= 0).all(), "an entry is in no cluster"
        assert (level.owner[:, count:] < 0).all(), "an entry that is not there has a cluster"
        assert (level.size.sum(1) == count).all()
        layer, one = (level.size > 0).nonzero(as_tuple=True)
        n, members = level.size[layer, one], level.contents(layer, one)
        present = torch.arange(members.shape[1]) < n[:, None]
        assert torch.equal(present, members >= 0)
        assert (level.members[layer, one, members.shape[1] :] == -1).all()
        held = level.owner[layer[:, None], members.clamp_min(0)]
        assert torch.equal(held[present], one[:, None].expand_as(held)[present])
        c, s2, _ = summary(points(layer, members), present)
        torch.testing.assert_close(level.centroid[layer, one], c, atol=tolerance, rtol=0)
        torch.testing.assert_close(level.variance[layer, one], s2, atol=tolerance, rtol=0)
        torch.testing.assert_close(s2, 1 - c.square().sum(1), atol=tolerance, rtol=0)
        too = bounds.exceeded(layer, n, s2 - tolerance, level.limit[layer, one])
        assert not bool((too & (level.home[layer, one] < 0)).any()), "a cluster should have been split"
        x = points(torch.arange(level.layers), torch.arange(count).expand(level.layers, -1))
        mean = x.mean(1)
        parts_of = n * s2 + n * (c - mean[layer]).square().sum(1)
        scatter = torch.zeros(level.layers, dtype=x.dtype).index_add(0, layer, parts_of)
        torch.testing.assert_close(scatter, (x - mean[:, None]).square().sum((1, 2)), atol=1e-7, rtol=0)
    _audit_nest(tree)
    _audit_buffers(tree)


def _audit_nest(tree: Hierarchy) -> None:
    parts, level = tree.summaries.parts, tree.semantic
    for layer in range(tree.layers):
        entries = torch.arange(tree.units * parts)
        above = level.parent[layer, level.owner[layer, entries]]
        assert torch.equal(above, tree.visual.owner[0, entries // parts]), "a cluster lies in two visual ones"
        for one in tree.visual.size[0].nonzero()[:, 0].tolist():
            told = tree.nest.children(one)[layer]
            assert (
                told[told >= 0].tolist()
                == ((level.parent[layer] == one) & (level.size[layer] > 0)).nonzero()[:, 0].tolist()
            )


def _audit_buffers(tree: Hierarchy) -> None:
    level = tree.semantic
    for layer, ids in enumerate(tree.buffer):
        assert sorted(ids) == (level.home[layer] >= 0).nonzero()[:, 0].tolist()
        homes = level.home[layer, ids]
        assert (level.size[layer, homes] > 0).all() and (level.home[layer, homes] < 0).all()
        assert torch.equal(level.parent[layer, homes], level.parent[layer, ids])
        assert set(homes.tolist()) == set(level.lazy[layer].nonzero()[:, 0].tolist())
        assert int(level.size[layer, ids].sum()) <= tree.rules.buffer
