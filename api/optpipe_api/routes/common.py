"""Dependencies, OpenAPI descriptions and answers that several routes share.

The dependencies are coroutines although they wait for nothing. FastAPI runs plain functions in
threads, which costs as much as the rest of a small request.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, TypeVarTuple

from fastapi import Depends, Header, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.concurrency import run_in_threadpool

from optpipe_api.access import ANYBODY, Principal, Role
from optpipe_api.bodies import etag_of, is_known, read_json_body
from optpipe_api.service import Service
from optpipe_api.services.events import Purpose

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence

    from optpipe.answers import Answer
    from optpipe.requests import ModelOnGpus

__all__ = [
    "KNOWN_PARAMETERS_ONLY",
    "NO_SCRIPTS",
    "OWNER_NAME",
    "TEXT",
    "Accept",
    "Answers",
    "ConstantDocument",
    "Cursor",
    "IfNoneMatch",
    "JsonText",
    "Limit",
    "Reader",
    "Serving",
    "Submitter",
    "answer_version",
    "count_waiting",
    "document",
    "ended",
    "idempotency_key",
    "json_body",
    "location_of",
    "parse_body",
    "parse_model_body",
    "seconds_to_wait",
    "split_page",
    "tagged",
    "text_filter",
    "version_headers",
    "visible_owner",
    "wait_while_connected",
]

Answers = dict[int | str, dict[str, Any]]
"""The ``responses`` of a route: OpenAPI descriptions by status."""

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


# --- Dependencies: the service, and the caller with the role that a route requires.


async def _find_service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


async def _find_caller(request: Request) -> Principal:
    caller: Principal = getattr(request.state, "principal", ANYBODY)
    return caller


async def _require_submitter(request: Request) -> Principal:
    caller = await _find_caller(request)
    caller.require(Role.SUBMIT)
    return caller


Serving = Annotated[Service, Depends(_find_service)]
Reader = Annotated[Principal, Depends(_find_caller)]
Submitter = Annotated[Principal, Depends(_require_submitter)]


# --- Parameters.

Accept = Annotated[str | None, Header()]
Cursor = Annotated[
    str | None,
    Query(pattern="^[0-9a-f]{32}$", description="`next` of the page before."),
]
IfNoneMatch = Annotated[str | None, Header(description="`ETag` of the version that you have.")]
Limit = Annotated[int, Query(ge=1, le=200)]


def text_filter(description: str) -> Any:
    """Return a parameter that selects by a text, which must be one that PostgreSQL can compare."""
    return Query(max_length=100, pattern=r"^[^\x00]*$", description=description)


OWNER_NAME = text_filter("Name of a key; yours, unless you are admin.")


def idempotency_key(effect: str) -> Any:
    """Return the header ``Idempotency-Key``; ``effect`` is what a repeated request does."""
    return Header(
        alias="Idempotency-Key",
        min_length=1,
        max_length=255,
        description=f"A repeated request with the same key {effect}.",
    )


def seconds_to_wait(event: str) -> Any:
    """Return the parameter `?wait=`: maximum seconds to wait for an event."""
    return Query(
        ge=0,
        allow_inf_nan=False,
        description=f"Maximum seconds to wait for {event}; the service limits them.",
    )


async def _refuse_unknown_parameters(request: Request) -> None:
    """Refuse parameters that a list does not have, and repeated ones.

    FastAPI ignores unknown parameters, so a filter with a typo would list everything. Of a repeated
    parameter it takes only the last.
    """
    known = [field.alias for field in request.scope["route"].dependant.query_params]
    unknown = f"is no parameter of this list; remove it, or give one of {', '.join(known)}"
    numbers = Counter(name for name, _ in request.query_params.multi_items())
    faults = []
    for name, value in request.query_params.items():
        messages = [unknown] * (name not in known)
        messages += ["is said more than once; give it once"] * (numbers[name] > 1)
        faults += [
            {"type": "extra_forbidden", "loc": ("query", name), "msg": message, "input": value}
            for message in messages
        ]
    if faults:
        raise RequestValidationError(faults)


KNOWN_PARAMETERS_ONLY = [Depends(_refuse_unknown_parameters)]
"""Dependencies of routes that list."""


# --- OpenAPI descriptions.

TEXT = {"schema": {"type": "string"}}

"""The content of a text."""


def _json_content(schema: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}}


def json_body(schema: str) -> dict[str, Any]:
    """Return the OpenAPI description of a JSON body in a named schema, for ``openapi_extra``."""
    return {"requestBody": {"required": True, "content": _json_content(schema)}}


def document(
    schema: str, description: str = "", texts: Mapping[str, str | None] | None = None
) -> Answers:
    """Return the OpenAPI description of an answer that is JSON in a named schema.

    Parameters
    ----------
    texts
        Other media types of the answer: an example for each, or None.
    """
    content = _json_content(schema)
    for media_type, example in (texts or {}).items():
        content[media_type] = TEXT if example is None else {**TEXT, "example": example}
    return {200: {"description": description or f"The {schema.lower()}.", "content": content}}


def location_of(noun: str) -> dict[str, Any]:
    """Return the OpenAPI description of the header ``Location``."""
    return {"Location": {**TEXT, "description": f"The {noun}'s address."}}


def ended(view: type[Answer], noun: str) -> Answers:
    """Return the OpenAPI description of the view of a job or batch that may have ended."""
    shared = {"model": view, "headers": location_of(noun)}
    return {
        200: {**shared, "description": f"The {noun} has ended."},
        202: {**shared, "description": f"The {noun} has not ended yet."},
    }


def tagged(answers: Answers, of: str) -> Answers:
    """Return the OpenAPI description of an answer with an entity tag, and of its 304.

    Parameters
    ----------
    answers
        The answer without its headers, under 200.
    of
        The thing that the tag identifies.
    """
    described = {"ETag": {**TEXT, "description": f"Tag of {of}, for `If-None-Match`."}}
    unchanged = "The version in `If-None-Match` is still the newest."
    return {
        200: {**answers[200], "headers": described},
        304: {"description": unchanged, "headers": described},
    }


# --- Bodies, and parts of answers.


async def parse_body(
    request: Request,
    service: Service,
    parse: Callable[[bytes, *Ts], T],
    *arguments: *Ts,
    is_heavy: bool = False,
    is_read: bool = False,
    max_bytes: int | None = None,
) -> T:
    """Return ``parse(body, *arguments)`` for the JSON body of a request.

    The service parses large bodies in processes. ``is_heavy``: parses small ones there, too.
    ``is_read``: whether the request submits nothing; submissions are parsed first. The body is
    released before this returns.

    Raises as `read_json_body`, `ParsePool.run` and ``parse``.
    """
    limit = service.settings.max_body_bytes
    body = await read_json_body(request, min(limit, max_bytes or limit))
    caller = await _find_caller(request)
    return await service.pool.run(
        parse, body, *arguments, caller=caller, is_heavy=is_heavy, is_read=is_read
    )


async def parse_model_body(
    request: Request,
    service: Service,
    parse: Callable[[bytes, *Ts, str | None], T],
    model: type[ModelOnGpus],
    *arguments: *Ts,
    is_heavy: bool = False,
    is_read: bool = False,
) -> T:
    """Return ``parse(body, *arguments, trace)`` for the body of a request with a model on GPUs.

    ``trace`` is the JSON text of the model's traced costs if no formula has them, else None. Raises
    as `parse_body` and `Tracer.trace`.
    """
    body = await read_json_body(request, service.settings.max_body_bytes)
    caller = await _find_caller(request)
    trace = await service.tracer.trace_body(body, model, service.pool, caller, is_read=is_read)
    return await service.pool.run(
        parse, body, *arguments, trace, caller=caller, is_heavy=is_heavy, is_read=is_read
    )


class JsonText(Response):
    """An answer whose content is JSON text already."""

    media_type = "application/json"


NO_SCRIPTS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; sandbox",
    "X-Content-Type-Options": "nosniff",
}
"""Headers of pictures. They show names from other users, and come from the address of our page."""


def visible_owner(owner: str, caller: Principal) -> str | None:
    """Return the owner of a job or batch; None unless the caller is an admin."""
    return owner if caller.role is Role.ADMIN else None


def split_page(service: Service, found: Sequence[T], limit: int) -> tuple[Sequence[T], str | None]:
    """Return a page and the cursor of the next one, from up to ``limit + 1`` records."""
    page = found[:limit]
    last: Any = page[-1] if len(found) > limit else None
    return page, None if last is None else service.cursors.encode(last.position)


# --- Documents with entity tags.


def version_headers(document_id: str, number: int, form: str) -> dict[str, str]:
    """Return the headers of a version of a document in a form."""
    return {
        "ETag": etag_of(document_id, number, form),
        "Cache-Control": "private, no-cache",
    }


async def answer_version(
    if_none_match: str | None,
    document_id: str,
    number: int,
    form: str,
    build: Callable[[], Awaitable[str]],
) -> Response:
    """Return 304 if the client has this version in this form, else the JSON text to build."""
    headers = version_headers(document_id, number, form)
    if is_known(if_none_match, headers["ETag"]):
        return Response(status_code=304, headers=headers)
    return JsonText(await build(), headers=headers)


class ConstantDocument:
    """A document that does not change while the server runs.

    It is built and encoded at the first request.

    Parameters
    ----------
    build
        Returns the text. Called once, in a thread.
    is_open
        Whether the document needs no key, so that shared caches may store it.
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
        caching = "no-cache" if is_open else "private, no-cache"
        self._headers = {"Cache-Control": caching, **(headers or {})}
        self._lock = threading.Lock()
        self._content: bytes | None = None

    async def answer(self, if_none_match: IfNoneMatch = None) -> Response:
        """Return the document, or 304 if the client has it. This can be the function of a route."""
        content = self._content or await run_in_threadpool(self._load)
        if is_known(if_none_match, self._headers["ETag"]):
            return Response(status_code=304, headers=self._headers)
        return Response(content, headers=self._headers, media_type=self._media_type)

    def _load(self) -> bytes:
        with self._lock:
            if self._content is None:
                content = self._build().encode()
                self._headers["ETag"] = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
                self._content = content
            return self._content


# --- Requests that wait. The service limits their number, and stops waiting if a client leaves.


@contextmanager
def count_waiting(service: Service, caller: Principal, wait_s: float) -> Iterator[None]:
    """Count a request that waits, until the block ends.

    Enter the block before the request changes anything: it raises `ServerBusyError` if too many
    connections are open, as `ConnectionLimit.counted`.
    """
    if wait_s <= 0:
        yield
        return
    with service.connections.counted(caller, Purpose.WAIT):
        yield


async def wait_while_connected(
    request: Request, waiting: Coroutine[Any, Any, T], wait_s: float
) -> T | None:
    """Return the result of a coroutine, or None as soon as the client has disconnected.

    Call this after the body of the request was read.
    """
    if wait_s <= 0:
        return await waiting

    async def wait_for_disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    result = asyncio.create_task(waiting)
    disconnect = asyncio.create_task(wait_for_disconnect())
    try:
        await asyncio.wait({result, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        return result.result() if result.done() else None
    finally:
        for task in (result, disconnect):
            task.cancel()
        await asyncio.gather(result, disconnect, return_exceptions=True)
