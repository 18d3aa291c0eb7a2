"""Messages that leave from a thread: what is left behind when one breaks, and what is not kept of them."""

import gc
import threading
import weakref
from collections.abc import Sequence
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from mmaccel.core.decoding.worker import Blob, Outbox
from mmaccel.core.errors import DraftError
from tests.spies import broken

FAR_S = 10.0


def drop(kind: int, *numbers: int, blob: Sequence[Blob] = ()) -> None:
    """A wire that takes everything."""


def refuse(kind: int, *numbers: int, blob: Sequence[Blob] = ()) -> None:
    raise DraftError("nobody is there")


@pytest.mark.parametrize("send", [drop, refuse])
def test_nothing_of_a_prompt_is_kept_whether_it_leaves_or_not(send: Any) -> None:
    """An error holds the frames that it came through, and these the pixels: a failed prompt must not stay that way."""
    outbox, pixels = Outbox(send), torch.zeros(8)
    gone = weakref.ref(pixels)
    outbox.put(1, (), lambda pixels=pixels: [pixels.numpy().data])  # type: ignore[misc]
    outbox.wait(FAR_S)
    del pixels
    gc.collect()
    assert gone() is None and (outbox.error is None) == (send is drop)


def test_a_prompt_is_not_kept_while_the_next_one_leaves() -> None:
    outbox, going = Outbox(drop), threading.Event()
    pixels = torch.zeros(8)
    gone = weakref.ref(pixels)

    def second() -> list[Blob]:
        assert going.wait(FAR_S)
        return []

    outbox.put(1, (), lambda pixels=pixels: [pixels.numpy().data])  # type: ignore[misc]
    del pixels
    outbox.put(1, (), second)
    first = outbox._thread
    assert first is not None
    for _ in range(100):
        if gone() is None:
            break
        first.join(0.05)
    assert gone() is None and outbox.is_sending
    going.set()
    outbox.wait(FAR_S)


def test_the_thread_may_come_to_end_its_own_worker() -> None:
    """A worker that nobody has any more is ended by whatever thread collects garbage: the one of its outbox, too."""
    outbox, waited = Outbox(drop), threading.Event()

    def collects() -> list[Blob]:
        outbox.wait()
        waited.set()
        return []

    outbox.put(1, (), collects)
    outbox.wait(FAR_S)
    assert waited.is_set() and outbox.error is None


def test_a_thread_that_cannot_be_started_leaves_nothing_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    outbox, sent = Outbox(lambda kind, *numbers, blob=(): sent.append(kind)), list[int]()
    with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="new thread"):
        broken(patched, threading.Thread, "start", RuntimeError("can't start new thread"))
        outbox.put(1, (), lambda: [])
    assert not outbox.is_sending
    outbox.wait(FAR_S)
    outbox.put(2, (), lambda: [])
    outbox.wait(FAR_S)
    assert sent == [2]


def test_a_thread_that_is_ended_from_within_does_not_stay_busy() -> None:
    outbox = Outbox(drop)
    outbox.put(1, (), Mock(side_effect=SystemExit))
    outbox.wait(FAR_S)
    assert not outbox.is_sending and "SystemExit" in str(outbox.error)
