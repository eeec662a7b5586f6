"""Requests that wait hold one of the service's places, and wait only for clients that are there."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from optpipe_api.places import Purpose

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator
    from typing import Any

    from fastapi import Request

    from optpipe_api.access import Principal
    from optpipe_api.service import Service

__all__ = ["place_to_wait", "while_there"]

T = TypeVar("T")


@contextmanager
def place_to_wait(service: Service, who: Principal, wait_s: float) -> Iterator[None]:
    """Hold a place where a request waits; to be taken before the request changes anything.

    Raises
    ------
    BusyError
        If there is none for him; see `Places.taken`.
    """
    if wait_s <= 0:
        yield
        return
    with service.places.taken(who, Purpose.WAIT):
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
