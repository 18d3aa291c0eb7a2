"""`/v1/streaming/sessions`: routes to open, list, feed, ask, save and close video streams."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response, StreamingResponse

from mmaccel.core.streams.live import run_in_thread
from mmaccel.serve.chat import Asks
from mmaccel.serve.guard import ConnectedClient, error_message
from mmaccel.serve.messages import AskRequest, FramesRequest, SaveRequest, SessionRequest
from mmaccel.serve.settings import Refused
from mmaccel.serve.streams import Stream, Streams

router = APIRouter(prefix="/v1/streaming/sessions", tags=["streams"])


async def get_open_streams(request: Request, asks: Asks) -> Streams:
    """FastAPI dependency: the server's open streams; the request's own is first loaded from another replica if need be."""
    streams: Streams = request.app.state.streams
    await streams.load_current(request.path_params.get("number", ""), asks)
    return streams


TheStreams = Annotated[Streams, Depends(get_open_streams)]


async def stream_json(stream: Stream) -> dict[str, Any]:
    """Return a stream's facts, counters and times, JSON-ready, with the clusters of its entries in the first such layer."""
    session, counters, clusters = stream.session, stream.kept.counters, {}
    if session.frames:  # else there is nothing for which to wait until a pass of the model ends
        clusters = await run_in_thread(session.clusters)
        counters = await stream.kept.read_counters()
    return {
        **stream.brief_json(),
        "counters": counters,
        "shown": session.shown,
        "clusters": {level: rows[0].tolist() for level, rows in clusters.items()},
    }


@router.get("")
async def list_streams(streams: TheStreams, asks: Asks) -> dict[str, Any]:
    """Return the caller's open streams, each with its id, recipe, frames and seconds."""
    return {"object": "list", "data": await streams.list_streams(asks)}


@router.post("", status_code=201)
async def open_stream(
    request: Request, streams: TheStreams, asks: Asks, body: SessionRequest | None = None
) -> dict[str, Any]:
    """Open a stream, or resume a saved one (`resume`)."""
    stream = await streams.open(body or SessionRequest(), asks)
    try:
        told = await stream_json(stream)
        if await request.is_disconnected():
            raise Refused(499, "the client has gone.")
    except BaseException:
        await streams.close(stream, forget=True)  # nobody knows its id
        raise
    return told


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
    stream = streams.get(number, asks)
    file = stream.kept.pictures.nearest_thumbnail(frame)
    if file is None or frame >= stream.session.frames:
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
    stream = streams.get(number, asks)
    await streams.save(stream, body.name, asks)
    return {"saved": body.name, "frames": stream.session.frames}


@router.delete("/{number}")
async def close_stream(number: str, streams: TheStreams, asks: Asks) -> dict[str, Any]:
    """Close a stream and forget it; what was saved under a name stays."""
    await streams.close(streams.get(number, asks), forget=True)
    return {"id": number, "deleted": True}
