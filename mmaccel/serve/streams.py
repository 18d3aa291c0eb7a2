"""`/v1/streaming/sessions`: routes to open, feed, ask, save and close video streams."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response, StreamingResponse
from torch import Tensor

from mmaccel.core.decoding.generate import MAX_NEW_TOKENS, Answer, Deadline
from mmaccel.core.errors import ModelError
from mmaccel.core.recipe import stream_policy
from mmaccel.core.streams.live import AsyncReply, AsyncVideoSession, await_or_cancel, run_in_thread
from mmaccel.serve import sources
from mmaccel.serve.admission import AdmissionController, StreamPromise
from mmaccel.serve.chat import Asks
from mmaccel.serve.engine import Engine
from mmaccel.serve.guard import ConnectedClient, error_message, hide_server_path
from mmaccel.serve.kept import StreamEntry
from mmaccel.serve.messages import AskRequest, FramesRequest, SaveRequest, SessionRequest
from mmaccel.serve.settings import Refused
from mmaccel.serve.turns import FairQueue

log = logging.getLogger("mmaccel.serve")
router = APIRouter(prefix="/v1/streaming/sessions", tags=["streams"])


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

    @asynccontextmanager
    async def prevent_close(self) -> AsyncIterator[None]:
        """Context during which the server does not close the stream for being idle."""
        self.busy += 1
        try:
            yield
        finally:
            self.busy -= 1
            self.used = time.monotonic()


class Streams:
    """All open streams of a server."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.limits = engine, engine.settings.limits
        self._open: dict[str, Stream] = {}
        self.admission = AdmissionController(
            engine.recipes, self.limits, engine.free_device_bytes(), engine.kept.device_bytes
        )
        self._opening: dict[str, int] = {}
        self._calls = defaultdict[str, FairQueue](partial(FairQueue, self.limits.calls, self.limits.waiting))
        self._sockets: Counter[str | None] = Counter()
        engine.metrics.streams.set_function(lambda: len(self._open))
        engine.metrics.held.set_function(lambda: self._own() + engine.kept.bytes())

    def _own(self) -> int:
        return sum(one.kept.total_bytes() for one in list(self._open.values()))

    def _check_room(self) -> None:
        """Raise `Refused` where streams hold all that they may."""
        if self._own() >= self.limits.memory_bytes:
            raise Refused(429, f"the streams hold {self.limits.memory_bytes} bytes; close one.", "no_room")

    @asynccontextmanager
    async def hold_call(self, stream: Stream) -> AsyncIterator[None]:
        """Context of one call on a stream: waits while its owner has too many calls. Raises `Refused` if too many wait."""
        async with stream.prevent_close(), self._calls[stream.owner].wait_for_turn(stream.owner):
            yield

    @contextmanager
    def count_open_socket(self, owner: str | None) -> Iterator[None]:
        """Context that counts an open socket of `owner` (None: its API key comes later); `Refused` if too many are open."""
        if self._sockets[owner] >= self.limits.sockets:
            raise Refused(429, "too many sockets are open; close one.", "too_many_sockets")
        self._sockets[owner] += 1
        try:
            yield
        finally:
            self._sockets[owner] -= 1

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
        promise = self.admission.admit_stream(name, asked.fps, asked.seconds)
        self._opening[caller] = self._opening.get(caller, 0) + 1
        try:
            folder = None if asked.resume is None else self.saved_stream_folder(asked.resume, caller)
            if folder is not None and not folder.is_dir():
                raise Refused(404, f"resume: no stream is saved as {asked.resume!r}.", "stream_not_found")
            make = partial(StreamEntry, engine.model, engine.processor, engine.recipes[name], self.limits)
            with engine.refuse_out_of_memory():
                kept = await run_in_thread(make)
                if folder is not None:
                    with hide_server_path(folder):
                        await kept.session.load(folder)
                    promise.last = promise.first = kept.read_usage()
        except BaseException:
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

    async def add_frames(self, stream: Stream, asked: FramesRequest) -> int:
        """Add the frames or video of a request to a stream, then its lines of text; return the number of frames added."""
        given = bool(asked.frames) + (asked.video_url is not None)
        if given == 2 or not (given or asked.text):
            raise ModelError("frames: give frames or a video_url, one of the two, or text.")
        if asked.times is not None and len(asked.times) != len(asked.frames):
            raise ModelError(f"times: {len(asked.times)} for {len(asked.frames)} frames; give one for each.")
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

    @asynccontextmanager
    async def ask_stream_context(self, stream: Stream, asked: AskRequest) -> AsyncIterator[AsyncReply]:
        """Context that asks a stream a question and yields the reply; leaving it cancels the answer."""
        limits = self.limits
        if len(asked.question) > limits.text:
            raise Refused(413, f"question: it has more than {limits.text} characters; write less.")
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


async def get_open_streams(request: Request, asks: Asks) -> Streams:
    """FastAPI dependency: the server's open streams; the request's own is first loaded from another replica if need be."""
    streams: Streams = request.app.state.streams
    await streams.load_current(request.path_params.get("number", ""), asks)
    return streams


TheStreams = Annotated[Streams, Depends(get_open_streams)]


async def stream_json(stream: Stream) -> dict[str, Any]:
    """Return a stream's facts, counters and times, JSON-ready, with the clusters of its entries in the first such layer."""
    clusters = await run_in_thread(stream.session.clusters)
    return {
        "id": stream.id,
        "object": "streaming.session",
        "recipe": stream.recipe,
        "frames": stream.session.frames,
        "seconds": stream.session.seconds,
        "counters": await stream.kept.read_counters(),
        "shown": stream.session.shown,
        "clusters": {level: rows[0].tolist() for level, rows in clusters.items()},
    }


@router.post("", status_code=201)
async def open_stream(body: SessionRequest, streams: TheStreams, asks: Asks) -> dict[str, Any]:
    """Open a stream, or resume a saved one (`resume`)."""
    return await stream_json(await streams.open(body, asks))


@router.get("/{number}")
async def get_stream(number: str, streams: TheStreams, asks: Asks) -> dict[str, Any]:
    """Return the state of a stream, and the cluster of each time step."""
    return await stream_json(streams.get(number, asks))


@router.post("/{number}/frames")
async def send_frames(
    number: str, body: FramesRequest, request: Request, streams: TheStreams, asks: Asks
) -> dict[str, Any]:
    """Send frames, or a video, to the stream; and text with times, which is added after them."""
    stream = streams.get(number, asks)
    taken = await ConnectedClient(request).wait(streams.add_frames(stream, body))
    return {"taken": taken, "frames": stream.session.frames, "seconds": stream.session.seconds}


@router.get("/{number}/frames/{frame}", response_class=Response)
async def get_thumbnail(number: str, frame: int, streams: TheStreams, asks: Asks) -> Response:
    """Send the thumbnail of a frame, or of the last frame before it that has one, as JPEG."""
    file = streams.get(number, asks).kept.pictures.nearest_thumbnail(frame)
    if file is None:
        raise Refused(404, f"frames: there is no picture of frame {frame}.")
    return Response(file, media_type="image/jpeg")


@router.post("/{number}/ask")
async def ask_stream(number: str, body: AskRequest, request: Request, streams: TheStreams, asks: Asks) -> Any:
    """Ask about what the stream has shown so far; with `stream` by server-sent events `delta`, then `answer`."""
    stream, client = streams.get(number, asks), ConnectedClient(request)
    if not body.stream:
        async with streams.ask_stream_context(stream, body) as reply:
            return streams.answer_json(stream, body, await client.wait(reply))
    async with AsyncExitStack() as stack:
        reply = await stack.enter_async_context(streams.ask_stream_context(stream, body))
        first: str | None = await client.wait(anext(reply, None))
        opened = stack.pop_all()

    async def events() -> AsyncIterator[str]:
        try:
            async with opened:
                piece = first
                while piece is not None:
                    yield f"event: delta\ndata: {json.dumps({'text': piece})}\n\n"
                    piece = await client.wait(anext(reply, None))
                assert reply.answer is not None
                whole = json.dumps(streams.answer_json(stream, body, reply.answer))
            yield f"event: answer\ndata: {whole}\n\n"
        except Exception as error:
            yield f"event: error\ndata: {json.dumps({'message': error_message(error)})}\n\n"

    return StreamingResponse(events(), media_type="text/event-stream", headers={"Cache-Control": "no-store"})


@router.post("/{number}/save")
async def save_stream(number: str, body: SaveRequest, streams: TheStreams, asks: Asks) -> dict[str, Any]:
    """Save the stream under a name; `resume` opens it again."""
    stream, folder = streams.get(number, asks), streams.saved_stream_folder(body.name, asks)
    folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    limits, held = streams.limits, sum(one.stat().st_size for one in folder.parent.rglob("*"))
    if not folder.exists() and (len(os.listdir(folder.parent)) >= limits.saves or held >= limits.saved_bytes):
        raise Refused(429, "too much is saved; save under a name that there is.", "no_room")
    async with streams.hold_call(stream), stream.taking:
        with hide_server_path(folder):
            await stream.session.save(folder)
    return {"saved": body.name, "frames": stream.session.frames}


@router.delete("/{number}")
async def close_stream(number: str, streams: TheStreams, asks: Asks) -> dict[str, Any]:
    """Close a stream and forget it; what was saved under a name stays."""
    await streams.close(streams.get(number, asks), forget=True)
    return {"id": number, "deleted": True}
