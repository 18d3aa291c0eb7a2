"""What leaves for a second process while its sender goes on: the pixels of a long video take a quarter of a second."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from mmaccel.core.errors import DraftError

Blob = bytes | bytearray | memoryview


class Outbox:
    """Messages that leave one after the other, from a thread which is there as long as any is on its way.

    send   takes a message's kind, its numbers and `blob`, its bytes in pieces; see `Wire.send`
    error  why one of them did not get through; those behind it are dropped
    left   when the last one had left, by `time.monotonic`
    """

    def __init__(self, send: Callable[..., None]) -> None:
        self._send, self._lock = send, threading.Lock()
        self._held: deque[tuple[int, tuple[int, ...], Callable[[], Sequence[Blob]]]] = deque()
        self._thread: threading.Thread | None = None
        self.error: DraftError | None = None
        self.left = 0.0

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
                thread = threading.Thread(target=self._work, daemon=True)
                try:
                    thread.start()
                except BaseException:  # there is room for no more threads, or the program is ending
                    self._held.clear()
                    raise
                self._thread = thread

    def wait(self, limit_s: float | None = None) -> None:
        """Until nothing is on its way, or for `limit_s`."""
        thread = self._thread
        # The thread itself may be asked: the collector of garbage, which ends a process that nobody has, runs in any.
        if thread is not None and thread is not threading.current_thread():
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
            except BaseException as error:  # raised in the caller's thread, by the next call of its worker
                told = str(error) if isinstance(error, DraftError) else f"{type(error).__name__}: {error}"
                with self._lock:
                    # Another one: the frames that this one has been through hold the prompt.
                    self.error = DraftError(told)
                    self._held.clear()
            # Nor is a prompt kept that has left.
            del blob
            self.left = time.monotonic()
