"""The open video streams of a server: opened or resumed, fed, asked, saved and closed."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from mmaccel.core.decoding.generate import MAX_NEW_TOKENS, Answer, Deadline
from mmaccel.core.errors import ModelError
from mmaccel.core.recipe import stream_policy
from mmaccel.core.streams.live import AsyncReply, AsyncVideoSession, await_or_cancel, run_in_thread
from mmaccel.core.streams.saved_stream import saved_content_fields
from mmaccel.core.streams.session_io import saved_recipe
from mmaccel.serve import sources
from mmaccel.serve.admission import AdmissionController, StreamPromise
from mmaccel.serve.engine import Engine
from mmaccel.serve.guard import hide_server_path
from mmaccel.serve.kept import StreamEntry
from mmaccel.serve.messages import AskRequest, FramesRequest, SessionRequest
from mmaccel.serve.settings import Refused
from mmaccel.serve.turns import FairQueue

log = logging.getLogger("mmaccel.serve")


@dataclass(eq=False)
class Stream:
    """An open stream of the caller `owner`. `used`: time of its last use (`time.monotonic`); `busy`: calls in progress."""

    id: str
    owner: str
    recipe: str
    kept: StreamEntry
    promise: StreamPromise
    used: float = field(default_factory=time.monotonic)
    busy: int = 0
    taking: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def session(self) -> AsyncVideoSession:
        return self.kept.session

    def brief_json(self) -> dict[str, Any]:
        """Return what the stream is and how long, JSON-ready, without waiting for the model."""
        return {
            "id": self.id,
            "object": "streaming.session",
            "recipe": self.recipe,
            "frames": self.session.frames,
            "seconds": self.session.seconds,
        }

    @asynccontextmanager
    async def prevent_close(self) -> AsyncIterator[None]:
        """Context during which the server does not close the stream for being idle."""
        self.busy += 1
        try:
            yield
        finally:
            self.busy -= 1
            self.used = time.monotonic()


def count_bytes(folder: Path) -> int:
    """Return the bytes of all files below `folder`; one that goes meanwhile counts as nothing."""
    held = 0
    for root, _, files in os.walk(folder):
        for name in files:
            with suppress(OSError):
                held += os.stat(os.path.join(root, name)).st_size
    return held


class Streams:
    """All open streams of a server."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.limits = engine, engine.settings.limits
        self._open: dict[str, Stream] = {}
        self.admission = AdmissionController(
            engine.recipes, self.limits, engine.free_device_bytes(), engine.kept.device_bytes
        )
        self._opening: dict[str, int] = {}
        self._reserving, self._saving = threading.Lock(), Counter[Path]()
        self._calls = defaultdict[str, FairQueue](partial(FairQueue, self.limits.calls, self.limits.waiting))
        self._sockets: Counter[str | None] = Counter()
        engine.metrics.streams.set_function(lambda: len(self._open))
        engine.metrics.held.set_function(lambda: self._own() + engine.kept.bytes())

    def _own(self) -> int:
        return sum(one.kept.total_bytes() for one in list(self._open.values()))

    def _check_room(self, more: int = 0) -> None:
        """Raise `Refused` where streams hold all that they may, or would with `more` bytes of a new one."""
        if self._own() + max(more, 1) > self.limits.memory_bytes:
            told = f"the streams hold the {self.limits.memory_bytes} bytes that they may; close one."
            raise Refused(503 if more else 429, told, "no_room")

    @asynccontextmanager
    async def hold_call(self, stream: Stream) -> AsyncIterator[None]:
        """Context of one call on a stream: waits while its owner has too many calls. Raises `Refused` if too many wait."""
        async with stream.prevent_close(), self._calls[stream.owner].wait_for_turn(stream.owner):
            yield

    @contextmanager
    def count_open_socket(self, owner: str | None, times: int = 1) -> Iterator[None]:
        """Context that counts an open socket of `owner`, a caller or an address (None: all whose API key comes later);
        raises `Refused` where `times` as many are open as one caller may have."""
        if self._sockets[owner] >= times * self.limits.sockets:
            raise Refused(429, "too many sockets are open; close one.", "too_many_sockets")
        self._sockets[owner] += 1
        try:
            yield
        finally:
            self._sockets[owner] -= 1
            self._sockets += Counter()  # which drops those that have none

    async def __aenter__(self) -> None:
        self._sweeping = asyncio.create_task(self._sweep())

    async def __aexit__(self, *_: object) -> None:
        self._sweeping.cancel()
        for one in list(self._open.values()):
            await self.close(one)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(min(30.0, self.limits.idle_seconds / 2))
            old = time.monotonic() - self.limits.idle_seconds
            for one in list(self._open.values()):
                if not one.busy and one.used < old:
                    try:
                        await self.close(one)
                    except Exception:  # the others are closed all the same
                        log.exception("closing a stream failed")

    def get(self, number: str, caller: str | None) -> Stream:
        """Return the stream with id `number`; raises `Refused` (404) if `caller` has none of that id."""
        found = self._open.get(number)
        if found is None or caller is None or found.owner != caller:
            raise Refused(404, "there is no stream of this id; open one.", "stream_not_found")
        return found

    async def open(self, asked: SessionRequest, caller: str) -> Stream:
        """Open a new stream or resume a saved one. Raises `Refused` if there are too many."""
        engine, kept = self.engine, None
        if not (names := engine.stream_recipe_names()):
            raise Refused(400, "recipe: this server has none with a memory of streams; give --recipe mosaic.")
        chosen = asked.recipe if asked.recipe is not None else (asked.model or "").partition("@")[2]
        chosen = chosen or (engine.default if engine.default in names else names[0])
        name = engine.find_recipe(asked.model, chosen)
        stream_policy(engine.recipes[name])
        self._check_room()
        own = sum(one.owner == caller for one in self._open.values()) + self._opening.get(caller, 0)
        every = len(self._open) + sum(self._opening.values())
        if every >= self.limits.sessions or own >= self.limits.own_sessions:
            raise Refused(429, "too many streams are open; close one.", "too_many_streams")
        promise: StreamPromise | None = None
        self._opening[caller] = self._opening.get(caller, 0) + 1
        try:
            folder = None if asked.resume is None else self.saved_stream_folder(asked.resume, caller)
            size = 0 if folder is None else await run_in_thread(partial(self._check_saved, folder, name))
            promise = self.admission.admit_stream(name, asked.fps, asked.seconds, size)
            make = partial(StreamEntry, engine.model, engine.processor, engine.recipes[name], self.limits)
            with engine.refuse_out_of_memory():
                kept = await run_in_thread(make)
                if folder is not None:
                    with hide_server_path(folder):
                        await kept.session.load(folder)
                    promise.last = promise.first = kept.read_usage()
                    if asked.fps is not None:  # one moved from another replica has its place
                        self._check_room(kept.total_bytes())
        except BaseException:
            if promise is not None:
                self.admission.release_promise(promise)
            if kept is not None:
                await kept.session.close()
            raise
        finally:
            self._opening[caller] -= 1
        made = Stream(secrets.token_urlsafe(18), caller, name, kept, promise)
        self._open[made.id] = made
        return made

    async def close(self, stream: Stream, forget: bool = False) -> None:
        """Cancel the stream's calls and free its memory. `forget`: replicas also delete its state in their shared folder."""
        if self._open.pop(stream.id, None) is not None:
            self.admission.release_promise(stream.promise)
            await stream.session.close()

    async def load_current(self, number: str, caller: str | None) -> None:
        """Load the stream's newest state, if replicas share streams (`ReplicatedStreams`); a single server does nothing."""

    async def on_stream_change(self, stream: Stream) -> None:
        """Hook for subclasses: called after a stream took in frames or text, or answered a turn of a conversation."""

    def saved_stream_folder(self, name: str, caller: str) -> Path:
        """Return the folder where a caller's stream is saved under `name`; raises `Refused` if saving is disabled."""
        if self.engine.settings.saves is None:
            raise Refused(403, "this server saves no streams; start it with --saves FOLDER.")
        return self.engine.settings.saves / caller / name

    def _check_saved(self, folder: Path, recipe: str) -> int:
        """Return the bytes of the stream saved in `folder`; raises `Refused` unless it can go on under `recipe`."""
        if not folder.is_dir():
            raise Refused(404, f"resume: no stream is saved as {folder.name!r}.", "stream_not_found")
        fits: list[str] = []
        with suppress(ModelError):  # which `load` raises again
            saved = saved_content_fields(saved_recipe(folder).kv)
            fits = [
                name for name, one in self.engine.recipes.items() if saved_content_fields(one.kv) == saved
            ]
        if fits and recipe not in fits:
            raise Refused(
                400, f"resume: {folder.name} was saved under the recipe {fits[0]!r}; name that one."
            )
        return count_bytes(folder)

    def reserve_save(self, folder: Path) -> None:
        """Make the folder of a stream that is saved for the first time; raises `Refused` where its caller has no room."""
        with self._reserving:
            self._saving[folder] += 1
            if folder.exists():
                return
            folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            held = count_bytes(folder.parent)
            if len(os.listdir(folder.parent)) >= self.limits.saves or held >= self.limits.saved_bytes:
                raise Refused(429, "too much is saved; save under a name that there is.", "no_room")
            folder.mkdir(mode=0o700)

    async def save(self, stream: Stream, name: str, caller: str) -> None:
        """Save a stream under a name of its caller. Raises `Refused` or `ModelError`."""
        folder = self.saved_stream_folder(name, caller)
        try:
            await run_in_thread(partial(self.reserve_save, folder))
            async with self.hold_call(stream), stream.taking:
                with hide_server_path(folder):
                    await stream.session.save(folder)
        finally:
            with self._reserving, suppress(OSError):
                self._saving[folder] -= 1
                if not self._saving[folder]:
                    del self._saving[folder]
                    folder.rmdir()  # only where nothing was written

    async def list_streams(self, caller: str) -> list[dict[str, Any]]:
        """Return the open streams of a caller, oldest first, as `brief_json`."""
        return [one.brief_json() for one in self._open.values() if one.owner == caller]

    async def add_frames(self, stream: Stream, asked: FramesRequest) -> int:
        """Add the frames or video of a request to a stream, then its lines of text; return the number of frames added."""
        given = bool(asked.frames) + (asked.video_url is not None)
        if given == 2 or not (given or asked.text):
            raise ModelError("frames: give frames or a video_url, one of the two, or text.")
        if asked.times is not None and len(asked.times) != len(asked.frames):
            raise ModelError(f"times: {len(asked.times)} for {len(asked.frames)} frames; give one for each.")
        if asked.times is not None and asked.fps is not None:
            raise ModelError("fps: the frames have times already; give one of the two.")
        if asked.frames and asked.stored:
            raise ModelError("stored: it is of a video_url; leave it out with frames.")
        engine, limits, deadline = self.engine, self.limits, Deadline(self.limits.seconds)
        if len(asked.frames) > limits.frames:
            raise Refused(413, f"frames: give at most {limits.frames} in a call.")
        session, taken = stream.session, 0
        async with self.hold_call(stream):
            if asked.frames:
                taken = await self.add_encoded_frames(stream, asked.frames, asked.times, asked.fps)
            elif asked.video_url is not None:
                with tempfile.TemporaryDirectory(prefix="mmaccel-") as folder:
                    url = asked.video_url.url
                    source = await engine.fetch_media(url, "video", stream.owner, Path(folder), deadline)
                    read = partial(engine.decode_video, source, asked.fps or 1.0, None, deadline)
                    video = await await_or_cancel(run_in_thread(read), deadline)
                call = partial(session.ingest if asked.stored else session.watch, video)
                taken = await self._taken(stream, video.frames, call, deadline, not asked.stored)
            if asked.text:
                async with stream.taking:
                    await session.tell([one.resolve_times(session.seconds) for one in asked.text])
                    await self.on_stream_change(stream)
        return taken

    async def add_encoded_frames(
        self, stream: Stream, pieces: Sequence[str | bytes], times: list[float] | None, fps: float | None
    ) -> int:
        """Decode the encoded frames `pieces` (bytes or base64) and add them to `stream`; return how many were added."""
        deadline = Deadline(self.limits.seconds)

        def read() -> Tensor:
            given = [one if isinstance(one, bytes) else sources.decode_base64(one) for one in pieces]
            return sources.decode_frames(given, self.limits)

        frames = await await_or_cancel(run_in_thread(read), deadline)
        call = partial(stream.session.watch, frames, times=times, fps=fps)
        return await self._taken(stream, frames, call, deadline)

    async def _taken(
        self, stream: Stream, frames: Tensor, call: Callable[..., Any], deadline: Deadline, live: bool = True
    ) -> int:
        began, metrics = time.monotonic(), self.engine.metrics
        async with stream.taking:
            self._check_room()
            deadline.check()
            before, start = stream.kept.usage_counts(), time.monotonic() - stream.session.session.waited_s
            with self.engine.refuse_out_of_memory():
                taken: int = await call(timeout=max(0.01, deadline.seconds_left() or 0.0))
            seconds = time.monotonic() - stream.session.session.waited_s - start
            await run_in_thread(partial(stream.kept.pictures.add, before[0], frames[:taken]))
            self.admission.record_call(stream.promise, seconds, before, stream.kept.read_usage(), live)
            await self.on_stream_change(stream)
        metrics.frames.inc(taken)
        metrics.rate.set(taken / max(time.monotonic() - began, 1e-9))
        return taken

    def check_text(self, **texts: str) -> None:
        """Raise `Refused` for a field whose text is too long."""
        for name, text in texts.items():
            if len(text) > self.limits.text:
                raise Refused(413, f"{name}: it has more than {self.limits.text} characters; write less.")

    @asynccontextmanager
    async def ask_stream_context(self, stream: Stream, asked: AskRequest) -> AsyncIterator[AsyncReply]:
        """Context that asks a stream a question and yields the reply; leaving it cancels the answer."""
        limits = self.limits
        self.check_text(question=asked.question)
        most = asked.max_tokens or MAX_NEW_TOKENS
        if most > limits.new_tokens:
            raise Refused(400, f"max_tokens: {most} is more than the {limits.new_tokens} of this server.")
        seconds = min(asked.timeout or limits.seconds, limits.seconds)
        async with self.hold_call(stream):
            how: dict[str, Any] = {"chat": asked.chat, "between": asked.between, "evidence": asked.evidence}
            how |= asked.answer_schema
            if not asked.greedy:
                how |= asked.options() | ({} if asked.seed is None else {"seed": asked.seed})
            reply = stream.session.ask(asked.question, most, timeout=seconds, **how)
            try:
                with self.engine.refuse_out_of_memory():
                    yield reply
            finally:
                await reply.aclose()
            if asked.chat:
                await self.on_stream_change(stream)

    def answer_json(self, stream: Stream, asked: AskRequest, answer: Answer) -> dict[str, Any]:
        """Return an answer as a JSON-ready mapping; also updates the metrics."""
        metrics, counted = self.engine.metrics, answer.counters
        draft = {"proposed": counted.get("drafted", 0), "accepted": counted.get("accepted", 0)}
        metrics.count_answer(answer.ttft_s or None, answer.tokens_per_s, len(answer.ids), draft)
        metrics.retrieved.inc(sum(one.recalled for one in answer.evidence))
        return {
            "text": answer.text,
            "finish_reason": answer.finish_reason,
            "tokens": len(answer.ids),
            "ttft_s": answer.ttft_s,
            "tokens_per_s": answer.tokens_per_s,
            "recipe": stream.recipe,
            "lines": answer.lines,
            "evidence": stream.kept.evidence_frames_json(answer.evidence, asked.thumbnails)
            if asked.evidence
            else None,
        }
