"""Which cluster is nearest to each of many points, while the clusters move under way."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmaccel.policies.kv.mosaic.level import Level


class Matching:
    """The cosines of the points `x` [n, d] with the centroids of a level of one layer, point by point in their order.

    batched   one product of all points and clusters at the start, and of each point at its turn one with the clusters that
              have changed since; otherwise with all of them
    """

    def __init__(self, level: Level, x: Tensor, batched: bool) -> None:
        self._level, self.x = level, x
        # In the order of change, each once.
        self._changed: dict[int, None] = {}
        self._cosine = self._with_all(x) if batched else None

    def nearest(self, row: int) -> int:
        """The cluster of the largest cosine with point `row`, of equal ones the lowest."""
        own = self.x[row : row + 1]
        if self._cosine is None:
            return int(self._with_all(own).argmax())
        cosine, more = self._cosine[row], self._level.used - self._cosine.shape[1]
        if more:
            cosine = pad(cosine, (0, more), value=-torch.inf)
        if self._changed:
            changed = torch.tensor(list(self._changed))
            cosine[changed] = _cosines(own, self._level.centroid[0].index_select(0, changed))[0]
        return int(cosine.argmax())

    def renew(self, clusters: Iterable[int]) -> None:
        """`clusters`, some of them new, have changed; none is empty."""
        self._changed.update(dict.fromkeys(clusters))

    def _with_all(self, x: Tensor) -> Tensor:
        used = slice(0, self._level.used)
        return _cosines(x, self._level.centroid[0, used]).masked_fill(
            self._level.size[0, used] == 0, -torch.inf
        )


def _cosines(x: Tensor, centroid: Tensor) -> Tensor:
    """[n, c] of points of length one and centroids, those of zeros 0."""
    cosines: Tensor = x @ centroid.mT / centroid.norm(dim=-1).clamp_min(1e-12)
    return cosines
