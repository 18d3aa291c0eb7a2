"""Linear readers that teach what answers alone teach slowly; they are thrown away after training.

Captions need thousands of steps to teach shapes, and leave a card's name spread over its tokens: a question then has
nothing to look up. So each visual token must tell the scene and the card it belongs to (`Eye`), and, halfway up the
layers, what came before it (`Recall`), which captions, counts and order rest on. The colour in a note must tell whose
it is: without that, answers about notes stay at "one of the colours noted".
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmaccel_lab.world import COLOURS, SCENES, SHAPES
from mmaccel_lab.world.words import OBJECTS


def _unit(x: Tensor) -> Tensor:
    return x * x.float().square().mean(-1, keepdim=True).add(1e-6).rsqrt().to(x.dtype)


def _read(reader: nn.Linear, x: Tensor) -> Tensor:
    return F.linear(x, reader.weight.to(x.dtype), reader.bias.to(x.dtype)).float()


class Recall(nn.Module):
    """Readers of the past of a frame with a card or a cut: the card before (shape, colour), how many cards came before
    (0 to 7), and at a cut the scene before it; and, of the colour in a note, whose colour it is."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        sizes = (len(SHAPES), len(COLOURS), 8, len(SCENES))
        self.readers = nn.ModuleList(nn.Linear(hidden, size) for size in sizes)
        self.note = nn.Linear(hidden, len(OBJECTS))

    def forward(self, states: Tensor, past: Tensor, noted: Tensor, owners: Tensor) -> Tensor:
        """Mean loss over states [C, T, E] whose frames' past is [C, 4], -1 where there is none, and over the states
        [M, E] of colours in notes that belong to the objects `owners` [M]."""
        x, loss = _unit(states), torch.zeros((), device=states.device)
        for reader, label in zip(self.readers, past.unbind(1), strict=True):
            logits = _read(reader, x).flatten(0, 1)  # type: ignore[arg-type]
            label = label[:, None].expand(-1, x.shape[1]).flatten()
            total = F.cross_entropy(logits, label, ignore_index=-1, reduction="sum")
            loss = loss + total / (label >= 0).sum().clamp(min=1)
        if len(owners):
            loss = loss + 3 * F.cross_entropy(_read(self.note, _unit(noted)), owners)
        return loss


class Eye(nn.Module):
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
        x = _unit(features)
        loss = torch.zeros((), device=features.device)
        for reader, name, weight in (
            (self.shape, "shape", balance),
            (self.colour, "colour", balance),
            (self.scene, "scene", bare / bare.sum().clamp(min=1)),
        ):
            classes = reader.out_features
            label = torch.where(table[name] < 0, classes - 1, table[name])
            logits = _read(reader, x)
            each = F.cross_entropy(
                logits.transpose(1, 2), label[:, None].expand(-1, x.shape[1]), reduction="none"
            )
            loss = loss + (each.mean(1) * weight).sum()
        return loss
