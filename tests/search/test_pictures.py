"""Pictures of patterns and tables: what is drawn of a plan is what it computes, and each pattern has a colour of its own."""

import pytest
import torch

from mmaccel.core.registry import registry
from mmaccel.search.picture import (
    COLOURS,
    demo_pattern_plan,
    demo_prompt_layout,
    draw_head_pattern_map,
    pair_masks_by_span,
    part_number_matrix,
)

DRAWN = ("a_shape", "tri_shape", "sf_fixed", "sf_strided", "vertical_slash", "grid", "block_topk")
BOUNDARIES = ("q_boundary", "k_boundary", "boundary_2d")


@pytest.mark.parametrize("name", [*DRAWN, *BOUNDARIES])
def test_both_panels_hold_the_pairs_of_a_plan(name: str) -> None:
    plan = demo_pattern_plan(name)
    mask = plan.to_mask()[0, 0]
    assert torch.equal(part_number_matrix(plan) > 0, mask) and 0.02 < mask.float().mean() < 0.3
    spans = [span for part in pair_masks_by_span(plan) for span in part]
    computed = sum(int(seen.sum()) for seen, _ in spans)
    assert computed == int(mask.sum())
    assert all(bool((listed | ~seen).all()) for seen, listed in spans)
    # The order of the plan makes the pairs dense: most blocks are not listed, and pairs fill a good part of those that are.
    listed = sum(int(listed.sum()) for _, listed in spans)
    assert computed > 0.25 * listed and listed < 0.5 * sum(listed.numel() for _, listed in spans)


def test_parts_of_a_boundary_are_rows_of_one_modality() -> None:
    modality, found = demo_prompt_layout().modality[0], part_number_matrix(demo_pattern_plan("q_boundary"))
    for number in range(1, int(found.max()) + 1):
        assert len(modality[(found == number).any(1)].unique()) == 1


def test_every_pattern_has_a_colour_of_its_own() -> None:
    names = (*DRAWN, "dense")
    assert set(names) <= registry("sparse").keys() and len({COLOURS[n] for n in (*names, "other")}) == 9
    drawn = draw_head_pattern_map([[*names, "q_boundary(tri_shape)", "mine"]], "all")
    told = [text.get_text() for text in drawn.legends[0].get_texts()]
    assert sorted(told) == sorted([*names, "other", "Q: q_boundary"])
