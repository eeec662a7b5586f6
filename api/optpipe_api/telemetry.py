"""Every request has an id, is measured, and is logged where it changes or refuses something."""

from __future__ import annotations

import re
import time
import uuid
from typing import TYPE_CHECKING

import structlog

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from optpipe_api.metrics import Metrics

__all__ = ["Telemetry"]

_ID = re.compile(rb"[A-Za-z0-9._:-]{1,64}")
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_READS = frozenset({"GET", "HEAD", "OPTIONS"})
_NO_ROUTE = "none"
_FIRST_REFUSAL = 400
_ABORTED = 499


class Telemetry:
    """Around all but the turns; what waits for its turn is not measured here.

    The id is the client's ``X-Request-ID`` where that is a short word.
    The id comes back in the answer's ``X-Request-ID``, and stands in every line that is logged on
    behalf of the request.
    """

    def __init__(self, app: ASGIApp, *, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _id_of(scope)
        structlog.contextvars.clear_contextvars()
        structlog.contextvars.bind_contextvars(request=request_id.decode())
        answer = _Answer(send, request_id)
        began = time.perf_counter()
        try:
            await self._app(scope, receive, answer)
        finally:
            self._note(scope, answer, time.perf_counter() - began)

    def _note(self, scope: Scope, answer: _Answer, seconds: float) -> None:
        method = scope["method"] if scope["method"] in _METHODS else "OTHER"
        self._metrics.answered(method, _route_of(scope), answer.status, seconds)
        if method in _READS and answer.status < _FIRST_REFUSAL:
            return
        structlog.get_logger(__name__).info(
            f"{method} {scope['path'][:200]!r} was answered with {answer.status}",
            action="http.request",
            status=answer.status,
            ms=round(seconds * 1000, 1),
            **({"made": answer.location} if answer.location else {}),
        )


class _Answer:
    """Passes an answer on, with the request's id; remembers what it said."""

    def __init__(self, send: Send, request_id: bytes) -> None:
        self._send = send
        self._request_id = request_id
        self.status = _ABORTED
        self.location = ""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = list(message.get("headers", ()))
            self.location = next(
                (value.decode("latin-1") for name, value in headers if name == b"location"), ""
            )
            message = {**message, "headers": [*headers, (b"x-request-id", self._request_id)]}
        await self._send(message)


def _id_of(scope: Scope) -> bytes:
    given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
    return given if _ID.fullmatch(given) else uuid.uuid4().hex.encode()


def _route_of(scope: Scope) -> str:
    """Return the template of the route: paths hold ids, of which there are endlessly many."""
    path = getattr(scope.get("route"), "path", None)
    return path if isinstance(path, str) else _NO_ROUTE
