"""Which cluster is nearest to each of many points, while the clusters move under way."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mmaccel.policies.kv.mosaic.level import Level


class Matching:
    """The cosines of the points `x` [n, d] with the centroids of a level of one layer.

    batched   one product for all points at the start, and for the points to come one for each cluster that has changed;
              otherwise each point is compared with all clusters when its turn comes
    """

    def __init__(self, level: Level, x: Tensor, batched: bool) -> None:
        self._level, self.x, self._batched = level, x, batched
        if batched:
            self._cosine = self._against(x, slice(0, level.used))

    def nearest(self, row: int) -> int:
        """The cluster of the largest cosine with point `row`, of equal ones the lowest."""
        if self._batched:
            return int(self._cosine[row].argmax())
        return int(self._against(self.x[row : row + 1], slice(0, self._level.used))[0].argmax())

    def renew(self, clusters: Sequence[int], row: int) -> None:
        """`clusters`, some of them new, have changed; points after `row` are still to come."""
        if not self._batched or row + 1 == len(self.x):
            return
        more = self._level.used - self._cosine.shape[1]
        if more > 0:
            grown = self._cosine.new_full((self.x.shape[0], more), -torch.inf)
            self._cosine = torch.cat([self._cosine, grown], 1)
        for one in clusters:
            span = slice(one, one + 1)
            self._cosine[row + 1 :, span] = self._against(self.x[row + 1 :], span)

    def _against(self, x: Tensor, clusters: slice) -> Tensor:
        centroid = self._level.centroid[0, clusters]
        cosine: Tensor = x @ centroid.mT / centroid.norm(dim=-1).clamp_min(1e-12)
        return cosine.masked_fill(self._level.size[0, clusters] == 0, -torch.inf)
