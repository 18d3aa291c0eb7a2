"""The FastAPI application: routes, request guards, and error responses."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from inspect import getdoc
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import FileResponse, JSONResponse, Response
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException

from mmaccel.core.decoding.generate import CallEnded
from mmaccel.core.errors import MmaccelError
from mmaccel.core.streams.live import tune_python_for_streams
from mmaccel.serve import chat, socket, stream_routes, streams
from mmaccel.serve.engine import Engine
from mmaccel.serve.guard import RequestCheckMiddleware, error_response, first_schema_error
from mmaccel.serve.settings import Refused, Settings

log = logging.getLogger("mmaccel.serve")
PAGE = Path(__file__).parent / "page"


def create_app(engine: Engine, registry: Callable[[Engine], streams.Streams] = streams.Streams) -> FastAPI:
    """Create the ASGI application for `engine`; `registry` makes the `Streams` object that holds the open streams."""
    began = time.monotonic()

    @asynccontextmanager
    async def living(app: FastAPI) -> AsyncIterator[None]:
        app.state.streams = registry(engine)
        async with app.state.streams:
            yield
        await engine.close()

    # OpenAPI has no WebSockets.
    told = f"WebSocket /v1/streaming/sessions/{{id}}/socket: {getdoc(socket.handle_stream_socket)}"
    app = FastAPI(title="mmaccel", description=told, docs_url=None, redoc_url=None, lifespan=living)
    app.state.engine = engine
    app.include_router(chat.router)
    app.include_router(stream_routes.router)
    app.mount("/page", StaticFiles(directory=PAGE))

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return FileResponse(PAGE / "index.html")

    @app.get("/health")
    async def health() -> dict[str, Any]:
        """Whether the server is there."""
        return {"status": "ok", "model": engine.name, "seconds": round(time.monotonic() - began, 1)}

    @app.get("/metrics")
    async def metrics() -> Response:
        """What it did, in Prometheus' form."""
        return Response(engine.metrics.prometheus_text(), media_type="text/plain; version=0.0.4")

    _tell_errors(app, engine.settings.limits.seconds)

    app.add_middleware(RequestCheckMiddleware, settings=engine.settings, metrics=engine.metrics)
    if origins := engine.settings.origins:
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
    return app


def _tell_errors(app: FastAPI, seconds: float) -> None:
    @app.exception_handler(Refused)
    async def refused(_: Request, error: Refused) -> JSONResponse:
        return error_response(error.status, str(error), error.code)

    @app.exception_handler(MmaccelError)
    async def wrong(_: Request, error: MmaccelError) -> JSONResponse:
        return error_response(400, str(error))

    @app.exception_handler(CallEnded)
    async def ended(_: Request, error: CallEnded) -> JSONResponse:
        return error_response(408, f"the video was not read within {seconds:g} s; ask for fewer frames.")

    @app.exception_handler(RequestValidationError)
    async def unfit(_: Request, error: RequestValidationError) -> JSONResponse:
        text, field = first_schema_error(error)
        return error_response(400, text, param=field)

    @app.exception_handler(HTTPException)
    async def http(_: Request, error: HTTPException) -> JSONResponse:
        return error_response(error.status_code, str(error.detail))

    @app.exception_handler(Exception)
    async def failed(_: Request, error: Exception) -> JSONResponse:
        return error_response(500, "the server failed; its log says why.")


def uvicorn_settings(settings: Settings) -> dict[str, Any]:
    """Return connection settings for uvicorn; message compression is off, as a small message could expand to a large one."""
    sockets = {
        "ws_max_size": settings.limits.message_bytes,
        "ws_max_queue": 2,
        "ws_per_message_deflate": False,
    }
    return {"server_header": False, "h11_max_incomplete_event_size": 1 << 16, **sockets}


def run_server(engine: Engine) -> None:
    """Serve `engine` over HTTP, by its settings, until the process is stopped."""
    import uvicorn

    settings = engine.settings
    logging.captureWarnings(True)
    warnings.simplefilter("default")
    with tune_python_for_streams():
        uvicorn.run(
            create_app(engine),
            host=settings.host,
            port=settings.port,
            timeout_graceful_shutdown=10,
            **uvicorn_settings(settings),
        )
