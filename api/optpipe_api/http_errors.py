"""One table from errors to HTTP statuses, and problem details (RFC 9457) for everything else."""

from __future__ import annotations

import json
import uuid
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import structlog
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match

from optpipe.answers import Fault
from optpipe.errors import InfeasibleProblemError, InputError, OptPipeError, RequestError, pointer
from optpipe_api.errors import (
    BodyTooLargeError,
    ForbiddenError,
    HeadersTooLargeError,
    KeyRequiredError,
    KeyReusedError,
    MediaTypeError,
    NotAcceptableError,
    OtherSiteError,
    ScheduleNotFoundError,
    ServerBusyError,
    SolverUnavailableError,
    StateConflictError,
    StoreUnavailableError,
    ThingNotFoundError,
    TooLargeToDrawError,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fastapi import FastAPI
    from starlette.requests import Request
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["ErrorBoundary", "documented", "install", "problem_response", "response_to", "status_of"]

_STATUSES: dict[type[OptPipeError], int] = {
    KeyRequiredError: 401,
    ForbiddenError: 403,
    OtherSiteError: 403,
    ThingNotFoundError: 404,
    ScheduleNotFoundError: 404,
    NotAcceptableError: 406,
    InfeasibleProblemError: 409,
    StateConflictError: 409,
    BodyTooLargeError: 413,
    TooLargeToDrawError: 413,
    MediaTypeError: 415,
    RequestError: 422,
    KeyReusedError: 422,
    ServerBusyError: 429,
    HeadersTooLargeError: 431,
    SolverUnavailableError: 503,
    StoreUnavailableError: 503,
    InputError: 422,
    OptPipeError: 500,
}
_WHEN = {
    400: "The request is not HTTP as we speak it.",
    401: "No API key, or none that is known; send `Authorization: Bearer KEY`.",
    403: "The key's role does not allow it; or a page of another site asks, or by a wrong Host.",
    404: "No such thing, or none of yours; or no schedule (yet).",
    406: "None of the forms above is accepted.",
    409: "Proven infeasible (`needs` says what is too small), or not possible in this state.",
    413: "The body is too large.",
    415: "The body is not declared as JSON.",
    422: "The request breaks a rule; `errors` says which.",
    429: "Too much is under way; `Retry-After` says when to try again.",
    500: "The solver failed, or needs more memory or time than it may have; `code` says which.",
    503: "The database does not answer or takes nothing, no solver starts, or the server stops.",
}
_EVERYWHERE = (401, 422, 429, 503)
_MAX_LINE = 600
_RETRY_STORE_S = 2


def status_of(error: OptPipeError) -> int:
    """Return the status of an error: that of its nearest ancestor in the table."""
    return next(_STATUSES[kind] for kind in type(error).__mro__ if kind in _STATUSES)


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI responses of a route that can fail so; some every route can."""
    content = {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Fault"}}}
    return {
        status: {"description": _WHEN[status], "content": content}
        for status in sorted({*statuses, *_EVERYWHERE})
    }


def problem_response(
    status: int,
    detail: str,
    code: str,
    instance: str,
    *,
    headers: Mapping[str, str] | None = None,
    **extra: Any,
) -> Response:
    """Return a problem detail as a response."""
    fault = Fault(
        type=f"urn:optpipe:error:{code}",
        title=HTTPStatus(status).phrase,
        status=status,
        detail=detail,
        code=code,
        instance=instance,
        **extra,
    )
    # ASCII: a detail may quote half of a surrogate pair, which UTF-8 cannot hold.
    text = json.dumps(fault.model_dump(exclude_none=True))
    return Response(text, status, headers, media_type="application/problem+json")


def install(app: FastAPI) -> None:
    app.add_exception_handler(OptPipeError, _on_optpipe)
    app.add_exception_handler(RequestValidationError, _on_parameters)
    app.add_exception_handler(HTTPException, _on_http)


async def _on_optpipe(request: Request, error: Exception) -> Response:
    if not isinstance(error, OptPipeError):
        raise error
    return response_to(error, request.url.path)


def response_to(error: OptPipeError, instance: str) -> Response:
    """Return the problem detail of an error, with the headers that its status asks for."""
    lines = [_shortened(line) for line in _outside(error).splitlines()]
    extra: dict[str, Any] = {}
    headers = {}
    status = status_of(error)
    if status == HTTPStatus.UNPROCESSABLE_ENTITY:
        extra["errors"] = lines
        places = error.pointers if isinstance(error, InputError) else ()
        extra["pointers"] = places if len(places) == len(lines) else [""] * len(lines)
    if isinstance(error, InfeasibleProblemError):
        extra["needs"] = error.needs
    if isinstance(error, ServerBusyError):
        headers["Retry-After"] = str(error.retry_after_s)
    if isinstance(error, (StoreUnavailableError, SolverUnavailableError)):
        headers["Retry-After"] = str(_RETRY_STORE_S)
    if isinstance(error, KeyRequiredError):
        headers["WWW-Authenticate"] = "Bearer"
    return problem_response(
        status, "\n".join(lines), error.code, instance, headers=headers, **extra
    )


def _outside(error: OptPipeError) -> str:
    """Return what anybody may read of an error; what is kept back stands in the log."""
    if not isinstance(error, StoreUnavailableError):
        return str(error)
    structlog.get_logger(__name__).warning(str(error), action="store.unavailable")
    return error.OUTSIDE


async def _on_parameters(request: Request, error: Exception) -> Response:
    if not isinstance(error, RequestValidationError):
        raise error
    lines = [
        _shortened(f"{'.'.join(map(str, item['loc']))} = {item.get('input')!r}: {item['msg']}")
        for item in error.errors()
    ]
    places = [pointer(*item["loc"]) for item in error.errors()]
    return problem_response(
        422, "\n".join(lines), "request.invalid", request.url.path, errors=lines, pointers=places
    )


async def _on_http(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    detail = f"{request.method} {_shortened(request.url.path)}: {error.detail}; see /docs"
    headers = error.headers
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        headers = {**(headers or {}), "Allow": ", ".join(_allowed(request))}
    return problem_response(
        error.status_code, detail, f"http.{error.status_code}", request.url.path, headers=headers
    )


def _allowed(request: Request) -> list[str]:
    """Return every method of an address: the framework names those of its first route only."""
    own = {name: request.scope[name] for name in ("type", "path", "root_path", "headers")}
    return [
        method
        for method in ("GET", "POST", "PUT", "PATCH", "DELETE")
        if any(
            route.matches({**own, "method": method})[0] is Match.FULL
            for route in request.app.router.routes
        )
    ]


def _shortened(line: str) -> str:
    return line if len(line) <= _MAX_LINE else f"{line[:_MAX_LINE]}..."


class ErrorBoundary:
    """Around what may fail: an error nobody expected becomes a 500 with an id, as in the log."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, watched)
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
                await _unexpected(fault_id, scope["path"])(scope, receive, send)


def _unexpected(fault_id: str, path: str) -> Response:
    return problem_response(
        500,
        f"an unexpected error, which is a fault of OptPipe; the server's log names it {fault_id}",
        "internal",
        path,
        id=fault_id,
    )
