"""The `uv` pruner (ParallelVLM): the draft keeps visual tokens whose similarity to the question grows most in the target."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize

from mmaccel.core.errors import RecipeError
from mmaccel.core.layout import TokenLayout
from mmaccel.core.prefill.prune import ScorePruner, Signals, Stage, question_text_columns
from mmaccel.core.registry import FieldLimit, limited, register


@register("prune", "uv")
@dataclass(frozen=True, kw_only=True)
class UVPrune(ScorePruner):
    """Unbiased verifier-guided pruning: keep the visual tokens whose similarity to the question grew most up to `layer`.

    The similarity S of a visual token and the question is the sum of the cosines between its state and the states of the
    question's tokens; the question is the text after the last image or video, and words of the same message before it, if
    these can be told from the chat's markup. The sum over layers of Eq. 3 telescopes to S^L - S^base, so two layers are
    read, and no attention scores: it works with every attention kernel. After ParallelVLM (arXiv 2603.19610, §4.1), which
    leaves S^0 open: here it is the first layer's output. Subtracting the similarity of the input embeddings instead changes
    little on the tiny models, on one of them next to nothing. The paper's sum is over all text.

    retention  share of the visual tokens that is kept, 1 - alpha of the paper
    layer      L; None: min(20, three tenths of the target's depth, rounded up). The paper's is 20 for
               targets of 28 layers too
    base       the layer whose similarity is subtracted: 0 the embeddings, 1 the first layer's output; None: 1, and 0 if
               `layer` is 1
    variation  False scores by S^L alone (the paper's ablation)
    contrast   score a token relative to the mean of its frame. Ours, for targets in which whole frames become similar to the
               question: a few of them would otherwise take the whole quota
    """

    stage: ClassVar = "draft"
    needs: ClassVar[frozenset[str]] = frozenset({"hidden"})

    layer: int | None = limited(
        None, FieldLimit(lambda layer: layer >= 1, "1 or more, or null for the default")
    )
    base: int | None = None
    variation: bool = True
    contrast: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.base is not None and (self.base < 0 or (self.layer is not None and self.base >= self.layer)):
            raise RecipeError(f"uv: base is {self.base}; give a layer from 0 to less than layer.")

    def pruning_stages(self, depth: int) -> tuple[Stage, ...]:
        layer = min(20, math.ceil(0.3 * depth)) if self.layer is None else self.layer
        base = min(1, layer - 1) if self.base is None else self.base
        if layer > depth or base >= layer:
            raise RecipeError(
                f"uv: layer {layer} and base {base} on a target of {depth} layers; give base < layer <= {depth}."
            )
        return (Stage(layer, hidden=(base, layer), share=self.retention),)

    def score_candidates(self, signals: Signals, layout: TokenLayout, at: Tensor) -> Tensor:
        base, late = signals["hidden"]
        rows = question_text_columns(layout)
        gain = _likeness(late, at, rows)
        if self.variation:
            gain = gain - _likeness(base, at, rows)
        if not self.contrast:
            return gain
        _, frame, counts = torch.unique_consecutive(
            layout.frame[0, at], return_inverse=True, return_counts=True
        )
        sums = gain.new_zeros(counts.numel()).index_add_(0, frame, gain)
        mean: Tensor = (sums / counts)[frame]
        return gain - mean


def _likeness(state: Tensor, at: Tensor, rows: Tensor) -> Tensor:
    """[m]: for each visual token the sum of its cosines with the question's tokens; O(m E)."""
    text = normalize(state[rows].float(), dim=-1).sum(0)
    return normalize(state[at].float(), dim=-1) @ text
