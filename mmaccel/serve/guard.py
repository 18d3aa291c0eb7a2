"""Checks of each request before its body is read: origin, API key, size."""

from __future__ import annotations

import asyncio
import logging
import time
import urllib.parse
from collections.abc import Awaitable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from fastapi import Request
from pydantic import ValidationError
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mmaccel.core.decoding.generate import CallEnded
from mmaccel.core.errors import MmaccelError
from mmaccel.serve.metrics import Metrics
from mmaccel.serve.settings import Refused, Settings, is_loopback

log = logging.getLogger("mmaccel.serve")
CHECK_S = 0.5
"""Seconds between two looks at whether a client is still there."""
COMMAS = 1 << 19
"""Commas of a body at most: to read JSON of more values would hold up all other requests."""
Done = TypeVar("Done")
OPEN = ("/", "/health", "/page/")
"""Paths that need no key; one that ends in a slash is open with all below it."""
PLAIN = dict.fromkeys(
    ("model_type", "model_attributes_type", "dict_type"), "it is not a JSON object; give one"
)
PLAIN["tuple_type"] = "it is not a list; give one of two numbers, as [60, 90]"
"""What is said of schema errors whose own words are Python's."""
SECURITY = {
    b"x-content-type-options": b"nosniff",
    b"referrer-policy": b"no-referrer",
    b"content-security-policy": b"default-src 'self'; img-src 'self' data: blob:; media-src 'self' blob: data:; "
    b"connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
}


def error_response(status: int, text: str, code: str | None = None, param: str | None = None) -> JSONResponse:
    """Return an error response in OpenAI's format."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    error = {"message": text, "type": kind, "param": param, "code": code}
    # Of what is too much or too slow nothing more is read.
    headers = (
        {"Retry-After": "1"}
        if status in (429, 503)
        else {"Connection": "close"}
        if status in (408, 413)
        else None
    )
    return JSONResponse({"error": error}, status, headers)


def _bearer_key(headers: Mapping[str, str]) -> str | None:
    """The API key in a request's Authorization header, or None."""
    kind, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if kind.lower() == "bearer" else None


class ConnectedClient:
    """The HTTP client of a request, who may disconnect before the answer is ready; then work for it is cancelled."""

    def __init__(self, request: Request) -> None:
        self._request, self._checked = request, time.monotonic()

    async def wait(self, work: Awaitable[Done]) -> Done:
        """Await `work` and return its result. If the client disconnects first, cancel `work` and raise `Refused`."""
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=CHECK_S)
                if time.monotonic() - self._checked > CHECK_S:
                    self._checked = time.monotonic()
                    if await self._request.is_disconnected():
                        raise Refused(499, "the client has gone.")
            return task.result()
        finally:
            task.cancel()


def unknown_key(key: str | None) -> Refused:
    """Return the error for a request without a key, or with one that the server does not know."""
    if key:
        return Refused(401, "the server does not know this key; send one of its own.", "wrong_key")
    return Refused(401, "this server needs a key; send it as Authorization: Bearer KEY.", "no_key")


def get_caller_identity(request: Request) -> str:
    """FastAPI dependency: the identity of the caller, which `RequestCheckMiddleware` derived from the API key."""
    return str(request.state.caller)


class RequestCheckMiddleware:
    """ASGI middleware that checks the origin, API key and size of every request before any route runs."""

    def __init__(self, app: ASGIApp, settings: Settings, metrics: Metrics) -> None:
        self._app, self._settings, self._metrics = app, settings, metrics
        self._held = 0  # bytes of bodies under way

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            return await self._app(scope, receive, send)
        headers = Headers(scope=scope)
        try:
            self._check_page(headers)
            asks = self._settings.identify_caller(key := _bearer_key(headers))
            path = scope["path"]
            is_open = path in OPEN or any(path.startswith(one) for one in OPEN if one[1:].endswith("/"))
            # A browser's WebSocket cannot send the header: the first message then has the key.
            if asks is None and not is_open and (key or scope["type"] == "http"):
                raise unknown_key(key)
            self._check_length(headers)
        except Refused as error:
            if scope["type"] == "websocket":
                await receive()
                return await send({"type": "websocket.close", "code": 1008, "reason": str(error)[:120]})
            self._metrics.requests.labels("refused", str(error.status)).inc()
            return await error_response(error.status, str(error), error.code)(scope, receive, send)
        scope.setdefault("state", {})["caller"] = asks

        begun = scope["type"] != "http"

        async def with_headers(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                message["headers"] = [*message["headers"], *SECURITY.items()]
                # Of the route: a path that anybody makes up is no label.
                path = getattr(scope.get("route"), "path", "other")
                self._metrics.requests.labels(path, str(message["status"])).inc()
            await send(message)

        held = [0]
        try:
            if scope["type"] == "websocket":
                return await self._app(scope, receive, with_headers)
            with self._metrics.running.track_inprogress():
                await self._app(scope, self._capped(receive, held), with_headers)
        except asyncio.CancelledError:
            # uvicorn cancels what still runs when it stops, and would log each stack.
            if not begun:
                with suppress(OSError):
                    await error_response(503, "the server stops; send this again.")(
                        scope, receive, with_headers
                    )
        finally:
            self._held -= held[0]

    def _check_page(self, headers: Headers) -> None:
        """Refuse what another site's page sends from a user's browser, to an address or a name that leads here."""
        host, origin = headers.get("host", ""), headers.get("origin")
        try:
            name = urllib.parse.urlsplit(f"//{host}").hostname or ""
            own = origin is None or urllib.parse.urlsplit(origin).netloc == host
        except ValueError:
            raise Refused(400, "the Host or Origin of the request is no address.") from None
        if not self._settings.keys and not is_loopback(name):
            raise Refused(
                403, "this server answers to localhost alone; for other names start it with --keys."
            )
        if not own and origin not in self._settings.origins:
            raise Refused(403, "this server does not answer pages of that origin (--origin).")

    def _check_length(self, headers: Headers) -> None:
        told, most = headers.get("content-length"), self._settings.limits.body_bytes
        if told is not None and (not told.isdecimal() or int(told[:20]) > most):
            raise Refused(413, f"the body has more than {most} bytes; send less.")

    def _capped(self, receive: Receive, held: list[int]) -> Receive:
        """`receive` with the caps on a body; `held` [1] counts its bytes."""
        limits, done, commas = self._settings.limits, False, 0
        end = time.monotonic() + limits.body_seconds

        async def capped() -> Message:
            nonlocal done, commas
            if done:  # what comes now is the end of the connection
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), max(0.01, end - time.monotonic()))
            except TimeoutError:
                raise HTTPException(408, f"the body did not come within {limits.body_seconds:g} s.") from None
            size = len(piece := message.get("body", b""))
            commas += piece.count(b",")
            held[0] += size
            self._held += size
            if held[0] > limits.body_bytes:
                raise HTTPException(413, f"the body has more than {limits.body_bytes} bytes; send less.")
            if commas > COMMAS:
                raise HTTPException(413, f"the body has more than {COMMAS} commas; send fewer values.")
            if self._held > limits.bodies_bytes:
                raise HTTPException(503, "the requests under way are too large together; try again later.")
            done = not message.get("more_body", False)
            return message

        return capped


def first_schema_error(error: Any) -> tuple[str, str]:
    """Return the first schema error of a request as (one sentence, field name)."""
    first = error.errors()[0]
    if first["loc"] == ("body",) or (first["type"] == "json_invalid" and first["loc"][:1] == ("body",)):
        return "the body: it is not a JSON object; send one, as Content-Type: application/json.", "the body"
    place = [str(one) for one in first["loc"] if one != "body"]
    # The tag of a part, as in "video_url.video_url.url", is none of the client's fields.
    field = (
        ".".join(one for one, after in zip(place, [*place[1:], ""], strict=False) if one != after)
        or "the body"
    )
    told = PLAIN.get(first["type"])
    if told is None:
        told = str(first["msg"]).removeprefix("Value error, ")
        # Pydantic's words are Python's; those of a validator here stay as they are.
        told = told if first["type"] in ("value_error", "unknown_field") else told.lower()
    return f"{field[:100]}: {told[:200].rstrip('.')}.", field[:100]


def error_message(error: BaseException) -> str:
    """Return the error message to send to a client; internal errors are only logged."""
    if isinstance(error, ValidationError):
        return first_schema_error(error)[0]
    if isinstance(error, MmaccelError):
        return str(error)
    if isinstance(error, CallEnded):
        return "the time of the request is over; ask for less."
    log.error("the server failed", exc_info=error)
    return "the server failed; its log says why."


@contextmanager
def hide_server_path(folder: Path) -> Iterator[None]:
    """Context that replaces the server's path in error messages by the saved stream's name."""
    try:
        yield
    except MmaccelError as error:
        raise Refused(400, str(error).replace(str(folder), folder.name)) from error
