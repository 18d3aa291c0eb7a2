"""Which cluster is nearest to each of many points, while the clusters move under way."""

from __future__ import annotations

import torch
from torch import Tensor

from mmaccel.policies.kv.mosaic.level import Level


class Matching:
    """The cosines of the points `x` [n, d] with the centroids of a level of one layer.

    batched   one product for all points at the start, and for the points to come one for each cluster that has changed;
              otherwise each point is compared when its turn comes
    """

    def __init__(self, level: Level, x: Tensor, batched: bool) -> None:
        self._level, self._x, self._batched = level, x, batched
        if batched:
            self._cosine = self._against(x, torch.arange(level.used))

    def nearest(self, row: int) -> int:
        """The cluster of the largest cosine with point `row`, of equal ones the lowest."""
        if self._batched:
            return int(self._cosine[row].argmax())
        return int(self._against(self._x[row : row + 1], torch.arange(self._level.used))[0].argmax())

    def renew(self, clusters: Tensor, row: int) -> None:
        """`clusters` [b], some of them new, have changed; points after `row` are still to come."""
        if not self._batched:
            return
        more = self._level.used - self._cosine.shape[1]
        if more > 0:
            grown = self._cosine.new_full((self._x.shape[0], more), -torch.inf)
            self._cosine = torch.cat([self._cosine, grown], 1)
        self._cosine[row + 1 :, clusters] = self._against(self._x[row + 1 :], clusters)

    def _against(self, x: Tensor, clusters: Tensor) -> Tensor:
        centroid = self._level.centroid[0, clusters]
        cosine: Tensor = x @ centroid.mT / centroid.norm(dim=-1).clamp_min(1e-12)
        return cosine.masked_fill(self._level.size[0, clusters] == 0, -torch.inf)
