"""The `visionzip` pruner: keeps those tokens of a frame that its vision tower attends to most, and merges the rest."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize, one_hot

from mmaccel.core.layout import TokenLayout
from mmaccel.core.prefill.prune import (
    KeptTokens,
    Signals,
    Stage,
    TokenPruner,
    columns_by_frame_size,
    evenly_spaced,
    share_token_count,
    with_unprunable_columns,
)
from mmaccel.core.registry import SHARE, limited, register


@register("prune", "visionzip")
@dataclass(frozen=True, kw_only=True)
class VisionZip(TokenPruner):
    """Before the language model, each frame keeps its dominant tokens and its contextual ones.

    Dominant: those that the tower's class token attends to most in its last layer, a mean over heads; in a tower without
    one, as most are, those that the other tokens of the frame attend to, a mean over queries too. Contextual: evenly spaced
    ones of the rest; every token that is neither joins the one whose vision key is most similar to its own (cosine), and the
    group becomes its mean. Both keep their cells, so layouts stay valid. An image is a frame; its finer tiles are together
    one more frame, but each is scored by itself.

    Lossy. After Yang et al. (arXiv 2412.04467). The paper counts 54 dominant and 10 contextual tokens; as frames of models
    differ, the fields are shares; the defaults give 54 and 10 of LLaVA-OneVision's 196. Scores and keys are pooled as the
    features are, if the model pools. The released code adds the mean to the contextual token; here that token is one of
    those averaged.

    retention   share of a frame's tokens that is kept, rounded down
    carry       whether what rounding takes from a frame goes to the next frame of its size, so that the whole video keeps
                its share: of frames of 16 tokens, a tenth is then one or two tokens each, and not always one
    contextual  share of those that are contextual, rounded to the nearest

    On a stream each frame is pruned before it is stored, and kept tokens are renumbered (`compact`), as in the released
    code: a memory has the same positions for all frames. `carry` is not allowed then, as all frames keep the same number.
    """

    stage: ClassVar = "frames"
    needs: ClassVar[frozenset[str]] = frozenset({"hidden", "vision_attention", "vision_key"})

    retention: float = limited(64 / 196, SHARE)
    contextual: float = limited(10 / 64, SHARE)
    carry: bool = False

    def for_stream(self) -> VisionZip | None:
        return None if self.carry else replace(self, compact=True)

    def kept_token_count(self, tokens: int) -> int:
        return share_token_count(self.retention, tokens)

    def pruning_stages(self, depth: int) -> tuple[Stage, ...]:
        return (Stage(0, hidden=(0,), share=self.retention),)

    def kept_tokens_per_frame(self, number: int, size: int) -> list[int]:
        """Return how many tokens each of `number` frames with `size` tokens keeps."""
        if not self.carry:
            return [share_token_count(self.retention, size)] * number
        return [
            b - a for a, b in pairwise(share_token_count(self.retention, n * size) for n in range(number + 1))
        ]

    def keep(self, signals: Signals, layout: TokenLayout, stage: Stage, total: int | None = None) -> Tensor:
        return self.prune(signals, layout, stage, total).columns

    def prune(
        self, signals: Signals, layout: TokenLayout, stage: Stage, total: int | None = None
    ) -> KeptTokens:
        states = signals["hidden"][0]
        chosen: list[Tensor] = []
        changed = states.clone()
        for frames in columns_by_frame_size(layout):
            counts = self.kept_tokens_per_frame(*frames.shape)
            for count in sorted(set(counts)):
                columns = frames[[i for i, n in enumerate(counts) if n == count]]
                merged = 0 if count == columns.shape[1] else round(count * self.contextual)
                score = signals["vision_attention"][columns].float()
                ranked = score.sort(descending=True, stable=True).indices
                chosen.append(columns.gather(1, ranked[:, : count - merged]).flatten())
                if merged:
                    rest = columns.gather(1, ranked[:, count - merged :].sort().values)
                    steps = evenly_spaced(merged, rest.shape[1], rest.device)
                    middle = rest[:, steps].flatten()
                    means = _joined(states[rest], signals["vision_key"][rest], steps)
                    changed[middle] = means.flatten(0, 1).to(states.dtype)
                    chosen.append(middle)
        columns = with_unprunable_columns(layout, *chosen)
        return KeptTokens(columns, changed[columns])


def _joined(states: Tensor, keys: Tensor, own: Tensor) -> Tensor:
    """[n, c, E] the means of the groups around c places `own` [c], out of r in each of n frames; states [n, r, E], keys
    [n, r, D]."""
    unit = normalize(keys.float(), dim=-1)
    group = (unit @ unit[:, own].transpose(1, 2)).argmax(2)
    group[:, own] = torch.arange(len(own), device=group.device)
    member = one_hot(group, len(own)).transpose(1, 2).float()
    return member @ states.float() / member.sum(2, keepdim=True)
