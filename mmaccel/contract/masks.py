"""Reference masks of sparse patterns, pair by pair from their definitions, for one sequence without padding.

For each pattern there are two bool masks [H or 1, S, S]: the query-key pairs that a correct plan must compute, and those
that it may compute. They differ for patterns that list whole blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from mmaccel.core.layout import MODALITIES, TokenLayout

Made = tuple[Tensor, Tensor]


def pattern_mask(
    name: str, given: Mapping[str, Any], layout: TokenLayout, query: Tensor, key: Tensor
) -> Made:
    """Return two masks [H or 1, S, S] of pattern `name` with fields `given`: the pairs that its plan must, and may, compute.
    query [1, H, S, D] and key [1, G, S, D] are after RoPE."""
    made: Any = DEFINED[name](given, layout, query[0], key[0])
    return made if isinstance(made, tuple) else (made, made)


def _line(layout: TokenLayout) -> tuple[Tensor, Tensor]:
    rows = torch.arange(layout.length, device=layout.device)
    return rows[:, None], rows[None]


def _near(place: Tensor, rank: Tensor, given: Mapping[str, Any]) -> Tensor:
    """The first and the last keys that are not after a query; `place` is that of the last of them."""
    return (place >= rank) & ((place - rank < given["window"]) | (rank < given["sink"]))


def _a_shape(given: Any, layout: TokenLayout, query: Tensor, key: Tensor) -> Tensor:
    return _near(*_line(layout), given)[None]


def _tri_shape(given: Any, layout: TokenLayout, query: Tensor, key: Tensor) -> Tensor:
    i, j = _line(layout)
    return (_near(i, j, given) | ((i >= j) & (i >= layout.length - given["bottom"])))[None]


def _sf_fixed(given: Any, layout: TokenLayout, query: Tensor, key: Tensor) -> Tensor:
    i, j = _line(layout)
    size = given["stride"]
    last = j % size >= size - given["summary"]
    return ((i >= j) & ((i // size == j // size) | last))[None]


def _sf_strided(given: Any, layout: TokenLayout, query: Tensor, key: Tensor) -> Tensor:
    i, j = _line(layout)
    return ((i >= j) & ((i - j < given["stride"]) | (i % given["stride"] == j % given["stride"])))[None]


def _within(kinds: Callable[[int, int], tuple[Any, bool]]) -> Callable[..., Tensor]:
    """A boundary: for a modality of queries and one of keys the fields of a_shape, and whether keys count by modality."""

    def mask(given: Any, layout: TokenLayout, query: Tensor, key: Tensor) -> Tensor:
        i, j = _line(layout)
        kind, seen = layout.modality[0], torch.zeros_like(i > j)
        for asks in MODALITIES:
            for shown in MODALITIES:
                fields, counted = kinds(asks, shown)
                here = kind == shown if counted else torch.ones_like(kind, dtype=torch.bool)
                upto = here.long().cumsum(0) - 1
                pair = (kind == asks)[:, None] & (kind == shown) & (i >= j)
                seen = seen | (pair & _near(upto[:, None], upto, given[fields]))
        return seen[None]

    return mask


def _weights(query: Tensor, key: Tensor, last: int) -> Tensor:
    """[H, last, S]: what the last queries attend to."""
    count = key.shape[1]
    k = key.repeat_interleave(len(query) // len(key), 0)
    scores = query[:, -last:].double() @ k.double().mT / query.shape[-1] ** 0.5
    rows = torch.arange(count - last, count, device=key.device)
    return scores.masked_fill(torch.arange(count, device=key.device) > rows[:, None], -torch.inf).softmax(-1)


def _spread(blocks: Tensor, block: int, length: int) -> Tensor:
    return blocks.repeat_interleave(block, 1).repeat_interleave(block, 2)[:, :length, :length]


def _vertical_slash(given: Any, layout: TokenLayout, query: Tensor, key: Tensor) -> Made:
    i, j = _line(layout)
    length, last, block = layout.length, given["last_q"], given["block"]
    weight = _weights(query, key, last)
    back = (i[-last:] - j).clamp(min=0).expand(len(weight), -1, -1)
    diagonal = torch.zeros(len(weight), length, dtype=torch.float64, device=i.device)
    diagonal.scatter_add_(1, back.flatten(1), weight.flatten(1))
    diagonal[:, 0] = torch.inf
    column = weight.sum(1).topk(given["vertical"]).indices
    slash = diagonal.topk(given["slash"]).indices
    upright = torch.zeros(len(weight), length, dtype=torch.bool, device=i.device).scatter_(1, column, True)
    slanted = ((i - j)[None, ..., None] == slash[:, None, None]).any(-1)
    short = -length % block
    whole = torch.nn.functional.pad(slanted, (0, short, 0, short))
    tiles = whole.unfold(1, block, block).unfold(2, block, block)
    rounded = _spread(tiles.flatten(3).any(3), block, length)
    return tuple((upright[:, None] | one) & (i >= j) for one in (slanted, rounded))  # type: ignore[return-value]


def _block_topk(given: Any, layout: TokenLayout, query: Tensor, key: Tensor) -> Tensor:
    """By means of whole blocks."""
    i, j = _line(layout)
    length, block = layout.length, given["block"]
    parts = [torch.stack([t.mean(1) for t in x.split(block, 1)], 1) for x in (query.double(), key.double())]
    scores = parts[0] @ parts[1].repeat_interleave(len(query) // len(key), 0).mT / query.shape[-1] ** 0.5
    blocks = torch.arange(scores.shape[1], device=i.device)
    seen = blocks <= blocks[:, None]
    share = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    always = (blocks == blocks[:, None]) | (seen & (blocks * block < given["sink"]))
    held = share.masked_fill(~always, 0).sum(-1, keepdim=True)
    rest, order = share.masked_fill(always | ~seen, -1).sort(-1, descending=True)
    before = held + rest.clamp(min=0).cumsum(-1) - rest.clamp(min=0)
    taken = (before < given["budget"]) & (rest >= 0)
    kept = always | torch.zeros_like(taken).scatter_(-1, order, taken)
    return _spread(kept, block, length) & (i >= j)


def _grid(given: Any, layout: TokenLayout, query: Tensor, key: Tensor) -> Tensor:
    """Slashes of one class of the places that tokens have in their frames."""
    i, j = _line(layout)
    frame = layout.frame[0]
    starts = (frame >= 0) & ~((frame[:, None] == frame) & (i > j)).any(1)
    begun = torch.where(starts, i[:, 0], 0).cummax(0).values
    cell = ((frame[:, None] == frame) & (i > j)).sum(1)
    number = torch.where(frame >= 0, cell, i[:, 0] - begun)
    stride = max(int(cell[frame >= 0].max()) + 1, given["min_stride"])
    phase = (number[:, None] - number) % stride
    weight, last = _weights(query, key, given["last_q"]), given["last_q"]
    phases = [(i > j)[-last:] & (phase[-last:] == p) for p in range(stride)]
    means = [weight[:, some].sum(-1) / some.sum().clamp(min=1) for some in phases]
    shift = torch.stack(means, -1).argmax(-1)
    slash = phase[None] == shift[:, None, None]
    return (slash | _near(i, j, given)) & (i >= j)


def _per_head(given: Any, layout: TokenLayout, query: Tensor, key: Tensor) -> Tensor:
    """A pattern for each head, alike in all layers; the others follow the default."""
    table: Any = next(iter(given["table"].values()))
    found = [table.get(head, given["default"]) for head in range(len(query))]
    return torch.cat([DEFINED[one["name"]](one, layout, query, key)[:1] for one in found])


DEFINED: dict[str, Callable[..., Any]] = {
    "a_shape": _a_shape,
    "tri_shape": _tri_shape,
    "sf_fixed": _sf_fixed,
    "sf_strided": _sf_strided,
    "vertical_slash": _vertical_slash,
    "block_topk": _block_topk,
    "grid": _grid,
    "per_head": _per_head,
    "q_boundary": _within(lambda asks, shown: (MODALITIES[asks], False)),
    "k_boundary": _within(lambda asks, shown: (MODALITIES[shown], True)),
    "boundary_2d": _within(lambda asks, shown: ("default", True)),
}
