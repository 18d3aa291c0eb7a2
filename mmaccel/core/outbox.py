"""What leaves for a second process while its sender goes on: the pixels of a long video take a quarter of a second."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

Blob = bytes | bytearray | memoryview


class Outbox:
    """Messages that leave one after the other, from a thread which is there as long as any is on its way.

    send   takes a message's kind, its numbers and `blob`, its bytes in pieces; see `Wire.send`
    error  why one of them did not get through; those behind it are dropped
    """

    def __init__(self, send: Callable[..., None]) -> None:
        self._send, self._lock = send, threading.Lock()
        self._held: deque[tuple[int, tuple[int, ...], Callable[[], Sequence[Blob]]]] = deque()
        self._thread: threading.Thread | None = None
        self.error: Exception | None = None

    @property
    def busy(self) -> bool:
        """Whether a message is on its way."""
        return self._thread is not None

    def put(self, kind: int, numbers: tuple[int, ...], blob: Callable[[], Sequence[Blob]]) -> None:
        """Send a message after those before it; its bytes are made when its turn has come."""
        with self._lock:
            if self.error is None:
                self._held.append((kind, numbers, blob))
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, daemon=True)
                self._thread.start()

    def wait(self, limit_s: float | None = None) -> None:
        """Until nothing is on its way, or for `limit_s`."""
        if (thread := self._thread) is not None:
            thread.join(limit_s)

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._held:
                    self._thread = None
                    return
                kind, numbers, blob = self._held.popleft()
            try:
                self._send(kind, *numbers, blob=blob())
            except Exception as error:  # raised in the caller's thread, by the next call of its worker
                with self._lock:
                    self.error = error
                    self._held.clear()
