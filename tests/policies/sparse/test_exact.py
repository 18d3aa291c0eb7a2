"""Each pattern against the mask of its paper, written down independently: equal, or between the mask and its closure."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmaccel.core.layout import IMAGE, TEXT, VIDEO
from mmaccel.policies.sparse import AShape, Boundary2D, Grid, VerticalSlash

from . import masks
from .scenes import Scene, scenes, sequence


def planned(pattern, scene: Scene) -> np.ndarray | None:
    """[B, H, n_query, n_key] bool of the plan, every pair of which is computed once; None when it is dense."""
    query, key, _ = scene.tensors()
    layout = scene.layout()
    plan = pattern.plan(query, key, layout.take(slice(scene.start, None)), layout)
    if plan is None:
        return None
    assert plan.overlap or int(plan.count_mask().max()) <= 1
    return plan.to_mask().numpy()


def place(scene: Scene, b: int, mask: np.ndarray) -> np.ndarray:
    """The mask of sequence b, unpadded, as [n_query, n_key] of the scene."""
    pad, n = scene.pad(b), scene.length
    whole = np.zeros((n, n), bool)
    whole[pad:, pad:] = mask
    return whole[scene.start :]


def weights_of(scene: Scene, b: int, head: int, count: int) -> tuple[masks.Rows, int]:
    """What the last queries of a head of sequence b attend to, and the position of its first query."""
    query, key, _ = scene.tensors()
    pad, first = scene.pad(b), max(0, scene.start - scene.pad(b))
    q = query[b, head, max(0, pad - scene.start) :].numpy()
    k = key[b, head // (scene.heads // scene.groups), pad:].numpy()
    return masks.last_rows(q, k, first, count), first


@given(scenes(), st.sampled_from([(0, 1), (3, 5), (16, 16), (20, 33), (1, 200)]))
def test_a_shape(scene: Scene, extent: tuple[int, int]) -> None:
    sink, window = extent
    got = planned(AShape(sink=sink, window=window, block=16), scene)
    for b, tokens in enumerate(scene.sequences):
        want = place(scene, b, masks.a_shape(tokens, sink=sink, window=window))
        assert (got[b] == want).all()


@given(scenes(), st.sampled_from([(0, 1), (7, 5), (16, 3), (40, 2), (3, 40), (200, 200)]))
def test_vertical_slash(scene: Scene, budget: tuple[int, int]) -> None:
    vertical, slash = budget
    got = planned(VerticalSlash(vertical=vertical, slash=slash, last_q=16, block=16), scene)
    for b, tokens in enumerate(scene.sequences):
        for h in range(scene.heads):
            rows, first = weights_of(scene, b, h, 16)
            element, closure = masks.vertical_slash(
                tokens, rows, vertical=vertical, slash=slash, first=first, block=16
            )
            assert (got[b, h] >= place(scene, b, element)).all()
            assert (got[b, h] <= place(scene, b, closure)).all()


LINES = [(h, v, s) for h in (True, False) for v in (True, False) for s in (True, False) if h or v or s]


@given(scenes(), st.sampled_from(LINES), st.sampled_from([(2, 12), (3, 5)]))
def test_grid_of_a_searched_stride(
    scene: Scene, lines: tuple[bool, bool, bool], strides: tuple[int, int]
) -> None:
    on = dict(zip(("horizontal", "vertical", "slash"), lines, strict=True))
    low, high = strides
    pattern = Grid(stride="free", min_stride=low, max_stride=high, last_q=16, block=16, **on)
    got = planned(pattern, scene)
    if got is None:
        assert min(len(t) for t in scene.sequences) < 3 * low
        return
    for b, tokens in enumerate(scene.sequences):
        for h in range(scene.heads):
            rows, _ = weights_of(scene, b, h, 16)
            found = masks.free_grid(
                rows,
                len(tokens),
                low=low,
                high=min(high, scene.length // 3),
                slack=pattern.slack,
                lines=on["horizontal"] or on["vertical"],
                slash=on["slash"],
            )
            assert (got[b, h] == place(scene, b, masks.grid(*found, **on))).all()


@given(scenes(), st.sampled_from(LINES), st.sampled_from([12, 5]))
def test_grid_of_the_frames(scene: Scene, lines: tuple[bool, bool, bool], high: int) -> None:
    on = dict(zip(("horizontal", "vertical", "slash"), lines, strict=True))
    got = planned(Grid(stride="frame", min_stride=2, max_stride=high, last_q=16, block=16, **on), scene)
    expected = []
    for b, tokens in enumerate(scene.sequences):
        found = [
            masks.frame_grid(tokens, weights_of(scene, b, h, 16)[0], low=2, high=high)
            for h in range(scene.heads)
        ]
        expected.append(found)
    serves = [
        len(t) >= 6 and any(x.frame >= 0 for x in t) and np.bincount(heads[0][0]).max() <= -(-len(t) // 2)
        for t, heads in zip(scene.sequences, expected, strict=True)
    ]
    assert (got is not None) == all(serves)
    if got is None:
        return
    for b, heads in enumerate(expected):
        for h, found in enumerate(heads):
            assert (got[b, h] == place(scene, b, masks.grid(*found, **on))).all()


PAIRS = [
    {},
    {"text>video": (0, 0)},
    {"video>video": (2, 9), "video>text": (0, 3), "image>video": (5, 0)},
    {"text>text": (0, 200), "video>image": (200, 0)},
]


@given(scenes(), st.sampled_from([(0, 1), (3, 7), (17, 20)]), st.sampled_from(PAIRS))
def test_boundary_2d(scene: Scene, extent: tuple[int, int], pairs: dict[str, tuple[int, int]]) -> None:
    pattern = Boundary2D(sink=extent[0], window=extent[1], pairs=pairs, block=16)
    got = planned(pattern, scene)
    for b, tokens in enumerate(scene.sequences):
        want = masks.boundary_2d(tokens, extent=lambda q, k: pairs.get(f"{q}>{k}", extent))
        assert (got[b] == place(scene, b, want)).all()


def test_islands_between_ragged_videos() -> None:
    """One-token timestamps between frames, two videos of other frame sizes, a picture: the layout that breaks windows
    measured in packed coordinates."""
    segments = []
    for frame in range(9):
        segments += [(TEXT, [1]), (VIDEO, [6 if frame < 5 else 7])]
    segments += [(IMAGE, [1]), (TEXT, [4]), (VIDEO, [3, 3]), (TEXT, [1])]
    scene = Scene((sequence(segments),), start=0)
    got = planned(Boundary2D(sink=2, window=8, block=16), scene)
    want = masks.boundary_2d(scene.sequences[0], extent=lambda q, k: (2, 8))
    assert (got[0] == want).all()


@pytest.mark.parametrize("pattern", [AShape(sink=0, window=200), VerticalSlash(vertical=200, slash=1)])
def test_full_budget_is_causal(pattern) -> None:
    scene = Scene(
        (sequence([(TEXT, [5]), (VIDEO, [6] * 12), (TEXT, [9])]), sequence([(TEXT, [40])])), start=30
    )
    got = planned(pattern, scene)
    for b, tokens in enumerate(scene.sequences):
        assert (got[b] == place(scene, b, masks.causal(tokens))).all()


def test_full_budget_of_a_boundary_is_causal() -> None:
    scene = Scene((sequence([(TEXT, [5]), (VIDEO, [6] * 12), (IMAGE, [3]), (TEXT, [9])]),))
    got = planned(Boundary2D(sink=50, window=60), scene)
    assert (got[0] == masks.causal(scene.sequences[0])).all()
