"""The `dycoke` pruner: drops tokens that repeat earlier frames; decoded tokens see only the most attended of the rest."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from mmaccel.core.errors import RecipeError
from mmaccel.core.layout import VIDEO, TokenLayout
from mmaccel.core.prefill.prune import (
    Signals,
    Stage,
    TokenPruner,
    frame_columns,
    share_token_count,
    top_indices,
    with_unprunable_columns,
)
from mmaccel.core.registry import SHARE, FieldLimit, in_range, limited, register


@register("prune", "dycoke")
@dataclass(frozen=True, kw_only=True)
class DyCoke(TokenPruner):
    """Prunes redundant video tokens before the language model, and hides some cached ones from decoding steps. First, of
    each four frames of a video the second and the fourth lose the share `drop` of their tokens: those most similar to the
    token of the same cell in the frame before. Then the third loses as much by similarity to the first. While decoding,
    layers from `layer` on see only the share 1 - `forget` of the cached video tokens, those with the most attention from the
    newest token in the layer before, a mean over heads; they are chosen anew when that attention has a cosine below
    `refresh` with the one of the last choice. Hidden tokens stay cached and may return. Images lose nothing.

    Lossy. After Tao et al. (arXiv 2411.15024). What a frame loses is rounded so that (1 - drop) of it, rounded down, stays;
    a last group of fewer than four frames is pruned alike; frames of unlike grids are left alone. In the released code a
    step that does not choose anew runs unpruned; here the last choice is kept.

    On a stream four frames are pruned together before they are stored, as one unit of the memory, and kept tokens are
    renumbered (`compact`), as a memory has the same positions for all units. A last group of fewer frames repeats its last.
    """

    stage: ClassVar = "frames"
    needs: ClassVar[frozenset[str]] = frozenset({"hidden"})
    prunes: ClassVar[frozenset[int]] = frozenset({VIDEO})
    group: ClassVar[int] = 4

    drop: float = limited(0.7, SHARE)
    forget: float = limited(0.7, SHARE)
    layer: int = limited(
        3, FieldLimit(lambda layer: layer >= 1, "1 or more, for the layer before it must attend")
    )
    refresh: float = limited(0.9, in_range(-1, 1, "a cosine, -1 to 1"))

    @property
    def no_tensor_parallel(self) -> str | None:  # type: ignore[override]
        return "forgets by the attention of all heads" if self.forget else None

    def pruning_stages(self, depth: int) -> tuple[Stage, ...]:
        if self.forget and self.layer >= depth:
            give = f"give 1 to {depth - 1}" if depth > 1 else "it needs two layers of attention or more"
            raise RecipeError(f"dycoke: layer {self.layer} of a model of {depth}; {give}.")
        return (Stage(0, hidden=(0,), share=(1 + 3 * (1 - self.drop)) / 4),)

    def keep(self, signals: Signals, layout: TokenLayout, stage: Stage, total: int | None = None) -> Tensor:
        states = signals["hidden"][0].float()
        blocks = frame_columns(layout)
        kinds = [int(layout.modality[0, block[0]]) for block in blocks]
        videos = [int(layout.segment[0, block[0]]) for block in blocks]
        kept, first = list(blocks), 0
        for i in range(len(blocks)):
            if i and videos[i] != videos[i - 1]:
                first = i
            frame, before = blocks[i], blocks[i - (0, 1, 2, 1)[(i - first) % 4]]
            if frame is before or kinds[i] != VIDEO or len(frame) != len(before):
                continue
            if all(torch.equal(cell[0, frame], cell[0, before]) for cell in (layout.row, layout.column)):
                likeness = cosine_similarity(states[frame], states[before], dim=-1)
                kept[i] = frame[top_indices(-likeness, share_token_count(1 - self.drop, len(frame)))]
        return with_unprunable_columns(layout, *kept)

    def for_stream(self) -> DyCoke:
        return replace(self, compact=self.drop > 0)

    def kept_token_count(self, tokens: int) -> int:
        return tokens + (self.group - 1) * share_token_count(1 - self.drop, tokens)

    @property
    def scoring_layer(self) -> int | None:
        return self.layer - 1 if self.forget else None

    def recalled_columns(self, attention: Tensor, columns: Tensor, before: Tensor | None) -> Tensor | None:
        if before is not None and float(cosine_similarity(attention, before, dim=0)) >= self.refresh:
            return None
        return columns[top_indices(attention, share_token_count(1 - self.forget, columns.numel()))]
