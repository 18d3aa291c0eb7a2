"""Double buffering: what a later layer needs comes in while this one computes, and nothing is overwritten while it is read.

Each of a few buffers on the device carries two marks: *ready*, after which its units are there, and *free*, after which no
one reads them any more. Who reads waits for ready; the wire waits for free before it writes. Leave either out and answers
are wrong now and then, under load.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from torch import Tensor

from mmaccel.core.errors import RecipeError, StoreError
from mmaccel.policies.kv.store.cost import Way
from mmaccel.policies.kv.store.lanes import Lanes, Mark

if TYPE_CHECKING:
    from mmaccel.policies.kv.store.host import HostStore


class _Slot:
    """A buffer and the two marks."""

    def __init__(self) -> None:
        self.buffer: Tensor | None = None
        self.ready: Mark | None = None
        self.free: Mark | None = None
        self.taken = False


class Ticket:
    """Units under way to a buffer. `wait` gives them; `release`, after the last reader was issued, gives the buffer back."""

    def __init__(self, slot: _Slot, units: int, tokens: int, lanes: Lanes) -> None:
        self._slot, self._rows, self._lanes = slot, units * tokens, lanes
        self._ready = slot.ready
        self._asked: Mark | None = None
        self._open = True

    def wait(self) -> tuple[Tensor, Tensor]:
        """Keys and values, each [G, n * P, D], that may be read by what is issued on the compute lane from now on."""
        if not self._open:
            raise StoreError("host store: a ticket that was released cannot be waited for; fetch again.")
        buffer, ready = self._slot.buffer, self._slot.ready
        assert buffer is not None and ready is not None
        if self._asked is None:
            self._asked = self._lanes.compute.mark(timed=True)
        self._lanes.compute.wait(ready)
        return buffer[0, :, : self._rows], buffer[1, :, : self._rows]

    def slack(self) -> float | None:
        """Seconds between the arrival of the units and the moment when the compute lane came to wait for them, by the
        device's clock: negative when it had to wait, None when it never came. Blocks until both have passed."""
        if self._asked is None or self._ready is None:
            return None
        self._asked.sync()
        self._ready.sync()
        return self._ready.seconds(self._asked)

    def release(self) -> None:
        """The buffer may be overwritten once what was issued on the compute lane so far has run; again: nothing happens."""
        if self._open:
            self._open = False
            self._slot.free = self._lanes.compute.mark()
            self._slot.taken = False

    def __enter__(self) -> tuple[Tensor, Tensor]:
        return self.wait()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class Slots:
    """`count` buffers for what comes from `store`, taken in turn; they grow to the largest fetch."""

    def __init__(self, store: HostStore, lanes: Lanes, count: int = 2, units: int = 0) -> None:
        if count < 1:
            raise RecipeError(f"slots: count is {count}; give at least 1.")
        self._store, self._lanes = store, lanes
        self._slots = [_Slot() for _ in range(count)]
        self._next = 0
        for slot in self._slots:
            self._fit(slot, units)

    def fetch_async(self, layer: int, units: Sequence[int] | Tensor, way: Way | None = None) -> Ticket:
        """Start to bring `units` of `layer` (see `HostStore.fetch`) into the next buffer that no ticket holds.

        Raises `StoreError` when tickets hold all of them.
        """
        slot = self._vacant()
        n = len(units)
        self._fit(slot, n)
        assert slot.buffer is not None
        rows = n * self._store.shape.tokens
        after = slot.free
        slot.ready = self._store.fetch_into(layer, units, slot.buffer[:, :, :rows], after=after, way=way)
        slot.taken = True
        return Ticket(slot, n, self._store.shape.tokens, self._lanes)

    def nbytes(self) -> int:
        """Bytes of the buffers."""
        return sum(slot.buffer.nbytes for slot in self._slots if slot.buffer is not None)

    def _vacant(self) -> _Slot:
        count = len(self._slots)
        for step in range(count):
            slot = self._slots[(self._next + step) % count]
            if not slot.taken:
                self._next = (self._next + step + 1) % count
                return slot
        raise StoreError(
            f"slots: all {count} buffers are held by tickets; release one, or give a larger count."
        )

    def _fit(self, slot: _Slot, units: int) -> None:
        rows = units * self._store.shape.tokens
        if slot.buffer is not None and slot.buffer.shape[2] >= rows:
            return
        if slot.buffer is not None:
            # The old one's memory returns to the compute lane's pool, while the wire may still be writing to it.
            self._lanes.wire.uses(slot.buffer)
        slot.buffer = self._store.buffer(units)
        # New memory may have been given up by work on the compute lane that has yet to run.
        slot.free = self._lanes.compute.mark()
