"""How a route gets at the service, and at who is asking.

Coroutines, although nothing is waited for: the framework calls plain functions in threads, at the
price of all the rest of a small request.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request

from optpipe_api.access import ANYBODY, Principal, Role
from optpipe_api.service import Service

__all__ = ["Admin", "Reader", "Serving", "Submitter"]


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
