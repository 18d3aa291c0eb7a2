"""VisionZip: of each frame the tokens its own vision tower looks at, and a few that stand for the rest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize

from mmaccel.core.layout import TokenLayout
from mmaccel.core.prune import (
    Kept,
    Stage,
    TokenPruner,
    best,
    check_share,
    everything,
    frames,
    others,
    quota,
    spread,
    staying,
)
from mmaccel.core.registry import register


@register("prune", "visionzip")
@dataclass(frozen=True, kw_only=True)
class VisionZip(TokenPruner):
    """Before the language model, each frame keeps its dominant tokens and its contextual ones.

    Dominant: those that the other tokens of the frame attend to most in the vision tower's last layer, a mean over heads and
    queries (towers without a class token have no other measure). Contextual: of the rest, some at even steps; every token
    that is neither joins the one whose vision key is most like its own (cosine), and the group becomes its mean. Both
    stand in their own cells, so layouts stay true. Images are untouched.

    Lossy. After Yang et al. (arXiv 2412.04467). The paper counts 54 dominant and 10 contextual tokens; as frames of models
    differ, the fields are shares; the defaults give 54 and 10 of LLaVA-OneVision's 196. Scores and keys are pooled as the
    features are, where the model pools. The released code adds the mean to the contextual token; here that token is one of
    those averaged.

    retention   share of a frame's tokens that stays, rounded down
    contextual  share of those that are contextual, rounded to the nearest
    """

    seat: ClassVar = "frames"
    needs: ClassVar[frozenset[str]] = frozenset({"hidden", "vision_attention", "vision_key"})
    lossy: ClassVar[bool] = True

    retention: float = 64 / 196
    contextual: float = 10 / 64

    def __post_init__(self) -> None:
        check_share(self.name, "retention", self.retention)
        check_share(self.name, "contextual", self.contextual)

    def stages(self, depth: int) -> tuple[Stage, ...]:
        return (Stage(0, hidden=(0,), share=self.retention),)

    def keep(
        self, signals: Mapping[str, Tensor], layout: TokenLayout, stage: Stage, total: int | None = None
    ) -> Tensor:
        return self.cut(signals, layout, stage, total).columns

    def cut(
        self, signals: Mapping[str, Tensor], layout: TokenLayout, stage: Stage, total: int | None = None
    ) -> Kept:
        states = signals["hidden"][0]
        chosen: list[Tensor] = []
        changed = states.clone()
        for frame in frames(layout):
            count = quota(stage.share, len(frame))
            merged = 0 if count == len(frame) else round(count * self.contextual)
            dominant = best(signals["vision_attention"][frame], count - merged)
            chosen.append(frame[dominant])
            if merged:
                rest = frame[others(dominant, len(frame))]
                middle = rest[spread(merged, len(rest), rest.device)]
                changed[middle] = _joined(states[rest], signals["vision_key"][rest], middle, rest).to(
                    states.dtype
                )
                chosen.append(middle)
        columns = staying(layout, torch.cat(chosen) if chosen else everything(layout)[:0])
        return Kept(columns, changed[columns])


def _joined(states: Tensor, keys: Tensor, middle: Tensor, rest: Tensor) -> Tensor:
    """[c, E] the means of the groups around the columns `middle` [c] out of `rest` [r], given states and keys."""
    own = torch.isin(rest, middle).nonzero()[:, 0]
    unit = normalize(keys.float(), dim=-1)
    group = (unit @ unit[own].T).argmax(1)
    group[own] = torch.arange(len(own), device=group.device)
    sums = torch.zeros(len(own), states.shape[1], device=states.device).index_add_(0, group, states.float())
    return sums / torch.bincount(group, minlength=len(own))[:, None]
