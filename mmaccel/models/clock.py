"""A streamer that notes when tokens reach the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


class Clock:
    """A streamer that calls `token` with the number of tokens that reached the host, and passes the tokens on to `inner`."""

    def __init__(self, token: Callable[[int], None], inner: Any) -> None:
        self.token, self.inner, self.prompt = token, inner, True

    def put(self, value: Tensor) -> None:
        if not self.prompt:
            # [B] tokens of a step, or [1, n] that were guessed and verified.
            self.token(value.shape[1] if value.ndim == 2 else 1)
        self.prompt = False
        if self.inner is not None:
            self.inner.put(value)

    def end(self) -> None:
        if self.inner is not None:
            self.inner.end()
