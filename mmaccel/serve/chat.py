"""`POST /v1/chat/completions` and `GET /v1/models`, compatible with the OpenAI client."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, StreamingResponse

from mmaccel.serve.engine import Completion, Engine
from mmaccel.serve.guard import ConnectedClient, error_message, get_caller_identity
from mmaccel.serve.messages import ChatRequest

router = APIRouter(tags=["OpenAI"])
Asks = Annotated[str, Depends(get_caller_identity)]


def get_engine(request: Request) -> Engine:
    """FastAPI dependency: the server's engine."""
    return request.app.state.engine  # type: ignore[no-any-return]


TheEngine = Annotated[Engine, Depends(get_engine)]


@router.get("/v1/models")
async def list_model_names(engine: TheEngine) -> dict[str, Any]:
    """Return the names that clients may give as model: the model, and NAME@RECIPE for the model under each recipe."""
    ids = [engine.name, *(f"{engine.name}@{recipe}" for recipe in engine.recipes)]
    streams = engine.stream_recipe_names()
    data = [{"id": one, "object": "model", "created": 0, "owned_by": "mmaccel"} for one in ids]
    ours = {"default": engine.default, "recipes": list(engine.recipes), "streams": streams}
    return {"object": "list", "data": data, "mmaccel": ours}


@router.post("/v1/chat/completions")
async def create_chat_completion(body: ChatRequest, request: Request, engine: TheEngine, asks: Asks) -> Any:
    """Answer a chat completion request, whole or by server-sent events. Decoding is greedy if `temperature` is not given."""
    engine.find_recipe(body.model, body.mmaccel.recipe)
    made: dict[str, Any] = {
        "id": f"chatcmpl-{secrets.token_hex(12)}",
        "created": int(time.time()),
        "model": body.model,
    }
    pieces: asyncio.Queue[str | None] = asyncio.Queue()
    loop, client = asyncio.get_running_loop(), ConnectedClient(request)

    def put(piece: str) -> None:
        loop.call_soon_threadsafe(pieces.put_nowait, piece)

    task = asyncio.create_task(engine.answer_chat_request(body, asks, put))
    task.add_done_callback(lambda _: pieces.put_nowait(None))
    try:
        # Before the first event an error has its status.
        first = await client.wait(pieces.get())
        if not body.stream or first is None:
            done = await client.wait(asyncio.shield(task))
            if not body.stream:
                return JSONResponse(_whole(made, done))
    except BaseException:
        task.cancel()
        raise

    async def each() -> AsyncIterator[str]:
        piece = first
        while piece is not None:
            yield piece
            piece = await client.wait(pieces.get())

    events = _events(body, made, each(), task)
    return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-store"})


def _reason(done: Completion) -> str:
    """OpenAI's word for why an answer ends."""
    return "stop" if done.finish_reason == "stop" else "length"


def _usage(done: Completion) -> dict[str, int]:
    total = done.prompt_tokens + done.new_tokens
    return {"prompt_tokens": done.prompt_tokens, "completion_tokens": done.new_tokens, "total_tokens": total}


def _ours(done: Completion) -> dict[str, Any]:
    report = {key: value for key, value in done.report.items() if key not in ("recipe", "kept_by_head")}
    return {
        "recipe": done.recipe,
        "finish_reason": done.finish_reason,
        "ttft_s": done.ttft_s,
        "alone": done.alone or None,
        "evidence": done.evidence,
        "report": report,
    }


def _whole(made: dict[str, Any], done: Completion) -> dict[str, Any]:
    message = {"role": "assistant", "content": done.text, "refusal": None}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": _reason(done)}
    rest = {"choices": [choice], "usage": _usage(done), "mmaccel": _ours(done)}
    return {**made, "object": "chat.completion", **rest}


async def _events(
    body: ChatRequest, made: dict[str, Any], pieces: AsyncIterator[str], task: asyncio.Task[Completion]
) -> AsyncIterator[str]:
    usage = body.stream_options is not None and body.stream_options.include_usage

    def event(delta: dict[str, Any], reason: str | None = None, **more: Any) -> str:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        told = {**made, "object": "chat.completion.chunk", "choices": [choice], **more}
        return f"data: {json.dumps(told | ({'usage': None} if usage else {}))}\n\n"

    try:
        yield event({"role": "assistant", "content": ""})
        async for piece in pieces:
            yield event({"content": piece})
        done = await task
        yield event({}, _reason(done), mmaccel=_ours(done))
        if usage:
            told = {**made, "object": "chat.completion.chunk", "choices": [], "usage": _usage(done)}
            yield f"data: {json.dumps(told)}\n\n"
        yield "data: [DONE]\n\n"
    except Exception as error:
        yield f"data: {json.dumps({'error': {'message': error_message(error), 'type': 'server_error'}})}\n\n"
    finally:
        task.cancel()
