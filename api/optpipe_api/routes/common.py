"""How a route gets at the service, and at who is asking.

Coroutines, although nothing is waited for: the framework calls plain functions in threads, at the
price of all the rest of a small request.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Depends, Header, Query, Request

from optpipe_api.access import ANYBODY, Principal, Role
from optpipe_api.service import Service

__all__ = [
    "Admin",
    "Reader",
    "Serving",
    "Submitter",
    "idempotency_key",
    "json_body",
    "json_content",
    "seconds_to_wait",
]


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


async def _admin(request: Request) -> Principal:
    principal = await _reader(request)
    principal.require(Role.ADMIN)
    return principal


Serving = Annotated[Service, Depends(_service)]
Reader = Annotated[Principal, Depends(_reader)]
Submitter = Annotated[Principal, Depends(_submitter)]
Admin = Annotated[Principal, Depends(_admin)]


# --- What several routes take alike: a time to wait, a key against doubled requests, a JSON body.


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


def json_body(schema: str) -> dict[str, Any]:
    """Return what OpenAPI says of a request whose body must be such a text."""
    return {"requestBody": {"required": True, "content": json_content(schema)}}
