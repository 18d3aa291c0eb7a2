"""A picture of what a pattern computes on a small prompt: its pairs as the tokens stand, and as its plan orders them.

The prompt is text, a video, text, a video, text; queries and keys are drawn at random, so that what a pattern estimates
from them (phases, columns, diagonals) is one of the ways it may come out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mmaccel.core.errors import RecipeError
from mmaccel.core.layout import TEXT, VIDEO, TokenLayout
from mmaccel.core.plan import AttentionPlan, element_mask
from mmaccel.core.registry import policy
from mmaccel.figure import figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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


def small_layout() -> TokenLayout:
    """The prompt."""
    modality = torch.cat([torch.full((count,), kind) for kind, count in SEGMENTS])
    video = modality == VIDEO
    frame = torch.where(video, (video.cumsum(0) - 1) // FRAME, -1)
    return TokenLayout.build(modality[None], frame=frame[None])


def small_plan(name: str) -> AttentionPlan:
    """The plan of a registered pattern for the prompt, one head. Raises `RecipeError` where it computes everything."""
    pattern = policy("sparse", {**FIELDS.get(name, {}), "name": name, "block": BLOCK})
    layout, rng = small_layout(), torch.Generator().manual_seed(0)
    query, key = (2 * torch.randn(1, 1, layout.length, 16, generator=rng) for _ in range(2))
    plan: AttentionPlan | None = pattern.plan(query, key, layout, layout)
    if plan is None:
        raise RecipeError(f"{name}: it lists no pairs to draw; its attention is dense; name another pattern.")
    return plan


def standing(plan: AttentionPlan) -> Tensor:
    """[n, n] int64: the part that computes a pair, counted from 1, and 0 for those that none does."""
    found = torch.zeros(plan.n_query, plan.n_key, dtype=torch.long)
    for number, part in enumerate(plan.parts, 1):
        for span in part.spans:
            seen = element_mask(part, span, plan.block_q, plan.block_k)[0, 0]
            row, column = seen.nonzero(as_tuple=True)
            found[part.q_row[0, 0, row].long(), span.k_row[0, 0, column].long()] = number
    return found


def ordered(plan: AttentionPlan) -> list[list[tuple[Tensor, Tensor]]]:
    """For each span of each part the pairs that are computed, and those of the listed blocks, [P, N] bool, as ordered."""
    bq, bk = plan.block_q, plan.block_k

    def tiles(part: Any, span: Any) -> tuple[Tensor, Tensor]:
        table = span.lists.table()[0, 0] >= 0
        return element_mask(part, span, bq, bk)[0, 0], table.repeat_interleave(bq, 0).repeat_interleave(bk, 1)

    return [[tiles(part, span) for span in part.spans] for part in plan.parts]


def plan_picture(name: str) -> Figure:
    """Both panels; a colour is a part of the plan, pale what its blocks hold beside its pairs; lines lie between spans."""
    plan = small_plan(name)
    drawn = figure(9.6, 5.2)
    left, right = drawn.subplots(1, 2)
    from matplotlib.colors import to_rgb

    colour = torch.tensor([(1.0, 1.0, 1.0), *(to_rgb(f"C{n % 10}") for n in range(len(plan.parts)))])
    left.imshow(colour[standing(plan)])
    edges = torch.tensor([count for _, count in SEGMENTS]).cumsum(0)[:-1]
    for edge in edges.tolist():
        left.axhline(edge - 0.5, color="black", linewidth=0.4)
        left.axvline(edge - 0.5, color="black", linewidth=0.4)
    left.set_title("as the tokens stand", fontsize=9)
    parts = ordered(plan)
    width = max(sum(seen.shape[1] for seen, _ in spans) for spans in parts)
    image, top = torch.ones(sum(spans[0][0].shape[0] for spans in parts), width, 3), 0
    for number, spans in enumerate(parts, 1):
        begin = 0
        for seen, listed in spans:
            rows, columns = seen.shape
            there = image[top : top + rows, begin : begin + columns]
            there[listed] = 0.75 + 0.25 * colour[number]
            there[seen] = colour[number]
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
