"""Pictures: the map of patterns by layer and head, and the attention of real heads before and after a permutation.

A head is drawn at a reduced resolution: weights are made for some rows at a time and summed into cells of the picture, so
that what is held is rows x length, never length x length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mmaccel.core.layout import TokenLayout
from mmaccel.figure import figure
from mmaccel.search.sample import Inside, frame_tokens

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CELLS = 1 << 24
"""Most weights held at a time."""
COLOURS = {
    "grid": "#3b7dd8",
    "a_shape": "#e0a030",
    "vertical_slash": "#4aa564",
    "tri_shape": "#c8503c",
    "sf_fixed": "#6a4fb8",
    "sf_strided": "#3fb0b8",
    "block_topk": "#7a5c3e",
    "dense": "#9a9a9a",
    "other": "#b05a9c",
}
LETTERS = {"q_boundary": "Q", "k_boundary": "K", "boundary_2d": "2"}


def table_map(layers: Sequence[Sequence[str]], title: str) -> Figure:
    """Layer by head, by the names that a report has: the colour is the pattern, the letter the boundary it runs within."""
    depth, heads = len(layers), max(map(len, layers))
    drawn = figure(2.6 + 0.28 * heads, 1.4 + 0.28 * depth)
    axes = drawn.add_subplot()
    from matplotlib.patches import Patch, Rectangle

    seen: dict[str, None] = {}
    letters: dict[str, None] = {}
    for n, layer in enumerate(layers):
        for h, head in enumerate(layer):
            kind, _, within = head.partition("(")
            name = within.removesuffix(")") or kind
            name = name if name in COLOURS else "other"
            seen[name] = None
            axes.add_patch(Rectangle((h - 0.45, n - 0.45), 0.9, 0.9, color=COLOURS[name]))
            if kind in LETTERS:
                letters[kind] = None
                axes.text(h, n, LETTERS[kind], ha="center", va="center", fontsize=7, color="white")
    axes.set(
        xlim=(-0.6, heads - 0.4), ylim=(depth - 0.4, -0.6), xlabel="head", ylabel="layer", aspect="equal"
    )
    axes.set_xticks(range(0, heads, max(1, heads // 8)))
    axes.set_yticks(range(0, depth, max(1, depth // 8)))
    told = [Patch(color=COLOURS[name], label=name) for name in COLOURS if name in seen]
    told += [Patch(color="none", label=f"{LETTERS[kind]}: {kind}") for kind in LETTERS if kind in letters]
    drawn.legend(handles=told, loc="outside right center", fontsize=8, frameon=False)
    drawn.suptitle(title, fontsize=9, x=0.02, ha="left")
    return drawn


def orders(layout: TokenLayout) -> dict[str, Tensor]:
    """Orders of one prompt's tokens: as they stand, by cell of the frame, by modality; [S] each, those that change anything.

    A token outside frames counts on from the frame before it, as a grid has it.
    """
    place = torch.arange(layout.length, device=layout.device)
    found = {"as it stands": place}
    size = frame_tokens(layout)
    if size > 1:
        cell = layout.cell[0]
        begin = torch.where(cell == 0, place, 0).cummax(0).values
        number = torch.where(cell >= 0, cell, place - begin) % size
        found["by place in the frame"] = torch.argsort(number, stable=True)
    modality = layout.modality[0]
    if bool((modality != modality[0]).any()):
        found["by modality"] = torch.argsort(modality, stable=True)
    return found


def pooled(inside: Inside, head: int, order: Tensor, size: int) -> Tensor:
    """[size, size] float32 (fewer for a short prompt): the mean weight that a row of a cell gives to each of its columns.

    `order` [S] is the order of rows and columns alike.
    """
    length = inside.layout.length
    size = min(size, length)
    group = inside.query.shape[1] // inside.key.shape[1]
    key = inside.key[0, head // group].float()
    place = torch.empty_like(order)
    place[order] = torch.arange(length, device=order.device)
    column = place * size // length
    step = max(1, CELLS // length)
    total = torch.zeros(size, size, device=key.device)
    for begin in range(0, length, step):
        rows = order[begin : begin + step]
        weight = weights(inside, head, rows, key)
        summed = torch.zeros(len(rows), size, device=key.device).index_add_(1, column, weight)
        total.index_add_(0, column[rows], summed)
    count = torch.bincount(column, minlength=size).float()
    return (total / (count[:, None] * count[None, :])).cpu()


def weights(inside: Inside, head: int, rows: Tensor, key: Tensor) -> Tensor:
    """[rows, S] float32: the attention of some rows of a head; key [S, D]."""
    score = (inside.query[0, head, rows].float() * inside.scale) @ key.T
    ahead = torch.arange(key.shape[0], device=key.device) > rows[:, None]
    return score.masked_fill_(ahead, -torch.inf).softmax(-1)


def corner(inside: Inside, head: int, size: int) -> Tensor:
    """[n, n]: the weights between the last `size` tokens of the last frames, none summed."""
    length = inside.layout.length
    rows = torch.arange(max(0, length - size), length, device=inside.query.device)
    group = inside.query.shape[1] // inside.key.shape[1]
    return weights(inside, head, rows, inside.key[0, head // group].float())[:, rows].cpu()


def head_picture(inside: Inside, head: int, size: int = 256) -> Figure:
    """One head: its last tokens one by one, then the whole of it in each order that changes anything."""
    panels = [("the last tokens", corner(inside, head, min(size, 192)))]
    panels += [(name, pooled(inside, head, order, size)) for name, order in orders(inside.layout).items()]
    drawn = figure(3.2 * len(panels), 4.2)
    from matplotlib.colors import LogNorm

    for axes, (name, values) in zip(drawn.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        shown = values[values > 0]
        high = float(shown.quantile(0.999)) if shown.numel() else 1.0
        image = axes.imshow(
            values, cmap="magma", norm=LogNorm(max(high / 1e4, 1e-12), max(high, 1e-11)), aspect="equal"
        )
        axes.set_title(name, fontsize=9)
        axes.set_xticks([])
        axes.set_yticks([])
        drawn.colorbar(image, ax=axes, orientation="horizontal", shrink=0.8, pad=0.03).set_label(
            "weight of a pair", fontsize=7
        )
    drawn.suptitle(f"layer {inside.layer}, head {head}, {inside.layout.length} tokens", fontsize=10)
    return drawn
