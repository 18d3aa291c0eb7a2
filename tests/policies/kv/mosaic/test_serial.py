"""The clustering takes one thread, and leaves the others to whoever calls it."""

from __future__ import annotations

import threading

import pytest
import torch

from mmaccel.policies.kv.mosaic.clusters import one_thread
from mmaccel.policies.kv.mosaic.maintain import Hierarchy
from tests.policies.kv.mosaic.scenes import feed, plant, runs, tree_of


@pytest.fixture(autouse=True)
def three_threads() -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_one_thread_inside_and_as_many_as_before_after() -> None:
    seen: list[int] = []
    with pytest.raises(KeyError), one_thread():
        with one_thread():
            seen.append(torch.get_num_threads())
        seen.append(torch.get_num_threads())
        raise KeyError
    assert [*seen, torch.get_num_threads()] == [1, 1, 3]


def test_another_thread_keeps_its_own() -> None:
    begun, done, seen = threading.Event(), threading.Event(), list[int]()

    def other() -> None:
        seen.append(torch.get_num_threads())
        begun.set()
        done.wait()
        seen.append(torch.get_num_threads())

    thread = threading.Thread(target=other)
    thread.start()
    begun.wait()
    with one_thread():
        done.set()
        thread.join()
    assert seen == [3, 3]


def test_inserting_and_splitting_take_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[int] = set()
    place, refine = Hierarchy._place_look, Hierarchy._refine
    for name, work in (("_place_look", place), ("_refine", refine)):

        def watched(*given: object, work: object = work) -> object:
            seen.add(torch.get_num_threads())
            return work(*given)  # type: ignore[operator]

        monkeypatch.setattr(Hierarchy, name, watched)
    tree = tree_of(buffer=64)
    feed(tree, plant(runs(40)), 5)
    assert seen == {1} and torch.get_num_threads() == 3
    seen.clear()
    tree.touch(0, (tree.semantic.size[0] > 0).nonzero()[:, 0])
    assert seen == {1} and torch.get_num_threads() == 3
