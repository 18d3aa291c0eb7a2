"""How much variance a cluster may have: by its size, and by what its layer's clusters had at the start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

MODES = ("relaxing", "tightening", "fixed")
Mode = Literal["relaxing", "tightening", "fixed"]
FLOOR, CAP = 1e-3, 0.95
"""A calibrated threshold stays within these; points of unit length have a variance of at most 1."""


@dataclass(frozen=True, eq=False)
class Threshold:
    """Mosaic's equation 5: a threshold that moves from `small` to `large` [L] as a cluster grows at rate `alpha`.

    mode    "relaxing": small clusters are held to the lower bound, as the equation's symbols say; the population variance of
            few points underestimates by (n - 1) / n, so this alone is neutral. "tightening": the other way round, as the
            paper's prose says. "fixed": the mean of the two at any size.
    """

    small: Tensor
    large: Tensor
    alpha: float
    mode: Mode

    @classmethod
    def calibrate(
        cls, s2: Tensor, n: Tensor, *, small: float, large: float, alpha: float, mode: Mode
    ) -> Threshold:
        """From the variances and sizes [L, C] of the first clusters: multiples of each layer's mean, weighted by size."""
        weight = n.to(s2.dtype)
        mean = (s2 * weight).sum(1) / weight.sum(1).clamp_min(1)
        return cls((small * mean).clamp(FLOOR, CAP), (large * mean).clamp(FLOOR, CAP), alpha, mode)

    def at(self, layer: Tensor, n: Tensor) -> Tensor:
        """The threshold of clusters of size `n` [...] at layers `layer` [...]."""
        small, large = self.small[layer], self.large[layer]
        if self.mode == "fixed":
            return (small + large) / 2
        grown = 1 - torch.exp((1 - n.to(small.dtype)) / self.alpha)
        if self.mode == "tightening":
            small, large = large, small
        return small + (large - small) * grown
