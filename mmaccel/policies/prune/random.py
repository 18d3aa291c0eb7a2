"""The `random` pruner: a random sample of the visual tokens, the same for the same seed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mmaccel.core.layout import TokenLayout
from mmaccel.core.prefill.prune import ScorePruner, Signals, Stage
from mmaccel.core.registry import register


@register("prune", "random")
@dataclass(frozen=True, kw_only=True)
class RandomPrune(ScorePruner):
    """Keep a random share `retention` of the visual tokens, drawn without replacement from a generator seeded by `seed`.

    The draw is made on the host, so that every device and process keeps the same tokens. Baseline of ParallelVLM (Figure 7).
    """

    stage: ClassVar = "draft"

    seed: int = 0

    def pruning_stages(self, depth: int) -> tuple[Stage, ...]:
        return (Stage(0, share=self.retention),)

    def score_candidates(self, signals: Signals, layout: TokenLayout, at: Tensor) -> Tensor:
        lot = torch.randperm(at.numel(), generator=torch.Generator().manual_seed(self.seed))
        return lot.to(at.device)
