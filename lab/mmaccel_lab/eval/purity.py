"""How well the clusters of a memory follow what a world shows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mmaccel_lab.world import World


@dataclass(frozen=True)
class Clustering:
    """The clusters of one level of a memory against the truth: a unit shows a scene, or a card, which is a thing of its own.

    clusters  of the level, mean over the layers
    purity    of the units, the share that shows what most of their cluster shows
    chance    the purity of as many clusters of the same sizes whose units are drawn at random
    rand      the adjusted Rand index: 1 where clusters are the things shown, 0 where they have nothing to do with them
    cards     of the cards, the share that lies in a cluster without anything else
    """

    clusters: float
    purity: float
    chance: float
    rand: float
    cards: float


def shown(world: World, frames_per_unit: int) -> Tensor:
    """[units] what each unit of `frames_per_unit` frames shows: a number for each scene, then one for each card."""
    scenes = list(dict.fromkeys(segment.scene for segment in world.segments))
    label = torch.tensor(
        [scenes.index(one.scene) for one in world.segments for _ in range(one.start, one.stop)]
    )
    for number, card in enumerate(world.cards):
        label[card.frame] = len(scenes) + number
    units = world.frames // frames_per_unit
    return label[: units * frames_per_unit].view(units, frames_per_unit).amax(1)


def clusterings(world: World, clusters: Mapping[str, Tensor], frames_per_unit: int) -> dict[str, Clustering]:
    """Each level of `clusters` ([L or 1, N] by level) against the truth, means over the layers."""
    label = shown(world, frames_per_unit)
    first_card = len({segment.scene for segment in world.segments})
    shuffled = torch.randperm(len(label), generator=torch.Generator().manual_seed(world.seed))
    found = {}
    for level, owner in clusters.items():
        truth = label.repeat_interleave(owner.shape[1] // len(label))
        mixed = label[shuffled].repeat_interleave(owner.shape[1] // len(label))
        counts = [contingency(one, truth) for one in owner]
        layers = len(counts)
        held = [count[count[:, first_card:].sum(1) > 0] for count in counts]
        alone = [float((one.gt(0).sum(1) == 1).sum()) for one in held]
        cards = len(truth[truth >= first_card].unique())
        found[level] = Clustering(
            clusters=sum(len(count) for count in counts) / layers,
            purity=sum(map(purity, counts)) / layers,
            chance=sum(purity(contingency(one, mixed)) for one in owner) / layers,
            rand=sum(map(adjusted_rand, counts)) / layers,
            cards=sum(alone) / layers / max(1, cards),
        )
    return found


def contingency(cluster: Tensor, truth: Tensor) -> Tensor:
    """[clusters, labels] how many entries are in each cluster and show each thing; `cluster`, `truth` [N]."""
    ids, row = cluster.unique(return_inverse=True)
    width = int(truth.max()) + 1
    return torch.bincount(row * width + truth, minlength=len(ids) * width).view(len(ids), width)


def purity(counts: Tensor) -> float:
    """Of all entries, the share that shows what most of their cluster shows."""
    return float(counts.amax(1).sum() / counts.sum())


def adjusted_rand(counts: Tensor) -> float:
    """The Rand index adjusted for chance (Hubert and Arabie, 1985)."""

    def pairs(n: Tensor) -> float:
        return float((n * (n - 1)).sum()) / 2

    both, ours, theirs = pairs(counts), pairs(counts.sum(1)), pairs(counts.sum(0))
    expected = ours * theirs / max(1.0, pairs(counts.sum()[None]))
    most = (ours + theirs) / 2
    return 1.0 if most == expected else (both - expected) / (most - expected)
