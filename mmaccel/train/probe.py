"""What teaches the eye: each visual token of a frame must tell, linearly, the scene and the card it belongs to.

Captions alone need thousands of steps to teach shapes, and leave a card's name spread over its tokens; a question then
has nothing to look up. The probes are thrown away after training.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmaccel.world import COLOURS, SCENES, SHAPES


class Probes(nn.Module):
    """Linear readers of visual tokens: scene, shape and colour (one more class each for "no card")."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.scene = nn.Linear(hidden, len(SCENES))
        self.shape = nn.Linear(hidden, len(SHAPES) + 1)
        self.colour = nn.Linear(hidden, len(COLOURS) + 1)

    def forward(self, features: Tensor, table: dict[str, Tensor]) -> Tensor:
        """Mean loss over features [F, T, E] of the frames of `table`; frames with and without a card weigh the same."""
        card = (table["shape"] >= 0).float()
        bare = 1 - card
        balance = card / card.sum().clamp(min=1) + 0.3 * bare / bare.sum().clamp(min=1)
        rms = features.float().square().mean(-1, keepdim=True).add(1e-6).rsqrt()
        x = features * rms.to(features.dtype)
        loss = torch.zeros((), device=features.device)
        for reader, name, weight in (
            (self.shape, "shape", balance),
            (self.colour, "colour", balance),
            (self.scene, "scene", bare / bare.sum().clamp(min=1)),
        ):
            classes = reader.out_features
            label = torch.where(table[name] < 0, classes - 1, table[name])
            logits = F.linear(x, reader.weight.to(x.dtype), reader.bias.to(x.dtype)).float()
            each = F.cross_entropy(
                logits.transpose(1, 2), label[:, None].expand(-1, x.shape[1]), reduction="none"
            )
            loss = loss + (each.mean(1) * weight).sum()
        return loss
