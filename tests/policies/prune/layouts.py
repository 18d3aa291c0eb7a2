"""Layouts of every kind, and signals made up for them."""

import torch
from hypothesis import strategies as st

from mmaccel.core.layout import IMAGE, TEXT, VIDEO, TokenLayout

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
