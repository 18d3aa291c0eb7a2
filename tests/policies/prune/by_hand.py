"""A pruned model written out: whole layers over the whole prompt, masks and gathers, no cache; layouts and signals."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from mmaccel.core.attach import adapter_for
from mmaccel.core.layout import IMAGE, TEXT, VIDEO, TokenLayout

Choose = Callable[[int, Tensor, Tensor, Tensor], tuple[Tensor, Tensor] | None]


def eager(model: Any) -> Any:
    """A copy whose language model tells its attention."""
    model = copy.deepcopy(model)
    model.set_attn_implementation({"text_config": "eager"})
    return model


@torch.no_grad()
def run(
    model: Any,
    inputs: dict[str, Tensor],
    written: Tensor,
    cuts: dict[int, Callable[[dict[str, Any]], tuple[Tensor, Tensor]]],
    see: Callable[[int, Tensor, Tensor], Tensor] | None = None,
    compact: bool = False,
) -> Tensor:
    """[n + 1, V]: the logits at the prompt's last token and at each of the tokens `written` [n] after it.

    `model` is eager; layers are those with attention. A cut at a layer is told ``hidden`` [S', E] now, ``start`` [S, E] what
    entered layer 0, ``columns`` [S'] the prompt's columns that are left, ``before`` and ``here`` [H, S', S'] the attention
    of the layer before and of the one to come, all of the prompt's; it gives the places out of S' that stay, and their
    states. ``see(layer, weights, mask)`` may change a layer's mask [R, R], by the weights [H, R, R] of the layer before.
    """
    family = adapter_for(model)
    entering = family.forward_inputs(model, inputs)
    embeds, levels = entering["inputs_embeds"][0], entering.get("deepstack_visual_embeds", [])
    visual = entering.get("visual_pos_masks")
    places = family.positions(model, inputs)
    S, n = embeds.shape[0], written.numel()
    end = places[..., -1:]
    places = torch.cat([places, end + 1 + torch.arange(n)], -1)
    start = embeds = torch.cat([embeds, model.get_input_embeddings()(written)])
    cos, sin = family.rotary_module(model)(embeds[None], places)
    columns = torch.arange(S + n)
    weights = None
    attended, cuts = family.attended_layers(model), dict(cuts)
    for number, layer in enumerate(family.layers(model)):
        index = attended.index(layer) if layer in attended else None
        if index == 0:
            start = embeds
        if (cut := cuts.pop(index if number else 0, None)) is not None:
            inside = int((columns < S).sum())
            told = {
                "hidden": embeds[:inside],
                "start": start[columns[:inside]],
                "columns": columns[:inside],
                "before": None if weights is None else weights[:, :inside, :inside],
                "here": None
                if index is None
                else _attend(layer, embeds, cos, sin, _causal(len(columns)))[1][:, :inside, :inside],
            }
            stay, states = cut(told)
            rows = torch.cat([stay, torch.arange(inside, len(columns))])
            embeds = torch.cat([states, embeds[inside:]])
            columns, cos, sin = columns[rows], cos[:, rows], sin[:, rows]
            if compact and inside != len(stay):
                flat = torch.arange(len(columns))[None]
                cos, sin = family.rotary_module(model)(
                    embeds[None], flat.expand(3, -1, -1) if family.mrope else flat
                )
        if index is None:
            embeds = embeds + layer.linear_attn(layer.input_layernorm(embeds)[None])[0]
        else:
            mask = _causal(len(columns))
            if see is not None and weights is not None:
                mask = see(index, weights, mask)
            out, weights = _attend(layer, embeds, cos, sin, mask)
            embeds = embeds + out
        embeds = embeds + layer.mlp(layer.post_attention_layernorm(embeds))
        if number < len(levels):
            added = torch.zeros(S + n, embeds.shape[1])
            added[:S][visual[0]] = levels[number]
            embeds = embeds + added[columns]
    hidden = family.text_model(model).norm(embeds[-n - 1 :])
    return model.get_output_embeddings()(hidden)


def _causal(count: int) -> Tensor:
    return torch.ones(count, count, dtype=torch.bool).tril()


def _attend(layer: Any, hidden: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    bias = torch.zeros(mask.shape).masked_fill(~mask, float("-inf"))[None, None]
    out, weights = layer.self_attn(
        hidden_states=layer.input_layernorm(hidden)[None],
        attention_mask=bias,
        position_embeddings=(cos, sin),
        past_key_values=None,
    )
    return out[0], weights[0]


Piece = tuple


def layout_of(pieces: list[Piece]) -> TokenLayout:
    """("text", n), ("image", n, tokens of tiles) or ("video", [(rows, columns), ...], marks), in order; batch 1."""
    fields: dict[str, list[int]] = {name: [] for name in ("modality", "segment", "frame", "row", "column")}

    def put(**values: int) -> None:
        for name, column in fields.items():
            column.append(values.get(name, -1))

    frame = 0
    for segment, (kind, what, *rest) in enumerate(pieces):
        if kind != "video":
            modality = TEXT if kind == "text" else IMAGE
            for cell in range(what):
                place = dict(frame=frame, row=0, column=cell) if kind == "image" else {}
                put(modality=modality, segment=segment, **place)
            for tile in range(rest[0] if rest else 0):  # finer tiles, in rows of two, each with a mark behind
                put(modality=modality, segment=segment, row=tile // 2, column=tile % 2)
                if tile % 2:
                    put(modality=modality, segment=segment)
            frame += kind == "image"
            continue
        for rows, columns in what:
            for cell in range(rows * columns):
                put(modality=VIDEO, segment=segment, frame=frame, row=cell // columns, column=cell % columns)
            frame += 1
        for _ in range(rest[0] if rest else 0):
            put(modality=VIDEO, segment=segment)
    tensors = {name: torch.tensor([column], dtype=torch.long) for name, column in fields.items()}
    return TokenLayout.build(tensors.pop("modality"), **tensors)


LAYOUTS = {
    "one video": [("text", 4), ("video", [(2, 3)] * 7, 1), ("text", 6)],
    "a long video": [("text", 3), ("video", [(3, 4)] * 8, 1), ("text", 7)],
    "two videos": [("text", 2), ("video", [(2, 2)] * 5, 1), ("text", 3), ("video", [(3, 2)] * 6, 1), ("text", 5)],
    "ragged frames": [("video", [(2, 2), (2, 3), (2, 3), (1, 4), (2, 3), (2, 3)]), ("text", 3)],
    "with images": [("image", 5), ("text", 2), ("video", [(2, 2)] * 4), ("image", 4), ("text", 4)],
    "image with tiles": [("text", 3), ("image", 6, 8), ("text", 4)],
    "video last": [("text", 5), ("video", [(2, 3)] * 4)],
    "no text": [("video", [(2, 2)] * 5)],
    "no video": [("text", 6), ("image", 4), ("text", 2)],
    "one token": [("text", 1), ("video", [(1, 1)]), ("text", 1)],
}  # fmt: skip


@st.composite
def layouts(draw: st.DrawFn) -> TokenLayout:
    """One sequence of texts, images and videos of ragged frames."""
    cell = st.tuples(st.integers(1, 3), st.integers(1, 4))
    piece = st.one_of(
        st.tuples(st.just("text"), st.integers(1, 6)),
        st.tuples(st.just("image"), st.integers(1, 5), st.sampled_from([0, 4])),
        st.tuples(st.just("video"), st.lists(cell, min_size=1, max_size=7), st.integers(0, 1)),
    )
    return layout_of(draw(st.lists(piece, min_size=1, max_size=5)))


def visual(layout: TokenLayout) -> list[int]:
    """The columns of images and of video frames, one by one; marks are none."""
    kinds, frame, row = (one[0].tolist() for one in (layout.modality, layout.frame, layout.row))
    return [c for c in range(layout.length) if kinds[c] != TEXT and (frame[c] >= 0 or row[c] >= 0)]


def videos(layout: TokenLayout) -> list[int]:
    """The columns of video frames."""
    return [c for c in visual(layout) if int(layout.modality[0, c]) == VIDEO]


def asked(layout: TokenLayout) -> list[int]:
    """The columns of the text after the last visual token; all text, or the last column, where there is none."""
    after, text = _text(layout)
    return after or text or [layout.length - 1]


def looking(layout: TokenLayout) -> list[int]:
    """The columns of the text after the last visual token; the last column, where there is none."""
    return _text(layout)[0] or [layout.length - 1]


def _text(layout: TokenLayout) -> tuple[list[int], list[int]]:
    """The columns of the text after the last visual token, and of all text."""
    text = [c for c, kind in enumerate(layout.modality[0].tolist()) if kind == TEXT]
    last = max(set(range(layout.length)) - set(text), default=-1)
    return [c for c in text if c > last], text


def frames_of(layout: TokenLayout) -> list[list[int]]:
    """The columns of each frame, and of the tiles of each image."""
    found: dict[tuple[int, int], list[int]] = {}
    for c in visual(layout):
        found.setdefault((int(layout.segment[0, c]), int(layout.frame[0, c])), []).append(c)
    return list(found.values())


def top(scores: dict[int, float], count: int) -> list[int]:
    """The columns of the largest scores; of equal ones the first."""
    return sorted(sorted(scores, key=lambda c: (-scores[c], c))[:count])


def whole(layout: TokenLayout, chosen: list[int]) -> list[int]:
    """The chosen columns and all that is neither a video frame's nor an image's."""
    return sorted([*chosen, *(set(range(layout.length)) - set(visual(layout)))])
