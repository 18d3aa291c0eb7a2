"""The windows of Appendix F as plans: what is no causal pattern of a prompt is an order and lists of blocks all the same."""

from __future__ import annotations

import pytest
import torch

from mmaccel.core.prefill.plan import AttentionPlan, Part, pad_rows, span_from_table

from . import masks

SHAPES = [((1, 9, 20), (0, 2, 5)), ((4, 3, 16), (1, 1, 4)), ((3, 5, 7), (2, 0, 3)), ((2, 2, 33), (0, 1, 16))]


@pytest.mark.parametrize(("shape", "window"), SHAPES)
def test_a_sliding_window_of_two_or_three_dimensions_is_exact_in_lines(
    shape: tuple[int, int, int], window: tuple[int, int, int]
) -> None:
    """Each line of the grid fills blocks of its own: which lines see each other is listed, how far along is the range."""
    frames, height, width = shape
    line = pad_rows(torch.arange(width, dtype=torch.int32), 16)
    first = torch.arange(frames * height, dtype=torch.int32)[:, None] * width
    rows = torch.where(line >= 0, line + first, -1).view(1, 1, -1)
    place = line.expand(frames * height, -1).reshape(1, 1, -1)
    each = len(line) // 16
    frame = torch.arange(frames).repeat_interleave(height * each)
    row = torch.arange(height).repeat_interleave(each).repeat(frames)
    near = ((frame[:, None] - frame).abs() <= window[0]) & ((row[:, None] - row).abs() <= window[1])
    span = span_from_table(rows, rows, place, place, -window[2], window[2] + 1, near[None, None], 16, 16)
    n = frames * height * width
    plan = AttentionPlan((Part(rows, (span,)),), 16, 16, 1, 1, n, n)
    assert torch.equal(plan.to_mask()[0, 0], torch.from_numpy(masks.sliding_window_3d(shape, window)))
    assert int(plan.count_mask().max()) == 1


def test_tiles_of_wide_windows_list_fewer_blocks_than_reading_order() -> None:
    """Neighbours in space and time as neighbours in the order shrink the closure of a window of two cells each way.

    Not of every window: on a grid of 8 x 8 x 8 with one cell each way, tiles list 39% of the pairs and reading order 21%.
    """
    shape, window = (4, 8, 32), (2, 2, 2)
    element = torch.from_numpy(masks.sliding_window_3d(shape, window))
    cell = torch.stack(torch.meshgrid(*[torch.arange(s) for s in shape], indexing="ij"), -1).view(-1, 3)
    tile = cell // torch.tensor([2, 2, 4])
    tiled = (tile @ torch.tensor([64, 8, 1])).argsort(stable=True)
    shares = {}
    for name, order in (("tiles", tiled), ("reading", torch.arange(len(cell)))):
        rows = order.int().view(1, 1, -1)
        touched = element[order][:, order].view(64, 16, 64, 16).any(3).any(1)
        place = torch.zeros_like(rows)
        span = span_from_table(rows, rows, place, place, 0, 1, touched[None, None], 16, 16)
        plan = AttentionPlan((Part(rows, (span,)),), 16, 16, 1, 1, len(cell), len(cell))
        assert (plan.to_mask()[0, 0] >= element).all()
        shares[name] = float(plan.count_listed_pairs()[0, 0]) / len(cell) ** 2
    assert shares["tiles"] < 0.6 * shares["reading"]
