"""What is known on the host of rows, places and lists, and for how long."""

from __future__ import annotations

import pytest
import torch

from mmaccel.backends import natural
from mmaccel.backends.natural import counted, first_rows, rows_in_order
from mmaccel.core.plan import span_by_range


def test_places_that_follow_each_other_are_known() -> None:
    cpu = torch.device("cpu")
    place = natural.places_from(-2, 2, 5, 8, cpu)
    assert place.tolist() == [[-2, -1, 0, 1, 2, -1, -1, -1]] * 2
    assert natural.first_place(place) == natural.first_place(place[:, None]) == (-2, 5)
    for other in (place[:, :5], place[:1], place[1:], place.clone(), place.T, place.view(torch.float32)):
        assert natural.first_place(other) is None
    known = len(natural._places)
    view = place[:, None]
    del place, other
    assert natural.first_place(view) == (-2, 5)
    view[0, 0, 1] = 7
    assert natural.first_place(view) is None
    del view
    assert len(natural._places) == known - 1
    assert natural.first_place(natural.places_from(0, 1, 3, 8, torch.device("meta"))) is None


def test_what_lists_reach_is_known_of_what_they_were_made_for() -> None:
    cpu = torch.device("cpu")
    q_row, keys = (natural.counted(1, n, 64, cpu)[:, None] for n in (40, 60))
    place, k_place = natural.places_from(20, 1, 40, 64, cpu)[:, None], natural.ranks(1, 64, cpu)[:, None]
    of = q_row, keys, place, k_place
    row = span_by_range(*of, 0, 9, 16, 16).lists.row
    pairs = natural.band(*of, 0, 9, (16, 16))
    assert pairs == natural.Band(40, 60, 20, 0, 9, (16, 16)) and natural.reaches(row, pairs)
    assert natural.reaches(row, pairs._replace(rows=30, keys=50))
    for other in (
        dict(rows=41),
        dict(keys=61),
        dict(first=21),
        dict(lo=-1),
        dict(hi=10),
        dict(blocks=(16, 32)),
    ):
        assert not natural.reaches(row, pairs._replace(**other))
    assert not natural.reaches(row.clone(), pairs) and not natural.reaches(row[:, :, :2], pairs)
    for i in range(4):
        assert natural.band(*(t.clone() if i == j else t for j, t in enumerate(of)), 0, 9, (16, 16)) is None
    more = natural.counted(1, 41, 64, cpu)[:, None]
    assert natural.band(more, *of[1:], 0, 9, (16, 16)) is None
    known = len(natural._reach)
    row[..., 1] = 0
    assert not natural.reaches(row, pairs)
    del row
    assert len(natural._reach) == known - 1


def test_an_order_is_known_while_it_lives() -> None:
    row = counted(2, 5, 8, torch.device("cpu"))
    assert row.tolist() == [[0, 1, 2, 3, 4, -1, -1, -1]] * 2
    assert rows_in_order(row) == rows_in_order(row[:, None]) == 5
    few = first_rows(row[:, None], 3)
    assert few.tolist() == [[[0, 1, 2, -1, -1, -1, -1, -1]]] * 2
    assert rows_in_order(few) == 3 and rows_in_order(first_rows(row, 7)) == 5
    for other in (row[:, :5], row[:1], row[1:], row.clone(), row.T, first_rows(row.clone(), 3)):
        assert rows_in_order(other) is None
    meta = [counted(1, n, 8, torch.device("meta")) for n in (3, 5)]
    assert [rows_in_order(one) for one in meta] == [None, None]
    known = len(natural._made)
    del row
    assert len(natural._made) == known - 1 and rows_in_order(few) == 3


def test_ranks_are_known_while_their_memory_is_there() -> None:
    cpu = torch.device("cpu")
    with torch.inference_mode():
        place = natural.ranks(2, 7, cpu)[:, None]
        assert place.tolist() == [[[0, 1, 2, 3, 4, 5, 6]]] * 2
        assert natural.are_ranks(place) and natural.are_ranks(place[..., :5])
        for other in (place[..., 1:], place[..., ::2], place.clone(), place.mT, place.view(torch.float32)):
            assert not natural.are_ranks(other)
        known = len(natural._ranks)
        del place, other
        assert len(natural._ranks) == known - 1
    assert not natural.are_ranks(natural.ranks(1, 5, torch.device("meta")))
    row = counted(1, 9, 12, cpu)
    few = natural.first_of(row[:, None], 3, 4)
    assert few.tolist() == [[[0, 1, 2, -1]]] and rows_in_order(few) == 3
    every = natural.first_of(row[:, None], 10, 12)
    assert torch.equal(every[:, 0], row) and rows_in_order(every) == 9
    assert rows_in_order(natural.first_of(row.flip(-1), 3, 4)) is None


@pytest.mark.parametrize("inference", [False, True])
def test_what_was_written_to_is_no_longer_known(inference: bool) -> None:
    cpu = torch.device("cpu")
    with torch.inference_mode(inference):
        row, place = counted(1, 5, 8, cpu), natural.ranks(2, 7, cpu)
        few, some = first_rows(row, 3), natural.first_of(row, 2, 4)
        assert [rows_in_order(t) for t in (row, few, some)] == [5, 3, 2] and natural.are_ranks(place)
        row[:, None][..., 0] = 4
        assert rows_in_order(row) is None and rows_in_order(row[:, None]) is None
        assert natural.rows_together([row]) is None and rows_in_order(first_rows(row, 3)) is None
        assert rows_in_order(few) == 3 and rows_in_order(some) == 2
        few.copy_(row)
        some.add_(1)
        assert rows_in_order(few) is None and rows_in_order(some) is None
        place[0, :1].fill_(3)
        assert not natural.are_ranks(place) and not natural.are_ranks(place[:, None])


def test_rows_that_were_written_to_are_no_longer_all_of_them() -> None:
    rows = [torch.tensor([[[0, 2, -1]]]), torch.tensor([[[1, 3]]])]
    natural.tell_together(rows, 4)
    assert natural.rows_together(rows) == 4
    rows[1][..., 0] = 3
    assert natural.rows_together(rows) is None
    natural.tell_together(rows[:1], 2)
    assert natural.rows_together(rows[:1]) == 2
