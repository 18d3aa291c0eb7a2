"""Open video streams with thumbnails of their frames, and a cache of stored videos for follow-up questions."""

from __future__ import annotations

import asyncio
import base64
import bisect
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from operator import itemgetter
from typing import Any

from torch import Tensor, nn

from mmaccel.core.decoding.generate import Evidence
from mmaccel.core.recipe import Recipe
from mmaccel.core.streams.live import AsyncVideoSession, run_in_thread
from mmaccel.media.video import write_jpeg
from mmaccel.serve.admission import StreamUsageCounts
from mmaccel.serve.metrics import Metrics
from mmaccel.serve.settings import Limits

SIDE = 160
"""Pixels of the longer side of a small picture."""
EVIDENCE = 16
"""Moments of an answer that are told, those that weigh most."""


class Thumbnails:
    """JPEG thumbnails of a stream's frames, by frame number. Whenever there are over `most`, every second is dropped."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._files: list[tuple[int, bytes]] = []  # read while another thread adds

    def add(self, first: int, frames: Tensor) -> None:
        """Add thumbnails of frames [T, 3, H, W], numbered from `first`."""
        for number, frame in enumerate(frames, first):
            self._files.append((number, write_jpeg(frame, SIDE)))
            if len(self._files) > self._most:
                self._files = self._files[::2]

    def nearest_thumbnail(self, number: int) -> bytes | None:
        """Return the thumbnail of a frame, or of the last frame before it that has one; None if there is none."""
        files = self._files
        place = bisect.bisect_right(files, number, key=itemgetter(0))
        return files[place - 1][1] if place else None


def without_kv_age_limit(recipe: Recipe) -> Recipe:
    """Return `recipe` for a stored video: its KV policy without the age limit (`keep_seconds`) that drops old frames."""
    if getattr(recipe.kv, "keep_seconds", None) is None:
        return recipe
    return replace(recipe, kv=replace(recipe.kv, keep_seconds=None))  # type: ignore[call-arg]


class StreamEntry:
    """One open video stream: its session, recipe, thumbnails, and the counters as they were last read."""

    def __init__(self, model: nn.Module, processor: Any, recipe: Recipe, limits: Limits) -> None:
        self.recipe, self.pictures = recipe, Thumbnails(limits.thumbnails)
        self.session = AsyncVideoSession(model, processor, recipe)
        self.users = 0
        self.asking = asyncio.Lock()
        self.counters: dict[str, float] = {}

    async def read_counters(self) -> dict[str, float]:
        """Read the session's counters anew and return them; in a thread, since this waits for a running forward pass."""
        self.counters = await run_in_thread(self.session.counters)
        return self.counters

    def evidence_frames_json(self, found: tuple[Evidence, ...], pictures: bool) -> list[dict[str, Any]]:
        """Return, JSON-ready, the frames of the evidence `found` that have the most attention, at most `EVIDENCE` of them;
        with thumbnails if `pictures`."""
        order = sorted(found, key=lambda one: (-(one.score or 0.0), -one.recalled, one.frames))[:EVIDENCE]
        told = [asdict(one) for one in order]
        for one in told if pictures else ():
            if (file := self.pictures.nearest_thumbnail(one["frames"][0])) is not None:
                one["image"] = "data:image/jpeg;base64," + base64.b64encode(file).decode()
        return told

    def read_usage(self) -> StreamUsageCounts:
        """Read bytes and questions anew, without waiting for a forward pass or the device, and return `usage_counts`."""
        self.counters |= self.session.usage()
        return self.usage_counts()

    def usage_counts(self) -> StreamUsageCounts:
        """Return frames, bytes and questions so far; bytes and questions as when the counters were last read."""
        device, questions = (int(self.counters.get(name, 0)) for name in ("bytes", "questions"))
        return StreamUsageCounts(self.session.frames, self.total_bytes(), device, questions)

    def total_bytes(self) -> int:
        """Return the bytes held on the device, the host and the disk, as when the counters were last read."""
        return int(sum(self.counters.get(name, 0) for name in ("bytes", "host_bytes", "host_disk_bytes")))


class VideoCache:
    """LRU cache of stored videos that a session has already encoded, keyed by caller, content, recipe and sampling."""

    def __init__(self, limits: Limits, metrics: Metrics) -> None:
        self._limits, self._metrics = limits, metrics
        self._videos: OrderedDict[Hashable, asyncio.Future[StreamEntry]] = OrderedDict()

    @asynccontextmanager
    async def get_or_open(
        self, key: Hashable, make: Callable[[], Awaitable[StreamEntry]]
    ) -> AsyncIterator[StreamEntry]:
        """Context that holds the cached video of `key`; if missing, `make` opens it, once for concurrent requests."""
        kept = await self._kept(key, make)
        kept.users += 1
        try:
            yield kept
        finally:
            kept.users -= 1
            await self.close_unused(self._limits.kept)

    async def _kept(self, key: Hashable, make: Callable[[], Awaitable[StreamEntry]]) -> StreamEntry:
        while (found := self._videos.get(key)) is not None:
            self._videos.move_to_end(key)
            try:
                kept = await asyncio.shield(found)
            except (Exception, asyncio.CancelledError):
                if not found.done() or ((task := asyncio.current_task()) and task.cancelling()):
                    raise
                continue  # who made it failed, or left: it is made anew
            self._metrics.hits.inc()
            return kept
        mine = self._videos[key] = asyncio.get_running_loop().create_future()
        try:
            kept = await make()
        except BaseException:
            if self._videos.get(key) is mine:
                del self._videos[key]
            mine.cancel()
            raise
        mine.set_result(kept)
        return kept

    def _whole(self) -> dict[Hashable, StreamEntry]:
        """Those that are made."""
        return {key: one.result() for key, one in self._videos.items() if one.done() and not one.cancelled()}

    def bytes(self) -> int:
        """Return the bytes that all cached videos hold in memory and on disk."""
        return sum(one.total_bytes() for one in self._whole().values())

    def device_bytes(self) -> int:
        """Return the bytes that all cached videos hold on the model's devices."""
        return sum(one.usage_counts().device for one in self._whole().values())

    async def close_unused(self, most: int) -> int:
        """Close videos that no request uses, least recently used first, until at most `most` are left and their bytes are
        within the server's limit; return how many were closed."""
        whole, closed = self._whole(), list[StreamEntry]()
        held = self.bytes()
        for key, one in whole.items():
            if len(whole) - len(closed) <= most and held <= self._limits.kept_bytes:
                break
            if not one.users:
                del self._videos[key]  # before anything is awaited: what `whole` says still holds
                closed, held = [*closed, one], held - one.total_bytes()
        self._metrics.kept.set(len(self._videos))
        for one in closed:
            await one.session.close()
        return len(closed)

    async def close(self) -> None:
        """Close all cached videos."""
        while self._videos:
            _, one = self._videos.popitem()
            if one.done() and not one.cancelled():
                await one.result().session.close()
