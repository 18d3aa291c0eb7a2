"""What policies are tried on: prompts of mixed modalities, ragged frames, islands of one token; and how a fault is told."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random

import torch
from torch import Tensor

from mmaccel.core.errors import RecipeError
from mmaccel.core.layout import IMAGE, TEXT, VIDEO, TokenLayout
from mmaccel.core.prune import Signals, Stage, observers

FIELDS = ("modality", "segment", "frame", "row", "column")


def promise(kept: object, sentence: str) -> None:
    """Raise `RecipeError` with the sentence unless the promise is `kept`."""
    if not kept:
        raise RecipeError(sentence)


def check_counters(who: str, counters: Mapping[str, object]) -> None:
    """Raise `RecipeError` unless all figures for the report are floats."""
    floats = all(isinstance(value, float) for value in counters.values())
    promise(floats, f"{who}: counters gives {counters}; give a float for each name.")


def layout(rng: Random, length: int, batch: int = 1) -> TokenLayout:
    """About `length` tokens in the longest of `batch` sequences; shorter ones are padded on the left."""
    sequences = [_sequence(rng, length if b == 0 else rng.randint(length // 2, length)) for b in range(batch)]
    width = max(map(len, sequences))
    blank = (TEXT, -1, -1, -1, -1)
    fields = torch.tensor([[blank] * (width - len(one)) + one for one in sequences])
    valid = torch.tensor([[False] * (width - len(one)) + [True] * len(one) for one in sequences])
    tensors = dict(zip(FIELDS, fields.unbind(-1), strict=True))
    return TokenLayout.build(tensors.pop("modality"), **tensors, valid=valid)


def _sequence(rng: Random, length: int) -> list[tuple[int, ...]]:
    tokens: list[tuple[int, ...]] = []
    frame = segment = 0
    while len(tokens) < length:
        kind = rng.choice((TEXT, IMAGE, VIDEO, VIDEO))
        if kind == TEXT:
            tokens += [(TEXT, segment, -1, -1, -1)] * rng.choice((1, 1, 2, 5, 12))
        for _ in range(0 if kind == TEXT else 1 if kind == IMAGE else rng.randint(1, 1 + length // 20)):
            rows, columns = rng.randint(1, 3), rng.choice((1, 2, 2, 2, 4))
            cells = [(i // columns, i % columns) for i in range(rows * columns)]
            tokens += [(kind, segment, frame, *cell) for cell in cells]
            frame += 1
        segment += 1
    return [*tokens, *[(TEXT, segment, -1, -1, -1)] * rng.choice((0, 1, 6))]


def signals_for(layout: TokenLayout, stage: Stage, seed: int = 0, asked: int | None = None) -> Signals:
    """Random signals of the shapes a stage declares; attention rows add up to one, `asked` of them or the observers'."""
    g = torch.Generator().manual_seed(seed)
    S, asked = layout.length, observers(layout).numel() if asked is None else asked
    tensors: dict[str, Tensor] = {
        "hidden": torch.randn(max(len(stage.hidden), 1), S, 8, generator=g),
        "attention": torch.rand(max(len(stage.attention), 1), asked, S, generator=g).softmax(-1),
        "vision_attention": torch.rand(S, generator=g),
        "vision_key": torch.randn(S, 5, generator=g),
    }
    return Signals(tensors)
