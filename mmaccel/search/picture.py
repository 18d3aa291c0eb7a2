"""Pictures: map of patterns by layer and head, a head's attention before and after permutation, and the plan of a pattern.

A head is drawn at reduced resolution: weights are computed for some rows at a time and summed into cells, so that memory is
rows x length, never length x length. A pattern is drawn on a small prompt (text, video, text, video, text) with random
queries and keys, so a pattern that chooses its lines or blocks by attention shows one possible result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mmaccel.core.errors import RecipeError, quoted
from mmaccel.core.layout import TEXT, VIDEO, TokenLayout
from mmaccel.core.prefill.plan import AttentionPlan, element_mask
from mmaccel.core.registry import policy, registry
from mmaccel.figure import create_figure
from mmaccel.search.measure import CapturedLayer, max_frame_tokens

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


def draw_head_pattern_map(layers: Sequence[Sequence[str]], title: str) -> Figure:
    """Draw a map of layers by heads from pattern names of a report: colours are patterns, letters are boundary types."""
    depth, heads = len(layers), max(map(len, layers))
    drawn = create_figure(2.6 + 0.28 * heads, 1.4 + 0.28 * depth)
    axes = drawn.add_subplot()
    from matplotlib.patches import Patch, Rectangle

    names: set[str] = set()
    for n, layer in enumerate(layers):
        for h, head in enumerate(layer):
            kind, _, within = head.partition("(")
            name = within.removesuffix(")") or kind
            name = name if name in COLOURS else "other"
            names |= {name, kind}
            axes.add_patch(Rectangle((h - 0.45, n - 0.45), 0.9, 0.9, color=COLOURS[name]))
            if kind in LETTERS:
                axes.text(h, n, LETTERS[kind], ha="center", va="center", fontsize=7, color="white")
    axes.set(
        xlim=(-0.6, heads - 0.4), ylim=(depth - 0.4, -0.6), xlabel="head", ylabel="layer", aspect="equal"
    )
    axes.set_xticks(range(0, heads, max(1, heads // 8)))
    axes.set_yticks(range(0, depth, max(1, depth // 8)))
    legend = [Patch(color=COLOURS[name], label=name) for name in COLOURS if name in names]
    legend += [Patch(color="none", label=f"{LETTERS[kind]}: {kind}") for kind in LETTERS if kind in names]
    drawn.legend(handles=legend, loc="outside right center", fontsize=8, frameon=False)
    drawn.suptitle(title, fontsize=9, x=0.02, ha="left")
    return drawn


def drawing_token_orders(layout: TokenLayout) -> dict[str, Tensor]:
    """Return the different token orders in which a head is drawn, [S] each: unchanged, by cell in the frame, by modality.

    Tokens outside frames continue the cell numbers of the frame before them, as in a grid pattern.
    """
    place = torch.arange(layout.length, device=layout.device)
    found = {"as it stands": place}
    size = max_frame_tokens(layout)
    if size > 1:
        cell = layout.cell[0]
        begin = torch.where(cell == 0, place, 0).cummax(0).values
        number = torch.where(cell >= 0, cell, place - begin) % size
        found["by place in the frame"] = torch.argsort(number, stable=True)
    modality = layout.modality[0]
    if bool((modality != modality[0]).any()):
        found["by modality"] = torch.argsort(modality, stable=True)
    return found


def pool_head_attention(inside: CapturedLayer, head: int, order: Tensor, size: int) -> Tensor:
    """Average a head's attention weights into cells, [size, size] float32 (smaller for a short prompt).

    `order` [S] is the order of both rows and columns.
    """
    length = inside.layout.length
    size, key = min(size, length), _keys(inside, head)
    place = torch.empty_like(order)
    place[order] = torch.arange(length, device=order.device)
    column = place * size // length
    step = max(1, CELLS // length)
    total = torch.zeros(size, size, device=key.device)
    for begin in range(0, length, step):
        rows = order[begin : begin + step]
        weight = attention_weights(inside, head, rows, key)
        summed = torch.zeros(len(rows), size, device=key.device).index_add_(1, column, weight)
        total.index_add_(0, column[rows], summed)
    count = torch.bincount(column, minlength=size).float()
    return (total / (count[:, None] * count[None, :])).cpu()


def attention_weights(inside: CapturedLayer, head: int, rows: Tensor, key: Tensor) -> Tensor:
    """Compute attention weights [rows, S] float32 of some rows of a head; key [S, D]."""
    score = (inside.query[0, head, rows].float() * inside.scale) @ key.T
    ahead = torch.arange(key.shape[0], device=key.device) > rows[:, None]
    return score.masked_fill_(ahead, -torch.inf).softmax(-1)


def _keys(inside: CapturedLayer, head: int) -> Tensor:
    return inside.key[0, head * inside.key.shape[1] // inside.query.shape[1]].float()


def draw_head_attention(inside: CapturedLayer, head: int, size: int = 256) -> Figure:
    """Draw one head: its last tokens at full resolution, then all tokens in each of `drawing_token_orders`."""
    length = inside.layout.length
    last = torch.arange(max(0, length - min(size, 192)), length, device=inside.query.device)
    panels = [("the last tokens", attention_weights(inside, head, last, _keys(inside, head))[:, last].cpu())]
    panels += [
        (name, pool_head_attention(inside, head, order, size))
        for name, order in drawing_token_orders(inside.layout).items()
    ]
    drawn = create_figure(3.2 * len(panels), 4.2)
    from matplotlib.colors import LogNorm

    for axes, (name, values) in zip(drawn.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        shown = values[values > 0]
        high = float(shown.quantile(0.999)) if shown.numel() else 1.0
        norm = LogNorm(max(high / 1e4, 1e-12), max(high, 1e-11))
        image = axes.imshow(values, cmap="magma", norm=norm, aspect="equal")
        axes.set_title(name, fontsize=9)
        axes.set(xticks=[], yticks=[])
        bar = drawn.colorbar(image, ax=axes, orientation="horizontal", shrink=0.8, pad=0.03)
        bar.set_label("weight of a pair", fontsize=7)
    drawn.suptitle(f"layer {inside.layer}, head {head}, {length} tokens", fontsize=10)
    return drawn


BLOCK = 16
SEGMENTS = ((TEXT, 40), (VIDEO, 240), (TEXT, 72), (VIDEO, 240), (TEXT, 48))
"""Modality and tokens of each segment of the prompt."""

FRAME = 12
"""Tokens of a frame."""

_NEAR = {"name": "a_shape", "sink": 16, "window": 48}
_LINES = {"name": "vertical_slash", "vertical": 8, "slash": 3, "last_q": 16}
FIELDS: Mapping[str, Mapping[str, Any]] = {
    "a_shape": _NEAR,
    "tri_shape": {"sink": 16, "window": 48, "bottom": 32},
    "vertical_slash": _LINES,
    "block_topk": {"budget": 0.5, "stride": 4, "sink": 16},
    "q_boundary": {"text": _LINES, "video": "grid", "image": None},
    "k_boundary": {"text": _LINES, "video": "grid", "image": None},
    "boundary_2d": {"default": _NEAR, "pairs": {"video>video": "grid"}},
}
"""Budgets for so short a prompt, and what stands within boundaries; other patterns are drawn as they are by default."""


def demo_prompt_layout() -> TokenLayout:
    """Return the layout of the small prompt that patterns are drawn on: text and video frames by `SEGMENTS`."""
    modality = torch.cat([torch.full((count,), kind) for kind, count in SEGMENTS])
    video = modality == VIDEO
    frame = torch.where(video, (video.cumsum(0) - 1) // FRAME, -1)
    return TokenLayout.build(modality[None], frame=frame[None])


def describe_changed_fields(name: str) -> str:
    """Return the fields in which pattern `name`, as drawn, differs from its defaults (in brackets): "block 16 (64), ..."."""
    defaults = {one.name: one.default for one in fields(registry("sparse")[name]) if one.init}
    told = {"block": BLOCK, **FIELDS.get(name, {})}
    return ", ".join(
        f"{field} {_short(told[field])} ({_short(default)})"
        for field, default in defaults.items()
        if told.get(field, default) != default
    )


def _short(value: Any) -> str:
    return str(value["name"]) if isinstance(value, Mapping) and "name" in value else quoted(value)


def example_pattern_plan(name: str) -> AttentionPlan:
    """Return the plan of pattern `name` for the small prompt, one head. Raises `RecipeError` if its attention is dense."""
    pattern = policy("sparse", {**FIELDS.get(name, {}), "name": name, "block": BLOCK})
    layout, rng = demo_prompt_layout(), torch.Generator().manual_seed(0)
    query, key = (2 * torch.randn(1, 1, layout.length, 16, generator=rng) for _ in range(2))
    plan: AttentionPlan | None = pattern.plan(query, key, layout, layout)
    if plan is None:
        raise RecipeError(f"{name}: it lists no pairs to draw; its attention is dense; name another pattern.")
    return plan


def part_number_matrix(plan: AttentionPlan) -> Tensor:
    """Number each query-key pair by the part of the plan that computes it: [n, n] int64, from 1; 0 for none."""
    numbers = torch.zeros(plan.n_query, plan.n_key, dtype=torch.long)
    for number, (part, spans) in enumerate(zip(plan.parts, pair_masks_by_span(plan), strict=True), 1):
        for span, (seen, _) in zip(part.spans, spans, strict=True):
            row, column = seen.nonzero(as_tuple=True)
            numbers[part.q_row[0, 0, row].long(), span.k_row[0, 0, column].long()] = number
    return numbers


def pair_masks_by_span(plan: AttentionPlan) -> list[list[tuple[Tensor, Tensor]]]:
    """Return, for each part (query rows) of the plan and each of its spans (keys), two masks [P, N] bool of query-key pairs:
    those that are computed, and all in listed blocks."""
    bq, bk = plan.block_q, plan.block_k

    def tiles(part: Any, span: Any) -> tuple[Tensor, Tensor]:
        table = span.lists.to_dense_table()[0, 0] >= 0
        return element_mask(part, span, bq, bk)[0, 0], table.repeat_interleave(bq, 0).repeat_interleave(bk, 1)

    return [[tiles(part, span) for span in part.spans] for part in plan.parts]


def draw_pattern_plan(name: str) -> Figure:
    """Draw the plan of pattern `name` over a small prompt: left in the tokens' order, right in the plan's order. Each part
    has a colour: full for computed pairs, pale (right) for other pairs of listed blocks. Lines divide segments on the left,
    spans and parts on the right. Raises `RecipeError` for a dense pattern."""
    plan = example_pattern_plan(name)
    drawn = create_figure(9.6, 5.2)
    left, right = drawn.subplots(1, 2)
    from matplotlib.colors import to_rgb

    colour = torch.tensor([(1.0, 1.0, 1.0), *(to_rgb(f"C{n % 10}") for n in range(len(plan.parts)))])
    left.imshow(colour[part_number_matrix(plan)])
    for edge in list(accumulate(count for _, count in SEGMENTS))[:-1]:
        left.axhline(edge - 0.5, color="black", linewidth=0.4)
        left.axvline(edge - 0.5, color="black", linewidth=0.4)
    left.set_title("as the tokens stand", fontsize=9)
    parts = pair_masks_by_span(plan)
    width = max(sum(seen.shape[1] for seen, _ in spans) for spans in parts)
    image, top = torch.ones(sum(spans[0][0].shape[0] for spans in parts), width, 3), 0
    for number, spans in enumerate(parts, 1):
        begin = 0
        for seen, listed in spans:
            rows, columns = seen.shape
            tile = image[top : top + rows, begin : begin + columns]
            tile[listed] = 0.75 + 0.25 * colour[number]
            tile[seen] = colour[number]
            begin += columns
            right.plot([begin - 0.5] * 2, [top - 0.5, top + rows - 0.5], color="black", linewidth=0.4)
        top += rows
        right.axhline(top - 0.5, color="black", linewidth=0.4)
    right.imshow(image)
    right.set_title("in the order of the plan", fontsize=9)
    for axes in (left, right):
        axes.set(xticks=[], yticks=[], xlabel="keys", ylabel="queries")
    drawn.suptitle(
        f"{name}: text, video, text, video, text; frames of {FRAME} tokens, blocks of {BLOCK}", fontsize=10
    )
    return drawn
