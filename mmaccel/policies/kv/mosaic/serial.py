"""Host work of many small operations, on one thread."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """Inside, what this thread computes with PyTorch on the host takes no other thread; others compute as they did.

    An operation of some ten microseconds gains little from a second thread, and waits for it: for milliseconds, where
    something else has its core, as whoever pins memory, reads video or launches kernels has.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
