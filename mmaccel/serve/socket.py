"""The WebSocket of a stream: clients send frames and questions while answers are still being sent."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import WebSocket
from pydantic import Field, TypeAdapter
from starlette.websockets import WebSocketDisconnect

from mmaccel.core.streams.live import run_in_thread
from mmaccel.core.streams.standing import AnswerChange, StandingQuestion
from mmaccel.media.video import image_size
from mmaccel.serve import sources
from mmaccel.serve.guard import error_message, unknown_key
from mmaccel.serve.messages import AskRequest, Seconds, StrictModel
from mmaccel.serve.settings import Refused
from mmaccel.serve.stream_routes import router, stream_json
from mmaccel.serve.streams import Stream, Streams


class APIKeyMessage(StrictModel):
    """Client message: the API key, sent first if no header has it."""

    type: Literal["key"]
    key: str


class FrameMessage(StrictModel):
    """Client message: an encoded image (base64 or data URL), the stream's frame at `time` seconds."""

    type: Literal["frame"]
    data: str
    time: Seconds | None = None


class AskMessage(AskRequest):
    """Client message: ask a question; messages with its answer carry the same `id`."""

    type: Literal["ask"]
    id: str = ""


class StandingQuestionMessage(StrictModel):
    """Client message: ask a question repeatedly while frames come; fields as in `VideoSession.on`."""

    type: Literal["on"]
    id: str = ""
    question: str
    every: Annotated[float, Field(ge=0.1, le=1e6)] = 2.0
    last: Annotated[float, Field(gt=0, le=1e6)] | None = None
    says: str | None = None
    max_tokens: Annotated[int, Field(ge=1, le=64)] = 16


class CancelMessage(StrictModel):
    """Client message: cancel the answer or repeated question with this `id`."""

    type: Literal["cancel"]
    id: str = ""


class StreamStateMessage(StrictModel):
    """Client message: ask for the state of the stream."""

    type: Literal["look"]


Incoming: TypeAdapter[Any] = TypeAdapter(
    Annotated[
        APIKeyMessage
        | FrameMessage
        | AskMessage
        | StandingQuestionMessage
        | CancelMessage
        | StreamStateMessage,
        Field(discriminator="type"),
    ]
)
WAITING = 32
"""Frames of a WebSocket that wait to be taken in; what comes then is left out, and told."""
CLIP = 16
"""Of these, at most so many are taken in at once."""
ANSWERS = 8
"""Questions of one socket that are answered at once, and standing questions of it."""
KEY_S = 3.0
"""Seconds for which a socket waits for its key."""
WITHOUT_KEY = 8
"""So many times the sockets of one caller may wait for a key, from all addresses together."""


@router.websocket("/{number}/socket")
async def handle_stream_socket(websocket: WebSocket, number: str) -> None:
    """Serve the WebSocket of the stream with id `number`: JSON messages with a `type`; a binary message is a frame.

    In: `key` (first, if a key is needed and no header has it), `frame` (data, time), `ask` (id, question, ...), `on` (id,
    question, every, ...), `cancel` (id), `look`. Out: `event` (name: ready, taken, dropped, stream, change, error), `delta`
    (id, text), `evidence` (id, moments), `answer` (id, the whole answer).
    """
    streams: Streams = websocket.app.state.streams
    asks = websocket.state.caller
    try:
        if asks is None:
            place = f"at {websocket.client.host if websocket.client else None}"
            with streams.count_open_socket(place), streams.count_open_socket(None, WITHOUT_KEY):
                await websocket.accept()
                try:
                    text = await asyncio.wait_for(websocket.receive_text(), KEY_S)
                except TimeoutError:
                    raise unknown_key(None) from None
                first = Incoming.validate_json(text)
                key = first.key if isinstance(first, APIKeyMessage) else None
                asks = streams.engine.settings.identify_caller(key)
                if asks is None:
                    raise unknown_key(key)
        else:
            await websocket.accept()
        await streams.load_current(number, asks)
        stream = streams.get(number, asks)
        with streams.count_open_socket(asks):
            talk = StreamConnection(websocket, streams, stream)
            try:
                async with stream.prevent_close():
                    await talk.handle_messages()
            finally:
                await talk.close()
    except WebSocketDisconnect:
        return
    except Exception as error:
        with suppress(RuntimeError):
            await websocket.close(1008, error_message(error)[:120])


class StreamConnection:
    """A WebSocket connection of a client to one stream: it takes frames and questions, and sends answers."""

    def __init__(self, websocket: WebSocket, streams: Streams, stream: Stream) -> None:
        self._socket, self._streams, self._stream = websocket, streams, stream
        self._frames = deque[tuple[bytes, float | None]]()
        self._came = asyncio.Event()
        self._answers: dict[str, asyncio.Task[None]] = {}
        self._standing: dict[str, StandingQuestion] = {}
        self._writing, self._dropped = asyncio.Lock(), 0

    async def handle_messages(self) -> None:
        """Handle the client's WebSocket messages until it disconnects."""
        await self._send("event", name="ready", **_brief(self._stream))
        watching = asyncio.create_task(self._watch())
        self._answers[""] = watching  # under a name that no question has
        while True:
            message = await self._socket.receive()
            if message["type"] == "websocket.disconnect":
                return
            try:
                await self._hear(message)
            except Exception as error:
                await self._send("event", name="error", message=error_message(error), **_id_of(message))

    async def _hear(self, message: Any) -> None:
        if (data := message.get("bytes")) is not None:
            return await self._frame(data, None)
        heard = Incoming.validate_json(message.get("text") or "")
        if isinstance(heard, FrameMessage):
            await self._frame(await asyncio.to_thread(sources.decode_base64, heard.data), heard.time)
        elif isinstance(heard, AskMessage):
            name = f"#{heard.id}"
            _check_question("ask", name in self._answers, len(self._answers) > ANSWERS)
            task = self._answers[name] = asyncio.create_task(self._answer(heard))
            task.add_done_callback(lambda _: self._answers.pop(name, None))
            await asyncio.sleep(0)  # it begins, and so tells of its end
        elif isinstance(heard, StandingQuestionMessage):
            await self._stand(heard)
        elif (
            isinstance(heard, CancelMessage) and (standing := self._standing.pop(heard.id, None)) is not None
        ):
            standing.cancel()
        elif isinstance(heard, CancelMessage) and (found := self._answers.get(f"#{heard.id}")) is not None:
            found.cancel()
        elif isinstance(heard, StreamStateMessage):
            await self._send("event", name="stream", **await stream_json(self._stream))

    async def _stand(self, asked: StandingQuestionMessage) -> None:
        _check_question("on", asked.id in self._standing, len(self._standing) >= ANSWERS)
        self._streams.check_text(question=asked.question, says=asked.says or "")
        loop, session = asyncio.get_running_loop(), self._stream.session.session

        async def tell(change: AnswerChange) -> None:
            found, told = change.answer, {"before": change.before, "seconds": change.seconds}
            evidence = self._stream.kept.evidence_frames_json(found.evidence, True)
            await self._send("event", name="change", id=asked.id, text=found.text, evidence=evidence, **told)

        async def fail(error: Exception) -> None:
            if (one := self._standing.get(asked.id)) is not None and one.failed is error:
                del self._standing[asked.id]
            await self._send("event", name="error", id=asked.id, message=error_message(error))

        def in_loop(work: Callable[[Any], Coroutine[Any, Any, None]]) -> Callable[[Any], object]:
            return lambda what: asyncio.run_coroutine_threadsafe(work(what), loop)

        how = asked.model_dump(include={"every", "last", "says"})
        how |= {"max_new_tokens": asked.max_tokens, "fails": in_loop(fail)}
        on = partial(session.on, asked.question, in_loop(tell), **how)
        self._standing[asked.id] = one = await run_in_thread(on)  # it turns the question into tokens
        if one.failed is not None:  # before it had its place
            del self._standing[asked.id]

    async def _frame(self, data: bytes, time: float | None) -> None:
        held = sum(len(one) for one, _ in self._frames) + len(data)
        if not self._frames or (len(self._frames) < WAITING and held <= self._streams.limits.message_bytes):
            self._frames.append((data, time))
            self._came.set()
        else:
            self._dropped += 1
            self._streams.engine.metrics.dropped.inc()
            await self._send("event", name="dropped", frames=self._dropped)

    async def _watch(self) -> None:
        """Take in frames as they come, as many at once as wait."""
        while True:
            await self._came.wait()
            self._came.clear()
            while self._frames:
                some = [self._frames.popleft()]
                kind = _kind(*some[0])
                while len(some) < CLIP and self._frames and _kind(*self._frames[0]) == kind:
                    some.append(self._frames.popleft())
                times = [time for _, time in some if time is not None]
                try:
                    async with self._streams.hold_call(self._stream):
                        data = [data for data, _ in some]
                        taken = await self._streams.add_encoded_frames(
                            self._stream, data, times or None, None
                        )
                except Exception as error:
                    await self._send("event", name="error", message=error_message(error), frames=len(some))
                else:
                    await self._send("event", name="taken", taken=taken, **_brief(self._stream))

    async def _answer(self, asked: AskMessage) -> None:
        streams, stream, text = self._streams, self._stream, ""
        try:
            async with streams.ask_stream_context(stream, asked) as reply:
                async for piece in reply:
                    text += piece
                    await self._send("delta", id=asked.id, text=piece)
            assert reply.answer is not None
            told = streams.answer_json(stream, asked, reply.answer)
            await self._send("evidence", id=asked.id, evidence=told["evidence"])
            await self._send("answer", id=asked.id, **told)
        except asyncio.CancelledError:
            await self._send("answer", id=asked.id, text=text, finish_reason="cancelled")
            raise
        except Exception as error:
            await self._send("event", name="error", id=asked.id, message=error_message(error))

    async def _send(self, kind: str, **fields: Any) -> None:
        async with self._writing:
            with suppress(RuntimeError, WebSocketDisconnect):  # the client has gone, which `listen` hears
                await self._socket.send_json({"type": kind, **fields})

    async def close(self) -> None:
        """Cancel running answers and standing questions of this connection."""
        for standing in self._standing.values():
            standing.cancel()
        tasks = list(self._answers.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _check_question(name: str, known: bool, full: bool) -> None:
    """Raise `Refused` for a question whose id is in use (`known`), or that is one too many (`full`)."""
    if known:
        raise Refused(
            429, f"{name}: a question with this id runs; give another id, or cancel that one first."
        )
    if full:
        raise Refused(429, f"{name}: {ANSWERS} such questions run on this socket; cancel one first.")


def _id_of(message: Any) -> dict[str, str]:
    """The `id` of a client's message that is wrong, if it has one."""
    with suppress(ValueError, AttributeError):
        if isinstance(name := json.loads(message["text"]).get("id"), str):
            return {"id": name}
    return {}


def _kind(data: bytes, time: float | None) -> tuple[Any, bool]:
    """What frames that are taken in at once have alike."""
    return image_size(data), time is None


def _brief(stream: Stream) -> dict[str, Any]:
    return {"frames": stream.session.frames, "seconds": stream.session.seconds}
