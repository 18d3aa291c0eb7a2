"""The `fastv` pruner: after the first layers, drops the visual tokens to which the last prompt token attends least."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from mmaccel.core.errors import RecipeError
from mmaccel.core.layout import TokenLayout
from mmaccel.core.prefill.prune import ScorePruner, Signals, Stage
from mmaccel.core.registry import FieldLimit, limited, register


@register("prune", "fastv")
@dataclass(frozen=True, kw_only=True)
class FastV(ScorePruner):
    """Before layer `layer` of the target, rank the visual tokens by the attention that the last token of the prompt paid
    them in the layer before, a mean over heads, and keep the best `retention` of them. Earlier layers keep all.

    Lossy. After Chen et al. (arXiv 2403.06764): K is `layer`, R is 1 - `retention`; kept tokens keep their positions. To
    keep a share r on average over all L layers, set retention = (r L - layer) / (L - layer), as `averaging` does.
    """

    stage: ClassVar = "layer"
    needs: ClassVar[frozenset[str]] = frozenset({"attention"})
    no_tensor_parallel: ClassVar[str | None] = "judges tokens by the attention of all heads"

    retention: float = 0.5
    layer: int = limited(
        2, FieldLimit(lambda layer: layer >= 1, "1 or more, for a layer before it must rank")
    )

    @classmethod
    def averaging(cls, share: float, depth: int, layer: int = 2) -> FastV:
        """Return a FastV that keeps `share` of the visual tokens, averaged over `depth` layers. Raises `RecipeError` if the
        first `layer` layers, which keep all, exceed that share."""
        rest = (share * depth - layer) / (depth - layer)
        if not 0 <= rest <= 1:
            raise RecipeError(
                f"fastv: {layer} whole layers of {depth} hold more than {share:g} on average; give a smaller layer."
            )
        return cls(retention=rest, layer=layer)

    def pruning_stages(self, depth: int) -> tuple[Stage, ...]:
        if self.layer >= depth:
            give = f"give 1 to {depth - 1}" if depth > 1 else "it needs two layers of attention or more"
            raise RecipeError(f"fastv: layer {self.layer} of a model of {depth}; {give}.")
        return (Stage(self.layer, attention=((self.layer - 1,),), share=self.retention),)

    def score_candidates(self, signals: Signals, layout: TokenLayout, at: Tensor) -> Tensor:
        return signals["attention"][0, -1, at]
