"""Images whose tokens see each other whole, beside a plan, a window, padding and other heads: against a mask written out."""

import os

import pytest
import torch
from torch import Tensor

from mmaccel.backends import reference, triton
from mmaccel.core.layout import IMAGE, TokenLayout
from mmaccel.core.memory.kv import KVView
from mmaccel.core.prefill.masked import BidirectionalImages
from mmaccel.core.registry import policy
from tests.backends.oracle import budget, drawn, masked

B, H, G, N, D, START = 2, 4, 2, 300, 16, 70
SPANS = ((0, 80, 100), (0, 100, 230), (0, 240, 241), (1, 90, 155), (1, 20, 60), (1, 280, 300))


def tensors(seed: int = 0, keys: int = N) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = drawn(B, (H, G), N - START, keys, D, seed)
    return query, key, value


def behind(columns: Tensor) -> Tensor:
    """[B, n, N]: the pairs of a token and one behind it in its image, of those that are new."""
    rows, seen = torch.arange(START, N)[:, None], torch.zeros(B, N - START, len(columns), dtype=torch.bool)
    for b, begin, past in SPANS:
        if begin >= START:
            seen[b] |= (begin <= rows) & (rows < columns) & (columns < past)
    return seen


def layout(pad: int = 0) -> TokenLayout:
    valid = torch.ones(B, N, dtype=torch.bool)
    valid[0, :pad] = False
    return TokenLayout.build(torch.full((B, N), IMAGE), valid=valid)


@pytest.mark.parametrize("pad", [0, 33])
@pytest.mark.parametrize(("sinks", "window"), [(0, None), (0, 24), (5, 24), (0, 290)])
def test_a_dense_layer(pad: int, sinks: int, window: int | None) -> None:
    query, key, value = tensors()
    told = layout(pad)
    images = BidirectionalImages(SPANS, frozenset({3})).of(3, START, told)
    assert images is not None and BidirectionalImages(SPANS, frozenset({3})).of(2, START, told) is None
    valid = told.valid if pad else None
    out = images.attend(
        None, (), KVView(key, value, None, sinks, window), valid, query, key, value, D**-0.5, None
    )
    rows, columns = torch.arange(START, N)[:, None], torch.arange(N)
    near = torch.ones(N - START, N, dtype=torch.bool) if window is None else rows - columns < window
    mask = ((rows >= columns) & near)[None] | behind(columns)
    if sinks:  # which count from the first token
        first = torch.tensor([pad, 0])[:, None, None]
        mask |= (rows >= columns) & (columns < first + sinks)
    want = masked(query, key, value, (mask & told.valid[:, None])[:, None], D**-0.5)
    assert (out - want).abs().max() < 1e-5


# Interpreted, this test runs among the cases of Triton's kernels (`tests/backends/test_triton.py`).
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.mark.parametrize("dense", [(), (1, 2)])
def test_a_planned_layer(dense: tuple[int, ...]) -> None:
    """The pairs of the pattern, those behind each row in its image, heads that a table leaves dense, and a dense tail that
    begins within an image."""
    kernel = (triton if INTERPRETED else reference).op
    query, key, value = tensors(1)
    told = layout()
    own = {"name": "a_shape", "sink": 8, "window": 20, "block": 16}
    heads = {head: own for head in range(H) if head not in dense}
    pattern = policy(
        "sparse", {"name": "per_head", "block": 16, "table": {0: heads}} if dense else own
    ).for_layer(0)
    plan = pattern.plan(query, key, told.select_tokens(slice(START, None)), told)
    assert bool(plan.dense) == bool(dense)
    images = BidirectionalImages(SPANS, frozenset({0})).of(0, START, told)
    tails, view = [(slice(None), 180, 230)], KVView(key, value)
    out = images.attend(plan, tails, view, None, query, key, value, D**-0.5, kernel)
    places, columns = torch.arange(START, N)[:, None], torch.arange(N)
    near = (places - columns < 20) | (columns < 8) | (places >= START + 180)
    near = torch.stack([near if head in heads else torch.ones_like(near) for head in range(H)])
    want = masked(query, key, value, ((places >= columns) & near)[None] | behind(columns)[:, None], D**-0.5)
    assert (out - want).abs().max() < 1e-5
    assert images.count_pairs(B).tolist() == [[190 + 130 * 129 / 2], [65 * 32 + 190]]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("size", [128, 256, 512])
def test_on_a_device(size: int) -> None:
    """Heads as large as those of Gemma 3 and 4, images of 256 tokens, within the error of the type."""
    device, keys, start = torch.device("cuda"), 2048, 512
    generator = torch.Generator().manual_seed(0)
    shapes = (1, 8, keys - start, size), (1, 2, keys, size), (1, 2, keys, size)
    query, key, value = (torch.randn(*s, generator=generator).to(device, torch.bfloat16) for s in shapes)
    told = TokenLayout.build(torch.full((1, keys), IMAGE, device=device))
    spans = tuple((0, begin, begin + 256) for begin in range(start, keys - 256, 264))
    images = BidirectionalImages(spans, frozenset({0})).of(0, start, told)
    pattern = policy("sparse", {"name": "a_shape", "sink": 64, "window": 256})
    plan = pattern.plan(query, key, told.select_tokens(slice(start, None)), told)
    out = images.attend(plan, (), KVView(key, value), None, query, key, value, size**-0.5, triton.op)
    rows, columns = torch.arange(start, keys, device=device)[:, None], torch.arange(keys, device=device)
    mask = (rows >= columns) & ((rows - columns < 256) | (columns < 64))
    for _, begin, past in spans:
        mask |= (begin <= rows) & (rows < columns) & (columns < past)
    exact, most = budget(query, key, value, mask[None, None], size**-0.5)
    assert float((out.double() - exact).abs().max()) <= most
