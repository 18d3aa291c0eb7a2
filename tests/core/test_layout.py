"""What a layout derives from the modality, the frames and the padding of tokens."""

import torch
from hypothesis import given

from mmaccel.core.layout import IMAGE, TEXT, VIDEO, TokenLayout
from tests.policies.sparse.scenes import Scene, scenes


@given(scenes())
def test_positions_segments_and_cells(scene: Scene) -> None:
    layout = scene.layout()
    for b, tokens in enumerate(scene.sequences):
        pad = scene.pad(b)
        assert layout.valid[b].tolist() == [False] * pad + [True] * len(tokens)
        assert layout.position[b, pad:].tolist() == list(range(len(tokens)))
        assert layout.cell[b, pad:].tolist() == [t.cell for t in tokens]
        assert (layout.cell[b, :pad] == -1).all()
        segment = layout.segment[b, pad:].tolist()
        for i in range(1, len(tokens)):
            change = tokens[i].modality != tokens[i - 1].modality
            assert segment[i] == segment[i - 1] + int(change)
    assert layout.has_padding == any(scene.pad(b) for b in range(scene.batch))
    for modality in (TEXT, IMAGE, VIDEO):
        counts = [sum(t.modality == modality for t in s) for s in scene.sequences]
        assert layout.max_tokens_by_modality[modality] == max(counts)


def test_marks_between_rows_do_not_restart_a_frame() -> None:
    """A picture of two rows of three cells, each followed by a mark, then a frame of two cells."""
    layout = TokenLayout.build(
        torch.tensor([[TEXT, *[IMAGE] * 8, TEXT, VIDEO, VIDEO]]),
        frame=torch.tensor([[-1, 0, 0, 0, -1, 0, 0, 0, -1, -1, 1, 1]]),
    )
    assert layout.cell.tolist() == [[-1, 0, 1, 2, -1, 3, 4, 5, -1, -1, 0, 1]]


@given(scenes())
def test_taking_and_sequences_keep_what_tokens_are(scene: Scene) -> None:
    layout = scene.layout()
    rows = slice(scene.start, None)
    late = layout.select_tokens(rows)
    assert (late.batch, late.length) == (scene.batch, scene.length - scene.start)
    for name in ("modality", "segment", "frame", "row", "column", "position", "valid"):
        assert torch.equal(getattr(late, name), getattr(layout, name)[:, rows])
    picked = torch.arange(0, scene.length, 2)
    assert torch.equal(layout.select_tokens(picked).position, layout.position[:, ::2])
    for b in range(scene.batch):
        assert torch.equal(layout.select_sequences(slice(b, b + 1)).modality, layout.modality[b : b + 1])
    assert torch.equal(layout.to("cpu").modality, layout.modality)


def test_what_is_read_of_a_layout_is_known_of_its_copies_and_of_equal_ones() -> None:
    def made() -> TokenLayout:
        return TokenLayout.build(torch.tensor([[TEXT, VIDEO, VIDEO]]), valid=torch.tensor([[0, 1, 1]]))

    one, other = made(), made()
    assert one.host_value("n", lambda: 1) == one.to("cpu").host_value("n", lambda: 2) == 1
    assert other.host_value("n", lambda: 3) == 3
    other.share_host_values(one)
    assert other.host_value("n", lambda: 4) == 1
    assert one.has_padding and not one.select_tokens(slice(1, None)).has_padding
    assert other.select_tokens(slice(1, None)).host_value("has_padding", lambda: 5) is False
    assert one.select_tokens(torch.tensor([1])).host_value("n", lambda: 6) == 6


def test_a_later_video_has_frames_of_its_own() -> None:
    """A turn with two frames, then one with two more, behind padding in the second sequence."""
    first = TokenLayout.build(
        torch.tensor([[VIDEO, VIDEO, TEXT], [TEXT, VIDEO, TEXT]]),
        frame=torch.tensor([[0, 1, -1], [-1, 0, -1]]),
        valid=torch.tensor([[1, 1, 1], [0, 1, 1]]),
    )
    later = TokenLayout.build(torch.tensor([[TEXT, VIDEO, VIDEO]] * 2), frame=torch.tensor([[-1, 0, 1]] * 2))
    both = first.append(later)
    assert both.frame.tolist() == [[0, 1, -1, -1, 2, 3], [-1, 0, -1, -1, 1, 2]]
    assert both.cell.tolist() == [[0, 0, -1, -1, 0, 0], [-1, 0, -1, -1, 0, 0]]
    assert both.position.tolist() == [[0, 1, 2, 3, 4, 5], [0, 0, 1, 2, 3, 4]]
    assert both.segment.tolist() == [[0, 0, 1, 1, 2, 2], [0, 1, 2, 2, 3, 3]]


def test_generated_tokens_follow_on() -> None:
    layout = TokenLayout.build(
        torch.tensor([[VIDEO, VIDEO, TEXT], [TEXT, VIDEO, VIDEO]]), valid=torch.tensor([[0, 1, 1], [1, 1, 1]])
    )
    longer = layout.extend(2)
    assert longer.position.tolist() == [[0, 0, 1, 2, 3], [0, 1, 2, 3, 4]]
    assert longer.modality[:, 3:].tolist() == [[TEXT, TEXT], [TEXT, TEXT]]
    assert longer.segment.tolist() == [[0, 0, 1, 1, 1], [0, 1, 1, 2, 2]]
    assert longer.frame[:, 3:].tolist() == [[-1, -1], [-1, -1]] and bool(longer.valid[:, 3:].all())
    assert layout.extend(0) is layout
