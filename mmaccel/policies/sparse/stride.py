"""Which stride and which phases a grid head has (MMInference, Algorithm 1), and the class of each token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmaccel.core.layout import TokenLayout
from mmaccel.policies.sparse.estimate import LastQueries, class_means, trimmed
from mmaccel.policies.sparse.orders import Order

REACH = 64
"""Members of a line, at most, by which a stride is judged; a grid repeats, so the nearest tell."""


@dataclass(frozen=True, eq=False)
class Classes:
    """number [B, h, N] class of each key in its order, beyond every class for padding; stride [B, h, 1] classes there are.

    line [B, H, 1] class of the vertical and horizontal lines, shift [B, H, 1] phase of the slashes; h is 1 or H.
    room is the most keys that a class can have, most the most classes there can be, padding counted.
    """

    number: Tensor
    stride: Tensor
    line: Tensor
    shift: Tensor
    room: int
    most: int


def best_stride(
    columns: Tensor | None, diagonals: Tensor | None, at: Tensor, low: int, high: int, slack: float
) -> Tensor:
    """[B, H, 1]: the smallest stride of low..high whose best lines weigh within `slack` of the best of any stride.

    columns, diagonals [B, H, n] weights, or None; at [B] place of the last query. A stride weighs what its heaviest class
    of columns and its heaviest class of diagonals weigh together, and nothing where three of it do not fit.
    """
    some = columns if columns is not None else diagonals
    assert some is not None
    width = min(some.shape[2], REACH * high)
    step = torch.arange(width, device=some.device)
    there = (step <= at[:, None])[None, :, None]
    recent = (at[:, None] - step).clamp(min=0)[:, None]
    lines = [columns.gather(2, recent.expand(*columns.shape[:2], -1))] if columns is not None else []
    lines += [diagonals[..., :width]] if diagonals is not None else []
    weight = torch.stack(lines).masked_fill(~there, 0.0)
    strides = torch.arange(low, high + 1, device=some.device)
    score = torch.stack([_heaviest(weight, there, s) for s in range(low, high + 1)], -1)
    score = score.masked_fill((3 * strides > at[:, None] + 1)[:, None], 0.0)
    good = score >= (1 - slack) * score.amax(-1, keepdim=True)
    return low + good.to(torch.uint8).argmax(-1, keepdim=True)


def _heaviest(weight: Tensor, there: Tensor, stride: int) -> Tensor:
    """[B, H]: the mean of the heaviest class, summed over the kinds of line; weight [kinds, B, H, width]."""
    short = -weight.shape[-1] % stride
    lines = -(-weight.shape[-1] // stride)
    folded = torch.nn.functional.pad(weight, (0, short)).view(*weight.shape[:-1], lines, stride)
    count = torch.nn.functional.pad(there, (0, short)).view(*there.shape[:-1], lines, stride).sum(-2)
    return trimmed(folded.sum(-2), folded.amax(-2), count).amax(-1).sum(0)


def strided_classes(
    columns: Tensor, diagonals: Tensor, sample: LastQueries, stride: Tensor, size: int, low: int, high: int
) -> Classes:
    """Classes by place mod stride [B, H, 1], of low..high, for `size` keys, with the phases of the heaviest lines."""
    n = columns.shape[2]
    place = torch.arange(size, device=columns.device)
    there = torch.nn.functional.pad(sample.seen, (0, size - n))[:, None]
    number = torch.where(there, place % stride, high)
    line = class_means(columns, number[..., :n], sample.seen, high + 1).argmax(-1, keepdim=True)
    ahead = place[:n] <= sample.at[:, -1:]
    shift = class_means(diagonals, place[:n] % stride, ahead, high + 1).argmax(-1, keepdim=True)
    return Classes(number, stride, line, shift, room=-(-n // low), most=high + 1)


def frame_classes(layout: TokenLayout, keys: Order, low: int, high: int) -> tuple[Tensor, Tensor, Tensor]:
    """number [B, 1, N] and stride [B, 1, 1] by the place of tokens in their frame, and whether they serve (bool, on device).

    A token outside frames counts on from the first token of the frame before it. The number of padding is `high`. They
    serve if every sequence has 3 * low tokens, a frame, and no class of more than 1 / low of its tokens.
    """
    B, N = keys.row.shape
    here, row = keys.row >= 0, keys.row.clamp(min=0).long()
    framed = (layout.frame.gather(1, row) >= 0) & here
    cell = layout.cell.gather(1, row)
    place = torch.arange(N, device=row.device).expand(B, N)
    begin = torch.where(framed & (cell == 0), place, 0).cummax(1).values
    number = torch.where(framed, cell, place - begin)
    longest = torch.where(framed, cell + 1, 0).amax(1, keepdim=True)
    stride = longest.clamp(low, high)
    number = torch.where(here, number % stride, high)
    sizes = torch.zeros(B, high + 1, dtype=torch.long, device=row.device).scatter_add_(1, number, here.long())
    count = here.sum(1)
    fits = (count >= 3 * low) & (longest[:, 0] > 0) & (sizes.amax(1) <= (count + low - 1) // low)
    return number[:, None], stride[:, None], (fits | (count == 0)).all()


def frame_phases(sample: LastQueries, number: Tensor, stride: Tensor, room: int, high: int) -> Classes:
    """Classes `number` [B, 1, N] of `stride` [B, 1, 1], at most `high`, with the phases of the heaviest lines."""
    B = number.shape[0]
    n = sample.key.shape[2]
    own = number[..., :n]
    at = sample.at.clamp(min=0)[:, None]
    asking = own.gather(2, at)
    before = (torch.arange(n, device=own.device) < sample.at[..., None])[:, None]
    bins = own[:, :, None].expand(B, 1, at.shape[2], n)
    # What each query gives to each class of keys, its own key left out: that one is heavy whatever the phase.
    count = before.new_zeros(B, 1, at.shape[2], high + 1, dtype=torch.float32)
    count = count.scatter_add_(3, bins, before.float())
    phase = torch.arange(high, device=own.device)
    paired = torch.where(phase < stride[..., None], (asking[..., None] - phase) % stride[..., None], high)
    members = count.gather(3, paired).sum(2)
    lines, shifts = [], []
    for weight in sample.weights():
        lines.append(
            class_means(weight.sum(2) / sample.askers(), own, sample.seen, high + 1).argmax(-1, keepdim=True)
        )
        given = torch.zeros(B, weight.shape[1], *count.shape[2:], device=weight.device)
        given.scatter_add_(3, bins.expand(-1, weight.shape[1], -1, -1), weight * before)
        total = given.gather(3, paired.expand(-1, weight.shape[1], -1, -1)).sum(2)
        shifts.append((total / members.clamp(min=1)).argmax(-1, keepdim=True))
    return Classes(number, stride, torch.cat(lines, 1), torch.cat(shifts, 1), room=room, most=high + 1)
