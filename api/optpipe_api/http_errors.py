"""HTTP statuses of errors, and errors as problem details (RFC 9457)."""

from __future__ import annotations

import json
import re
import uuid
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import structlog
from fastapi.exceptions import RequestValidationError
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.gzip import GZipMiddleware
from starlette.responses import Response
from starlette.routing import Match

from optpipe.answers import Fault
from optpipe.errors import InfeasibleProblemError, InputError, OptPipeError, pointer
from optpipe_api.errors import (
    KeyRequiredError,
    ServerBusyError,
    SolverUnavailableError,
    StoreUnavailableError,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fastapi import FastAPI
    from starlette.requests import Request
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = [
    "CompressedAnswers",
    "ErrorBoundary",
    "HeadAsGet",
    "documented",
    "install",
    "response_to",
    "status_of",
]

_STATUSES: dict[type[OptPipeError], int] = {
    InfeasibleProblemError: 409,
    InputError: 422,
    OptPipeError: 500,
}
"""HTTP statuses of the errors that the core raises; the others have an attribute."""

_WHEN = {
    400: "The request is not valid HTTP.",
    401: "No API key, or an unknown one; send `Authorization: Bearer KEY`.",
    403: "The role of the key does not allow this, or the request is from a page of another site "
    "or has the wrong Host.",
    404: "There is no such resource of this key, or no schedule (yet).",
    406: "None of the formats above is acceptable, or the server cannot produce it.",
    409: "Proven infeasible (`needs` names what is too small), or not possible in this state.",
    413: "The body is too large.",
    415: "The Content-Type of the body is not JSON, or it has a Content-Encoding.",
    422: "The request breaks a rule; `errors` names it.",
    429: "Too many jobs, requests or connections; `Retry-After` is the time until the next try.",
    500: "The solver failed, or needs more memory or time than its limit; `code` says which.",
    503: "The database does not answer or refuses writes, no solver starts, or the server stops.",
}
_EVERYWHERE = (401, 422, 429, 503)
_MAX_LINE_CHARS = 600
_RETRY_UNAVAILABLE_S = 2


def status_of(error: OptPipeError) -> int:
    """Return the HTTP status of an error: its own, or that of its nearest ancestor in the table."""
    own: int | None = getattr(error, "status", None)
    return own or next(_STATUSES[kind] for kind in type(error).__mro__ if kind in _STATUSES)


def documented(*statuses: int, too_large: str = "") -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI descriptions of a route's errors.

    Parameters
    ----------
    statuses
        Further statuses than those that every route has.
    too_large
        The description of 413, if it is not about the body.
    """
    when = _WHEN | ({413: too_large} if too_large else {})
    content = {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Fault"}}}
    return {
        status: {"description": when[status], "content": content}
        for status in sorted({*statuses, *_EVERYWHERE})
    }


def install(app: FastAPI) -> None:
    """Add the handlers that turn exceptions into problem details."""

    @app.exception_handler(OptPipeError)
    async def on_optpipe_error(request: Request, error: OptPipeError) -> Response:
        return response_to(error, request.url.path)

    @app.exception_handler(RequestValidationError)
    async def on_parameter_errors(request: Request, error: RequestValidationError) -> Response:
        lines = [
            _shorten(f"{'.'.join(map(str, item['loc']))} = {item.get('input')!r}: {item['msg']}")
            for item in error.errors()
        ]
        pointers = [pointer(*item["loc"]) for item in error.errors()]
        return _problem_response(
            422,
            "\n".join(lines),
            "request.invalid",
            request.url.path,
            errors=lines,
            pointers=pointers,
        )

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        detail = f"{request.method} {_shorten(request.url.path)}: {error.detail}; see /docs"
        headers = error.headers
        if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            headers = {**(headers or {}), "Allow": ", ".join(_list_methods(request))}
        status = error.status_code
        return _problem_response(
            status, detail, f"http.{status}", request.url.path, headers=headers
        )


def response_to(error: OptPipeError, instance: str) -> Response:
    """Return the problem detail of an error, with the headers that belong to its status."""
    text = str(error)
    if isinstance(error, StoreUnavailableError):
        # The message names the database, so only the log gets it.
        structlog.get_logger(__name__).warning(text, action="store.unavailable")
        text = error.OUTSIDE
    lines = [_shorten(line) for line in text.splitlines()]
    status = status_of(error)
    extra: dict[str, Any] = {}
    headers = {}
    if status == HTTPStatus.UNPROCESSABLE_ENTITY:
        extra["errors"] = lines
        pointers = error.pointers if isinstance(error, InputError) else ()
        extra["pointers"] = pointers if len(pointers) == len(lines) else [""] * len(lines)
    if isinstance(error, InfeasibleProblemError):
        extra["needs"] = error.needs
    if isinstance(error, ServerBusyError):
        headers["Retry-After"] = str(error.retry_after_s)
    if isinstance(error, (StoreUnavailableError, SolverUnavailableError)):
        headers["Retry-After"] = str(_RETRY_UNAVAILABLE_S)
    if isinstance(error, KeyRequiredError):
        headers["WWW-Authenticate"] = "Bearer"
    return _problem_response(
        status, "\n".join(lines), error.code, instance, headers=headers, **extra
    )


def _problem_response(
    status: int,
    detail: str,
    code: str,
    instance: str,
    *,
    headers: Mapping[str, str] | None = None,
    **extra: Any,
) -> Response:
    fault = Fault(
        type=f"urn:optpipe:error:{code}",
        title=HTTPStatus(status).phrase,
        status=status,
        detail=detail,
        code=code,
        instance=instance,
        **extra,
    )
    # ASCII, because a detail may quote half of a surrogate pair, which UTF-8 cannot encode.
    text = json.dumps(fault.model_dump(exclude_none=True))
    return Response(text, status, headers, media_type="application/problem+json")


def _list_methods(request: Request) -> list[str]:
    """Return every method of an address. Starlette names only those of the first route."""
    own = {name: request.scope[name] for name in ("type", "path", "root_path", "headers")}
    found = [
        method
        for method in ("GET", "POST", "PUT", "PATCH", "DELETE")
        if any(
            route.matches({**own, "method": method})[0] is Match.FULL
            for route in request.app.router.routes
        )
    ]
    has_head = "GET" in found and not _is_stream(request.scope)
    return ["HEAD", *found] if has_head else found


def _is_stream(scope: Scope) -> bool:
    path: str = scope["path"]
    return path.endswith("/events")


def _shorten(line: str) -> str:
    return line if len(line) <= _MAX_LINE_CHARS else f"{line[:_MAX_LINE_CHARS]}..."


class HeadAsGet:
    """ASGI middleware that answers HEAD as GET; the server leaves out the body.

    An event stream has no end to wait for, so that it answers 405.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "HEAD":
            inner = {**scope, "method": "HEAD" if _is_stream(scope) else "GET"}
            await self._app(inner, receive, send)
            scope["route"] = inner.get("route")
        else:
            await self._app(scope, receive, send)


_REFUSES_GZIP = re.compile(rb"gzip\s*;\s*q=0(\.0*)?\s*(,|$)")
_COMPRESSED_BYTES, _COMPRESSION_LEVEL = 8 * 1024, 4
"""A schedule of 48 kB takes 0.4 ms; level 6 takes 1.3 ms and saves nothing."""


class CompressedAnswers:
    """ASGI middleware that sends large answers as gzip to clients that accept it.

    Such a client gets weak ``ETag``s, because one tag then names two forms of a document. Events
    pass as they come.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._compressed = GZipMiddleware(app, _COMPRESSED_BYTES, _COMPRESSION_LEVEL)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        accepted = dict(scope.get("headers", ())).get(b"accept-encoding", b"")
        if b"gzip" not in accepted or _REFUSES_GZIP.search(accepted):
            await self._app(scope, receive, send)
            return

        async def send_weak(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(raw=message["headers"])
                if "etag" in headers:
                    headers["etag"] = f"W/{headers['etag']}"
            await send(message)

        await self._compressed(scope, receive, send_weak)


class ErrorBoundary:
    """ASGI middleware that answers an unexpected error with a 500 and its id in the log."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def note_start(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, note_start)
        except Exception:
            if scope["type"] != "http":
                raise
            fault_id = uuid.uuid4().hex
            structlog.get_logger(__name__).exception(
                "a request failed unexpectedly",
                action="http.unexpected",
                id=fault_id,
                method=scope["method"],
                path=scope["path"],
            )
            if not started:
                detail = (
                    "an unexpected error, which is a fault of OptPipe; the server's log names it "
                    f"{fault_id}"
                )
                response = _problem_response(500, detail, "internal", scope["path"], id=fault_id)
                await response(scope, receive, send)
