"""Queues requests so that callers take turns, and one with many requests does not block the others."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from mmaccel.serve.settings import Refused


class FairQueue:
    """Queue of requests in which callers take turns: one request of a caller, then one of the next caller. At most `first`
    requests hold a turn, and at most `waiting` wait for one. A request may give up its turn to the next and go on running;
    at most `more` do so, so at most `most` = `first` + `more` run at a time."""

    def __init__(self, first: int, waiting: int, more: int = 0) -> None:
        self._free, self._room, self._more, self.most = first, waiting, more, first + more
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    def __len__(self) -> int:
        """How many wait."""
        return sum(map(len, self._waiting.values()))

    @asynccontextmanager
    async def wait_for_turn(self, caller: str) -> AsyncIterator[Callable[[], None]]:
        """Context that waits for a turn for `caller` and holds it. It yields a function that gives the turn up early, or
        does nothing while `more` other requests run without one. Raises `Refused` if too many wait."""
        if self._free:
            self._free -= 1
        elif len(self) >= self._room:
            raise Refused(429, f"{self._room} requests wait already; try again later.", "busy")
        else:
            await self._wait(caller)
        held = True

        def leave() -> None:
            nonlocal held
            if held and self._more:
                held, self._more = False, self._more - 1
                self._next()

        try:
            yield leave
        finally:
            if held:
                self._next()
            else:
                self._more += 1

    async def _wait(self, caller: str) -> None:
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(caller, deque()).append(mine)
        try:
            await mine
        except asyncio.CancelledError:
            if mine.done() and not mine.cancelled():
                self._next()  # the turn came with the cancelling
            elif (queue := self._waiting.get(caller)) is not None and mine in queue:
                queue.remove(mine)
                if not queue:
                    del self._waiting[caller]
            raise

    def _next(self) -> None:
        while self._waiting:
            caller, queue = self._waiting.popitem(last=False)
            first = queue.popleft()
            if queue:
                self._waiting[caller] = queue  # behind the others
            if not first.done():
                first.set_result(None)
                return
        self._free += 1
