"""How a route gets at the service, and at who is asking.

Coroutines, although nothing is waited for: the framework calls plain functions in threads, at the
price of all the rest of a small request.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from fastapi import Depends, Header, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.concurrency import run_in_threadpool

from optpipe_api.access import ANYBODY, Principal, Role
from optpipe_api.bodies import is_known
from optpipe_api.service import Service
from optpipe_api.services.events import Purpose

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence

    from optpipe.answers import Answer

__all__ = [
    "KNOWN_ALONE",
    "NO_SCRIPTS",
    "Accept",
    "Answers",
    "ConstantDocument",
    "Cursor",
    "IfNoneMatch",
    "Limit",
    "Reader",
    "Serving",
    "Submitter",
    "ended",
    "idempotency_key",
    "json_body",
    "json_content",
    "location_of",
    "owner_for",
    "page_of",
    "place_to_wait",
    "seconds_to_wait",
    "tagged",
    "while_there",
]

Answers = dict[int | str, dict[str, Any]]
T = TypeVar("T")


async def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


async def _reader(request: Request) -> Principal:
    principal: Principal = getattr(request.state, "principal", ANYBODY)
    return principal


async def _submitter(request: Request) -> Principal:
    principal = await _reader(request)
    principal.require(Role.SUBMIT)
    return principal


Serving = Annotated[Service, Depends(_service)]
Reader = Annotated[Principal, Depends(_reader)]
Submitter = Annotated[Principal, Depends(_submitter)]


# --- What several routes take and answer alike.

Accept = Annotated[str | None, Header()]
# The id of the last thing shown: a number of ours would tell how much others have made meanwhile.
Cursor = Annotated[
    str | None,
    Query(pattern="^[0-9a-f]{32}$", description="`next` of a page: the id it ends with."),
]
IfNoneMatch = Annotated[str | None, Header(description="`ETag` of the known one.")]
Limit = Annotated[int, Query(ge=1, le=200)]


async def _known_alone(request: Request) -> None:
    """Refuse parameters that a list does not have, or of which it would take the last alone.

    A filter with a typo would list everything.
    """
    known = [field.alias for field in request.scope["route"].dependant.query_params]
    none = f"is no parameter of this list; remove it, or give one of {', '.join(known)}"
    given = Counter(name for name, _ in request.query_params.multi_items())
    faults = [
        {"type": "extra_forbidden", "loc": ("query", name), "msg": why, "input": value}
        for name, value in request.query_params.items()
        for why in (
            none if name not in known else "",
            "is said more than once; give it once" if given[name] > 1 else "",
        )
        if why
    ]
    if faults:
        raise RequestValidationError(faults)


KNOWN_ALONE = [Depends(_known_alone)]
"""For routes that list: what else is asked for is refused."""


def idempotency_key(effect: str) -> Any:
    """Return the header ``Idempotency-Key``; ``effect`` is what a repeated one does."""
    return Header(
        alias="Idempotency-Key",
        min_length=1,
        max_length=255,
        description=f"A repeated request with the same key {effect}.",
    )


def seconds_to_wait(event: str) -> Any:
    """Return the parameter ``?wait=``: seconds, 0 or more, until an event."""
    return Query(ge=0, allow_inf_nan=False, description=f"Seconds to wait for {event}; capped.")


def json_content(schema: str) -> dict[str, Any]:
    """Return the content of a JSON text whose schema is published under a name."""
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}}


def document(schema: str) -> Answers:
    """Return what OpenAPI says of an answer that is such a text and nothing else."""
    return {200: {"description": f"The {schema.lower()}.", "content": json_content(schema)}}


def json_body(schema: str) -> dict[str, Any]:
    """Return what OpenAPI says of a request whose body must be such a text."""
    return {"requestBody": {"required": True, "content": json_content(schema)}}


def location_of(thing: str) -> dict[str, Any]:
    """Return what OpenAPI says of the header ``Location``."""
    return {"Location": {"schema": {"type": "string"}, "description": f"The {thing}'s address."}}


def ended(view: type[Answer], thing: str) -> Answers:
    """Return what OpenAPI says of an answer about something that may have ended."""
    headers = location_of(thing)
    return {
        200: {"model": view, "description": f"The {thing} has ended.", "headers": headers},
        202: {"model": view, "description": f"The {thing} goes on.", "headers": headers},
    }


def tagged(shown: Mapping[str, Any], of: str, **headers: str) -> Answers:
    """Return what OpenAPI says of an answer with an entity tag, and of a 304.

    ``of`` is what the tag names; of other headers the type and a sentence.
    """
    described = {
        name.replace("_", "-"): {"schema": {"type": "integer"}, "description": text}
        for name, text in headers.items()
    }
    etag = {"schema": {"type": "string"}, "description": f"Of {of}, for `If-None-Match`."}
    described["ETag"] = etag
    unchanged = "What `If-None-Match` names is still the newest."
    return {
        200: {**shown, "headers": described},
        304: {"description": unchanged, "headers": described},
    }


def owner_for(owner: str, who: Principal) -> str | None:
    """Return the owner of a thing; only admins see it."""
    return owner if who.role is Role.ADMIN else None


def page_of(found: Sequence[T], limit: int) -> tuple[Sequence[T], str | None]:
    """Return a page, and the cursor of the next one, from one thing more than are shown."""
    shown = found[:limit]
    last: Any = shown[-1] if len(found) > limit else None
    return shown, None if last is None else last.id


# A picture shows names that somebody else chose, and comes from our own address.
NO_SCRIPTS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; sandbox",
    "X-Content-Type-Options": "nosniff",
}


# --- Documents and pages that never change while the server runs.

_OPEN_CACHING, _KEYED_CACHING = "no-cache", "private, no-cache"


class ConstantDocument:
    """A document that is built and encoded once, at its first request, and has an entity tag.

    Parameters
    ----------
    build
        Returns the text. Called once, in a thread.
    is_open
        Whether the document needs no key, so that a cache may share it.
    headers
        More headers of every answer.
    """

    def __init__(
        self,
        build: Callable[[], str],
        media_type: str = "application/json",
        *,
        is_open: bool = False,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._build = build
        self._media_type = media_type
        self._headers = {
            "Cache-Control": _OPEN_CACHING if is_open else _KEYED_CACHING,
            **(headers or {}),
        }
        self._lock = threading.Lock()
        self._content: bytes | None = None

    async def answer(self, if_none_match: str | None) -> Response:
        """Return the document, or 304 where the client has it."""
        content = self._content or await run_in_threadpool(self._built)
        if is_known(if_none_match, self._headers["ETag"]):
            return Response(status_code=304, headers=self._headers)
        return Response(content, headers=self._headers, media_type=self._media_type)

    def _built(self) -> bytes:
        with self._lock:
            if self._content is None:
                content = self._build().encode()
                self._headers["ETag"] = f'"{hashlib.sha256(content).hexdigest()[:_TAG_DIGITS]}"'
                self._content = content
            return self._content


_TAG_DIGITS = 32


# --- Requests that wait count against a limit, and wait only for clients that are there.


@contextmanager
def place_to_wait(service: Service, who: Principal, wait_s: float) -> Iterator[None]:
    """Count a request that waits; to be entered before the request changes anything.

    Raises `ServerBusyError` if too many are open; see `ConnectionLimit.counted`.
    """
    if wait_s <= 0:
        yield
        return
    with service.connections.counted(who, Purpose.WAIT):
        yield


async def while_there(request: Request, waiting: Coroutine[Any, Any, T], wait_s: float) -> T | None:
    """Return what is waited for; None as soon as the client has hung up.

    The body of the request must have been read, where it has one.
    """
    if wait_s <= 0:
        return await waiting
    news = asyncio.create_task(waiting)
    goodbye = asyncio.create_task(_goodbye(request))
    try:
        await asyncio.wait({news, goodbye}, return_when=asyncio.FIRST_COMPLETED)
        return news.result() if news.done() else None
    finally:
        for task in (news, goodbye):
            task.cancel()
        await asyncio.gather(news, goodbye, return_exceptions=True)


async def _goodbye(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
