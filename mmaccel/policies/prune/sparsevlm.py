"""The `sparsevlm` pruner: ranks visual tokens by attention of a question's visual words; merges dropped ones into a few."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from mmaccel.core.errors import RecipeError, quoted
from mmaccel.core.layout import TokenLayout
from mmaccel.core.prefill.prune import (
    KeptTokens,
    Signals,
    Stage,
    TokenPruner,
    candidate_columns,
    complement_indices,
    observation_columns,
    question_text_columns,
    share_token_count,
    top_indices,
    with_unprunable_columns,
)
from mmaccel.core.registry import SHARE, at_least, limited, register

LAYERS, DEPTH = (2, 6, 15), 32


@register("prune", "sparsevlm")
@dataclass(frozen=True, kw_only=True)
class SparseVLM(TokenPruner):
    """Chosen text tokens (raters) score the visual tokens after each of `layers`; the best stay, some of the rest are
    merged.

    Raters are chosen once, from the input embeddings: for each visual token a softmax of its products with the tokens of the
    text after the last image or video, averaged over the visual tokens; a rater is a token above the mean. A visual token's
    score is the attention that the raters pay it in the layer just run, a mean over heads and raters. Words before the
    visual tokens cannot attend to them; if the question is there, all rows after them, which have read it, are raters. A
    stage keeps a share of the whole prompt's visual tokens, rounded down. Of the best `recycle` of the dropped, t tokens, t
    // 10 + 1 cluster centres are found by density peaks over the `neighbours` nearest (states scaled by the root of their
    size); each cluster becomes the mean of its members, at the position of its centre, beside the kept tokens.

    Lossy. After Zhang et al. (arXiv 2410.04417), first version; its layers 2, 6 and 15 of 32 and its counts of 300, 200 and
    110 of 576 tokens are the defaults. Not implemented: the rank test that skips a stage, the noise against equal densities
    (here the first wins), and renumbering, which is `compact`.

    layers   the layers after which to prune, from 0; None: 2, 6 and 15 of 32, in proportion to the depth
    recycle  share of the dropped tokens that is merged instead; 0 drops them all
    raters   "chosen" as above, or "all" rows after the visual tokens. A stream has no embeddings of its video to choose by
             and no states to merge: there all are raters, and nothing is recycled
    """

    stage: ClassVar = "layer"
    needs: ClassVar[frozenset[str]] = frozenset({"hidden", "attention"})
    no_tensor_parallel: ClassVar[str | None] = "judges tokens by the attention of all heads"

    retention: tuple[float, ...] = (300 / 576, 200 / 576, 110 / 576)
    layers: tuple[int, ...] | None = None
    recycle: float = limited(0.3, SHARE)
    raters: Literal["chosen", "all"] = "chosen"
    neighbours: int = limited(5, at_least(1))

    def __post_init__(self) -> None:
        super().__post_init__()
        shares = self.retention
        if not isinstance(shares, list | tuple) or not shares:
            raise RecipeError(
                f"sparsevlm: retention is {quoted(shares)}; give a list of shares, one a stage."
            )
        for share in shares:
            SHARE.check(self.name, "retention", share)
        if list(shares) != sorted(shares, reverse=True):
            raise RecipeError(f"sparsevlm: retention is {list(shares)}; give shares that do not rise.")
        object.__setattr__(self, "retention", tuple(shares))
        if self.layers is None and len(shares) != len(LAYERS):
            raise RecipeError(
                f"sparsevlm: retention has {len(shares)} shares; give {len(LAYERS)}, or give layers too."
            )
        if (layers := self.layers) is not None:
            fits = isinstance(layers, list | tuple) and all(type(x) is int and x >= 0 for x in layers)
            if not fits or list(layers) != sorted(set(layers)) or len(layers) != len(shares):
                raise RecipeError(
                    f"sparsevlm: layers is {quoted(layers)}; give rising layer numbers, one a share of retention."
                )
            object.__setattr__(self, "layers", tuple(layers))

    def for_stream(self) -> SparseVLM:
        return replace(self, recycle=0.0, raters="all")

    def pruning_stages(self, depth: int) -> tuple[Stage, ...]:
        layers = self.layers
        if layers is None:
            layers = tuple(round(layer * depth / DEPTH) for layer in LAYERS)
        if list(layers) != sorted(set(layers)) or layers[-1] + 1 >= depth:
            raise RecipeError(
                f"sparsevlm: cuts after layers {list(layers)} of a model of {depth}; give rising layers below {depth - 1}."
            )
        return tuple(
            Stage(layer + 1, hidden=(0, layer + 1), attention=((layer,),), share=share)
            for layer, share in zip(layers, self.retention, strict=True)
        )

    def keep(self, signals: Signals, layout: TokenLayout, stage: Stage, total: int | None = None) -> Tensor:
        return self.prune(signals, layout, stage, total).columns

    def prune(
        self, signals: Signals, layout: TokenLayout, stage: Stage, total: int | None = None
    ) -> KeptTokens:
        at = candidate_columns(layout)
        count = stage.count_kept_tokens(at, total)
        if count == at.numel():
            return KeptTokens(with_unprunable_columns(layout, at))
        score = self._score(signals, layout, at)
        top = top_indices(score, count)
        rest = complement_indices(top, at.numel())
        pool = rest[top_indices(score[rest], share_token_count(self.recycle, rest.numel()))]
        if not pool.numel():
            return KeptTokens(with_unprunable_columns(layout, at[top]))
        states = signals["hidden"][-1]
        chosen, means = _clusters(states[at[pool]], pool.numel() // 10 + 1, self.neighbours)
        columns = with_unprunable_columns(layout, at[top], at[pool[chosen]])
        changed = states.index_copy(0, at[pool[chosen]], means)
        return KeptTokens(columns, changed[columns])

    def _score(self, signals: Signals, layout: TokenLayout, at: Tensor) -> Tensor:
        """[m] the attention of the raters."""
        rows, judged = observation_columns(layout), signals["attention"][0][:, at].float()
        if self.raters == "all" or not bool(torch.isin(rows, question_text_columns(layout)).any()):
            return judged.mean(0)
        embeddings = signals["hidden"][0].float()
        relation = (embeddings[at] @ embeddings[rows].T).softmax(-1).mean(0)
        raters = relation > relation.mean()
        return (judged[raters] if bool(raters.any()) else judged).mean(0)


def _clusters(states: Tensor, count: int, neighbours: int) -> tuple[Tensor, Tensor]:
    """Density peaks: the places [count] of the centres among `states` [t, E], and the means [count, E] of their clusters.

    A state's density is exp(-mean squared distance to its nearest `neighbours`, itself counted); its height the distance to
    the nearest denser one (the largest distance for the densest). Centres have the largest products of both.
    """
    x = states.float()
    apart = torch.cdist(x, x) / x.shape[1] ** 0.5
    near = apart.topk(min(neighbours, len(x)), dim=1, largest=False).values
    density = (-(near**2).mean(1)).exp()
    rank = torch.arange(len(x), device=x.device)
    denser = (density[None] > density[:, None]) | (
        (density[None] == density[:, None]) & (rank[None] < rank[:, None])
    )
    height = apart.masked_fill(~denser, float("inf")).amin(1)
    height = torch.where(height.isinf(), apart.max(), height)
    chosen = top_indices(density * height, count)
    cluster = apart[:, chosen].argmin(1)
    cluster[chosen] = torch.arange(count, device=x.device)
    sums = torch.zeros(count, x.shape[1], device=x.device).index_add_(0, cluster, x)
    means = sums / torch.bincount(cluster, minlength=count)[:, None]
    return chosen, means.to(states.dtype)
