"""The `pyramid_drop` pruner: drops visual tokens at several stages, each of which keeps a share of the previous one's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from mmaccel.core.errors import RecipeError, quoted
from mmaccel.core.layout import TokenLayout
from mmaccel.core.prefill.prune import ScorePruner, Signals, Stage
from mmaccel.core.registry import register


@register("prune", "pyramid_drop")
@dataclass(frozen=True, kw_only=True)
class PyramidDrop(ScorePruner):
    """At each stage keep the share `retention` of the visual tokens left, by the prompt's last token's attention to them.

    The attention is that of the layer about to run, a mean over heads, computed for that one row. Counts are shares of the
    whole prompt's visual tokens (a half, a quarter, an eighth), each rounded down, so that rounding does not accumulate.

    Lossy. After Xing et al. (arXiv 2410.17247): λ is `retention`. The released code renumbers the kept tokens at every
    stage; `compact` does so too, but is off by default, as it loses M-RoPE's time and place.

    stages_at  the stages, as shares of the depth, rounded to a layer (8, 16 and 24 of 32)
    """

    stage: ClassVar = "layer"
    needs: ClassVar[frozenset[str]] = frozenset({"attention"})
    no_tensor_parallel: ClassVar[str | None] = "judges tokens by the attention of all heads"

    retention: float = 0.5
    stages_at: tuple[float, ...] = (0.25, 0.5, 0.75)

    def __post_init__(self) -> None:
        super().__post_init__()
        at = self.stages_at
        shares = isinstance(at, list | tuple) and all(isinstance(x, float) and 0 < x < 1 for x in at)
        if not at or not shares or list(at) != sorted(set(at)):
            raise RecipeError(
                f"pyramid_drop: stages_at is {quoted(at)}; give rising shares of the depth between 0 and 1."
            )
        object.__setattr__(self, "stages_at", tuple(at))

    def pruning_stages(self, depth: int) -> tuple[Stage, ...]:
        layers = [round(x * depth) for x in self.stages_at]
        if layers[0] < 1 or layers != sorted(set(layers)) or layers[-1] >= depth:
            raise RecipeError(
                f"pyramid_drop: stages_at {list(self.stages_at)} fall on layers {layers} of {depth}; "
                "give shares that are layers of their own."
            )
        return tuple(
            Stage(layer, attention=((layer,),), share=self.retention**rank)
            for rank, layer in enumerate(layers, 1)
        )

    def score_candidates(self, signals: Signals, layout: TokenLayout, at: Tensor) -> Tensor:
        return signals["attention"][0, -1, at]
