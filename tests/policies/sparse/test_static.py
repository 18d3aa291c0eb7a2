"""The static patterns and the content baseline against the masks of their papers."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmaccel.core.layout import IMAGE, TEXT, VIDEO, TokenLayout
from mmaccel.core.registry import registry
from mmaccel.policies.sparse import BlockTopK, SFFixed, SFStrided, TriShape, block_topk
from tests.spies import Largest, product

from . import masks
from .scenes import Scene, Token, scenes, sequence

STRIDES: list[dict[str, Any]] = [
    dict(stride="frame", low=2, high=12),
    dict(stride="frame", low=3, high=5),
    dict(stride="frame", low=1, high=1024),
    dict(stride=1, low=1, high=1),
    dict(stride=7, low=7, high=7),
    dict(stride=16, low=16, high=16),
    dict(stride=500, low=500, high=500),
]


def check(pattern, scene: Scene, mask_of) -> None:
    got = scene.mask(pattern)
    for b, tokens in enumerate(scene.sequences):
        assert (got[b] == scene.place(b, mask_of(tokens))).all()


def fields_of(strides: dict[str, Any]) -> dict[str, Any]:
    names = dict(stride="stride", low="min_stride", high="max_stride")
    return {names[k]: v for k, v in strides.items() if strides["stride"] == "frame" or k == "stride"}


@given(
    scenes(), st.sampled_from([(0, 1), (3, 5), (16, 16), (1, 200)]), st.sampled_from([0, 1, 7, 16, 40, 300])
)
def test_tri_shape(scene: Scene, extent: tuple[int, int], bottom: int) -> None:
    fields = dict(sink=extent[0], window=extent[1], bottom=bottom)
    check(TriShape(block=16, **fields), scene, lambda tokens: masks.tri_shape(tokens, **fields))


@given(scenes(), st.sampled_from(STRIDES), st.sampled_from([0, 1, 3, 50]), st.sampled_from(["last", "first"]))
def test_sf_fixed(scene: Scene, strides: dict[str, Any], summary: int, side: str) -> None:
    def mask_of(tokens):
        cut, _ = masks.segments(tokens, **strides)
        return masks.sf_fixed(cut, summary=summary, side=side)

    check(SFFixed(block=16, summary=summary, side=side, **fields_of(strides)), scene, mask_of)


@given(scenes(), st.sampled_from(STRIDES))
def test_sf_strided(scene: Scene, strides: dict[str, Any]) -> None:
    pattern = SFStrided(block=16, **fields_of(strides))
    check(pattern, scene, lambda tokens: masks.sf_strided(*masks.segments(tokens, **strides)))


VIDEO_ALONE = Scene((sequence([(VIDEO, [12] * 9)]),), heads=1, groups=1)


def marked_frames() -> tuple[Token, ...]:
    """Five frames of 3 rows of 4 cells and a mark each, with timestamps of one and two tokens between; then a question."""
    tokens: list[Token] = [Token(TEXT)] * 3
    for frame in range(5):
        tokens += [Token(TEXT)] * (1 + frame % 2)
        for cell in range(12):
            tokens.append(Token(VIDEO, frame, cell))
            if cell % 4 == 3:
                tokens.append(Token(VIDEO))
    return (*tokens, *[Token(TEXT)] * 40)


def test_marks_belong_to_their_frame_and_timestamps_to_none() -> None:
    scene = Scene((marked_frames(), sequence([(TEXT, [9]), (VIDEO, [6, 6, 7]), (IMAGE, [5])])))
    strides = dict(stride="frame", low=2, high=64)
    cut, step = masks.segments(scene.sequences[0], **strides)
    assert step == 15 and [len(s) for s in cut] == [4, 15, 2, 15, 1, 15, 2, 15, 1, 15, 15, 15, 10]
    for pattern, mask in (
        (SFFixed(block=16, **fields_of(strides)), lambda cut, _: masks.sf_fixed(cut, summary=1, side="last")),
        (SFStrided(block=16, **fields_of(strides)), masks.sf_strided),
    ):
        check(pattern, scene, lambda tokens, mask=mask: mask(*masks.segments(tokens, **strides)))


def test_text_alone_has_segments_of_128() -> None:
    scene = Scene((sequence([(TEXT, [300])]),), heads=1, groups=1)
    for cls in (SFFixed, SFStrided):
        assert (scene.mask(cls()) == scene.mask(cls(stride=128))).all()


def test_parts_of_the_bottom_have_few_rows() -> None:
    """The long lists of the dense rows stand in a part of two blocks, not in that of all rows."""
    query, key = torch.zeros(1, 2, 4096, 8), torch.zeros(1, 1, 4096, 8)
    layout = Scene((sequence([(TEXT, [4096])]),)).layout()
    plan = TriShape(window=512).plan(query, key, layout, layout)
    assert plan is not None and [part.q_row.shape[-1] for part in plan.parts] == [4096, 128]
    longest = [max(s.lists.list_lengths.max() for s in part.spans) for part in plan.parts]
    assert longest[0] <= 9 and longest[1] == 64


@pytest.mark.parametrize(
    ("name", "boundary"),
    product(["tri_shape", "sf_fixed", "sf_strided"], ["q_boundary", "k_boundary", "boundary_2d"]),
)
def test_of_a_single_modality_a_boundary_changes_nothing(name: str, boundary: str) -> None:
    inner = {"name": name, "block": 16}
    fields = dict(default=inner) if boundary == "boundary_2d" else dict(text=inner, video=inner, image=inner)
    made = (boundary, dict(block=16, **fields)), (name, dict(block=16))
    bound, plain = (registry("sparse").build(*one) for one in made)
    assert (VIDEO_ALONE.mask(bound) == VIDEO_ALONE.mask(plain)).all()


CHOICES: list[dict[str, Any]] = [
    dict(sink=0, budget=0.3),
    dict(sink=5, budget=0.6),
    dict(sink=20, budget=0.0),
    dict(sink=16, budget=0.95, top=3),
    dict(sink=0, budget=1.0, top=1),
    dict(sink=40, budget=1.0, top=4),
    dict(sink=0, budget=1.0),
]


@pytest.mark.parametrize("stride", [None, 16, 4, 1], ids=["mean", "16", "4", "1"])
@given(scene=scenes(), choice=st.sampled_from(CHOICES))
def test_the_heaviest_blocks_are_kept(stride: int | None, scene: Scene, choice: dict[str, Any]) -> None:
    how = dict(score="mean") if stride is None else dict(score="antidiagonal", stride=stride)
    pattern = BlockTopK(block=16, **how, **choice)
    plan = scene.plan(pattern)
    listed = plan.parts[0].spans[0].lists.list_lengths.sum(-1).max()
    assert int(listed) <= pattern.max_blocks_total(plan.n_query, plan.n_key)
    query, key, _ = scene.tensors()
    got = plan.to_mask().numpy()
    for b, tokens in enumerate(scene.sequences):
        pad, n = scene.pad(b), len(tokens)
        first = max(0, scene.start - pad)
        for h in range(scene.heads):
            q = query[b, h, max(0, pad - scene.start) :].numpy()
            k = key[b, h // (scene.heads // scene.groups), pad:].numpy()
            share = masks.block_shares(q, k, first, 16, stride)
            assert np.allclose(share.sum(1), 1)
            mask = masks.block_topk(share, n, first, block=16, **{"top": None, **choice})
            assert (got[b, h, max(0, pad - scene.start) :, pad:] == mask[first:]).all()
            assert not got[b, h, :, :pad].any() and not got[b, h, : max(0, pad - scene.start)].any()


def test_a_run_of_queries_at_a_time_is_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene((sequence([(VIDEO, [10] * 20)]), sequence([(TEXT, [150])])), start=21)
    whole = scene.plan(BlockTopK(block=16, budget=0.5, sink=0)).to_mask()
    monkeypatch.setattr(block_topk, "ENTRIES", 1)
    assert torch.equal(scene.plan(BlockTopK(block=16, budget=0.5, sink=0)).to_mask(), whole)


def test_a_limit_makes_the_bound_linear() -> None:
    assert BlockTopK(top=32, sink=128).max_blocks_total(131072, 131072) <= 2048 * 32
    assert BlockTopK().max_blocks_total(128, 131072) == 2047 + 2048


@pytest.mark.parametrize("score", ["antidiagonal", "mean"])
def test_no_tensor_holds_every_pair(score: str) -> None:
    S = 4096
    query, key = torch.randn(1, 2, S, 16), torch.randn(1, 1, S, 16)
    layout = TokenLayout.text(1, S)
    with Largest() as seen:
        BlockTopK(score=score, budget=0.5).plan(query, key, layout, layout)
    assert seen.entries < S * S / 8
